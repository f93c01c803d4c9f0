"""Casts to smaller floating-point dtypes against torch's."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

import hocket.ckpt  # noqa: E402
from hocket.ckpt.cli.app import app  # noqa: E402
from hocket.ckpt.verbs.convert import convert  # noqa: E402

EXACT = [0.0, -0.0, 1.0, 0.3, 2.0**-9, 2.0**-20, 240.0, -240.0, float("nan")]
LARGE = [241.0, 449.0, -463.0, 465.0, 1e3, -1e9, 57344.0, 61439.0, 61441.0, 65519.0, 65521.0, 3.4e38]
DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
INFINITE = [float("inf"), float("-inf")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_items_beyond_the_range_are_cast_as_by_torch_and_counted(tmp_path, dtype, source):
    target = DTYPES[dtype]
    items = torch.tensor(EXACT + LARGE + INFINITE).to(source)
    many = torch.zeros(1 << 19).to(source)  # more than a block of the cast
    many[300_000] = items[-1]
    save_file({"items": items, "many": many, "count": torch.tensor([2**20])}, tmp_path / "in.safetensors")
    path = tmp_path / "out.safetensors"
    outcome = convert(str(tmp_path / "in.safetensors"), str(path), to="safetensors", dtype=dtype)
    written = load_file(path)
    assert written["count"].item() == 2**20
    # Before it saturated, torch made NaN of what is beyond the range of E4M3.
    limit = torch.finfo(target).max if dtype == "F8_E4M3" else float("inf")
    expected = items.float().clamp(-limit, limit).to(source).to(target)
    np.testing.assert_array_equal(written["items"].float().numpy(), expected.float().numpy())
    signs = [part[~part.isnan()].signbit() for part in (written["items"].float(), expected.float())]
    assert torch.equal(*signs)
    lost = items.isfinite() & ~expected.float().isfinite() | (~items.isnan() & expected.float().isnan())
    if dtype == "F8_E4M3":
        lost = items.float().abs() > limit
    wanted = {"items": int(lost.sum()), "many": int(dtype.endswith("FNUZ") or dtype == "F8_E4M3")}
    assert outcome.beyond_range == {name: number for name, number in wanted.items() if number}
    assert (
        outcome.beyond_range
        == convert(str(tmp_path / "in.safetensors"), str(path), to="safetensors", dtype=dtype).beyond_range
    )  # a rerun, which compares


def test_the_command_tells_of_items_beyond_the_range(tmp_path, capsys):
    save_file({"w": torch.full((4, 500), 500.0)}, tmp_path / "in.safetensors")
    for to in ("hocket", "dcp"):
        arguments = [
            "--to",
            to,
            "--dtype",
            "F8_E4M3",
            "--max-shard-size",
            "100",
        ]  # several pieces of a tensor
        with pytest.raises(SystemExit) as ended:
            app(["convert", str(tmp_path / "in.safetensors"), str(tmp_path / to), *arguments])
        assert ended.value.code == 0
        assert "2,000 items of 1 tensor (w) are beyond the range" in " ".join(capsys.readouterr().out.split())
        written = hocket.ckpt.open(str(tmp_path / to))["w"]
        assert (written.astype("f4") == 448).all()
