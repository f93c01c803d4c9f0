"""A comparison of the modules around cut layers with the same modules on whole matrices.

A plan may run and not fit the model: attention that splits a packed output by its own width, or that counts
its heads itself, computes something else with a part of the features. In the first forward pass each class of
module around cut layers is computed both ways.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from hocket.dist.config.axes import TP
from hocket.dist.config.tensor_parallel import Style, split_style
from hocket.dist.errors import ModelError
from hocket.dist.layout.checks.first_passes import FirstPasses
from hocket.dist.layout.sequence.arguments import Call, drawn_like, replace_first, without_cache
from hocket.dist.layout.sequence.blocks import SequenceBlocks

_log = logging.getLogger("hocket.dist")

_WHOLE = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise")
"""Styles whose modules take and return whole activations, whatever is around them."""
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LIKENESS = {True: 0.1, False: 0.01}
"""The part of its norm by which an output may differ, in low precision and otherwise."""


class _Unit:
    """A module around cut layers, and the forward method that is set on it for the first passes.

    Args:
        name: Its name.
        module: The module, of which the layers are cut later.
        whole: A copy from before the cut, whose tensors are on the meta device.
        compare: Called before the forward method, with this object and the arguments.

    Attributes:
        forward: The module's forward method.
        passes: Those in which it is compared.
    """

    def __init__(
        self, name: str, module: nn.Module, whole: nn.Module, compare: Callable[["_Unit", Call], None]
    ) -> None:
        self.name, self.module, self.whole = name, module, whole
        self.forward: Callable[..., Any] = module.forward
        self.passes = FirstPasses()
        self._own = vars(module).get("forward")
        self._compare = compare
        functools.update_wrapper(self, self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward method, after the comparison if that is due."""
        self._compare(self, (args, kwargs))
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the own forward method for a copy of the module."""
        module = copy.deepcopy(self.module, memo)
        return (
            MethodType(type(module).forward, module) if self._own is None else copy.deepcopy(self._own, memo)
        )

    def restore(self) -> None:
        """Set the own forward method again, unless another layout has set one around this."""
        if vars(self.module).get("forward") is not self:
            return
        if self._own is None:
            del self.module.forward
        else:
            self.module.forward = self._own


class PlanCheck:
    """The comparison of a model, whose making takes copies of modules, without their values.

    Args:
        model: Plain, before it is cut.
        styles: The style of each module that will be cut.
        mesh: The axis `tp`.
        blocks: The blocks between which sequences are cut over the axis; None if they are whole.
        is_given: Whether the plan is the user's; only then what cannot be compared is said.
    """

    def __init__(
        self,
        model: nn.Module,
        styles: Mapping[str, Style],
        mesh: DeviceMesh,
        *,
        blocks: SequenceBlocks | None,
        is_given: bool,
    ) -> None:
        self._mesh, self._blocks, self._is_given = mesh, blocks, is_given
        self._is_busy = False
        self._units = list[_Unit]()
        memo: dict[int, Any] = {id(one): _on_meta(one) for one in (*model.parameters(), *model.buffers())}
        for name in self._names(model, styles):
            module = model.get_submodule(name)
            try:
                whole = copy.deepcopy(module, memo)
            except Exception as error:  # noqa: BLE001 - whatever a user's object raises
                self._say(name, f"it cannot be copied ({type(error).__name__}: {error})")
                continue
            whole.requires_grad_(False).eval()
            self._units.append(_Unit(name, module, whole, self._compare_if_due))

    @property
    def is_pending(self) -> bool:
        """Whether a module has yet to be compared."""
        return any(not unit.passes.has_ended for unit in self._units)

    def leave_out_pass(self) -> None:
        """Count a pass in which nothing is compared."""
        for unit in self._units:
            unit.passes.is_due()

    def attach(self) -> None:
        """Replace the modules' forward methods, before any other layout replaces or wraps them."""
        for unit in self._units:
            unit.module.forward = unit

    def try_block(self, name: str, call: Call) -> None:
        """Compare a block and what is inside, on random activations in place of those of a call. Collective.

        Args:
            name: The block; nothing is done if it is like one that is compared.
            call: The arguments, with activations of whole sequences.

        Raises:
            ModelError: The results differ.
        """
        for unit in self._units:
            if unit.name == name:
                args, kwargs = replace_first(call, drawn_like)
                with torch.no_grad():
                    unit(*args, **kwargs)

    def _names(self, model: nn.Module, styles: Mapping[str, Style]) -> Iterator[str]:
        """Yield one module of each class and plan around cut layers, the outer ones first."""
        modules = dict(model.named_modules())
        around, outside = _modules_around(modules, _not_whole(styles))
        for layer in outside:
            self._say(layer, "what takes its output is outside of all blocks")
        seen = set[tuple[type, tuple[tuple[str, str], ...]]]()
        for name in (one for one in modules if one in around):  # parents come before their children
            inside = f"{name}." if name else ""
            plan = tuple(
                (key.removeprefix(inside), str(style))
                for key, style in styles.items()
                if key.startswith(inside)
            )
            if (key := (type(modules[name]), plan)) not in seen:
                seen.add(key)
                yield name

    def _compare_if_due(self, unit: _Unit, call: Call) -> None:
        # Parts of sequences are compared with whole ones elsewhere, by a pass that comes through here, too.
        is_part = self._blocks is not None and self._blocks.is_cut
        if self._is_busy or is_part or _is_again() or not unit.passes.is_due():
            return
        self._is_busy = True
        try:
            self._compare(unit, call)
        finally:
            self._is_busy = False
        if unit.passes.has_ended:
            unit.restore()

    def _compare(self, unit: _Unit, call: Call) -> None:
        """Compute a module both ways. Collective over the ranks of the axis.

        Raises:
            ModelError: The results differ.
        """
        given = list(unit.module.parameters())
        if any(isinstance(one, DTensor) and one.device_mesh.mesh_dim_names != (TP,) for one in given):
            unit.passes.end()  # experts of which each rank has some, for which no plan stands
            return
        call = without_cache(call)
        devices = [given[0].device] if given and given[0].device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            try:
                expected = _first(self._compute_whole(unit, call))
                found = _first(_evaluate(unit.module, unit.forward, call))
                is_other, is_zero = self._differs(found, expected, call)
                if is_other and not torch.equal(expected, _first(self._compute_whole(unit, call))):
                    raise TypeError("it draws random numbers in evaluation, too")
            except (torch.OutOfMemoryError, ModelError):
                raise
            except Exception as error:  # noqa: BLE001 - whatever a user's module raises in a pass of its own
                unit.passes.end()
                self._say(unit.name, f"{error} ({type(error).__name__})")
                return
        if not is_zero:
            unit.passes.end()
        if is_other:
            raise ModelError(_refusal(unit))

    def _compute_whole(self, unit: _Unit, call: Call) -> Any:
        values = {name: _whole(one) for name, one in unit.module.named_parameters()}
        args, kwargs = _fresh(call)
        return functional_call(unit.whole, values | dict(unit.module.named_buffers()), args, kwargs)

    def _differs(self, found: torch.Tensor, expected: torch.Tensor, call: Call) -> tuple[bool, bool]:
        """Return whether outputs differ on any rank of the axis, and whether they are 0 on all.

        Raises:
            TypeError: They have other shapes, as where a module returns a part for the next one.
        """
        if found.shape != expected.shape:
            raise TypeError(f"it returns {tuple(found.shape)} in place of {tuple(expected.shape)}")
        size, difference = expected.float().norm(), (found.float() - expected.float()).norm()
        before = next(iter(_floats(call)), None)
        if before is not None and before.shape == expected.shape:
            # What a block adds to its input may be small beside it.
            size = torch.minimum(size, (expected.float() - before.float()).norm())
        is_low = expected.itemsize < 4 or torch.is_autocast_enabled(expected.device.type)
        rounding = torch.finfo(expected.dtype).eps * expected.float().norm()
        # A difference that is not a number is none of the plan: the training itself reports it.
        flags = torch.stack([difference > _LIKENESS[is_low] * size + rounding, size > 0]).float()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._mesh.get_group())
        is_other, is_any = flags.tolist()
        return bool(is_other), not is_any

    def _say(self, name: str, why: str) -> None:
        others = (unit.name for unit in self._units if unit.name != name)
        is_inner = any(name.startswith(f"{other}." if other else "") for other in others)
        if self._is_given and not is_inner and self._mesh.get_rank() == 0:
            _log.warning(
                "`%s` is not compared with what it computes on whole matrices, so nothing tells whether the "
                "tensor-parallel plan fits it: %s. Compare the loss of the first batches with that of one "
                "process",
                name,
                why,
            )


def _modules_around(modules: Mapping[str, nn.Module], layers: Iterable[str]) -> tuple[set[str], list[str]]:
    """Return the modules around layers, up to a block, and the layers outside of all blocks of the model."""
    around, blocks, parents = set[str](), set[str](), dict[str, str]()
    for layer in layers:
        found, name = list[str](), layer
        while name:
            name = name.rpartition(".")[0]
            if not isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
                found.append(name)
            if name and isinstance(modules[name.rpartition(".")[0]], _LISTS) and found:
                blocks.add(found[-1])
                around.update(found)
                break
        else:
            parents[layer] = found[0]
    outside = list[str]()
    for layer, parent in parents.items():
        if any(block.startswith(f"{parent}." if parent else "") for block in blocks):
            outside.append(layer)
        else:
            around.add(parent)
    return around, outside


def _not_whole(styles: Mapping[str, Style]) -> list[str]:
    return [
        name
        for name, style in styles.items()
        if not (isinstance(style, str) and split_style(style)[0] in _WHOLE)
    ]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _evaluate(module: nn.Module, forward: Callable[..., Any], call: Call) -> Any:
    """Call a module's forward method in evaluation."""
    modes = {one: one.training for one in module.modules()}
    args, kwargs = _fresh(call)
    try:
        module.eval()
        return forward(*args, **kwargs)
    finally:
        for one, mode in modes.items():
            one.training = mode


def _fresh(call: Call) -> Call:
    """Return arguments whose tensors a module may change."""
    copied: Call = tree_map_only(torch.Tensor, torch.clone, call)
    return copied


def _floats(tree: Any) -> Iterator[torch.Tensor]:
    return (one for one in tree_leaves(tree) if isinstance(one, torch.Tensor) and one.is_floating_point())


def _first(output: Any) -> torch.Tensor:
    first = next(_floats(output), None)
    if first is None:
        raise TypeError(f"it returns a {type(output).__name__}, in which there is no tensor of numbers")
    return _whole(first)


def _is_again() -> bool:
    """Return whether a module is compiled, or computed again in a backward pass."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1


def _refusal(unit: _Unit) -> str:
    kind = type(unit.module).__name__.removeprefix("FSDP")
    where = f"`{unit.name}`, a {kind}," if unit.name else kind
    return (
        f"{where} does not compute with the matrices that the tensor-parallel plan cuts what it computes "
        "with whole ones, so training would differ from that of one process without an error: it splits the "
        "output of several matrices that are stored as one, or counts heads or features itself. Give such a "
        "matrix the style 'packed_colwise:3' for three in one, take the number of heads from the shape of "
        "the layer's output (`view(*x.shape[:2], -1, head_dim)`), or give the layer the style "
        "'colwise_gather_output'"
    )
