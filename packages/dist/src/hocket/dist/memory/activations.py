"""What a forward pass saves, sends and computes, measured on the meta device without any rank."""

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.layout.activation import apply_activation_levers
from hocket.dist.layout.wrapping import choose_wraps


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPass:
    """The figures of a forward pass on one microbatch.

    Attributes:
        inside: Bytes that the blocks save for backward.
        outside: Bytes that the rest saves, such as embeddings, the head and the loss.
        recomputed: Bytes of the largest block, where blocks are recomputed or offloaded.
        boundary: Shape of the activations between blocks; empty without blocks.
        boundary_bytes: Bytes of them.
        flops_inside: Floating-point operations of the blocks.
        flops_outside: Those of the rest.
        exchanged: Bytes of the first input and of the output of each module that has parameters, by name.
    """

    inside: int
    outside: int
    recomputed: int
    boundary: tuple[int, ...] = ()
    boundary_bytes: int = 0
    flops_inside: int = 0
    flops_outside: int = 0
    exchanged: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def activations(self) -> int:
        """Bytes of activations at the end of the forward pass, with the largest recomputed block."""
        return self.inside + self.outside + self.recomputed


def measure_activations(
    model: nn.Module,
    batch: Any,
    config: FSDPConfig,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> int:
    """Return the bytes that a forward pass saves for backward, by running it on the meta device.

    Args:
        model: Plain, on any device; a copy of it is moved to the meta device.
        batch: One microbatch, tensors in dicts or lists.
        config: Its activation levers are applied; its low precision is that of the forward pass.
        loss: `loss(outputs, batch)`; the model's own if it has one.

    Raises:
        NotImplementedError: The forward reads values of tensors, which the meta device does not have.
    """
    return measure_forward(model, batch, config, loss=loss).activations


def measure_forward(
    model: nn.Module,
    batch: Any,
    config: FSDPConfig,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> ForwardPass:
    """Return all figures of a forward pass; arguments and errors are those of `measure_activations`."""
    param_dtype = config.policy_for(model.parameters()).param_dtype
    blocks = list(choose_wraps(model)) if config.auto_wrap else []
    plain = _Pass(model, blocks, param_dtype)
    counter = FlopCounterMode(display=False)
    plain.run(batch, loss, counter)
    saved, by_block = plain.saved.bytes, plain.by_block
    # Offloaded activations are not on the device, and checkpointed ones are there for one block at a time.
    largest = 0
    if (config.activation_checkpointing or config.activation_cpu_offload) and blocks:
        largest = max(by_block.values(), default=0)
    if config.activation_checkpointing and blocks:
        recomputed = _Pass(model, blocks, param_dtype)
        apply_activation_levers(recomputed.model, replace(config, activation_cpu_offload=False), blocks)
        recomputed.run(batch, loss)
        saved, by_block = recomputed.saved.bytes, recomputed.by_block
    inside = min(sum(by_block.values()), saved)
    return ForwardPass(
        inside=0 if config.activation_cpu_offload else inside,
        outside=saved - inside,
        recomputed=largest,
        boundary=plain.boundary,
        boundary_bytes=plain.exchanged.get(plain.first, (0, 0))[0],
        flops_inside=plain.flops_inside,
        flops_outside=counter.get_total_flops() - plain.flops_inside,
        exchanged=plain.exchanged,
    )


class _Pass:
    """A forward pass of a copy of a model on the meta device, with what its hooks find.

    Args:
        model: Plain.
        blocks: The names of its blocks.
        param_dtype: The low precision of the forward pass.
    """

    def __init__(self, model: nn.Module, blocks: Collection[str], param_dtype: torch.dtype | None) -> None:
        model = copy.deepcopy(model).to("meta")
        # The meta device has no autocast; casting a copy's parameters gives the same sizes.
        self.model = model if param_dtype is None else model.to(param_dtype)
        self._param_dtype = param_dtype
        self.saved = _Counter(self.model)
        self.by_block: dict[str, int] = {}
        self.exchanged: dict[str, tuple[int, int]] = {}
        self.boundary: tuple[int, ...] = ()
        self.first = ""
        self.flops_inside = 0
        self._flops = FlopCounterMode(display=False)
        self._open: list[tuple[str, _Counter, int]] = []
        for name, module in self.model.named_modules():
            if name in blocks:
                module.register_forward_pre_hook(functools.partial(self._enter, name))
            if name in blocks or module._parameters:
                module.register_forward_hook(functools.partial(self._leave, name, name in blocks))

    def run(self, batch: Any, loss: Any, flops: FlopCounterMode | None = None) -> None:
        """Run the forward pass and the loss; `flops` counts their operations."""
        self._flops = flops or self._flops
        with flops or contextlib.nullcontext(), saved_tensors_hooks(self._pack, _unpack):
            _forward(self.model, batch, loss, self._param_dtype)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        for _, counter, _ in self._open[-1:]:
            counter.pack(tensor)
        return self.saved.pack(tensor)

    def _enter(self, name: str, _module: nn.Module, args: Any) -> None:
        self._open.append((name, _Counter(self.model), self._flops.get_total_flops()))
        if not self.first and args and isinstance(args[0], torch.Tensor):
            self.first, self.boundary = name, tuple(args[0].shape)

    def _leave(self, name: str, is_block: bool, _module: nn.Module, args: Any, output: Any) -> None:
        values = (*args, *(output if isinstance(output, tuple) else (output,)))
        sizes = [one.numel() * one.element_size() for one in values if isinstance(one, torch.Tensor)]
        self.exchanged[name] = (
            (sizes[0], sizes[len(args) if len(sizes) > len(args) else -1]) if sizes else (0, 0)
        )
        if is_block:
            _, counter, flops = self._open.pop()
            self.by_block[name] = counter.bytes
            self.flops_inside += (self._flops.get_total_flops() - flops) * (not self._open)


class _Counter:
    """A counter of the bytes of saved tensors: each storage once, without the model's own."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._seen = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.bytes += storage.nbytes()
        return tensor


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _forward(model: nn.Module, batch: Any, loss: Any, param_dtype: torch.dtype | None) -> Any:
    """Run the forward pass and the loss on the meta device; the result keeps the saved tensors alive."""
    batch = _map_tensors(lambda tensor: tensor.to("meta"), batch)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if param_dtype is None or not tensor.is_floating_point() else tensor.to(param_dtype)

    compute: Any = loss or getattr(model, "loss", None)
    outputs = model(_map_tensors(cast, batch))
    return compute(outputs, batch) if callable(compute) else outputs


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a batch with the result of `function` in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)({key: _map_tensors(function, item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(function, item) for item in value)
    return value
