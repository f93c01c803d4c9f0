"""Every strategy and lever computes the losses and gradients of one process with the plain model.

Tolerances: float32 within 2e-6 of losses, gradients and trained parameters; bfloat16 within 1% of the loss
    and 10% of each gradient's norm, since 8 bits of mantissa are rounded in every layer.
"""

import functools
from typing import Any, NamedTuple

import pytest
import torch

from hocket.dist import provide
from support import small_models
from support.standing_ranks import StandingRanks

STEPS = 2
LR = 0.05


class Case(NamedTuple):
    """A configuration, the trainer's precision, and how a rank's batch is divided."""

    config: dict[str, Any] | None
    precision: str = "fp32"
    microbatches: int = 1
    is_synced_last: bool = False
    is_autocast: bool = False


class Run(NamedTuple):
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    description: str


CASES = {
    "ddp": Case(None),
    "ddp, unused parameters searched": Case(None),
    "FULL_SHARD": Case({"sharding_strategy": "full_shard"}),
    "SHARD_GRAD_OP": Case({"sharding_strategy": "SHARD_GRAD_OP"}),
    "NO_SHARD": Case({"sharding_strategy": "NO_SHARD"}),
    "NO_SHARD, accumulated": Case({"sharding_strategy": "NO_SHARD"}, microbatches=2, is_synced_last=True),
    "HYBRID_SHARD": Case({"sharding_strategy": "hybrid_shard"}),
    "cpu_offload": Case({"cpu_offload": True}),
    "checkpointing": Case({"activation_checkpointing": True}),
    "checkpointing every second": Case(
        {"activation_checkpointing": True, "activation_checkpointing_every": 2}
    ),
    "checkpointing by operator": Case(
        {
            "activation_checkpointing": True,
            "activation_checkpointing_save_ops": ["matmul", "attention", "convolution"],
        }
    ),
    "activation offload": Case({"activation_cpu_offload": True}),
    "checkpointing and offload, accumulated": Case(
        {"activation_checkpointing": True, "activation_cpu_offload": True}, microbatches=2
    ),
    "prefetch": Case({"forward_prefetch": True, "forward_prefetch_limit": 2, "backward_prefetch_limit": 2}),
    "ignored modules": Case({"ignored_modules": ["head"]}),
    "ignored modules, accumulated": Case({"ignored_modules": ["head"]}, microbatches=2),
    "ignored modules, synced last": Case(
        {"ignored_modules": ["head"], "gradient_sync": "last"}, microbatches=2, is_synced_last=True
    ),
    "unused parameters searched": Case({"find_unused_parameters": True}),
    "all levers": Case(
        {
            "sharding_strategy": "SHARD_GRAD_OP",
            "gradient_sync": "last",
            "cpu_offload": True,
            "activation_checkpointing": True,
            "activation_cpu_offload": True,
            "forward_prefetch": True,
        },
        microbatches=2,
        is_synced_last=True,
    ),
    "bf16 DEFAULT": Case({}, "amp_bf16"),
    "bf16 PURE": Case({"mixed_precision": "pure"}, "amp_bf16"),
    "bf16 FULL": Case({"mixed_precision": "FULL"}, "amp_bf16"),
    "bf16 NO_SHARD": Case({"sharding_strategy": "NO_SHARD"}, "amp_bf16"),
    "bf16 SHARD_GRAD_OP, prefetch": Case(
        {"sharding_strategy": "SHARD_GRAD_OP", "forward_prefetch": True}, "amp_bf16"
    ),
    "bf16 ignored modules": Case({"ignored_modules": ["head"]}, "amp_bf16", is_autocast=True),
    "bf16 ddp": Case(None, "amp_bf16", is_autocast=True),
    "bf16 checkpointing and offload": Case(
        {"activation_checkpointing": True, "activation_cpu_offload": True, "cpu_offload": True}, "amp_bf16"
    ),
}
CASES_OF_4 = {
    "FULL_SHARD": Case({}),
    "HSDP by degree": Case({"data_parallel_replicate_degree": 2}),
    "HSDP, replicas synced last": Case(
        {"data_parallel_replicate_degree": 2, "gradient_sync": "replicas_last", "ignored_modules": ["head"]},
        microbatches=2,
        is_synced_last=True,
    ),
    "HSDP, synced last": Case(
        {"data_parallel_replicate_degree": 2, "gradient_sync": "last"}, microbatches=2, is_synced_last=True
    ),
    "HYBRID over set2": Case({"sharding_strategy": "HYBRID_SHARD", "process_group": "set2"}),
    "HYBRID over mod2": Case({"sharding_strategy": "_HYBRID_SHARD_ZERO2", "process_group": "mod2"}),
    "self": Case({"process_group": "self"}),
    "HSDP, host offload": Case({"data_parallel_replicate_degree": 2, "cpu_offload": True}),
    "bf16 HSDP": Case({"data_parallel_replicate_degree": 2}, "amp_bf16"),
    "bf16 HYBRID over mod2": Case(
        {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "process_group": "mod2"}, "amp_bf16"
    ),
}
KINDS = ("gpt", "conv")


def _whole(value: Any) -> torch.Tensor:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone()


@functools.cache
def _alone(kind: str) -> Run:
    model = small_models.build(kind, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for batch in small_models.batches(kind, STEPS):
        loss = model.loss(model(batch), batch)
        loss.backward()
        gradients = gradients or {name: _whole(value.grad) for name, value in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, gradients, {n: _whole(p) for n, p in model.named_parameters()}, "")


def _train(name: str, case: Case, kind: str) -> Run:
    with provide(
        case.config,
        device="cpu",
        timeout_s=60,
        precision=case.precision,
        find_unused_parameters=name.startswith("ddp, unused"),
    ) as parallelism:
        rank, size = parallelism.data_parallel
        model = small_models.build(kind, seed=3 if rank == 0 else 99)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        names = [name for name, _ in model.named_parameters()]
        module = parallelism.lay_out(model, [optimizer])
        assert [name for name, _ in module.named_parameters()] == names
        losses: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for batch in small_models.batches(kind, STEPS):
            total = torch.zeros(1, dtype=torch.float64)
            for index in range(case.microbatches):
                part = {key: value.chunk(size)[rank] for key, value in batch.items()}
                part = {key: value.chunk(case.microbatches)[index] for key, value in part.items()}
                is_last = index == case.microbatches - 1
                parallelism.sync_gradients(module, is_last or not case.is_synced_last)
                # FSDP2 casts sharded modules itself; autocast, which the trainer uses, casts the rest.
                with torch.autocast("cpu", torch.bfloat16, enabled=case.is_autocast):
                    loss = model.loss(module(part), part) / case.microbatches
                loss.backward()
                total += loss.detach().double()
            if not gradients:
                gradients = {name: _whole(value.grad) for name, value in module.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            losses.append((parallelism.reduce_async(total).wait() / size).item())
        parameters = {name: _whole(value) for name, value in module.named_parameters()}
        return Run(losses, gradients, parameters, parallelism.describe())


def _check(runs: list[Run], kind: str, *, is_exact: bool) -> None:
    alone = _alone(kind)
    for run in runs:
        if is_exact:
            assert run.losses == pytest.approx(alone.losses, abs=2e-6)
        else:
            assert run.losses == pytest.approx(alone.losses, rel=1e-2)
            assert run.losses != pytest.approx(alone.losses, abs=2e-6), "no low precision was used"
        for name, gradient in alone.gradients.items():
            found = run.gradients[name]
            assert found.dtype == torch.float32
            if is_exact:
                torch.testing.assert_close(found, gradient, atol=2e-6, rtol=1e-5, msg=name)
                torch.testing.assert_close(run.parameters[name], alone.parameters[name], atol=2e-6, rtol=1e-5)
            else:
                assert (found - gradient).norm() <= 0.1 * gradient.norm() + 1e-6, name
        for name, value in runs[0].parameters.items():
            assert torch.equal(run.parameters[name], value), f"ranks differ in {name}"


def _is_exact(case: Case) -> bool:
    return case.precision == "fp32" or (case.config or {}).get("mixed_precision") == "FULL"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_process_does(two_ranks: StandingRanks, name: str, kind: str) -> None:
    case = CASES[name]
    _check(two_ranks.run(_train, name, case, kind), kind, is_exact=_is_exact(case))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES_OF_4)
def test_four_ranks_compute_what_one_process_does(four_ranks: StandingRanks, name: str, kind: str) -> None:
    case = CASES_OF_4[name]
    _check(four_ranks.run(_train, name, case, kind), kind, is_exact=_is_exact(case))


def test_levers_are_described(two_ranks: StandingRanks) -> None:
    described = two_ranks.run(_train, "all levers", CASES["all levers"], "gpt")[0].description
    for words in ("SHARD_GRAD_OP", "activations checkpointed", "activations offloaded", "in host memory"):
        assert words in described


def test_checkpointing_recomputes_and_operators_are_kept() -> None:
    """Count forward calls of a layer inside the blocks, which recomputation doubles."""
    calls = {name: _count_calls(config) for name, config in _COUNTED.items()}
    assert calls == {"plain": (3, 3), "full": (6, 6), "every second": (5, 5), "matmul kept": (6, 3)}


_COUNTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"activation_checkpointing": True},
    "every second": {"activation_checkpointing": True, "activation_checkpointing_every": 2},
    "matmul kept": {"activation_checkpointing": True, "activation_checkpointing_save_ops": ["matmul"]},
}


def _count_calls(config: dict[str, Any]) -> tuple[int, int]:
    """Return how often the blocks' last projection is called, and how often the first is computed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from hocket.dist import FSDPConfig
    from hocket.dist.layout.activation import apply_activation_levers

    class CountProducts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # (64, 12) × (12, 36): the forward product of `qkv` and no other.
            if func is torch.ops.aten.mm.default and [tuple(a.shape) for a in args] == [(64, 12), (12, 36)]:
                type(self).count += 1
            return func(*args, **(kwargs or {}))

    model = small_models.build("gpt", seed=3)
    calls = []
    for block in model.blocks:
        block.mlp_out.register_forward_pre_hook(lambda *_: calls.append(1))
    apply_activation_levers(model, FSDPConfig(**config), {f"blocks.{i}" for i in range(3)})
    (batch,) = small_models.batches("gpt", 1)
    with CountProducts() as products:
        model.loss(model(batch), batch).backward()
    return len(calls), products.count
