"""The initialisers of a model that was built on the meta device, in the order of a build on a real device.

A build sets a tensor several times: the constructor of a layer calls `reset_parameters`, then the constructor
of its parent may do so, and in the end `model.apply(self._init_weights)` visits every module, children before
their parents. Each of these calls may write tensors of the modules below its own: an attention block sets its
projections, a decoder scales the last layers of its blocks.

`trace` runs the calls on the meta device, which costs no memory, and records the tensors that each of them
reads and writes. `needed` leaves out the calls whose results later calls overwrite. `units` groups the
remaining calls by the tensors that they share, so that each group runs with only its own tensors in memory.
"""

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_RESETS = ("reset_parameters", "_reset_parameters", "_init_weights")
_RUN_AGAIN = frozenset({*_RESETS, "post_init"})
_OVERWRITES = frozenset({"normal_", "uniform_", "fill_", "zero_", "copy_", "exponential_", "random_"})
# `torch.nn.init` skips these on the meta device, so a tensor's version does not count them.
_UNCOUNTED_INITS = frozenset({"trunc_normal_", "orthogonal_", "sparse_"})


@dataclass(slots=True)
class InitCall:
    """One call of an initialiser, and its effect as `trace` found it."""

    module: str
    """The name of the module that is initialised."""
    run: Callable[[], object]
    seed_name: str
    """The name that the seed of the call's generator is made from."""
    reads: set[str] = field(default_factory=set)
    """The tensors whose earlier values the call uses."""
    overwrites: set[str] = field(default_factory=set)
    """The tensors that the call sets whole, whatever they were."""
    writes: dict[str, int] = field(default_factory=dict)
    """The number of writes by tensor."""

    @property
    def tensors(self) -> set[str]:
        """The tensors that the call reads or writes."""
        return self.reads | self.writes.keys()


class AccessRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the tensors that operations read and write, by name; views count as their tensors.

    Args:
        names: The name of each tensor by the address of its storage.
        answers_scalars: Whether reading a number from a tensor without values gives 0 instead of an error.
    """

    def __init__(self, names: Mapping[int, str], *, answers_scalars: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._answers_scalars = answers_scalars
        self.reads: set[str] = set()
        self.overwrites: set[str] = set()
        self.writes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one operation and run it."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self._answers_scalars and args[0].is_meta:
            return False if args[0].dtype is torch.bool else 0
        written = [
            value
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name))
            if isinstance(value, torch.Tensor)
        ]
        is_view = not written and any(one.alias_info is not None for one in func._schema.returns)
        for value in tree_leaves((args, kwargs)):
            name = self._name_of(value)
            if name is None or is_view:
                continue
            is_written = any(value is one for one in written)
            is_whole = is_written and func._schema.name.rpartition("::")[2] in _OVERWRITES
            is_whole = is_whole and value.numel() == self._numel(value)
            if is_written:
                self.writes[name] = self.writes.get(name, 0) + 1
            if is_whole and name not in self.reads:
                self.overwrites.add(name)
            elif name not in self.overwrites:
                self.reads.add(name)
        return func(*args, **kwargs)

    def _name_of(self, value: object) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        return self._names.get(value.untyped_storage()._cdata)

    def _numel(self, value: torch.Tensor) -> int:
        return value.untyped_storage().nbytes() // value.element_size()


class _HidesMeta(TorchFunctionMode):
    """Makes `tensor.is_meta` False, since `torch.nn.init` does nothing for tensors where it is True."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_meta:
            return False
        return func(*args, **(kwargs or {}))


def find_calls(
    modules: Mapping[str, nn.Module], owned: Iterable[str], *, init_fn: Callable[[nn.Module], Any] | None
) -> list[InitCall]:
    """Return the initialisers of a model in the order of a build.

    Args:
        modules: The modules by name, the model itself as "".
        owned: The names of the tensors without values.
        init_fn: Initialises a module's own tensors; None for the model's own initialisers.
    """
    owners = {name.rpartition(".")[0] for name in owned}
    with_tensors = {"", *owners, *(above for name in owners for above in _ancestors(name))}
    names = [name for name in _build_order(modules) if name in with_tensors]
    if init_fn is not None:
        return [InitCall(name, _bind(init_fn, modules[name]), name) for name in names if name in owners]
    visitors = {name: _visitor(modules, name) for name in names}
    calls = []
    for name in names:
        reset = _reset(modules[name])
        if reset is not None:
            calls.append(InitCall(name, reset, f"{name}:reset" if visitors[name] else name))
    for name in names:
        visitor = visitors[name]
        if visitor is not None:
            calls.append(InitCall(name, _bind(visitor, modules[name]), name))
    return calls


class Twins:
    """A copy of a model's modules with tensors of its own, all on the meta device.

    Modules keep their classes, attributes and places, and sharding the model does not change them. A tensor
    that several modules share has a twin in each of them.

    Args:
        model: Not sharded yet.
    """

    def __init__(self, model: nn.Module) -> None:
        twins: dict[int, nn.Module] = {}
        self.modules = {name: _twin(module, twins) for name, module in model.named_modules()}
        self.slots = {
            f"{name}.{leaf}" if name else leaf: (module, leaf)
            for name, module in self.modules.items()
            for leaf in leaves(module)
        }
        """The module and the attribute of each tensor."""

    def value(self, name: str) -> torch.Tensor:
        """Return a tensor, detached."""
        module, leaf = self.slots[name]
        value = module._parameters.get(leaf)
        if value is None:
            value = module._buffers[leaf]  # type: ignore[assignment]
        assert value is not None
        return value.detach()

    def set(self, name: str, value: torch.Tensor) -> None:
        """Replace a tensor."""
        module, leaf = self.slots[name]
        parameter = module._parameters.get(leaf)
        if parameter is None:
            module._buffers[leaf] = value
        else:
            module._parameters[leaf] = nn.Parameter(value, parameter.requires_grad)

    def storages(self) -> dict[int, str]:
        """Return the name of each tensor by the address of its storage."""
        return {self.value(name).untyped_storage()._cdata: name for name in self.slots}


def leaves(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters and buffers."""
    return [
        leaf
        for slots in (module._parameters, module._buffers)
        for leaf, value in slots.items()
        if value is not None
    ]


def _twin(module: nn.Module, twins: dict[int, nn.Module]) -> nn.Module:
    if id(module) in twins:
        return twins[id(module)]
    # Not `copy.copy`: some modules refuse it.
    twin: nn.Module = object.__new__(type(module))
    twins[id(module)] = twin
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = {
        leaf: value if value is None else nn.Parameter(_empty(value), value.requires_grad)
        for leaf, value in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        leaf: value if value is None else _empty(value) for leaf, value in module._buffers.items()
    }
    twin.__dict__["_modules"] = {
        name: child if child is None else _twin(child, twins) for name, child in module._modules.items()
    }
    return twin


def _empty(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def trace(call: InitCall, twins: Twins) -> bool:
    """Run an initialiser on the meta device and record its effect in it.

    Returns:
        Whether the initialiser ran to its end. One that needs values is taken to read and write all tensors
        of its module and of the modules below.
    """
    below = [name for name in twins.slots if not call.module or name.startswith(f"{call.module}.")]
    names = twins.storages()
    kept = [twins.value(name) for name in below]  # an address stays unique while its tensor lives
    recorder = AccessRecorder(names, answers_scalars=True)
    is_traced = True
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("meta"), _HidesMeta(), recorder:
            call.run()
    except Exception:  # noqa: BLE001 - the call runs again with values, and may raise again
        is_traced = False
        call.reads, call.writes = set(below), dict.fromkeys(below, 1)
    else:
        call.reads, call.overwrites, call.writes = recorder.reads, recorder.overwrites, recorder.writes
    for name, old in zip(below, kept, strict=True):
        if names.get(twins.value(name).untyped_storage()._cdata) != name:
            call.overwrites.add(name)
            call.writes.setdefault(name, 1)
            twins.set(name, _empty(old))
    return is_traced


def needed(calls: Sequence[InitCall], wanted: Iterable[str]) -> list[InitCall]:
    """Return the calls whose effect on the wanted tensors is not overwritten by later calls, in order."""
    live = set(wanted)
    kept = []
    for call in reversed(calls):
        if live.isdisjoint(call.writes):
            continue
        kept.append(call)
        live -= call.overwrites
        live |= call.reads
    return kept[::-1]


def units(calls: Sequence[InitCall]) -> list[list[InitCall]]:
    """Group calls that share tensors, directly or over other calls; each group keeps their order."""
    group_of: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        merged = [index]
        for group in {
            id(group_of[name]): group_of[name] for name in call.tensors if name in group_of
        }.values():
            merged = [*group, *merged]
        for name in {name for one in merged for name in calls[one].tensors}:
            group_of[name] = merged
    groups = {id(group): group for group in group_of.values()}
    return [[calls[index] for index in sorted(group)] for group in groups.values()]


def constructor_writes(kind: type[nn.Module]) -> str | None:
    """Return the name of a function that writes tensors in a constructor, uncounted by their versions.

    These are writes through `Tensor.data`, and the functions of `torch.nn.init` that skip tensors on the meta
    device. Methods that are run again do not count, nor do torch's own classes.
    """
    for owner in kind.__mro__:
        constructor = inspect.unwrap(owner.__dict__.get("__init__", object))
        if isinstance(constructor, FunctionType) and not _is_library(owner.__module__):
            found = _uncounted_write(constructor, kind, set())
            if found is not None:
                return found
    return None


def _is_library(module: str) -> bool:
    return module.partition(".")[0] == "torch" or module == "transformers.modeling_utils"


def _uncounted_write(function: FunctionType, kind: type, seen: set[FunctionType]) -> str | None:
    """Search a function, and the methods and neighbours in its module that it names."""
    seen.add(function)
    instructions = [one for code in _codes(function.__code__) for one in dis.get_instructions(code)]
    names = {str(one.argval) for one in instructions if one.opname.startswith(("LOAD_", "STORE_"))}
    sets_data = any(one.opname == "STORE_ATTR" and one.argval == "data" for one in instructions)
    in_place = {
        name for name in names if name in _OVERWRITES or (name.endswith("_") and hasattr(nn.init, name))
    }
    if sets_data or ("data" in names and in_place) or names & _UNCOUNTED_INITS:
        return function.__qualname__
    for name in sorted(names - _RUN_AGAIN):
        for called in (inspect.getattr_static(kind, name, None), function.__globals__.get(name)):
            if not isinstance(called, FunctionType) or called.__module__ != function.__module__:
                continue
            if called not in seen and name not in ("forward", "__init__"):
                found = _uncounted_write(called, kind, seen)
                if found is not None:
                    return found
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _build_order(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names with children before their parents, in the order in which `apply` visits them."""
    children: dict[str, list[str]] = {}
    for name in modules:
        if name:
            children.setdefault(name.rpartition(".")[0], []).append(name)
    order: list[str] = []

    def visit(name: str) -> None:
        for child in children.get(name, ()):
            visit(child)
        order.append(name)

    visit("")
    return order


def _visitor(modules: Mapping[str, nn.Module], name: str) -> Callable[[nn.Module], Any] | None:
    """Return `_init_weights(module)` of the module itself or of the nearest one above it."""
    for above in (name, *_ancestors(name)):
        method = getattr(modules.get(above), "_init_weights", None)
        if callable(method) and _num_arguments(method) == 1:
            return method  # type: ignore[no-any-return]
    return None


def _reset(module: nn.Module) -> Callable[[], Any] | None:
    """Return the module's own initialiser, which takes no argument."""
    for name in _RESETS:
        method = getattr(module, name, None)
        if callable(method) and _num_arguments(method) == 0:
            return method  # type: ignore[no-any-return]
    return None


def _num_arguments(method: Callable[..., Any]) -> int:
    """Return the number of arguments that a call has to give."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is inspect.Parameter.empty for one in parameters)


def _bind(function: Callable[[nn.Module], Any], module: nn.Module) -> Callable[[], Any]:
    return lambda: function(module)


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name
