"""What a forward pass saves, sends and computes, measured on the meta device without any rank."""

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.errors import ModelError
from hocket.dist.layout.activation import apply_activation_levers, select_modules
from hocket.dist.layout.experts import find_experts
from hocket.dist.layout.sequence.arguments import first_tensor
from hocket.dist.layout.sequence.blocks import find_blocks
from hocket.dist.layout.wrapping import choose_wraps
from hocket.dist.memory.expert_rows import EvenRows
from hocket.dist.memory.meta_operators import KnownIndices, attend
from hocket.dist.memory.passages import Passage, mark_again, passage_of

_FLOAT32 = 4
"""Bytes of a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The figures of a part of a forward pass.

    Attributes:
        saved: Bytes that it saves for backward.
        flops: Its floating-point operations.
        attended: Bytes of the queries, keys, values and results of its attention.
        keyed: Bytes of the keys and values alone.
        key_gradients: Bytes of their gradients in float32.
        routed: Bytes of the rows that it sends to experts, once for each expert of a row.
    """

    saved: int = 0
    flops: int = 0
    attended: int = 0
    keyed: int = 0
    key_gradients: int = 0
    routed: int = 0

    def __add__(self, other: "Span") -> "Span":
        """Return the figures of both parts."""
        return Span(
            saved=self.saved + other.saved,
            flops=self.flops + other.flops,
            attended=self.attended + other.attended,
            keyed=self.keyed + other.keyed,
            key_gradients=self.key_gradients + other.key_gradients,
            routed=self.routed + other.routed,
        )


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
        passages: The activations that each module gets and gives, by its name.
        whole: All of the pass; `saved` without recomputation.
        parts: The parts of it in the blocks that stages share, by name.
    """

    inside: int
    outside: int
    recomputed: int
    boundary: tuple[int, ...] = ()
    boundary_bytes: int = 0
    flops_inside: int = 0
    flops_outside: int = 0
    passages: Mapping[str, Passage] = field(default_factory=dict)
    whole: Span = field(default_factory=Span)
    parts: Mapping[str, Span] = field(default_factory=dict)

    def with_change(self, before: "ForwardPass", after: "ForwardPass") -> "ForwardPass":
        """Return the pass with the bytes changed as from `before` to `after`, which have equal blocks."""

        def change(span: Span, name: str) -> Span:
            return replace(span, saved=span.saved + after.parts[name].saved - before.parts[name].saved)

        sizes = ("inside", "outside", "recomputed")
        return replace(
            self,
            **{name: getattr(self, name) + getattr(after, name) - getattr(before, name) for name in sizes},
            whole=replace(self.whole, saved=self.whole.saved + after.whole.saved - before.whole.saved),
            parts={name: change(span, name) for name, span in self.parts.items()},
        )

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
    exchanges_rows: bool = False,
) -> ForwardPass:
    """Return all figures of a forward pass.

    Rows are spread evenly over the experts of each stack.

    Args:
        model: Plain, on any device; a copy of it is moved to the meta device.
        batch: One microbatch, tensors in dicts or lists.
        config: Its activation levers are applied; its low precision is that of the forward pass.
        loss: `loss(outputs, batch)`; the model's own if it has one.
        exchanges_rows: Whether ranks share the experts, so that rows travel.

    Raises:
        ModelError: The model recomputes its blocks by itself.
        NotImplementedError: The forward reads values of tensors, which the meta device does not have.
    """
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            raise ModelError(
                f"`{name}` has the checkpointing of transformers, whose second pass is not estimated. Leave "
                "`gradient_checkpointing_enable()` out for the estimate, and set `activation_checkpointing` "
                "in `--fsdp-config`, which recomputes the same blocks"
            )
    param_dtype = config.policy_for(model.parameters()).param_dtype
    blocks = list(choose_wraps(model)) if config.auto_wrap else []
    plain = _Pass(model, blocks, param_dtype, exchanges_rows=exchanges_rows)
    plain.run(batch, loss)
    saved, by_block = plain.saved.bytes, plain.by_block
    # Offloaded activations are not on the device, and checkpointed ones are there for one block at a time.
    largest = 0
    if (config.activation_checkpointing or config.activation_cpu_offload) and blocks:
        largest = max(by_block.values(), default=0)
    if config.activation_checkpointing and blocks:
        recomputed = _Pass(model, blocks, param_dtype, exchanges_rows=exchanges_rows)
        apply_activation_levers(recomputed.model, replace(config, activation_cpu_offload=False), blocks)
        recomputed.run(batch, loss)
        saved, by_block = recomputed.saved.bytes, recomputed.by_block
    inside = min(sum(by_block.values()), saved)
    whole = plain.figures(plain.saved)
    return ForwardPass(
        inside=0 if config.activation_cpu_offload else inside,
        outside=saved - inside,
        recomputed=largest,
        boundary=plain.boundary,
        boundary_bytes=plain.boundary_bytes,
        flops_inside=plain.flops_inside,
        flops_outside=whole.flops - plain.flops_inside,
        passages=mark_again(plain.passed, plain.num_saved, select_modules(model, config, blocks)),
        whole=whole,
        parts=plain.parts,
    )


class _Pass(TorchFunctionMode):
    """A forward pass of a copy of a model on the meta device, with what its hooks find.

    Args:
        model: Plain.
        blocks: The names of its blocks, by which it is sharded.
        param_dtype: The low precision of the forward pass.
        exchanges_rows: Whether ranks share the experts, so that rows travel.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Collection[str],
        param_dtype: torch.dtype | None,
        *,
        exchanges_rows: bool,
    ) -> None:
        super().__init__()
        model = copy.deepcopy(model).to("meta")
        # The meta device has no autocast; casting a copy's parameters gives the same sizes.
        self.model = model if param_dtype is None else model.to(param_dtype)
        self._param_dtype = param_dtype
        self.saved = _Counter(self.model)
        self.by_block: dict[str, int] = {}
        self.parts: dict[str, Span] = {}
        self.passed: dict[str, Passage] = {}
        self.num_saved: dict[str, int] = {}
        self.boundary: tuple[int, ...] = ()
        self.boundary_bytes = self.flops_inside = self._other_flops = 0
        self._attended = self._keyed = self._keys = self._num_saved = 0
        self._flops = FlopCounterMode(display=False)
        self._rows = EvenRows(is_exchanged=exchanges_rows)
        self._open: list[tuple[_Counter, Span]] = []
        self._part: tuple[_Counter, Span] | None = None
        try:
            parts: Collection[str] = find_blocks(model, "a layout")[1]
        except ModelError:
            parts = ()
        self._blocks, self._parts = frozenset(blocks), frozenset(parts)
        firsts = (next(iter(parts), None), next(iter(blocks), None))
        self._first = next((name for name in firsts if name is not None), None)
        for name, module in self.model.named_modules():
            if name in self._blocks or name in self._parts:
                # Before the hooks of a share, which cut sequences.
                module.register_forward_pre_hook(
                    functools.partial(self._enter, name), with_kwargs=True, prepend=True
                )
            module.register_forward_hook(functools.partial(self._leave, name), with_kwargs=True)
        for stack in find_experts(self.model).values():
            self._rows.attach(stack, self._apart)

    def run(self, batch: Any, loss: Any) -> None:
        """Run the forward pass and the loss."""
        with self._flops, KnownIndices(), self, saved_tensors_hooks(self._pack, _unpack):
            _forward(self.model, batch, loss, self._param_dtype)

    def figures(self, counter: "_Counter", before: Span | None = None) -> Span:
        """Return the figures up to now, or those since `before`."""
        start = before or Span()
        return Span(
            saved=counter.bytes,
            flops=self._flops.get_total_flops() + self._other_flops + self._rows.flops - start.flops,
            attended=self._attended - start.attended,
            keyed=self._keyed - start.keyed,
            key_gradients=self._keys * _FLOAT32 - start.key_gradients,
            routed=self._rows.sent - start.routed,
        )

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Let the operations of a measurement count for nothing; `EvenRows` says what they come to."""
        before = self._flops.get_total_flops()
        yield
        self._other_flops -= self._flops.get_total_flops() - before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and note what attention takes, gives and computes."""
        given = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **given)
        result, flops = attend(*args, **given)
        query, key, value = (*args, *(given[name] for name in ("query", "key", "value") if name in given))[:3]
        self._attended += sum(map(_size, (query, key, value, result)))
        self._keyed += _size(key) + _size(value)
        self._keys += key.numel() + value.numel()
        self._other_flops += flops
        return result

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._num_saved += 1
        for counter, _ in self._open[-1:]:
            counter.pack(tensor)
        if self._part is not None:
            self._part[0].pack(tensor)
        return self.saved.pack(tensor)

    def _enter(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        begun = self.figures(self.saved)
        if name in self._blocks:
            self._open.append((_Counter(self.model), begun))
        if name in self._parts:
            self._part = _Counter(self.model), begun
        if name == self._first:
            with contextlib.suppress(ModelError):
                hidden = first_tensor((args, kwargs))
                self.boundary, self.boundary_bytes = tuple(hidden.shape), _size(hidden)

    def _leave(self, name: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.passed[name], self.num_saved[name] = passage_of(args, kwargs, output), self._num_saved
        if name in self._blocks:
            counter, begun = self._open.pop()
            self.by_block[name] = counter.bytes
            self.flops_inside += self.figures(counter, begun).flops * (not self._open)
        if name in self._parts and self._part is not None:
            self.parts[name] = self.figures(*self._part)
            self._part = None


class _Counter:
    """A counter of the bytes of saved tensors: each storage once, without the model's own."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._seen = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._kept: list[torch.UntypedStorage] = []  # so that no other storage gets the address of one
        self.bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._kept.append(storage)
            self.bytes += storage.nbytes()
        return tensor


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
