"""The ring attention of torch, which is private to it: the one place that names its functions.

torch sends keys and values around the ranks, calls an attention operator for each part, and merges the
results. Under a causal mask a rank has a part of the head of the sequence and one of its tail, so that all
ranks compute as much.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from hocket.dist.errors import ConfigError

_MODULES = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",  # torch 2.9
)
_SIGNATURES = {
    "_templated_ring_attention": "group seq_dim op query key value is_causal kwargs",
    "_templated_ring_attention_backward": "group seq_dim op grad_out grad_out_name query key value out "
    "logsumexp is_causal kwargs",
}
_OPTIONS = ("enable_load_balance", "convert_to_f32", "rotate_method")
_ROTATIONS = {"allgather": "ALL_GATHER", "alltoall": "ALL_TO_ALL"}
_POSITIONS = 2
"""The dim of positions in `(batch, heads, positions, features)`."""


class TorchRing:
    """The functions of torch's ring attention.

    Raises:
        ConfigError: This torch does not have them as they are known.
    """

    def __init__(self) -> None:
        self._torch = _find_module()
        self._options = self._torch._cp_options

    def attend(
        self,
        group: torch.distributed.ProcessGroup,
        operator: Callable[..., Any],
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        is_causal: bool,
        rotate_method: str,
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return the output, its sums and the operator's other results. Collective over the ranks of `group`.

        Args:
            group: The ranks that share a sequence.
            operator: Called with queries, keys, values, `is_causal` and `options`.
            tensors: Queries, keys and values of this rank's positions: under a causal mask those of part
                `rank` and of part `2 * size - 1 - rank` of `2 * size`.
            is_causal: Whether positions see earlier ones alone. If so, only the parts that they see are
                passed to the operator; otherwise the whole part of each rank, in the order `rank`, `rank - 1`
                and so on.
            rotate_method: 'allgather' or 'alltoall'.
            **options: Further arguments of the operator.
        """
        with self._set(is_causal, rotate_method):
            results: tuple[torch.Tensor, ...] = self._torch._templated_ring_attention(
                group, _POSITIONS, operator, *tensors, is_causal=is_causal, **options
            )
        return results

    def differentiate(
        self,
        group: torch.distributed.ProcessGroup,
        operator: Callable[..., Any],
        *,
        is_causal: bool,
        rotate_method: str,
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of this rank's queries, keys and values. Collective, as `attend`.

        Args:
            group: The ranks that share a sequence.
            operator: Called with `grad_out`, the arguments and results of `attend`, all by name.
            is_causal: As for `attend`.
            rotate_method: As for `attend`.
            **arguments: `grad_out`, `query`, `key`, `value`, `out`, `logsumexp` and options of the operator.
        """
        with self._set(is_causal, rotate_method):
            results = self._torch._templated_ring_attention_backward(
                group, _POSITIONS, operator, grad_out_name="grad_out", is_causal=is_causal, **arguments
            )
        grad_query, grad_key, grad_value = results[:3]
        return grad_query, grad_key, grad_value

    @contextlib.contextmanager
    def _set(self, is_causal: bool, rotate_method: str) -> Iterator[None]:
        """Set torch's options, which are global, and set them back."""
        before = {name: getattr(self._options, name) for name in _OPTIONS}
        rotation = getattr(self._torch._RotateMethod, _ROTATIONS[rotate_method])
        wanted = dict(zip(_OPTIONS, (is_causal, True, rotation), strict=True))
        try:
            for name, value in wanted.items():
                setattr(self._options, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self._options, name, value)


def _find_module() -> ModuleType:
    for name in _MODULES:
        try:
            found = importlib.import_module(name)
        except ImportError:
            continue
        if _is_known(found):
            return found
    raise ConfigError(
        f"`parallelism_config['cp']['method']` is 'ring', and this is torch {torch.__version__}, whose ring "
        "attention differs from that of torch 2.9 to 2.15. Install one of these, or leave the method out"
    )


def _is_known(module: ModuleType) -> bool:
    """Whether a module has the functions and options, with the arguments that are passed here."""
    functions = {name: getattr(module, name, None) for name in _SIGNATURES}
    if not all(map(callable, functions.values())):
        return False
    arguments = {name: " ".join(inspect.signature(one).parameters) for name, one in functions.items() if one}
    options = getattr(module, "_cp_options", None)
    rotations = getattr(module, "_RotateMethod", None)
    return (
        arguments == _SIGNATURES
        and all(hasattr(options, name) for name in _OPTIONS)
        and all(hasattr(rotations, name) for name in _ROTATIONS.values())
    )
