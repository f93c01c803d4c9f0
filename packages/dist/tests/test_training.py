"""Training sharded or replicated is training: the same numbers as one process with the plain model."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.dist import provide
from support.ranks import run_ranks


def _models() -> Any:
    name = "hocket_dist_test_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("models.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


models = _models()

LAYOUTS = {
    "fsdp": {},
    "zero2": {"sharding_strategy": "SHARD_GRAD_OP"},
    "one group": {"auto_wrap": False},
    "hsdp": {"data_parallel_replicate_degree": 2},
    "replicated": None,
}


def _train(
    config: dict[str, Any] | None, microbatches: int, policy: str
) -> tuple[dict, list[float], list[float], dict]:
    with provide(config, device="cpu", timeout_s=30) as parallelism:
        rank, size = parallelism.data_parallel
        model = models.build(seed=3 if rank == 0 else 99)  # rank 0's values hold
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        laid_out = parallelism.lay_out(model, [optimizer])
        losses, norms = [], []
        for batch in models.batches():
            parts = [
                models.share(models.share(batch, rank, size), i, microbatches) for i in range(microbatches)
            ]
            mine = torch.zeros((), dtype=torch.float64)
            for index, part in enumerate(parts):
                parallelism.sync_gradients(laid_out, policy == "every" or index == microbatches - 1)
                loss = model.loss(laid_out(part), part) / microbatches
                loss.backward()
                mine += loss.detach().double()
            norms.append(parallelism.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append((parallelism.reduce_async(mine.reshape(1)).wait() / size).item())
        kinds = {name: type(value).__name__ for name, value in model.state_dict().items()}
        return {name: models.whole(value) for name, value in model.named_parameters()}, losses, norms, kinds


def _check(results: list[tuple], kind: str) -> None:
    parameters, losses, norms = models.train_alone()
    for trained, trained_losses, trained_norms, kinds in results:
        assert list(trained) == list(parameters)
        assert set(kinds.values()) == {kind}
        for name, value in parameters.items():
            torch.testing.assert_close(
                trained[name], value, atol=1e-6, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
            )
        assert trained_losses == pytest.approx(losses, abs=1e-6)
        assert trained_norms == pytest.approx(norms, rel=1e-5)
        assert trained_norms == results[0][2], "the norm differs between ranks"
    assert norms[0] > 1.0, "nothing was clipped"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("layout", ["fsdp", "replicated"])
def test_twenty_steps_are_those_of_one_process(layout: str, world_size: int) -> None:
    results = run_ranks(_train, world_size, LAYOUTS[layout], 1, "every")
    _check(results, "DTensor" if layout == "fsdp" else "Tensor")


@pytest.mark.parametrize(("layout", "world_size"), [("zero2", 2), ("one group", 2), ("hsdp", 4)])
def test_other_layouts_train_alike(layout: str, world_size: int) -> None:
    _check(run_ranks(_train, world_size, LAYOUTS[layout], 1, "every"), "DTensor")


@pytest.mark.parametrize("policy", ["every", "last"])
@pytest.mark.parametrize("layout", ["fsdp", "replicated"])
def test_microbatches_change_nothing_however_gradients_are_synchronised(layout: str, policy: str) -> None:
    results = run_ranks(_train, 2, LAYOUTS[layout], 2, policy)
    _check(results, "DTensor" if layout == "fsdp" else "Tensor")
