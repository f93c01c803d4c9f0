"""The suite of `Parallelism`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hocket.trainer.protocols import Parallelism
from hocket.trainer.ranks.sharded_tensors import whole_tensor

# A width of layers that works for any small number of ranks: they divide it, or pad their shards.
_WIDTH = 8


def check_parallelism(make: Callable[[], Parallelism]) -> None:
    """Check that a parallelism trains as one process would: layout, gradients, their norm, and reductions.

    Collective: call it on every rank of the job (with one process, just call it). Ranks must have the same
    data-parallel size, and there may be at most 16 of them.

    Args:
        make: A function that returns the parallelism of this process, in fp32.

    Raises:
        AssertionError: If a result is not the one of a single process.
    """
    parallelism = make()
    rank, size = parallelism.data_parallel
    assert 0 <= rank < size, f"`data_parallel` is {(rank, size)}; expected (rank, size) with 0 <= rank < size"
    _check_facts(parallelism)
    _check_reductions(parallelism)
    _check_layout(parallelism)
    for accumulate in (False, True):
        _check_gradients(parallelism, accumulate=accumulate)


def _check_facts(parallelism: Parallelism) -> None:
    rank, size = parallelism.data_parallel
    assert isinstance(parallelism.device, torch.device), "`device` is not a `torch.device`"
    assert 0 <= parallelism.global_rank < parallelism.world_size, (
        f"`global_rank` is {parallelism.global_rank} of `world_size` {parallelism.world_size}"
    )
    assert parallelism.world_size % size == 0, (
        f"{size} data-parallel ranks do not divide `world_size` {parallelism.world_size}"
    )
    assert size != parallelism.world_size or rank == parallelism.global_rank, (
        f"every rank takes its own data, and `data_parallel` is {(rank, size)} on rank "
        f"{parallelism.global_rank}"
    )
    description = parallelism.describe()
    assert isinstance(description, str), f"`describe` returned a `{type(description).__name__}`"
    assert description, "`describe` returned an empty text"
    assert "\n" not in description, f"`describe` returned {description!r}; expected one line"


def _check_reductions(parallelism: Parallelism) -> None:
    rank, size = parallelism.data_parallel
    # Two reductions run at once and are awaited in the other order: they must not mix.
    first = parallelism.reduce_async(torch.tensor([1.0, rank, 2.0**50 + rank], dtype=torch.float64))
    second = parallelism.reduce_async(torch.tensor([0.5], dtype=torch.float64))
    assert second.wait().tolist() == [0.5 * size], "`reduce_async` does not sum over the data-parallel ranks"
    expected = [size, size * (size - 1) / 2, size * 2.0**50 + size * (size - 1) / 2]
    for _ in range(2):
        result = first.wait()
        assert result.dtype is torch.float64, f"`reduce_async` made {result.dtype} of float64"
        assert result.tolist() == expected, (
            f"`reduce_async` gives {result.tolist()}; expected {expected}, each time"
        )


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH))


def _batch(rank: int, microbatch: int = 0) -> torch.Tensor:
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(100 * microbatch + rank))


def _full(tensor: Any) -> torch.Tensor:
    """Return the whole of a tensor on the host, whether it is sharded or not."""
    whole = whole_tensor(tensor)
    return whole.detach().cpu()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "lr": 0.5}, {"params": biases, "weight_decay": 0.25}]
    return torch.optim.SGD(groups, lr=0.1)


def _laid_out(parallelism: Parallelism) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    model = _model()
    reference = copy.deepcopy(model)
    optimizer = _optimizer(model)
    return parallelism.lay_out(model, [optimizer]), reference, optimizer


def _plain_name(name: str) -> str:
    # DDP and compiled modules add a prefix to the parameter's name.
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def _assert_close(actual: Any, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(_full(actual), expected.detach(), msg=lambda text: f"{what}: {text}")


def _check_layout(parallelism: Parallelism) -> None:
    module, reference, optimizer = _laid_out(parallelism)
    assert isinstance(module, nn.Module), (
        f"`lay_out` returned a `{type(module).__name__}`, not an `nn.Module`"
    )
    parameters = {_plain_name(name): parameter for name, parameter in module.named_parameters()}
    expected = dict(reference.named_parameters())
    assert parameters.keys() == expected.keys(), f"`lay_out` changed the names to {sorted(parameters)}"
    for name, parameter in parameters.items():
        _assert_close(parameter, expected[name], f"`lay_out` changed `{name}`")
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [[names.get(id(one), "?") for one in group["params"]] for group in optimizer.param_groups]
    assert groups == [["0.weight", "2.weight"], ["0.bias", "2.bias"]], (
        f"`lay_out` left the optimizer with the groups {groups}; expected the laid out parameters, by name"
    )
    options = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert options == [(0.5, 0), (0.1, 0.25)], f"`lay_out` changed the groups' options to {options}"
    device = next(iter(parameters.values())).device
    _assert_close(
        module(_batch(0).to(device)), reference(_batch(0)), "the laid out module computes other outputs"
    )


def _check_gradients(parallelism: Parallelism, *, accumulate: bool) -> None:
    """Compare gradients, and their norm, with those of one process that sees every rank's batches."""
    rank, size = parallelism.data_parallel
    module, reference, optimizer = _laid_out(parallelism)
    device = next(module.parameters()).device
    num_microbatches = 2 if accumulate else 1
    for microbatch in range(num_microbatches):
        parallelism.sync_gradients(module, microbatch == num_microbatches - 1)
        module(_batch(rank, microbatch).to(device)).square().sum().backward()
        for other in range(size):
            (reference(_batch(other, microbatch)).square().sum() / size).backward()
    parallelism.sync_gradients(module, True)
    how = f"over {num_microbatches} microbatches, {size} ranks"
    for (name, parameter), reference_parameter in zip(
        module.named_parameters(), reference.parameters(), strict=True
    ):
        assert parameter.grad is not None, f"`{name}` has no gradient after `backward`"
        assert reference_parameter.grad is not None
        _assert_close(parameter.grad, reference_parameter.grad, f"the gradient of `{name}` {how}")
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    norm = parallelism.clip_grad_norm_(list(module.parameters()), 0.5)
    assert not hasattr(norm, "full_tensor"), "`clip_grad_norm_` returned a `DTensor`; expected a plain tensor"
    _assert_close(norm, expected, f"the gradients' norm {how}")
    optimizer.step()
    _optimizer(reference).step()
    for (name, parameter), reference_parameter in zip(
        module.named_parameters(), reference.parameters(), strict=True
    ):
        _assert_close(parameter, reference_parameter, f"`{name}` after a clipped step {how}")
