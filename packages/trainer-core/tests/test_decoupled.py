"""Momentum of DecoupledSGDW that begins late, and states that do not fit the shards of parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim import DecoupledAdamW, DecoupledSGDW
from support.ranks import run_ranks

KERNELS = {
    "default": {},
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
INFINITE = float("inf")


@pytest.mark.parametrize("kernel", KERNELS)
def test_parameters_that_thaw_begin_their_momentum_then(kernel):
    options = {"momentum": 0.9, "dampening": 0.3}
    ours, theirs = ([nn.Parameter(torch.full((3,), 1.0 + index)) for index in range(3)] for _ in range(2))
    both = (
        (ours, DecoupledSGDW(ours, 0.1, **options, **KERNELS[kernel])),
        (theirs, SGD(theirs, 0.1, **options)),
    )
    for step in range(4):
        for params, optimizer in both:
            for index, param in enumerate(params):
                # The second one joins later, and the last one is absent in between.
                has_gradient = [True, step > 1, step != 1][index]
                param.grad = torch.full((3,), 0.5 + step - index) if has_gradient else None
            optimizer.step()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_overflow_in_the_first_step_leaves_no_momentum(kernel):
    """A fused kernel would leave a buffer of arbitrary values, to which the next step adds."""
    param, late, alone = (nn.Parameter(torch.ones(64)) for _ in range(3))
    optimizer = DecoupledSGDW([param, late], 0.1, momentum=0.9, weight_decay=1e-4, **KERNELS[kernel])
    other = SGD([alone], 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value in (INFINITE, INFINITE, 1.0, INFINITE, 2.0):
        before = copy.deepcopy([param, late])
        scaler.scale(torch.ones(()))
        for one in [param, late] if value == 2.0 else [param]:
            one.grad = torch.full((64,), value * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        if value == INFINITE:
            assert torch.equal(param, before[0])
            continue
        with torch.no_grad():
            alone.mul_(1 - 1e-4)
        alone.grad = torch.full((64,), value)
        other.step()
        torch.testing.assert_close(param, alone)
    torch.testing.assert_close(late, torch.full((64,), 1 - 1e-4 - 0.2))


def refuse_whole_states():
    mesh = init_device_mesh("cpu", (2,))
    messages = []
    for kind, slot in ((DecoupledAdamW, "exp_avg"), (DecoupledSGDW, "momentum_buffer")):
        for kernel in KERNELS.values():
            # Only the first rank has a row of it.
            param = nn.Parameter(distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)]))
            options = {} if kind is DecoupledAdamW else {"momentum": 0.9}
            optimizer = kind([param], lr=0.1, **options, **kernel)
            param.grad = torch.ones_like(param)
            optimizer.step()
            optimizer.state[param][slot] = optimizer.state[param][slot].full_tensor()
            with pytest.raises(TrainerConfigError) as caught:
                optimizer.step()
            messages.append(str(caught.value))
    return messages


def test_a_whole_state_of_a_sharded_parameter_is_refused_alike_on_all_ranks():
    first, second = run_ranks(refuse_whole_states, 2, init="gloo")
    assert first == second
    for message in first:
        assert "of the shape (1, 4): the parameter is sharded and the state is whole" in message
        assert "`set_optimizer_state_dict`" in message
