"""Initialisation, after sharding, of a model that was built on the meta device.

The values have the distribution that a build on a real device gives them, and do not depend on the layout
or on the number of ranks: the model's initialisers run in the order of a build, on whole tensors on the CPU,
each with a generator seeded by (seed, name of the module), and every rank keeps its shards of the results.
Only tensors that initialisers set together are whole at a time: mostly those of one module.

Drawing shards directly would be wrong: on a CPU mesh, and with CPU offload, every rank draws the same values
(pytorch#196562).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hocket.dist.errors import ModelError
from hocket.dist.layout.initializers import (
    AccessRecorder,
    InitCall,
    Twins,
    constructor_writes,
    find_calls,
    leaves,
    needed,
    trace,
    units,
)

InitFn = Callable[[nn.Module], None]

_REMEDY = (
    "Move that code into a method `reset_parameters()` of the module, or pass `param_init_fn` in "
    "`fsdp_config`, which then initialises all modules; or build the model with values on rank 0 and on the "
    "meta device on the other ranks"
)


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
        self._owned = {name: value._version for name, value in _named_tensors(model) if value.is_meta}
        self._ties = find_ties(model)
        self._init_fn = init_fn
        # A model on a real device needs no twins.
        self._twins = Twins(model) if self._owned else None

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
        tie(self._model, self._ties)

    def initialize(self, seed: int, *, given: set[str] | None = None) -> None:
        """Draw the values of every tensor that is not among `given`. No communication.

        Args:
            seed: The same on all ranks.
            given: Names that have values from elsewhere, such as a file.

        Raises:
            ModelError: A tensor has no initialiser, or its initialiser leaves it without values, or the
                model's constructors set it in a way that cannot be repeated after sharding.
        """
        wanted = self._owned.keys() - (given or set())
        if not wanted or self._twins is None:
            return
        twins = self._twins
        init_fn = self._init_fn or self._own_init_fn()
        calls = find_calls(twins.modules, self._owned, init_fn=init_fn)
        is_traced = [trace(call, twins) for call in calls]
        self._check_written(calls, wanted)
        if init_fn is None:
            if all(is_traced):
                self._check_counts(calls, wanted)
            self._check_constructors(wanted)
        for unit in units(needed(calls, wanted)):
            self._run(unit, seed, wanted)

    def _own_init_fn(self) -> InitFn | None:
        """Return `param_init_fn` of the model or of one of its children, as in Composer."""
        assert self._twins is not None
        model = self._twins.modules[""]
        for owner in (model, *model.children()):
            if callable(init_fn := getattr(owner, "param_init_fn", None)):
                return init_fn  # type: ignore[no-any-return]
        return None

    def _check_written(self, calls: list[InitCall], wanted: set[str]) -> None:
        """Raise for a tensor that no initialiser writes."""
        assert self._twins is not None
        written = {name for call in calls for name in call.writes}
        for name in [name for name in self._owned if name in wanted - written]:
            owner = name.rpartition(".")[0]
            if any(call.module == owner for call in calls):
                raise _left_without_values(name)
            module = self._twins.modules[owner]
            raise ModelError(
                f"`{owner or type(module).__name__}` ({type(module).__name__}) was built on the meta device "
                f"and has no initialiser for `{name}`. Give it `reset_parameters()`, or set `param_init_fn` "
                "in `fsdp_config` or on the model"
            )

    def _check_constructors(self, wanted: set[str]) -> None:
        """Raise if the code of a constructor sets tensors in a way that their versions do not count."""
        assert self._twins is not None
        modules = self._twins.modules
        for owner in {name.rpartition(".")[0] for name in wanted}:
            for above in (owner, *_ancestors(owner)):
                kind = type(modules[above])
                if (function := constructor_writes(kind)) is not None:
                    raise ModelError(
                        f"`{above or kind.__name__}` ({kind.__name__}) was built on the meta device, and its "
                        f"constructor sets initial values in `{function}`, which cannot run again after "
                        f"sharding. {_REMEDY}"
                    )

    def _check_counts(self, calls: list[InitCall], wanted: set[str]) -> None:
        """Raise for a tensor that was written more often than the initialisers write it.

        A tensor on the meta device has no values, but its version counts the writes.
        """
        first_names = {other: first for first, others in self._ties.items() for other in others}
        counts = Counter[str]()
        for call in calls:
            for name, count in call.writes.items():
                counts[first_names.get(name, name)] += count
        for name in sorted(wanted):
            if self._owned[name] > counts[name]:
                raise ModelError(
                    f"`{name}` was built on the meta device by {self._owned[name]} writes, and the "
                    f"initialisers of the model (`reset_parameters`, `_init_weights`) repeat {counts[name]} "
                    "of them after sharding: other code, such as a constructor, sets its initial values. "
                    f"{_REMEDY}"
                )

    def _run(self, unit: list[InitCall], seed: int, wanted: set[str]) -> None:
        """Run initialisers that share tensors, and keep this rank's shards of the results."""
        assert self._twins is not None
        twins = self._twins
        names = sorted({name for call in unit for name in call.tensors})
        for name in names:
            twins.set(name, _poisoned(twins.value(name)))
        for call in unit:
            recorder = AccessRecorder(twins.storages())
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(_seed_of(seed, call.seed_name))
                try:
                    with recorder:
                        call.run()
                except Exception as error:
                    kind = type(twins.modules[call.module]).__name__
                    error.add_note(
                        f"raised by the initialiser of `{call.module or kind}`, which was built on the meta "
                        "device"
                    )
                    raise
            for name in sorted(recorder.writes.keys() & (wanted - set(names))):
                raise ModelError(
                    f"the initialiser of `{call.module or 'the model'}` writes `{name}` or not, depending "
                    "on values, so it cannot run on a model that was built on the meta device. Set the "
                    "tensor in `param_init_fn`, or build the model on a real device"
                )
        modules = dict(self._model.named_modules())
        for name in names:
            value = twins.value(name)
            if name in wanted:
                if _is_poisoned(value):
                    raise _left_without_values(name)
                owner, _, leaf = name.rpartition(".")
                fill(_slot(modules[owner], leaf), value)
            twins.set(name, torch.empty(value.shape, dtype=value.dtype, device="meta"))  # frees it


def _left_without_values(name: str) -> ModelError:
    return ModelError(
        f"`{name}` was built on the meta device and its initialiser left it without values. Set it in "
        "`param_init_fn`, or build it on a real device"
    )


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
    for axis, dim in sharded_axes(tensor):
        start, stop = shard_range(part.shape[dim], tensor.device_mesh.size(axis), coordinate[axis])
        part = part.narrow(dim, start, stop - start)
    return part


def sharded_axes(tensor: DTensor) -> list[tuple[int, int]]:
    """Return the axes of the mesh that cut a tensor, each with the tensor's dim, in the order of the cuts.

    `fully_shard` cuts what tensor parallelism has left, and torch then names its shard a strided one. The
    class of that is no `Shard` in some versions of torch.
    """
    cuts = [
        (isinstance(placement, Shard) and type(placement) is Shard, axis, int(placement.dim))  # type: ignore[attr-defined]
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    first = [(axis, dim) for is_plain, axis, dim in cuts if is_plain]
    late = [(axis, dim) for is_plain, axis, dim in cuts if not is_plain]
    return [*first, *reversed(late)]


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
            ties = find_ties(model)
            _replace_tensors(model, lambda _, value: value.to("meta"))
            tie(model, ties)

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
    slots = Counter(id(getattr(module, leaf)) for module in model.modules() for leaf in leaves(module))
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


def tie(model: nn.Module, ties: dict[str, list[str]]) -> None:
    """Give each parameter of `find_ties` all its names again."""
    for first, others in ties.items():
        owner, _, leaf = first.rpartition(".")
        for other in others:
            module, _, other_leaf = other.rpartition(".")
            model.get_submodule(module)._parameters[other_leaf] = model.get_submodule(owner)._parameters[leaf]


def find_ties(model: nn.Module) -> dict[str, list[str]]:
    """Return the first name of every tied parameter with its other names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: group[1:] for group in names.values() if len(group) > 1}


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _slot(module: nn.Module, leaf: str) -> torch.Tensor:
    """Return one of the module's own parameters or buffers, detached."""
    value = module._parameters.get(leaf)
    if value is None:
        value = module._buffers[leaf]  # type: ignore[assignment]
    assert value is not None
    return value.detach()


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
