"""Estimates of the memory that a layout needs on each rank, made without a GPU and without starting ranks."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.layout.activation import apply_activation_levers
from hocket.dist.layout.wrapping import choose_wraps
from hocket.dist.ranks.mesh import MeshShape


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a training step.

    Attributes:
        parameters: Shards of the parameters.
        gradients: Shards of the gradients.
        optimizer: Shards of the optimizer's state.
        gathered: Whole parameters and gradients of the groups that are gathered at the same time.
        activations: Tensors saved for backward, with the largest recomputed block.
        buffers: Buffers, whole on every rank.
        host: The part of the above that is in host memory (host offload).
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    buffers: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        parts = (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.activations
            + self.buffers
        )
        return parts - self.host


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSize:
    """The parameters of one group.

    Attributes:
        name: Name of the module, "" for the root.
        stored: Bytes as stored.
        gathered: Bytes in the dtype in which they are gathered.
        reduced: Bytes of their gradients in the dtype in which they are reduced; 0 where frozen.
        trained: Bytes, as stored, of the parameters that are trained.
    """

    name: str
    stored: int
    gathered: int
    reduced: int
    trained: int


def estimate_memory(
    model: nn.Module,
    config: FSDPConfig,
    shape: MeshShape,
    *,
    activations: int = 0,
    optimizer_slots: int = 2,
) -> MemoryEstimate:
    """Estimate the memory of a training step on each rank.

    The model of the peak is: shards of parameters, gradients and optimizer state; the parameters of the root
    and of the two largest blocks with FULL_SHARD (one computes, one is prefetched), of all blocks otherwise;
    the gradients of the largest group before and after their cast; saved activations.

    Args:
        model: Plain, on any device, the meta device included.
        config: The layout.
        shape: The mesh, from `mesh_shape`.
        activations: Bytes from `measure_activations`.
        optimizer_slots: Tensors of a parameter's size in the optimizer, 2 for Adam, 1 for SGD with momentum.
    """
    groups = group_sizes(model, config)
    stored, trained = sum(group.stored for group in groups), sum(group.trained for group in groups)
    shard_bytes = [
        -(-value // (shape.shard * shape.context)) for value in (stored, trained, trained * optimizer_slots)
    ]
    root, *blocks = sorted(groups, key=lambda group: (group.name != "", -group.gathered))
    is_freed = bool(config.should_reshard)
    gathered = root.gathered + sum(block.gathered for block in (blocks[:2] if is_freed else blocks))
    # At world size 1 FSDP2 computes with the shards themselves, unless they are cast or offloaded.
    if (
        shape.shard * shape.context == 1
        and not config.cpu_offload
        and config.policy_for(model.parameters()).param_dtype is None
    ):
        gathered = 0
    gathered += max(group.reduced for group in groups)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return MemoryEstimate(
        parameters=shard_bytes[0],
        gradients=shard_bytes[1],
        optimizer=shard_bytes[2],
        gathered=gathered,
        activations=activations,
        buffers=buffers,
        host=sum(shard_bytes) if config.cpu_offload else 0,
    )


def group_sizes(model: nn.Module, config: FSDPConfig) -> list[GroupSize]:
    """Return the sizes of the groups that `fully_shard` would make, the root first."""
    names = list(choose_wraps(model)) if config.auto_wrap else []
    owned: dict[str, list[nn.Parameter]] = {"": [], **{name: [] for name in names}}
    for name, parameter in model.named_parameters():
        owners = [group for group in names if name.startswith(f"{group}.")]
        owned[max(owners, key=len, default="")].append(parameter)
    sizes = []
    for name, parameters in owned.items():
        policy = config.policy_for(parameters)
        gathered = sum(p.numel() * _bytes(policy.param_dtype or p.dtype) for p in parameters)
        reduced = sum(
            p.numel() * (_bytes(policy.param_dtype or p.dtype) + _bytes(policy.reduce_dtype or p.dtype))
            for p in parameters
            if p.requires_grad
        )
        parameter_sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in parameters]
        sizes.append(
            GroupSize(
                name=name,
                stored=sum(size for size, _ in parameter_sizes),
                gathered=gathered,
                reduced=reduced,
                trained=sum(size for size, is_trained in parameter_sizes if is_trained),
            )
        )
    return sizes


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
    model = copy.deepcopy(model).to("meta")
    blocks = list(choose_wraps(model)) if config.auto_wrap else []
    param_dtype = config.policy_for(model.parameters()).param_dtype
    if param_dtype is not None:
        # The meta device has no autocast; casting a copy's parameters gives the same sizes.
        model = model.to(param_dtype)
    plain = copy.deepcopy(model)
    # Offloaded activations are not on the device, and checkpointed ones are there for one block at a time.
    largest = 0
    if (config.activation_checkpointing or config.activation_cpu_offload) and blocks:
        if config.activation_checkpointing:
            apply_activation_levers(model, replace(config, activation_cpu_offload=False), blocks)
        largest = max(_saved_by_block(plain, batch, blocks, loss, param_dtype).values(), default=0)
    saved = _saved(model, batch, loss, param_dtype)
    if config.activation_cpu_offload and blocks:
        bytes_by_block = _saved_by_block(model, batch, blocks, loss, param_dtype)
        saved -= sum(bytes_by_block.values())
    return saved + largest


def _saved(model: nn.Module, batch: Any, loss: Any, param_dtype: torch.dtype | None) -> int:
    counter = _Counter(model)
    with saved_tensors_hooks(counter.pack, _unpack):
        _forward(model, batch, loss, param_dtype)
    return counter.bytes


def _saved_by_block(
    model: nn.Module, batch: Any, blocks: list[str], loss: Any, param_dtype: torch.dtype | None
) -> dict[str, int]:
    """Return the bytes that each block saves."""
    counters: dict[str, _Counter] = {}
    open_hooks: list[saved_tensors_hooks] = []
    handles = []
    for name in blocks:
        module = model.get_submodule(name)
        counter = counters[name] = _Counter(model)

        def enter(*_: Any, counter: "_Counter" = counter) -> None:
            hooks = saved_tensors_hooks(counter.pack, _unpack)
            hooks.__enter__()
            open_hooks.append(hooks)

        def leave(*_: Any) -> None:
            open_hooks.pop().__exit__(None, None, None)

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    _forward(model, batch, loss, param_dtype)
    for handle in handles:
        handle.remove()
    return {name: counter.bytes for name, counter in counters.items()}


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


def _bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize


def ladder(
    model: nn.Module,
    config: FSDPConfig,
    shape: MeshShape,
    *,
    activations: int,
    microbatch_size: int | None = None,
) -> Iterator[tuple[str, int]]:
    """Yield the settings to try when memory runs out, in order, each with the bytes it saves on a rank.

    Args:
        model: Plain; only its shapes and dtypes are used.
        config: The present layout.
        shape: The present mesh.
        activations: Bytes of the present microbatch.
        microbatch_size: Samples of the present microbatch, if known.
    """
    current_bytes = estimate_memory(model, config, shape, activations=activations).total
    if microbatch_size is None or microbatch_size > 1:
        size = "half the microbatch" if microbatch_size is None else f"={microbatch_size // 2}"
        yield f"`device_train_microbatch_size`{size if size[0] == '=' else ': ' + size}", activations // 2
    ranks = shape.shard * shape.context * shape.replicate
    if not config.should_reshard:
        full_shard = replace(config, sharding_strategy="FULL_SHARD", process_group=None)
        one_copy = MeshShape(replicate=1, shard=ranks)
        yield (
            "`sharding_strategy='FULL_SHARD'`",
            current_bytes - _total(model, full_shard, one_copy, activations),
        )
    elif shape.replicate > 1:
        one_copy = MeshShape(replicate=1, shard=ranks)
        yield (
            f"one copy over all {ranks} ranks instead of {shape.replicate}",
            current_bytes - _total(model, config, one_copy, activations),
        )
    if not config.activation_checkpointing:
        blocks = max(len(choose_wraps(model)), 1)
        yield "`activation_checkpointing=True`", activations - activations // blocks
    if not config.cpu_offload:
        yield (
            "`cpu_offload=True`",
            current_bytes - _total(model, replace(config, cpu_offload=True), shape, activations),
        )
    if not config.activation_cpu_offload:
        yield "`activation_cpu_offload=True`", activations // 2


def _total(model: nn.Module, config: FSDPConfig, shape: MeshShape, activations: int) -> int:
    return estimate_memory(model, config, shape, activations=activations).total
