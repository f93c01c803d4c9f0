"""A rank's own values of any size are saved, read back on the same rank and checked."""

import pytest

torch = pytest.importorskip("torch")

from hocket.ckpt.errors import CheckpointCorruptError  # noqa: E402
from hocket.ckpt.torch import CheckpointStore  # noqa: E402


@pytest.mark.parametrize("options", [{}, {"compression": "zstd:1"}])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_large_per_rank_values_are_stored_in_the_data_file(tmp_path, mode, options):
    store = CheckpointStore(str(tmp_path), **options)
    large = {
        "x": bytes(range(256)) * 1000,
        "numbers": [index / 7 for index in range(10_000)],
        "n": float("inf"),
    }
    state = {"w": torch.arange(3.0), "mask": torch.ones(5, dtype=torch.bool)}
    for step, tree in enumerate((state, {})):
        store.save(tree, step=step, per_rank=large, mode=mode).wait(30)
        loaded = store.load(f"step-{step}", {name: torch.zeros_like(one) for name, one in tree.items()})
        assert loaded.per_rank == large
        assert all(torch.equal(loaded.state[name], one) for name, one in tree.items())
        assert (tmp_path / f"step-{step}" / "checkpoint.json.zst").stat().st_size < 2_000
    store.close()
    damaged = next((tmp_path / "step-1" / "data").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-20] + b"\1" * 20)
    with pytest.raises(CheckpointCorruptError, match="per_rank"):
        store.load("step-1", {})
