"""A step that a source records is carried over by a conversion, or named as left out."""

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import hocket.ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import CheckpointNotFoundError
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.demo import write_demo

torch = pytest.importorskip("torch")

STATES = {
    "Hocket's": {"timestamp": {"epoch": 1, "batch": 7}},
    "Composer's": {"state": {"timestamp": {"Timestamp": {"epoch": 1, "batch": 7}}}},
    "Lightning's": {"epoch": 1, "global_step": 7},
    "a script's": {"step": 7, "model": {"step": 9}},
    "nanoGPT's": {"iter_num": 7, "best_val_loss": 9},
    "a long way": {"timestamp": {"batch": 7}, "global_step": 9},
}
WITHOUT = {
    "nothing": {},
    "a tensor": {"global_step": torch.tensor(7)},
    "a flag": {"global_step": True},
    "a fraction": {"global_step": 7.0},
    "a negative number": {"global_step": -7},
    "another value": {"best": {"global_step": 7}},
}


def step_of(place):
    return hocket.ckpt.open(place).manifest.step


@pytest.mark.parametrize("by", ["torch", "dcp"])
@pytest.mark.parametrize("case", [*STATES, *WITHOUT])
def test_a_trainers_count_of_steps_becomes_the_step(tmp_path, case, by):
    source = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), **(STATES | WITHOUT)[case]}, source)
    if by == "dcp":
        convert(source, tmp_path / "dcp", to="dcp")
        source = tmp_path / "dcp"
    convert(source, tmp_path / "h", to="hocket")
    assert step_of(tmp_path / "h") == (7 if case in STATES else 0)
    convert(source, tmp_path / "selected", to="hocket", include=["w"])
    assert step_of(tmp_path / "selected") == step_of(tmp_path / "h")
    convert(source, tmp_path / "given", to="hocket", step=3)
    assert step_of(tmp_path / "given") == 3


@pytest.mark.parametrize(("text", "step"), {"70": 70, "-1": 0, "7.5": 0, "": 0, "²": 0, "9" * 30: 0}.items())
def test_the_metadata_of_safetensors_records_a_step(tmp_path, text, step):
    save_file({"w": np.ones(2)}, tmp_path / "a.safetensors", metadata={"step": text})
    convert(tmp_path / "a.safetensors", tmp_path / "h", to="hocket")
    assert step_of(tmp_path / "h") == step


def test_a_step_is_kept_or_named_as_left_out(tmp_path):
    write_demo(str(tmp_path / "demo"))
    convert(tmp_path / "demo", tmp_path / "h", to="hocket")
    assert step_of(tmp_path / "h") == 1000
    for to, name in {"dcp": "d", "torch": "t.pt", "safetensors": "s"}.items():
        assert "(step)" in convert(tmp_path / "demo", tmp_path / name, to=to).left_out
        convert(tmp_path / name, tmp_path / f"back from {to}", to="hocket")
        # The demo's values have the count, and safetensors holds no values.
        assert step_of(tmp_path / f"back from {to}") == (0 if to == "safetensors" else 1000)
    save_file({"w": np.ones(2)}, tmp_path / "a.safetensors", metadata={"step": "70"})
    for to, name in {"dcp": "d2", "torch": "t2.pt"}.items():
        assert convert(tmp_path / "a.safetensors", tmp_path / name, to=to).left_out == ("__metadata__",)


def test_the_source_of_the_step_is_said_and_unknown_names_get_the_nearest(tmp_path):
    torch.save({"net": {"layer": {"w": torch.ones(2)}}, "iteration": 7}, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "h", to="hocket")
    assert (report.step, report.step_from) == (7, "iteration")
    torch.save({"w": torch.ones(2)}, tmp_path / "b.pt")
    told = {
        ("a.pt", "hocket"): "step 7, as `iteration` of the source says",
        ("b.pt", "hocket"): "step 0: the source names none that is known; `--step` gives it",
    }
    for (name, to), line in told.items():
        shown = CliRunner().invoke(
            app, ["convert", f"{tmp_path}/{name}", f"{tmp_path}/{name}.to", "--to", to]
        )
        assert line in shown.output
    shown = CliRunner().invoke(app, ["convert", f"{tmp_path}/b.pt", f"{tmp_path}/c", "--to", "dcp"])
    assert "step 0" not in shown.output
    given = convert(tmp_path / "b.pt", tmp_path / "given", to="hocket", step=3)
    assert (given.step, given.step_from) == (3, None)
    opened = hocket.ckpt.open(tmp_path / "h")
    for name, message in {
        "w": r"Did you mean `net\.layer\.w`\?",
        "net.layer.v": r"Did you mean `net\.layer\.w`\?",
        "iteration": r"which is a value: 7",
    }.items():
        with pytest.raises(CheckpointNotFoundError, match=message):
            opened[name]
    with pytest.raises(
        CheckpointNotFoundError, match=r"`rename` has `nett`.*near: `net`.*Nothing was written"
    ):
        convert(tmp_path / "a.pt", tmp_path / "renamed", to="hocket", rename={"nett": "model"})
    assert not (tmp_path / "renamed").exists()
