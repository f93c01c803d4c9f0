"""Models that a layout cannot train are refused by the name of the module or parameter at fault."""

import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hocket.dist import ModelError, provide
from support.standing_ranks import StandingRanks


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _sharded() -> nn.Module:
    return fully_shard(_net(), mesh=init_device_mesh("cpu", (2,)))


def _tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(_net(), mesh, {"0": ColwiseParallel()})


def _wrapped() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(_net()))


class Mixed(nn.Module):
    """A layer in bfloat16 and a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x.bfloat16()).float())


def _sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))


def _scalar() -> nn.Module:
    model = _net()
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


class Hiding(nn.Module):
    """A model whose output keeps its tensor in an attribute."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net, self.kind = _net(), kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(logits=self.net(x))


@dataclasses.dataclass(slots=True)
class Slots:
    logits: torch.Tensor


def _train_hiding(kind: Any, inner: bool) -> str:
    model: nn.Module = Hiding(kind)
    if inner:
        model.net.register_forward_hook(lambda _module, _args, output: kind(logits=output))
        model.net._fsdp_wrap = True
    with provide({"auto_wrap": inner}, device="cpu", timeout_s=60) as parallelism:
        parallelism.lay_out(model)
        with torch.no_grad():
            model(torch.ones(1, 4))
        try:
            output = model(torch.ones(1, 4))
        except ModelError as error:
            return str(error)
        assert model(torch.ones(1, 4)) is not None
        return type(output).__name__


def test_outputs_that_hide_their_tensors_are_refused(two_ranks: StandingRanks) -> None:
    for kind in (types.SimpleNamespace, Slots):
        for message in two_ranks.run(_train_hiding, kind, False):
            assert message.startswith(
                f"Hiding returns a `{kind.__name__}` with tensors that `fully_shard` does not"
            )
    for message in two_ranks.run(_train_hiding, types.SimpleNamespace, True):
        assert "`net`, a Sequential, returns a `SimpleNamespace`" in message
    assert set(two_ranks.run(_train_hiding, dict, False)) == {"dict"}


Build = Callable[[], nn.Module]
CASES: dict[str, tuple[Build, Any, str | None, list[str]]] = {
    "sharded, no config": (_sharded, None, None, ["by `fully_shard`", "`fsdp_config={}` shards it"]),
    "sharded, config": (_sharded, {}, None, ["by `fully_shard`", "plain model, which `fsdp_config` shards"]),
    "tensor parallel, no config": (_tensor_parallel, None, None, ["`0.weight` is a DTensor", "('tp',)"]),
    "tensor parallel, config": (
        _tensor_parallel,
        {},
        None,
        ["`0.weight` is a DTensor", "without a config takes such"],
    ),
    "wrapped, no config": (_wrapped, None, None, ["`1`, a DistributedDataParallel", "attribute `module`"]),
    "wrapped, config": (_wrapped, {}, None, ["`1`, a DistributedDataParallel"]),
    "two dtypes": (
        Mixed,
        {},
        None,
        ["`layer.weight` is bfloat16 and `norm.weight` is float32", "`_fsdp_wrap"],
    ),
    "sparse": (_sparse, {}, None, ["`0` has sparse gradients", "`sparse=False`"]),
    "scalars in fp16": (_scalar, {}, "amp_fp16", ["`scale` is a scalar", "'amp_bf16'"]),
}


def _message(name: str) -> str:
    build, config, precision, _ = CASES[name]
    with provide(config, device="cpu", timeout_s=30, precision=precision) as parallelism:
        model = build()
        with pytest.raises(ModelError) as caught:
            parallelism.lay_out(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return str(caught.value)


def _messages() -> dict[str, str]:
    return {name: _message(name) for name in CASES}


def test_a_model_that_cannot_be_laid_out_is_refused_by_name(two_ranks: StandingRanks) -> None:
    for messages in two_ranks.run(_messages):
        for name, (*_, words) in CASES.items():
            for word in words:
                assert word in messages[name], name


def test_the_advice_for_two_dtypes_works(one_rank: None) -> None:
    x, alone = torch.ones(2, 4), Mixed()
    with provide({}, device="cpu", timeout_s=30) as parallelism:
        model = copy.deepcopy(alone)
        model.norm._fsdp_wrap = True
        parallelism.lay_out(model)
        for one in (model, alone):
            one(x).square().sum().backward()
        for parameter, reference in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad)
