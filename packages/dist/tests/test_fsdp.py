"""Each key of `fsdp_config` changes a training step: the gathered tensors, their order and their dtypes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.dist import provide
from hocket.dist.layout import activation
from support.standing_ranks import StandingRanks

LAYERS = 3
HIDDEN = tuple(8 * (index + 1) for index in range(LAYERS))
"""Different widths, so that the size of a gathered tensor identifies its block."""


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(4, hidden, bias=False)
        self.down = nn.Linear(hidden, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for hidden in HIDDEN)
        self.head = nn.Linear(4, 36, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NAMES = {8 * hidden: f"block {index}" for index, hidden in enumerate(HIDDEN)} | {144: "root", 528: "whole"}


class Step(NamedTuple):
    """The collectives and results of one training step on a rank."""

    events: list[str]
    """`gather NAME` and `forward NAME`, in their order; `backward` where the backward pass begins."""
    ranks_of_gathers: list[int]
    """Number of ranks of each gather."""
    dtypes: tuple[set[str], set[str], str]
    """The dtypes of gathered parameters, of reduced gradients, and of the output."""
    num_reduced: tuple[int, int]
    """Number of reductions within the ranks of a copy, and of sums over copies."""
    shapes: dict[str, tuple[int, ...]]
    """The shape of this rank's shard of each parameter."""
    num_groups: int
    initial: float
    is_offloaded: bool


class Collectives(TorchDispatchMode):
    """Records the collectives of torch's sharded and replicated modules."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.ranks_of_gathers: list[int] = []
        self.dtypes: tuple[set[str], set[str]] = (set(), set())
        self.num_reduced = [0, 0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d.") and "allgather" in name:
            whole, part = args[:2]
            self.events.append(f"gather {NAMES[whole.numel()]}")
            self.ranks_of_gathers.append(whole.numel() // part.numel())
            self.dtypes[0].add(str(whole.dtype))
        elif name.startswith("c10d.") and "reduce_scatter" in name:
            self.dtypes[1].add(str(args[0].dtype))
            self.num_reduced[0] += 1
        elif name.startswith("c10d.allreduce") and args[0][0].dtype != torch.float64:
            # In float64, ranks exchange in the first pass which parameters they used.
            self.dtypes[1].add(str(args[0][0].dtype))
            self.num_reduced[1] += 1
        return func(*args, **(kwargs or {}))


def _step(config: dict[str, Any], precision: str | None = None, microbatches: int = 1) -> Step:
    with provide(config, device="cpu", timeout_s=30, precision=precision) as parallelism:
        torch.manual_seed(7 + parallelism.data_parallel[0])
        model = Model()
        module = parallelism.lay_out(model)
        parameters = dict(module.named_parameters())
        shapes = {
            name: tuple(getattr(one, "to_local", lambda one=one: one)().shape)
            for name, one in parameters.items()
        }
        first = parameters["blocks.0.up.weight"]
        initial = getattr(first, "full_tensor", lambda: first)().sum().item()
        with Collectives() as seen:
            for index, block in enumerate(model.blocks):
                block.up.register_forward_pre_hook(
                    lambda *_, index=index: seen.events.append(f"forward block {index}")
                )
            for number in range(microbatches):
                parallelism.sync_gradients(module, number == microbatches - 1)
                output = module(torch.ones(2, 4))
                seen.events.append("backward")
                output.sum().backward()
        groups = [each for each in model.modules() if isinstance(each, FSDPModule)]
        sharded = [group for each in groups if (group := each._get_fsdp_state()._fsdp_param_group)]
        held = [one for group in sharded for one in group.fsdp_params]
        return Step(
            seen.events,
            seen.ranks_of_gathers,
            (*seen.dtypes, str(output.dtype)),
            (seen.num_reduced[0], seen.num_reduced[1]),
            shapes,
            len(groups),
            initial,
            all(one.offload_to_cpu for one in held),
        )


BLOCKS = [f"block {index}" for index in range(LAYERS)]


def _gathers(step: Step, *, after: str | None = None) -> list[str]:
    events = step.events[step.events.index(after) :] if after else step.events
    return [event.removeprefix("gather ") for event in events if event.startswith("gather")]


Case = tuple[dict[str, Any], dict[str, Any], Callable[[Step], object]]
ALL = [*BLOCKS, "root"]
CASES_OF_2: dict[str, Case] = {
    "sharding_strategy=FULL_SHARD": (
        {},
        {},
        lambda step: (
            sorted(_gathers(step)) == sorted([*ALL, *BLOCKS]) and step.shapes["head.weight"] == (18, 4)
        ),
    ),
    "sharding_strategy=SHARD_GRAD_OP": (
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {},
        lambda step: sorted(_gathers(step)) == sorted(ALL) and step.shapes["head.weight"] == (18, 4),
    ),
    "sharding_strategy=NO_SHARD": (
        {"sharding_strategy": "NO_SHARD"},
        {},
        lambda step: (
            step.num_reduced[1] == LAYERS + 1
            and set(step.ranks_of_gathers) <= {1}
            and step.shapes["head.weight"] == (36, 4)
        ),
    ),
    "reshard_after_forward": (
        {"reshard_after_forward": False},
        {},
        lambda step: not _gathers(step, after="backward"),
    ),
    "mixed_precision=DEFAULT": (
        {},
        {"precision": "amp_bf16"},
        lambda step: step.dtypes == ({"torch.bfloat16"}, {"torch.float32"}, "torch.bfloat16"),
    ),
    "mixed_precision=PURE": (
        {"mixed_precision": "PURE"},
        {"precision": "amp_bf16"},
        lambda step: step.dtypes == ({"torch.bfloat16"}, {"torch.bfloat16"}, "torch.bfloat16"),
    ),
    "mixed_precision=FULL": (
        {"mixed_precision": "FULL"},
        {"precision": "amp_bf16"},
        lambda step: step.dtypes == ({"torch.float32"}, {"torch.float32"}, "torch.float32"),
    ),
    "mixed_precision, a dict": (
        {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16", "output_dtype": "fp32"}},
        {},
        lambda step: step.dtypes == ({"torch.bfloat16"}, {"torch.bfloat16"}, "torch.float32"),
    ),
    "amp_dtype": (
        {"amp_dtype": "bf16"},
        {"precision": "fp32"},
        lambda step: step.dtypes[0] == {"torch.bfloat16"},
    ),
    "auto_wrap": (
        {"auto_wrap": False},
        {},
        lambda step: step.num_groups == 1 and set(_gathers(step)) == {"whole"},
    ),
    "cpu_offload": ({"cpu_offload": True}, {}, lambda step: step.is_offloaded),
    "no cpu_offload": ({}, {}, lambda step: not step.is_offloaded),
    "ignored_modules": (
        {"ignored_modules": ["head"]},
        {},
        lambda step: step.shapes["head.weight"] == (36, 4) and step.num_reduced == (LAYERS, 1),
    ),
    "gradient_sync of FULL_SHARD": (
        {},
        {"microbatches": 2},
        lambda step: step.num_reduced == (2 * (LAYERS + 1), 0),
    ),
    "gradient_sync=every": (
        {"gradient_sync": "every"},
        {"microbatches": 2},
        lambda step: step.num_reduced == (2 * (LAYERS + 1), 0),
    ),
    "gradient_sync=last": (
        {"gradient_sync": "last"},
        {"microbatches": 2},
        lambda step: step.num_reduced == (LAYERS + 1, 0),
    ),
    "gradient_sync=replicas_last": (
        {"data_parallel_replicate_degree": 2, "gradient_sync": "replicas_last"},
        {"microbatches": 2},
        lambda step: step.num_reduced[1] == LAYERS + 1,
    ),
    "no forward_prefetch": (
        {},
        {},
        lambda step: (
            step.events.index("gather block 1") > step.events.index("forward block 0")
            and step.events.index("gather block 2") > step.events.index("forward block 1")
        ),
    ),
    "forward_prefetch": (
        {"forward_prefetch": True},
        {},
        lambda step: (
            step.events.index("gather block 1") < step.events.index("forward block 0")
            and step.events.index("gather block 2") > step.events.index("forward block 0")
        ),
    ),
    "forward_prefetch_limit": (
        {"forward_prefetch": True, "forward_prefetch_limit": 2},
        {},
        lambda step: step.events.index("gather block 2") < step.events.index("forward block 0"),
    ),
}
CASES_OF_4: dict[str, Case] = {
    "data_parallel_replicate_degree": (
        {"data_parallel_replicate_degree": 2},
        {},
        lambda step: set(step.ranks_of_gathers) == {2} and step.num_reduced == (LAYERS + 1, LAYERS + 1),
    ),
    "data_parallel_shard_degree": (
        {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2},
        {},
        lambda step: set(step.ranks_of_gathers) == {2} and step.shapes["head.weight"] == (18, 4),
    ),
    "sharding_strategy=HYBRID_SHARD": (
        {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2},
        {},
        lambda step: step.ranks_of_gathers == [2] * (2 * LAYERS + 1) and step.num_reduced[1] == LAYERS + 1,
    ),
    "gradient_sync of HYBRID_SHARD": (
        {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2},
        {"microbatches": 2},
        lambda step: step.num_reduced == (2 * (LAYERS + 1), LAYERS + 1),
    ),
    "sharding_strategy=_HYBRID_SHARD_ZERO2": (
        {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "data_parallel_shard_degree": 2},
        {},
        lambda step: step.ranks_of_gathers == [2] * (LAYERS + 1),
    ),
    "process_group=set2": (
        {"process_group": "set2"},
        {},
        lambda step: set(step.ranks_of_gathers) == {2} and step.num_reduced[1] == LAYERS + 1,
    ),
    "process_group=self": (
        {"process_group": "self"},
        {},
        lambda step: step.shapes["head.weight"] == (36, 4),
    ),
    "reshard_after_forward=2": (
        {"reshard_after_forward": 2},
        {},
        # Forward gathers over all ranks, backward over the two ranks that kept the parameters.
        lambda step: step.ranks_of_gathers == [4] * (LAYERS + 1) + [2] * LAYERS,
    ),
}


def _steps(cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Step]:
    return {name: _step(config, **options) for name, (config, options) in cases.items()}


def _run(ranks: StandingRanks, cases: dict[str, Case]) -> list[dict[str, Step]]:
    found: list[dict[str, Step]] = ranks.run(
        _steps, {name: (config, options) for name, (config, options, _) in cases.items()}, timeout_s=120
    )
    return found


def test_keys_change_the_step_of_two_ranks(two_ranks: StandingRanks) -> None:
    for found in _run(two_ranks, CASES_OF_2):
        for name, step in found.items():
            assert CASES_OF_2[name][2](step), (name, step)


def test_keys_change_the_step_of_four_ranks(four_ranks: StandingRanks) -> None:
    for found in _run(four_ranks, CASES_OF_4):
        for name, step in found.items():
            assert CASES_OF_4[name][2](step), (name, step)


def test_backward_prefetch_limit_sets_how_many_blocks_are_gathered_ahead(two_ranks: StandingRanks) -> None:
    """With a limit of 2, two blocks are gathered before the last block's first gradient."""
    for one, two in zip(
        two_ranks.run(_events_of_backward, 1), two_ranks.run(_events_of_backward, 2), strict=True
    ):
        first = one.index("gradient block 2")
        assert "gather block 0" not in one[:first]
        assert {"gather block 1", "gather block 0"} <= set(two[: two.index("gradient block 2")])


def _events_of_backward(limit: int) -> list[str]:
    with provide({"backward_prefetch_limit": limit}, device="cpu", timeout_s=30) as parallelism:
        model = Model()
        module = parallelism.lay_out(model)
        with Collectives() as seen:
            for index, block in enumerate(model.blocks):
                block.down.register_full_backward_hook(
                    lambda *_, index=index: seen.events.append(f"gradient block {index}")
                )
            output = module(torch.ones(2, 4, requires_grad=True))
            seen.events.clear()
            output.sum().backward()
        return seen.events


def _values_of(sync: bool) -> float:
    step = _step({"sync_module_states": sync, "process_group": "self"})
    return step.initial


def test_sync_module_states_decides_whether_ranks_keep_their_own_weights(two_ranks: StandingRanks) -> None:
    first, second = two_ranks.run(_values_of, True)
    assert first == second
    first, second = two_ranks.run(_values_of, False)
    assert first != second


def test_verbose_prints_a_line_for_each_group(one_rank: None, capfd: pytest.CaptureFixture[str]) -> None:
    with provide({"verbose": True, "amp_dtype": "bf16"}, device="cpu", timeout_s=10) as parallelism:
        parallelism.lay_out(Model())
    printed = capfd.readouterr().err
    assert all(name in printed for name in ("(root)", "blocks.0", "blocks.1", "blocks.2", "bfloat16"))
    with provide({}, device="cpu", timeout_s=10) as parallelism:
        parallelism.lay_out(Model())
    assert "blocks.0" not in capfd.readouterr().err


@pytest.mark.parametrize("is_on", [True, False])
def test_saved_activations_are_offloaded_and_weights_are_not(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    shapes = []

    class Noted(torch.autograd.graph.save_on_cpu):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (shapes.append(tuple(tensor.shape)), pack(tensor))[1]

    monkeypatch.setattr(activation, "save_on_cpu", Noted)
    with provide({"activation_cpu_offload": is_on}, device="cpu", timeout_s=10) as parallelism:
        module = parallelism.lay_out(Model())
        module(torch.ones(2, 4)).sum().backward()
    expected = {(2, 4), *((2, hidden) for hidden in HIDDEN)} if is_on else set()
    assert set(shapes) == expected
