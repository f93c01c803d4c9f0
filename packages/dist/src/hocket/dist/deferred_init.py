"""Initialisation, after sharding, of a model that was built on the meta device.

The values do not depend on the layout or on the number of ranks: each module's own parameters are drawn
whole, on the CPU, from a generator seeded by (seed, name of the module), and every rank keeps its shards of
them. At most one module's own parameters are whole at a time, so an initialiser is given one module, not the
model.

Drawing shards directly would be wrong: on a CPU mesh, and with CPU offload, every rank draws the same values
(pytorch#196562).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hocket.dist.errors import ModelError

InitFn = Callable[[nn.Module], None]


class DeferredModel:
    """The plan of values for a model with parameters or buffers on the meta device.

    Make the plan before the model is sharded; call `allocate` and `initialize` after.

    Args:
        model: Not sharded yet.
        init_fn: `param_init_fn` of the config; None uses the model's own initialisers.
    """

    def __init__(self, model: nn.Module, init_fn: InitFn | None = None) -> None:
        self._model = model
        # `named_parameters` yields the first name of a tied parameter, whose module initialises it.
        self._owned = {name for name, value in model.named_parameters() if value.is_meta}
        self._owned |= {name for name, value in model.named_buffers() if value.is_meta}
        self._ties = _ties(model)
        self._plain = {name: _twin(module) for name, module in model.named_modules()}
        self._init_of = {
            name: _find_init(model, name, module, init_fn)
            for name, module in model.named_modules()
            if any(_join(name, leaf) in self._owned for leaf in _leaves(module))
        }

    @property
    def names(self) -> set[str]:
        """The names of the parameters and buffers without values, tied parameters once."""
        return set(self._owned)

    def allocate(self, device: torch.device) -> None:
        """Allocate the shards and buffers that are on the meta device, and tie the tied parameters again.

        Args:
            device: The device of the values, "cpu" with CPU offload.
        """
        _to_empty(self._model, device)
        _tie(self._model, self._ties)

    def initialize(self, seed: int, *, given: set[str] | None = None) -> None:
        """Draw the values of every module that is not among `given`. No communication.

        Args:
            seed: The same on all ranks.
            given: Names that have values from elsewhere, such as a file.

        Raises:
            ModelError: A module has no initialiser, or its initialiser leaves a tensor without values.
        """
        wanted = self._owned - (given or set())
        modules = dict(self._model.named_modules())
        for name, init in self._init_of.items():
            leaves = [leaf for leaf in _leaves(modules[name]) if _join(name, leaf) in wanted]
            if not leaves:
                continue
            twin = self._plain[name]
            _poison(twin)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(_seed_of(seed, name))
                try:
                    init(twin)
                except Exception as error:
                    error.add_note(
                        f"raised by the initialiser of `{name or type(twin).__name__}`, which was built "
                        "on the meta device"
                    )
                    raise
            for leaf in leaves:
                initial_value = _slot(twin, leaf)
                if _is_poisoned(initial_value):
                    raise ModelError(
                        f"`{_join(name, leaf)}` was built on the meta device and its initialiser left it "
                        "without values. Set it in `param_init_fn`, or build it on a real device."
                    )
                fill(_slot(modules[name], leaf), initial_value)
            self._plain[name] = _twin(twin)  # frees the whole tensors


def fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into a sharded or plain one."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(local_part(tensor, whole))
        else:
            tensor.copy_(whole)


def local_part(tensor: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of `whole` that this rank holds of a DTensor of the same shape."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is on the mesh"
    part = whole
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            start, stop = shard_range(
                part.shape[placement.dim], tensor.device_mesh.size(axis), coordinate[axis]
            )
            part = part.narrow(placement.dim, start, stop - start)
    return part


def shard_range(rows: int, count: int, index: int) -> tuple[int, int]:
    """Return the first and one past the last row of a shard, as `torch.chunk` cuts them."""
    shard_rows = -(-rows // count)
    return min(index * shard_rows, rows), min((index + 1) * shard_rows, rows)


class RankZeroValues:
    """The values of a model that only rank 0 built, sent into shards one tensor at a time.

    Args:
        model: Not sharded yet; on rank 0 with values, elsewhere on the meta device. On rank 0 it is moved to
            the meta device, too, so that all ranks shard it alike.
    """

    def __init__(self, model: nn.Module) -> None:
        self._values: dict[str, torch.Tensor] = {}
        if dist.get_rank() == 0:
            self._values = {name: value.detach() for name, value in _named_tensors(model)}
            ties = _ties(model)
            _replace_tensors(model, lambda _, value: value.to("meta"))
            _tie(model, ties)

    def send(self, model: nn.Module, *, into: torch.device, over: torch.device) -> None:
        """Allocate the shards and buffers one tensor at a time, and fill each with the values of rank 0.

        Collective. Rank 0 frees a tensor before it allocates the next shard, so it holds at most one shard
        beside the model. Parameters that were tied have equal values and are no longer tied.

        Args:
            model: Sharded, its parameters on the meta device.
            into: The device of the values, "cpu" with CPU offload.
            over: The device of the collectives.
        """

        def receive(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == 0:
                whole = self._values.pop(name).to(over).contiguous()
            else:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=over)
            dist.broadcast(whole, src=0)
            filled = torch.empty_like(tensor, device=into) if tensor.is_meta else tensor
            fill(filled, whole)
            return filled

        _replace_tensors(model, receive)


def _replace_tensors(model: nn.Module, replace: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer once, in the same order on all ranks; FSDP2 adopts the new shards.

    Args:
        model: Plain or sharded.
        replace: Takes a tensor's first name and the tensor; a tied tensor's result serves all its names.
    """
    tensors = {id(tensor): (name, tensor) for name, tensor in _named_tensors(model)}
    pending = dict(tensors)  # `tensors` keeps the tensors alive, so that their ids are not reused
    slots = Counter(id(getattr(module, leaf)) for module in model.modules() for leaf in _leaves(module))
    shared: dict[int, torch.Tensor] = {}

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor)
        if key in shared:
            return shared[key]
        if key not in pending:
            return tensor  # already replaced: several modules hold its module
        result = replace(*pending.pop(key))
        if slots[key] > 1:
            shared[key] = result
        return result

    model._apply(visit)  # type: ignore[no-untyped-call]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _to_empty(model: nn.Module, device: torch.device) -> None:
    # Not `model.to_empty`, which would also replace tensors that have values.
    model._apply(  # type: ignore[no-untyped-call]
        lambda value: torch.empty_like(value, device=device) if value.is_meta else value
    )


def _tie(model: nn.Module, ties: dict[str, list[str]]) -> None:
    for first, others in ties.items():
        owner, _, leaf = first.rpartition(".")
        for other in others:
            module, _, other_leaf = other.rpartition(".")
            model.get_submodule(module)._parameters[other_leaf] = model.get_submodule(owner)._parameters[leaf]


def _ties(model: nn.Module) -> dict[str, list[str]]:
    """Return the first name of every tied parameter with its other names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: group[1:] for group in names.values() if len(group) > 1}


def _twin(module: nn.Module) -> nn.Module:
    """Return a module with the same class, attributes and children, and with its own tensor slots."""
    # Not `copy.copy`: a module that was sharded in the meantime refuses it.
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = {
        leaf: value if value is None else nn.Parameter(value.detach().to("meta"), value.requires_grad)
        for leaf, value in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        leaf: value if value is None else value.to("meta") for leaf, value in module._buffers.items()
    }
    return twin


def _find_init(model: nn.Module, name: str, module: nn.Module, init_fn: InitFn | None) -> InitFn:
    if init_fn is not None:
        return init_fn
    for owner in (model, *model.children()):
        if callable(model_init_fn := getattr(owner, "param_init_fn", None)):
            return model_init_fn  # type: ignore[no-any-return]
    for ancestor in _ancestors(model, name):
        # A model of Transformers initialises each of its modules with this method.
        if callable(model_init_fn := getattr(ancestor, "_init_weights", None)):
            return model_init_fn  # type: ignore[no-any-return]
    if callable(getattr(module, "reset_parameters", None)):
        return _reset_parameters

    def missing(_module: nn.Module) -> None:
        raise ModelError(
            f"`{name or type(module).__name__}` ({type(module).__name__}) was built on the meta device and "
            "has no "
            "initialiser. Give it `reset_parameters()`, or set `param_init_fn` in `fsdp_config` or on the "
            "model."
        )

    return missing


def _reset_parameters(module: Any) -> None:
    module.reset_parameters()


def _ancestors(model: nn.Module, name: str) -> Iterator[nn.Module]:
    while name:
        name = name.rpartition(".")[0]
        yield model.get_submodule(name)


def _leaves(module: nn.Module) -> list[str]:
    return [
        leaf
        for slots in (module._parameters, module._buffers)
        for leaf, value in slots.items()
        if value is not None
    ]


def _slot(module: nn.Module, leaf: str) -> torch.Tensor:
    """Return one of the module's own parameters or buffers, detached."""
    value = module._parameters.get(leaf)
    if value is None:
        value = module._buffers[leaf]  # type: ignore[assignment]
    assert value is not None
    return value.detach()


def _poison(module: nn.Module) -> None:
    """Replace the module's own tensors by CPU tensors filled with a mark for unwritten elements."""
    module.__dict__["_parameters"] = {
        leaf: value if value is None else nn.Parameter(_poisoned(value), value.requires_grad)
        for leaf, value in module._parameters.items()
    }
    module.__dict__["_buffers"] = {
        leaf: value if value is None else _poisoned(value) for leaf, value in module._buffers.items()
    }


def _join(module: str, leaf: str) -> str:
    return f"{module}.{leaf}" if module else leaf


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def _poisoned(value: torch.Tensor) -> torch.Tensor:
    mark: float = torch.nan
    if value.dtype is torch.bool:
        mark = False
    elif not value.dtype.is_floating_point and not value.dtype.is_complex:
        mark = torch.iinfo(value.dtype).min
    return torch.full(value.shape, mark, dtype=value.dtype, device="cpu")


def _is_poisoned(value: torch.Tensor) -> bool:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return bool(value.isnan().any())
    if value.dtype in (torch.bool, torch.uint8):
        return False  # these dtypes have no value to spare for the mark
    return bool((value == torch.iinfo(value.dtype).min).any())
