"""Muon on shards takes the steps that it takes on whole matrices, and sends no more than it has to.

Tolerance: as for the other products of axes, a relative 1e-5 of losses, norms and the update, float32.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim import Muon, muon_with_adamw
from support import layouts
from support.standing_ranks import StandingRanks

TOLERANCE = 1e-5
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "dp_shard 4": ({"dp_shard": 4}, 4),
    "dp_replicate 2 × dp_shard 2": ({"dp_replicate": 2, "dp_shard": 2}, 4),
    "dp_shard 2 × tp 2": ({"dp_shard": 2, "tp": 2}, 2),
    "tp 4": ({"dp_shard": 1, "tp": 4}, 1),
    "dp_shard 2 × cp 2": ({"dp_shard": 2, "cp": 2}, 2),
    "dp_shard 4, offloaded": ({"dp_shard": 4, "fsdp": {"cpu_offload": True}}, 4),
}


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    # In bfloat16 the last bit of a gradient decides on the third digit of an update.
    return muon_with_adamw(model, lr=3e-3, eps=1e-4, ns_dtype="float32")


@functools.cache
def _alone(kind: str, steps: int) -> layouts.Numbers:
    return layouts.train(kind, None, 1, steps=steps, make_optimizers=_muon)


def _train(kind: str, config: dict[str, Any], num_ranks: int, steps: int) -> layouts.Numbers:
    return layouts.train(kind, config, num_ranks, steps=steps, make_optimizers=_muon)


def _check(four_ranks: StandingRanks, kind: str, name: str, steps: int) -> None:
    config, num_ranks = LAYOUTS[name]
    for one in four_ranks.run(_train, kind, config, num_ranks, steps):
        differences = one.largest_differences(_alone(kind, steps))
        assert max(differences.values()) <= TOLERANCE, (one.description, differences)


@pytest.mark.parametrize("name", ["dp_shard 4", "dp_shard 2 × tp 2"])
def test_muon_on_shards_trains_as_one_process(four_ranks: StandingRanks, name: str) -> None:
    _check(four_ranks, "gpt", name, 3)


CASES = [
    *(("gpt", name) for name in LAYOUTS),
    # A tied weight, and stacks of matrices.
    *(
        (kind, name)
        for kind in ("tied llama", "mixtral")
        for name in ("dp_shard 2 × tp 2", "dp_shard 2 × cp 2")
    ),
]


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_muon_on_every_layout_trains_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks, kind, name, layouts.num_steps(kind))


def _steps(values: list[torch.Tensor], gradients: list[list[torch.Tensor]], **settings: Any) -> list[Any]:
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = Muon(params, lr=0.1, **settings)
    for given in gradients:
        for param, gradient in zip(params, given, strict=True):
            param.grad = gradient
        optimizer.step()
    return [param.detach() for param in params]


PLACEMENTS = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
]
SHAPES = [(7, 5), (4, 9), (1, 6), (3, 3), (6, 4, 5), (2, 7, 3), (12, 1)]


def _sharded(values: list[torch.Tensor], gradients: list[list[torch.Tensor]], ns_dtype: str) -> list[Any]:
    """Return for each placement the parameters after the steps, whole, and the bytes that this rank sent."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    exchange, sent = dist.all_to_all_single, []

    def counted(received: torch.Tensor, buffer: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(buffer.numel() * buffer.element_size())
        return exchange(received, buffer, *args, **options)

    found = []
    for placements in PLACEMENTS:
        sent.clear()
        dist.all_to_all_single = counted
        try:
            moved = [
                [distribute_tensor(one, mesh, placements) for one in step] for step in [values, *gradients]
            ]
            result = _steps(moved[0], moved[1:], ns_dtype=ns_dtype)
        finally:
            dist.all_to_all_single = exchange
        local = sum(one.to_local().numel() * 4 for one in moved[0])
        found.append(([one.full_tensor() for one in result], sum(sent), local * len(gradients)))
    return found


@pytest.mark.parametrize("ns_dtype", ["bfloat16", "float32"])
def test_each_placement_gives_the_bits_of_whole_matrices(four_ranks: StandingRanks, ns_dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values, *gradients = ([torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(4))
    whole = _steps(values, gradients, ns_dtype=ns_dtype)
    for by_placement in four_ranks.run(_sharded, values, gradients, ns_dtype):
        for placements, (found, sent, shards) in zip(PLACEMENTS, by_placement, strict=True):
            for one, expected in zip(found, whole, strict=True):
                assert torch.equal(one, expected), (placements, expected.shape)
            if placements == (Replicate(), Replicate()):
                assert sent == 0
            elif placements == (Shard(0), Replicate()):
                assert 0 < sent <= 2 * shards


@pytest.mark.parametrize(
    "settings", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}]
)
def test_a_whole_matrix_gets_torchs_bits(settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    values, *gradients = (
        [torch.randn(shape, generator=generator) for shape in SHAPES if len(shape) == 2] for _ in range(4)
    )
    params = [nn.Parameter(value.clone()) for value in values]
    theirs = torch.optim.Muon(params, lr=0.1, **settings)
    for given in gradients:
        for param, gradient in zip(params, given, strict=True):
            param.grad = gradient
        theirs.step()
    for one, expected in zip(_steps(values, gradients, **settings), params, strict=True):
        assert torch.equal(one, expected.detach())


def test_a_state_of_torchs_muon_goes_on() -> None:
    generator = torch.Generator().manual_seed(4)
    first, second, value = (torch.randn(5, 4, generator=generator) for _ in range(3))
    param = nn.Parameter(value.clone())
    theirs = torch.optim.Muon([param], lr=0.1, nesterov=False)
    param.grad = first
    theirs.step()
    taken = nn.Parameter(param.detach().clone())
    ours = pickle.loads(pickle.dumps(Muon([taken])))
    (taken,) = ours.param_groups[0]["params"]
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # torch shares the tensors
    for optimizer, each in ((theirs, param), (ours, taken)):
        each.grad = second
        optimizer.step()
    assert torch.equal(taken, param)


def test_a_state_of_torchs_muon_leaves_the_dtype_as_it_was_given() -> None:
    theirs = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    plain, wide = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    for ours, expected in ((Muon([plain]), "bfloat16"), (Muon([wide], ns_dtype="float32"), "float32")):
        ours.load_state_dict(theirs.state_dict())
        assert ours.param_groups[0]["ns_dtype"] == expected


def _with_gradients_to_be_summed(value: torch.Tensor, gradient: torch.Tensor) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    param: Any = nn.Parameter(distribute_tensor(value, mesh, (Replicate(),)))
    share = gradient * (dist.get_rank() + 1) / 10
    param.grad = DTensor.from_local(share, mesh, (Partial(),))
    Muon([param], lr=0.1, ns_dtype="float32").step()
    return param.detach().to_local()


def test_gradients_whose_sum_over_ranks_is_due_are_summed_first(four_ranks: StandingRanks) -> None:
    generator = torch.Generator().manual_seed(5)
    value, gradient = (torch.randn(5, 4, generator=generator) for _ in range(2))
    (whole,) = _steps([value], [[gradient]], ns_dtype="float32")
    for one in four_ranks.run(_with_gradients_to_be_summed, value, gradient):
        torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("param", "settings", "message"),
    [
        (torch.ones(3), {}, r"shape \(3,\)"),
        (torch.ones(2, 2, dtype=torch.complex64), {}, "complex64"),
        (torch.ones(2, 2), {"ns_dtype": "float16"}, "`ns_dtype` of `Muon` is 'float16'; expected one of"),
        (torch.ones(2, 2), {"adjust_lr_fn": "rms"}, "`adjust_lr_fn` of `Muon` is 'rms'"),
        (torch.ones(2, 2), {"lr": float("nan")}, "`lr` of `Muon` is nan"),
    ],
)
def test_what_muon_cannot_take_is_named(param: torch.Tensor, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerConfigError, match=message):
        Muon([nn.Parameter(param)], **settings)


def test_a_batch_of_matrices_is_each_matrix_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    stack, *gradients = (torch.randn(3, 6, 4, generator=generator) for _ in range(3))
    (together,) = _steps([stack], [[one] for one in gradients])
    apart = _steps(list(stack), [list(one) for one in gradients])
    torch.testing.assert_close(together, torch.stack(apart), rtol=1e-5, atol=1e-5)


def _warnings_of_torchs(config: dict[str, Any], make: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layouts.train("gpt", config, 4, steps=1, make_optimizers=make)
    return [str(one.message) for one in caught if "torch.optim.Muon" in str(one.message)]


def _torchs(model: nn.Module) -> list[torch.optim.Optimizer]:
    ours = muon_with_adamw(model)
    return [torch.optim.Muon(ours[0].param_groups[0]["params"]), ours[1]]


def test_torchs_own_muon_on_shards_is_named(four_ranks: StandingRanks) -> None:
    sharded, replicated = {"dp_shard": 4}, {"dp_replicate": 4, "dp_shard": 1}
    for said in four_ranks.run(_warnings_of_torchs, sharded, _torchs):
        assert len(said) == 1
        assert "use `hocket.trainer.optim.Muon`" in said[0]
    assert four_ranks.run(_warnings_of_torchs, replicated, _torchs) == [[]] * 4
    assert four_ranks.run(_warnings_of_torchs, sharded, _muon) == [[]] * 4
