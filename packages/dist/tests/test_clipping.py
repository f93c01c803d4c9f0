"""Clipping by the norm of gradients of every kind is that of torch in one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hocket.dist import clip_grad_norm_, provide
from hocket.trainer.errors import TrainerError
from hocket.trainer.ranks.sharded_tensors import global_norm, tensor_norms, whole_tensor
from hocket.trainer.step.gradient_clipping import clamp_gradients
from support.standing_ranks import StandingRanks

MAX_NORM, MAX_VALUE = 0.05, 0.002


class Mixture(nn.Module):
    """A model with gradients of several kinds."""

    def __init__(self, *, is_sparse: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4, sparse=is_sparse, dtype=dtype)
        self.filter = nn.Parameter(torch.randn(4, 4, dtype=dtype.to_complex()))
        self.head = nn.Linear(4, 2, dtype=dtype)
        self.logit_scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.embed(indices)
        return self.head((x.to(self.filter.dtype) @ self.filter).abs()) * self.logit_scale.exp()


class Halves(nn.Module):
    """A model of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(6, 4, dtype=torch.bfloat16), nn.Linear(4, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(indices).float())


MODELS: dict[str, tuple[nn.Module, Any]] = {
    "sparse and complex": (Mixture(is_sparse=True), None),
    "sparse and complex, double": (Mixture(is_sparse=True, dtype=torch.float64), None),
    "complex and scalars in shards": (Mixture(is_sparse=False), {}),
    "two dtypes": (Halves(), None),
}
INDICES = torch.tensor([[1, 1, 3], [3, 5, 1]])


def _reference(name: str) -> nn.Module:
    """Return the model with the gradients of all rows, the embedding's dense."""
    model = copy.deepcopy(MODELS[name][0])
    model.embed.sparse = False
    model(INDICES).square().mean().backward()
    return model


def _dense(gradient: Any) -> torch.Tensor:
    gradient = getattr(gradient, "full_tensor", lambda: gradient)()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _clip(name: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    model, config = MODELS[name]
    model = copy.deepcopy(model)
    with provide(config, device="cpu", timeout_s=30) as parallelism:
        laid_out = parallelism.lay_out(model)
        laid_out(INDICES.chunk(2)[parallelism.global_rank]).square().mean().backward()
        monitored = global_norm(tensor_norms({key: one.grad for key, one in model.named_parameters()}))
        norm = parallelism.clip_grad_norm_(model.parameters(), MAX_NORM)
        return norm, monitored, {key: _dense(one.grad) for key, one in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_any_kind_are_clipped_by_their_norm(two_ranks: StandingRanks, name: str) -> None:
    model = _reference(name)
    expected = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    gradients = {key: one.grad for key, one in model.named_parameters()}
    for norm, monitored, clipped in two_ranks.run(_clip, name):
        near: dict[str, Any] = {"rtol": 1e-2 if name == "two dtypes" else 1e-5, "atol": 1e-5}
        torch.testing.assert_close(norm, expected, **near)
        torch.testing.assert_close(monitored, expected, check_dtype=False, **near)
        torch.testing.assert_close(clipped, gradients, **near)


def test_a_conjugated_gradient_is_clipped_in_place() -> None:
    parameter = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    parameter.grad = torch.tensor([3.0, 4.0j, 0.0]).conj()
    assert clip_grad_norm_([parameter], 1.0) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, -0.8j, 0.0]))


def test_a_gradient_that_another_rank_counts_is_scaled_and_not_counted() -> None:
    own, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    own.grad, other.grad = torch.tensor([3.0, 4.0]), torch.tensor([30.0, 40.0])
    assert clip_grad_norm_([own, other], 1.0, uncounted=[other]) == 5.0
    torch.testing.assert_close(own.grad, torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(other.grad, torch.tensor([6.0, 8.0]))
    assert clip_grad_norm_([other], 1.0, uncounted=[other]) == 0.0
    torch.testing.assert_close(other.grad, torch.tensor([6.0, 8.0]))


def _clip_on_one() -> tuple[float, list[float] | None]:
    one = nn.Parameter(torch.zeros(2))
    if dist.get_rank() == 0:
        one.grad = torch.tensor([3.0, 4.0])
    norm = clip_grad_norm_([one], 1.0, over=dist.group.WORLD)
    return float(norm), None if one.grad is None else one.grad.tolist()


def test_a_rank_without_gradients_takes_part_in_the_norm(two_ranks: StandingRanks) -> None:
    first, second = two_ranks.run(_clip_on_one)
    assert first == (5.0, pytest.approx([0.6, 0.8]))
    assert second == (5.0, None)


def test_sparse_gradients_are_clipped_by_value_as_dense_ones() -> None:
    model = nn.Embedding(6, 4, sparse=True)
    dense = copy.deepcopy(model)
    dense.sparse = False
    for one in (model, dense):
        (one(INDICES) * torch.linspace(-0.01, 0.01, 4)).sum().backward()
    nn.utils.clip_grad_value_(dense.parameters(), MAX_VALUE)
    clamp_gradients(model.named_parameters(), MAX_VALUE)
    torch.testing.assert_close(model.weight.grad.to_dense(), dense.weight.grad)


def _whole_with_torch_2_9(rows: int) -> str:
    with pytest.MonkeyPatch.context() as patch, provide({}, device="cpu", timeout_s=30):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        values = torch.arange(2.0 * rows).view(rows, 2)
        tensor = distribute_tensor(values, mesh, [Shard(0), Shard(0)])
        patch.setattr(torch, "__version__", type(torch.__version__)("2.9.1"))
        try:
            torch.testing.assert_close(whole_tensor(tensor), values)
        except TrainerError as error:
            return str(error)
    return ""


def test_shards_that_torch_2_9_puts_together_wrongly_are_refused(four_ranks: StandingRanks) -> None:
    assert four_ranks.run(_whole_with_torch_2_9, 8) == [""] * 4
    for message in four_ranks.run(_whole_with_torch_2_9, 6):
        assert "a tensor (6, 2) is cut over 2 x 2 ranks along dim 0, into unequal shards" in message
        assert "torch 2.9.1 may return wrong values" in message
