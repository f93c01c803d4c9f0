"""Matching a state with a checkpoint by name: successful loads, and errors with their messages."""

import copy
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hocket.ckpt.dcp import HocketWriter
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointStateError
from hocket.ckpt.torch import CheckpointStore, load
from hocket.ckpt.verbs.convert import convert


def test_loading_two_tensors_into_shared_memory_raises(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"a": torch.zeros(3), "b": torch.ones(3)}, step=0)
    tied = torch.zeros(3)
    with pytest.raises(CheckpointIncompatibleError, match="`a` and `b` share their memory"):
        store.load("step-0", {"a": tied, "b": tied})


def test_tensors_that_overlap_partially_in_memory_raise_before_anything_is_read(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"a": torch.zeros(4, 6), "b": torch.ones(4, 6)}, step=0)
    memory = torch.full((4, 11), 7.0)
    with pytest.raises(CheckpointStateError, match="`a` and `b` overlap in memory"):
        store.load("step-0", {"a": memory[:, :6], "b": memory[:, 5:]})
    assert memory.eq(7).all()
    memory = torch.zeros(4, 12)  # views that interleave have no byte in common
    store.load("step-0", {"a": memory[:, ::2], "b": memory[:, 1::2]})
    assert memory[:, ::2].eq(0).all()
    assert memory[:, 1::2].eq(1).all()


def test_two_views_of_the_same_bytes_are_loaded_in_order(tmp_path):
    store, matrix = CheckpointStore(str(tmp_path)), torch.arange(2_250_000.0).view(1500, 1500)
    store.save({"w": matrix, "turned": matrix.t()}, step=0)
    store.save({"w": matrix, "turned": torch.ones(1500, 1500)}, step=1)
    into = torch.zeros(1500, 1500)
    store.load("step-0", {"w": into, "turned": into.t()})
    assert torch.equal(into, matrix)
    store.load("step-1", {"w": into, "turned": into.t()})  # as in torch, the last one stays
    assert into.eq(1).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("origin", ["HocketWriter", "convert"])
def test_integer_keys_that_dcp_saved_as_text_load_into_integer_keys(tmp_path, origin):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"optim": optimizer.state_dict()}
    writer = (
        HocketWriter(tmp_path / "x") if origin == "HocketWriter" else dcp.FileSystemWriter(tmp_path / "dcp")
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    if origin == "convert":
        convert(tmp_path / "dcp", tmp_path / "x", to="hocket")
    into = copy.deepcopy(state)
    for slots in into["optim"]["state"].values():
        for tensor in slots.values():
            tensor.zero_()
    loaded = load(tmp_path / "x", into).state["optim"]
    assert loaded["param_groups"] == state["optim"]["param_groups"]
    assert list(loaded["state"]) == [0, 1]
    for number, slots in state["optim"]["state"].items():
        assert all(torch.equal(loaded["state"][number][slot], tensor) for slot, tensor in slots.items())


def test_a_different_model_raises_with_all_differences(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save(
        {"model": {"fc1.weight": torch.ones(3, 2), "fc2.weight": torch.ones(4), "s": torch.ones(2)}}, step=0
    )
    into = {
        "model": {"fc1.wieght": torch.zeros(3, 2), "fc2.weight": torch.zeros(5), "s": torch.zeros(2).half()}
    }
    with pytest.raises(CheckpointIncompatibleError) as caught:
        store.load("step-0", into)
    message = str(caught.value)
    assert "`model.fc2.weight`: shape [4] in the checkpoint, [5] here" in message
    assert "`model.s`: dtype F32 in the checkpoint, F16 here" in message
    assert "Not in the checkpoint: `model.fc1.wieght` (near: `model.fc1.weight`)" in message
    assert "Only in the checkpoint: `model.fc1.weight` (near: `model.fc1.wieght`)" in message
    assert all(tensor.eq(0).all() for tensor in into["model"].values())
    into["model"]["fc2.weight"] = torch.zeros(4)
    store.load("step-0", into, strict=False, cast=True)
    assert into["model"]["s"].eq(1).all()
    assert into["model"]["fc1.wieght"].eq(0).all()


def test_globs_select_part_of_the_tree(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save(
        {"model": {"a.w": torch.ones(3), "b.w": torch.ones(3)}, "loop": {"epoch": 3, "lr": 1.0}}, step=0
    )
    into = {"model": {"a.w": torch.zeros(3), "other": torch.zeros(1)}, "loop": {"epoch": 0, "lr": 0.0}}
    loaded = store.load("step-0", into, include=["model.a*", "loop.epoch"])
    assert loaded.state["model"]["a.w"].eq(1).all()
    assert loaded.state["loop"] == {"epoch": 3, "lr": 0.0}


def test_ignored_names_may_be_in_the_checkpoint_only(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"model": {"a.w": torch.ones(3), "head.w": torch.ones(7)}, "loop": {"epoch": 3}}, step=0)
    into = {"model": {"a.w": torch.zeros(3)}}
    with pytest.raises(CheckpointIncompatibleError, match=r"Only in the checkpoint: `loop`"):
        store.load("step-0", into, ignore=["model.head"])
    with pytest.raises(CheckpointIncompatibleError, match=r"Only in the checkpoint: `model\.head\.w`"):
        store.load("step-0", into, ignore=["loop"])
    assert into["model"]["a.w"].eq(0).all()
    store.load("step-0", into, ignore=["loop", "model.head.*"])
    assert into["model"]["a.w"].eq(1).all()
    with pytest.raises(CheckpointIncompatibleError, match=r"Not in the checkpoint: `model\.other`"):
        store.load("step-0", {"model": {"other": torch.zeros(1)}}, ignore=["*"])
    with pytest.raises(ValueError, match=r"`ignore` is 'model'; expected a list of globs"):
        store.load("step-0", into, ignore="model")


def test_globs_that_match_nothing_raise(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"model": {"w": torch.ones(3)}, "groups": [{"lr": 1.0}, {"lr": 2.0}]}, step=0)
    into = {"model": {"w": torch.zeros(3)}, "groups": [{"lr": 0.0}]}
    with pytest.raises(ValueError, match=r"`include` is 'model'; expected a list of globs"):
        store.load("step-0", into, include="model")
    nothing = r"`modle\.\*`, which matches none of its 3 names \(near: `model`"
    with pytest.raises(CheckpointIncompatibleError, match=nothing):
        store.load("step-0", into, include=["groups", "modle.*"], strict=False)
    with pytest.raises(CheckpointIncompatibleError, match=r"`groups`: its items \[1\] are chosen, .* has 1"):
        store.load("step-0", into, include=["groups.1"])
    assert into["model"]["w"].eq(0).all()
    into["groups"].append({"lr": 0.0})
    assert store.load("step-0", into, include=["groups.1"]).state["groups"] == [{"lr": 0.0}, {"lr": 2.0}]
    assert len(store.load("step-0", {**into, "groups": []}, include=["groups"]).state["groups"]) == 2


def test_a_wrapped_models_names_are_saved_without_wrappers(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"model": {"module._orig_mod.fc.weight": torch.ones(3)}}, step=0)
    into = {"model": {"_orig_mod.fc.weight": torch.zeros(3)}}
    assert store.load("step-0", into).state["model"]["_orig_mod.fc.weight"].eq(1).all()


def test_foreign_checkpoints_with_wrapped_names_load(tmp_path):
    # `w` matches two names: the exact one takes precedence over the one without its wrapper.
    saved = {"module.v": torch.full((3,), 1.0), "module.w": torch.full((3,), 2.0), "w": torch.full((3,), 3.0)}
    torch.save(saved, tmp_path / "ddp.pt")
    convert(str(tmp_path / "ddp.pt"), str(tmp_path / "x"), to="hocket")
    store = CheckpointStore(str(tmp_path))
    found = store.load("x", {key: torch.zeros(3) for key in saved}).state
    assert all(torch.equal(found[key], saved[key]) for key in saved)
    into = {key: torch.zeros(3) for key in ("w", "_orig_mod.v", "_orig_mod.w")}
    found = store.load("x", into, include=["module.v", "*w"]).state
    assert {key: tensor[0].item() for key, tensor in found.items()} == {
        "w": 3, "_orig_mod.v": 1, "_orig_mod.w": 2
    }  # fmt: skip


def test_keys_of_plain_values_keep_their_prefixes(tmp_path):
    store = CheckpointStore(str(tmp_path))
    config = {"module.lr": 1, "a._orig_mod.b": 2}
    store.save({"w": torch.ones(3), "config": config}, step=0)
    for into in ({}, dict.fromkeys(config), {"lr": None, "a.b": None}):
        found = store.load("step-0", {"w": torch.zeros(3), "config": into}).state["config"]
        assert list(found) == list(into or config)
        assert list(found.values()) == [1, 2]


@pytest.mark.parametrize("include", [None, ["optim"]])
def test_parameter_names_in_optimizer_groups_are_cleaned_as_in_its_state(tmp_path, include):
    def optim(prefix, number):
        group = {"lr": number, "params": [f"{prefix}w", f"{prefix}b"]}
        state = {f"{prefix}w": {"m": torch.full((3,), number)}, f"{prefix}b": {"m": None}}
        return {"optim": {"state": state, "param_groups": [group]}}

    store = CheckpointStore(str(tmp_path))
    for step, prefix in enumerate(("", "_orig_mod.", "module.")):
        store.save(optim(prefix, 1.0), step=step)
        for other in ("", "_orig_mod.", "module."):
            found = store.load(f"step-{step}", optim(other, 0.0), include=include).state
            weight = found["optim"]["state"][f"{other}w"].pop("m")
            assert weight.eq(1).all()
            expected = optim(other, 1.0)
            del expected["optim"]["state"][f"{other}w"]["m"]
            assert found == expected


def test_an_optimizer_that_has_not_stepped_loads_its_slots(tmp_path):
    store = CheckpointStore(str(tmp_path))
    slots = {"exp_avg": torch.randn(4, 3), "row": torch.randn(4), "step": torch.tensor(7.0), "note": "x"}
    store.save({"state": {"fc.weight": slots}}, step=0)
    parameter = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16))
    unstepped = SimpleNamespace(slots_like={"_orig_mod.fc.weight": parameter, "new": parameter})
    state = store.load("step-0", {"state": unstepped}).state["state"]
    assert list(state) == ["_orig_mod.fc.weight"]
    made = state["_orig_mod.fc.weight"]
    assert made["note"] == "x"
    assert not made["exp_avg"].requires_grad
    assert all(torch.equal(made[slot], slots[slot]) for slot in ("exp_avg", "row", "step"))
    empty = CheckpointStore(str(tmp_path / "more"))
    empty.save({"state": unstepped}, step=0)
    assert empty.load("step-0", {"state": unstepped}).state == {"state": {}}


def test_a_tensor_at_a_parameters_name_is_loaded_with_its_layout(tmp_path):
    store = CheckpointStore(str(tmp_path))
    averages = {"fc.weight": torch.randn(4, 3), "fc.bias": torch.randn(4)}
    store.save({"average": averages}, step=0)
    like = {name: torch.zeros_like(one, dtype=torch.bfloat16) for name, one in averages.items()}
    made = store.load(
        "step-0", {"average": SimpleNamespace(slots_like={**like, "new": torch.zeros(2)})}
    ).state["average"]
    assert list(made) == list(averages)
    assert all(torch.equal(made[name], one) for name, one in averages.items())


def test_slots_and_values_missing_from_the_checkpoint_raise(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"model": {"w": torch.ones(2)}, "s": {"x": 1, "deep": {"a": 1}}}, step=0)
    unstepped = SimpleNamespace(slots_like={"w": torch.zeros(2)})
    into = {"model": {"w": torch.zeros(2)}, "optim": {"state": unstepped}}
    with pytest.raises(CheckpointIncompatibleError, match=r"Not in the checkpoint: `optim\.state`"):
        store.load("step-0", {**into, "s": {}})
    assert store.load("step-0", into, include=["model.*"]).state["optim"]["state"] is unstepped
    assert store.load("step-0", into, strict=False).state["optim"]["state"] is unstepped
    into = {"model": {"w": torch.zeros(2)}, "s": {"x": 0, "y": 5, "deep": {"b": 2}}}
    with pytest.raises(CheckpointIncompatibleError, match=r"Not in the checkpoint: `s\.y`.*, `s\.deep\.b`"):
        store.load("step-0", into)
    values = store.load("step-0", into, strict=False).state["s"]
    assert values == {"x": 1, "y": 5, "deep": {"a": 1, "b": 2}}
    assert store.load("step-0", {**into, "s": {"x": 0}}).state["s"] == {"x": 1, "deep": {"a": 1}}


def test_a_saved_parameter_that_the_optimizer_lacks_raises(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"state": {"fc.weight": {"m": torch.ones(2)}}}, step=0)
    with pytest.raises(CheckpointIncompatibleError, match=r"Only in the checkpoint: `state\.fc\.weight\.m`"):
        store.load("step-0", {"state": SimpleNamespace(slots_like={"other": torch.ones(2)})})


def test_slots_with_lists_and_dicts_get_new_tensors(tmp_path):
    store = CheckpointStore(str(tmp_path))
    slots = {
        "past": [torch.ones(4, 3), torch.zeros(4, 3)],
        "blocks": {0: torch.ones(2), 1: {"step": torch.tensor(3.0)}},
        "mixed": [None, torch.tensor(1), 2],
        "empty": [],
    }
    store.save({"state": {"w": slots, "scalar": 3}}, step=0)
    parameters = {"w": torch.zeros(4, 3, dtype=torch.bfloat16), "scalar": torch.zeros(())}
    state = store.load("step-0", {"state": SimpleNamespace(slots_like=parameters)}).state["state"]
    assert describe(state) == describe({"w": slots, "scalar": 3})


class Open(dict):
    layouts: ClassVar = {}

    def __init__(self, open_names, /, **entries):
        super().__init__(entries)
        self.open_names = open_names


def describe(node):
    """Return a tree with lists in place of tensors, to compare."""
    if isinstance(node, torch.Tensor):
        return [str(node.dtype), node.tolist()]
    if isinstance(node, dict):
        return {key: describe(child) for key, child in node.items()}
    return [describe(child) for child in node] if isinstance(node, list) else node


def test_the_open_keys_of_a_mapping_take_what_the_checkpoint_has(tmp_path):
    store = CheckpointStore(str(tmp_path))
    saved = {
        "grown": torch.ones(5, 2),
        "same": torch.ones(2),
        "typed": torch.ones(2, dtype=torch.int64),
        "late": [torch.ones(1), {3: torch.zeros(2)}],
        "value": 7,
    }
    store.save({"open": saved, "rest": 1}, step=0)
    same = torch.zeros(2)
    into = Open(set(saved), grown=torch.zeros(0, 2), same=same, typed=torch.zeros(2), value=torch.zeros(1))
    found = store.load("step-0", {"open": into, "rest": 0}).state["open"]
    assert describe(found) == describe(saved)
    assert found["same"] is same
    assert "late" not in store.load("step-0", {"open": into, "rest": 0}, ignore=["open.late"]).state["open"]
    closed = Open({"grown"}, grown=torch.zeros(1), same=torch.zeros(3))
    with pytest.raises(
        CheckpointIncompatibleError, match=r"`open\.same`: shape \[2\] in the checkpoint, \[3\]"
    ):
        store.load("step-0", {"open": closed, "rest": 0})
    closed = Open({"grown"}, grown=torch.zeros(1), more=torch.zeros(3), same=torch.zeros(2))
    with pytest.raises(
        CheckpointIncompatibleError, match=r"`open\.more`.*Only in the checkpoint: `open\.typed`"
    ):
        store.load("step-0", {"open": closed, "rest": 0})
    assert store.load("step-0", {"open": {**into, **saved}, "rest": 0, "new": Open({"x"})}).state["new"] == {}


def test_parameter_groups_take_the_checkpoints_tensors(tmp_path):
    store = CheckpointStore(str(tmp_path))
    groups = [{"params": ["w"], "lr": torch.tensor(0.1)}, {"params": ["v"], "count": torch.tensor(2)}]
    slots = {"w": {"m": torch.ones(2)}}
    store.save({"state": slots, "param_groups": groups}, step=0)
    for into in ([{"params": ["w"], "lr": torch.tensor(0.5)}], [{"params": ["w"], "lr": 0.5}], groups):
        found = store.load("step-0", {"state": slots, "param_groups": into}).state
        assert describe(found["param_groups"]) == describe(groups)
