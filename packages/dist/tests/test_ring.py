"""The operators that ring attention merges, the cut of sequences, and torch's functions for the ring."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.dist.errors import ConfigError, ModelError
from hocket.dist.layout.sequence import torch_ring
from hocket.dist.layout.sequence.exchange import Axis, part_of
from hocket.dist.layout.sequence.kernels import CPU, EFFICIENT, FLASH, Kernel, find_kernel
from hocket.dist.layout.sequence.torch_ring import TorchRing

CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "shared heads": {"is_causal": True, "key_heads": 2},
    "fewer queries": {"length": 5, "key_length": 10},
    "fewer keys": {"length": 10, "key_length": 5, "key_heads": 1},
}
BIASED = {"bias": {"with_bias": True, "key_heads": 2}}


def _compare(case: dict[str, Any], dtype: torch.dtype, device: str, tolerance: float) -> Kernel:
    """Compare an operator, its sums and gradients with attention by hand in float64."""
    case = {"length": 10, "key_length": 10, "key_heads": 4, "is_causal": False, "with_bias": False} | case
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    query, grad_out = draw(2, 4, case["length"], 16), draw(2, 4, case["length"], 16)
    key, value = (draw(2, case["key_heads"], case["key_length"], 16) for _ in range(2))
    bias = draw(1, 1, case["length"], case["key_length"]) if case["with_bias"] else None
    kernel = find_kernel(query, has_bias=bias is not None)
    settings = {"bias": bias, "is_causal": case["is_causal"], "scale": 0.3}
    out, logsumexp, *state = kernel.attend(query, key, value, **settings)
    tensors = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp}
    found = kernel.differentiate(grad_out=grad_out, **tensors, state=state, **settings)

    exact = [one.double().requires_grad_() for one in (query, key, value)]
    wide = [exact[0], *(one.repeat_interleave(4 // case["key_heads"], dim=1) for one in exact[1:])]
    scores = 0.3 * wide[0] @ wide[1].mT
    if bias is not None:
        scores = scores + bias.double()
    if case["is_causal"]:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    expected = scores.softmax(-1) @ wide[2]
    gradients = torch.autograd.grad(expected, exact, grad_out.double())
    for one, other in zip(
        (out, logsumexp, *found), (expected, scores.logsumexp(-1), *gradients), strict=True
    ):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    return kernel


@pytest.mark.parametrize("name", [*CASES, *BIASED])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_the_operator_of_the_cpu_attends(name: str, dtype: torch.dtype, tolerance: float) -> None:
    assert _compare((CASES | BIASED)[name], dtype, "cpu", tolerance) is CPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_flash_attention_attends(name: str) -> None:
    assert _compare(CASES[name], torch.bfloat16, "cuda", 0.06) is FLASH


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *BIASED])
def test_memory_efficient_attention_attends(name: str) -> None:
    assert _compare((CASES | BIASED)[name], torch.float32, "cuda", 5e-3) is EFFICIENT


@pytest.mark.parametrize(
    ("kernel", "dtype", "has_bias"),
    [(FLASH, torch.bfloat16, False), (EFFICIENT, torch.float32, False), (EFFICIENT, torch.float32, True)],
)
def test_the_operators_of_cuda_take_what_they_are_given(
    kernel: Kernel, dtype: torch.dtype, has_bias: bool
) -> None:
    """Tensors without values show the arguments and shapes on a machine without a GPU, and no more."""
    if kernel is EFFICIENT and torch.__version__ < "2.15":
        pytest.skip("the shapes of memory-efficient attention need a driver in torch 2.9")
    with FakeTensorMode():
        query = torch.empty(2, 4, 6, 8, device="cuda", dtype=dtype)
        key = torch.empty(2, 2, 12, 8, device="cuda", dtype=dtype)
        bias = torch.empty(1, 1, 6, 12, device="cuda", dtype=dtype) if has_bias else None
        settings = {"bias": bias, "is_causal": False, "scale": 0.3}
        out, logsumexp, *state = kernel.attend(query, key, key, **settings)
        assert (out.shape, logsumexp.shape, len(state)) == ((2, 4, 6, 8), (2, 4, 6), 2)
        found = kernel.differentiate(
            grad_out=out,
            query=query,
            key=key,
            value=key,
            out=out,
            logsumexp=logsumexp,
            state=state,
            **settings,
        )
        assert [one.shape for one in found] == [query.shape, key.shape, key.shape]


def test_dtypes_without_an_operator_are_refused() -> None:
    with pytest.raises(ModelError, match="attention has float64 queries on cpu, and ring attention computes"):
        find_kernel(torch.zeros(1, 1, 2, 8, dtype=torch.float64), has_bias=False)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_has_a_part_of_the_head_and_one_of_the_tail(size: int) -> None:
    whole = torch.arange(12 * size).view(1, -1)
    axes = [Axis(name="cp", group=None, rank=rank, size=size, is_balanced=True) for rank in range(size)]  # type: ignore[arg-type]
    parts = [part_of(whole, axis, axis.rank) for axis in axes]
    seen = [int(part.sum()) for part in parts]  # the scores of causal attention
    assert seen == seen[:1] * size
    assert parts[0].tolist() == [[*range(6), *range(12 * size - 6, 12 * size)]]
    balancers = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    order = balancers._HeadTailLoadBalancer(12 * size, size, "cpu")._generate_indices()
    assert torch.equal(torch.cat(parts, dim=1), whole[:, order[0]])


def test_a_ring_of_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    TorchRing()
    changed: Any = types.ModuleType("changed")
    changed.__dict__.update(vars(TorchRing()._torch))
    assert torch_ring._is_known(changed)
    changed._templated_ring_attention = lambda mesh, query, key, value: (mesh, query, key, value)
    assert not torch_ring._is_known(changed)
    monkeypatch.setattr(torch_ring, "_MODULES", ("torch.distributed", "torch.no_such_module"))
    with pytest.raises(ConfigError) as caught:
        TorchRing()
    assert f"this is torch {torch.__version__}, whose ring attention differs" in str(caught.value)


def test_options_of_torch_are_set_back() -> None:
    ring = TorchRing()
    before = [getattr(ring._options, name) for name in torch_ring._OPTIONS]
    with ring._set(False, "alltoall"):
        assert not ring._options.enable_load_balance
        assert ring._options.rotate_method.name == "ALL_TO_ALL"
    assert [getattr(ring._options, name) for name in torch_ring._OPTIONS] == before


def test_flash_attention_of_the_cpu_is_what_torch_calls() -> None:
    """The operator gives the bits of `scaled_dot_product_attention`."""
    query, key, value = (
        torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    out, *_ = CPU.attend(query, key, value, is_causal=True, scale=8**-0.5)
    assert torch.equal(out, F.scaled_dot_product_attention(query, key, value, is_causal=True))
