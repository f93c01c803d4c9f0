"""The suite of `CheckpointStore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hocket.trainer.data.batch_tree import tensors
from hocket.trainer.process.world import global_rank
from hocket.trainer.protocols import CheckpointStore
from hocket.trainer.testing.trees import describe_difference, snapshot


def check_checkpoint_store(make_store: Callable[[], CheckpointStore]) -> None:
    """Check that a store saves, loads, lists and deletes checkpoints, and refuses a state that does not fit.

    Collective if the store is: call it on every rank.

    Args:
        make_store: A function that opens the store, always in the same place, which is empty at first.

    Raises:
        AssertionError: If the store fails a check.
    """
    store = make_store()
    assert list(store.list()) == [], "the store is not empty at first; give `make_store` a place of its own"
    _meet()
    name = _check_save_and_load(store, make_store)
    _check_async(store)
    _check_refusals(store, name)
    _check_listing(store, make_store)


def _meet() -> None:
    """Wait for all ranks, so that no rank changes the store while another rank still reads it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def _tree(fill: int) -> dict[str, Any]:
    """Return a state with every kind of leaf; `fill` sets the values."""
    generator = torch.Generator().manual_seed(fill)
    return {
        "model": {
            "weight": torch.randn(5, 3, generator=generator),
            "half": torch.randn(4, generator=generator).bfloat16(),
            "scalar": torch.tensor(float(fill)),
            "empty": torch.zeros(0, 3),
            "mask": torch.rand(7, generator=generator) > 0.5,
            "steps": torch.tensor([fill, 2**60 + fill]),
        },
        "list": [{"inner": torch.full((2,), fill, dtype=torch.float64)}, fill],
        "time": {
            "batch": fill,
            "big": 2**62 + fill,
            "seconds": fill / 7,
            "name": f"run-{fill} é",
            "none": None,
        },
        "flag": bool(fill % 2),
        "pair": (fill, "two"),
        "bytes": bytes([0, 255, fill % 256]),
        "nothing": {},
    }


def _check_save_and_load(store: CheckpointStore, make_store: Callable[[], CheckpointStore]) -> str:
    saved, rank = _tree(1), global_rank()
    handle = store.save(saved, step=10, per_rank={"rank": rank}, user={"note": "first"})
    handle.wait(60.0)
    assert handle.done(), "`done()` is false after `wait()` returned"
    assert isinstance(handle.name, str), f"the handle's `name` is `{handle.name!r}`; expected text"
    difference = describe_difference(saved, _tree(1))
    assert difference is None, f"`save` changed the state given to it: {difference}"
    _meet()
    entries = list(make_store().list())
    listed = [(entry.name, entry.step, entry.status) for entry in entries]
    assert listed == [(handle.name, 10, "committed")], f"after one save, `list()` tells of {listed}"
    for store_again, source in (
        (store, handle.name),
        (make_store(), handle.name),
        (make_store(), entries[0].uri),
    ):
        target = _tree(2)
        target_tensors = list(tensors(target))
        loaded = store_again.load(source, target)
        difference = describe_difference(loaded.state, saved)
        assert difference is None, f"`load({source!r})` gives another state than was saved: {difference}"
        assert all(one is other for one, other in zip(target_tensors, tensors(loaded.state), strict=True)), (
            "`load` returned new tensors; it is to fill those of `into`"
        )
        actual = (loaded.step, loaded.name, loaded.user, loaded.per_rank)
        expected = (10, handle.name, {"note": "first"}, {"rank": rank})
        assert actual == expected, (
            f"`load` gives (step, name, user, per_rank) as {actual}; expected {expected}"
        )
    _meet()
    return handle.name


def _check_async(store: CheckpointStore) -> None:
    state = _tree(3)
    expected = snapshot(state)
    handle = store.save(state, step=20, mode="async")
    for tensor in tensors(state):
        tensor.zero_()  # as the next step would; the save must have its own copy by now
    handle.wait(60.0)
    difference = describe_difference(store.load(handle.name, _tree(4)).state, expected)
    assert difference is None, f"an asynchronous save took in later changes: {difference}"


def _check_refusals(store: CheckpointStore, name: str) -> None:
    _expect_error(
        lambda: store.load("no-such-checkpoint", _tree(1)), "a name that does not exist", "no-such-checkpoint"
    )
    reshaped = _tree(2)
    reshaped["model"]["weight"] = torch.zeros(5, 4)
    _expect_error(lambda: store.load(name, reshaped), "a tensor of another shape", "weight")
    larger = _tree(2)
    larger["model"]["extra"] = torch.ones(2)
    _expect_error(lambda: store.load(name, larger), "a tensor that was not saved", "extra")
    smaller = _tree(2)
    del smaller["model"]["scalar"]
    _expect_error(lambda: store.load(name, smaller), "a saved tensor that nobody takes", "scalar")
    store.load(name, smaller, ignore=["model.scal*"])
    _expect_error(
        lambda: store.load(name, smaller, ignore=["model.weight"]), "a saved tensor beside `ignore`", "scalar"
    )
    loaded = store.load(name, larger, strict=False)
    difference = describe_difference(loaded.state["model"]["weight"], _tree(1)["model"]["weight"])
    assert difference is None, f"`load(strict=False)` did not load what fits: {difference}"
    assert larger["model"]["extra"].tolist() == [1.0, 1.0], (
        "`load(strict=False)` changed a tensor that was not saved"
    )


def _expect_error(call: Callable[[], object], what: str, named: str) -> None:
    message = None
    try:
        call()
    except Exception as error:  # noqa: BLE001 - which class is the store's business; that it tells is ours
        message = str(error)
    assert message is not None, f"`load` took {what} without an error"
    assert named in message, f"the error for {what} does not name `{named}`: {message}"


def _check_listing(store: CheckpointStore, make_store: Callable[[], CheckpointStore]) -> None:
    store.save(_tree(5), step=30, name="chosen").wait(60.0)
    _meet()
    steps = [entry.step for entry in make_store().list()]
    assert steps == [10, 20, 30], f"`list()` gives the steps {steps}; expected the newest last"
    assert list(store.list())[-1].name == "chosen", (
        f"a name given to `save` became `{list(store.list())[-1].name}`"
    )
    _meet()
    store.delete(20)
    _meet()
    steps = [entry.step for entry in make_store().list()]
    assert steps == [10, 30], f"after `delete(20)`, `list()` gives the steps {steps}; expected [10, 30]"
    difference = describe_difference(store.load("chosen", _tree(6)).state, _tree(5))
    assert difference is None, f"`delete(20)` touched another checkpoint: {difference}"
