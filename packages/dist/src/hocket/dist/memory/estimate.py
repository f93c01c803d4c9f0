"""Estimates of the memory that a layout needs on each rank, made without a GPU and without starting ranks."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.layout.wrapping import choose_wraps
from hocket.dist.ranks.mesh import MeshShape


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a training step.

    Attributes:
        parameters: Shards of the parameters.
        gradients: Shards of the gradients.
        optimizer: Shards of the optimizer's state.
        gathered: Whole parameters and gradients of the groups that are gathered at the same time, and the
            whole gradients of all groups where microbatches accumulate them (`gradient_sync="last"`).
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
        gradient: Bytes of their gradients as backward makes them; 0 where frozen.
        reduced: Bytes of their gradients in the dtype in which they are reduced; 0 where frozen.
        trained: Bytes, as stored, of the parameters that are trained.
        largest: Bytes of the largest gradient, as it is reduced.
        is_stack: Whether these are experts that ranks share.
        is_cast: Whether they are gathered in another dtype than they are stored in.
    """

    name: str
    stored: int
    gathered: int
    gradient: int
    reduced: int
    trained: int
    largest: int = 0
    is_stack: bool = False
    is_cast: bool = False

    def part(self, ranks: int) -> "GroupSize":
        """Return the part that each of some ranks has of a stack of experts."""
        return replace(self, **{name: -(-getattr(self, name) // ranks) for name in _BYTES})


_BYTES = ("stored", "gathered", "gradient", "reduced", "trained", "largest")


def estimate_memory(
    model: nn.Module,
    config: FSDPConfig,
    shape: MeshShape,
    *,
    activations: int = 0,
    optimizer_slots: int = 2,
    microbatches: int = 1,
) -> MemoryEstimate:
    """Estimate the memory of a training step on each rank.

    The model of the peak is: shards of parameters, gradients and optimizer state; the parameters of the root
    and of the two largest blocks with FULL_SHARD (one computes, one is prefetched), of all blocks otherwise;
    the gradients of the root, and of the largest group before and after their cast; saved activations.

    Args:
        model: Plain, on any device, the meta device included.
        config: The layout.
        shape: The mesh, from `mesh_shape`.
        activations: Bytes from `measure_activations`.
        optimizer_slots: Tensors of a parameter's size in the optimizer, 2 for Adam, 1 for SGD with momentum.
        microbatches: Microbatches of a step.
    """
    return memory_of_groups(
        group_sizes(model, config),
        config,
        shape,
        activations=activations,
        optimizer_slots=optimizer_slots,
        microbatches=microbatches,
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    )


def memory_of_groups(
    groups: Sequence[GroupSize],
    config: FSDPConfig,
    shape: MeshShape,
    *,
    activations: int,
    optimizer_slots: int,
    microbatches: int,
    buffers: int,
    experts: int = 1,
) -> MemoryEstimate:
    """Estimate the memory of the groups that a rank has, as `estimate_memory` does that of a model.

    Experts that all ranks share stay in their place. If fewer share them, those with the same experts gather
    them, as a group of their own.

    Args:
        groups: From `group_sizes`; the first one is the root.
        config: The layout.
        shape: The mesh.
        activations: Bytes of the activations.
        optimizer_slots: Tensors of a parameter's size in the optimizer.
        microbatches: Microbatches of a step.
        buffers: Bytes of the buffers.
        experts: The ranks that share the experts.
    """
    ranks = shape.shard * shape.context
    stored, trained = sum(group.stored for group in groups), sum(group.trained for group in groups)
    shard_bytes = [-(-value // ranks) for value in (stored, trained, trained * optimizer_slots)]
    root, *others = groups
    blocks = sorted((one for one in others if not one.is_stack), key=lambda group: -group.gathered)
    stacks = sorted((one.part(experts) for one in others if one.is_stack), key=lambda one: -one.gathered)
    is_in_place = experts == ranks
    is_freed = bool(config.should_reshard)
    gathered = root.gathered + sum(block.gathered for block in (blocks[:2] if is_freed else blocks))
    if ranks == 1 and microbatches == 1 and not is_freed:
        # Backward frees the copy that one rank computes with as it makes gradients, which are as large.
        gathered = max(gathered - shard_bytes[1], 0)
    if is_in_place:
        # Computed with where they are stored; in low precision each pass makes copies that backward needs.
        is_kept = not config.activation_checkpointing
        gathered += sum(one.gathered for one in (stacks if is_kept else stacks[:1]) if one.is_cast)
    else:
        # A block and its experts are gathered at the same time, and the next block without its experts.
        gathered += sum(one.gathered for one in (stacks[:1] if is_freed else stacks))
    # The root's gradients, such as those of the head, wait for the end of backward.
    makes = [block.gradient + block.reduced for block in blocks]
    makes += [one.gradient + (one.largest if is_in_place else one.reduced) for one in stacks]
    largest = max(makes, default=0)
    if microbatches > 1 and config.sync_policy == "last" and ranks > 1:
        # Whole gradients until the last microbatch, and shards of them only after it.
        whole = [root, *blocks, *([] if is_in_place else stacks)]
        shards = sum(-(-one.trained // (ranks // experts if one.is_stack else ranks)) for one in whole)
        gathered += max(sum(one.reduced for one in whole) - shards, 0)
        if is_in_place:  # beside their gradients so far, those that a microbatch makes
            gathered += max((one.gradient + one.largest for one in stacks), default=0)
    else:
        gathered += max(root.gradient + root.reduced, root.gradient + largest)
    if shape.tensor > 1 and not is_sharded(groups, config, ranks * shape.replicate):
        gathered = 0  # `tp` alone cuts the model, which is not sharded as well
    return MemoryEstimate(
        parameters=shard_bytes[0],
        gradients=shard_bytes[1],
        optimizer=shard_bytes[2],
        gathered=gathered,
        activations=activations,
        buffers=buffers,
        host=sum(shard_bytes) if config.cpu_offload else 0,
    )


def is_sharded(groups: Sequence[GroupSize], config: FSDPConfig, ranks: int) -> bool:
    """Return whether `fully_shard` acts on a model that ranks of `tp` cut.

    Args:
        groups: From `group_sizes`.
        config: The layout.
        ranks: The ranks of the other axes that share the parameters or have copies of them.
    """
    is_cast = any(one.is_cast or one.gradient != one.reduced for one in groups)
    return ranks > 1 or config.cpu_offload or is_cast


def group_sizes(
    model: nn.Module,
    config: FSDPConfig,
    *,
    keep: Callable[[str], bool] | None = None,
    stacks: Collection[str] = (),
) -> list[GroupSize]:
    """Return the sizes of the groups that `fully_shard` would make, the root first.

    Args:
        model: Plain.
        config: The layout.
        keep: Whether a rank has the parameter of a name, as those of its stage; None for all.
        stacks: The names of the stacks of experts that ranks share.
    """
    inside = tuple(f"{name}." for name in stacks)
    wraps = choose_wraps(model) if config.auto_wrap else {}
    names = [*stacks, *(name for name in wraps if not f"{name}.".startswith(inside))]
    owned: dict[str, list[nn.Parameter]] = {"": [], **{name: [] for name in names}}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        while owner not in owned:
            owner = owner.rpartition(".")[0]
        if keep is None or keep(name):
            owned[owner].append(parameter)
    sizes = []
    for name, parameters in owned.items():
        if name and not parameters:
            continue
        policy = config.policy_for(parameters)
        whole = [(p.numel() * (policy.param_dtype or p.dtype).itemsize, p.requires_grad) for p in parameters]
        reduced = sum(
            p.numel() * (policy.reduce_dtype or p.dtype).itemsize for p in parameters if p.requires_grad
        )
        parameter_sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in parameters]
        sizes.append(
            GroupSize(
                name=name,
                stored=sum(size for size, _ in parameter_sizes),
                gathered=sum(size for size, _ in whole),
                gradient=sum(size for size, is_trained in whole if is_trained),
                reduced=reduced,
                trained=sum(size for size, is_trained in parameter_sizes if is_trained),
                largest=max(
                    (
                        p.numel() * (policy.reduce_dtype or p.dtype).itemsize
                        for p in parameters
                        if p.requires_grad
                    ),
                    default=0,
                ),
                is_stack=name in stacks,
                is_cast=policy.param_dtype is not None
                and any(p.dtype != policy.param_dtype for p in parameters),
            )
        )
    return sizes


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
