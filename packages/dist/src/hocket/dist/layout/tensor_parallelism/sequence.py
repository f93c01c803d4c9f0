"""Sequence parallelism beside tensor parallelism: activations between the cut layers are cut, too.

Ranks of `tp` hold a part of each sequence between the layers that a plan cuts. The input of such layers is
gathered, and where their output would be added up over the ranks, each rank gets its part of the sum.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hocket.dist.config.tensor_parallel import Style, split_style
from hocket.dist.errors import ConfigError, ModelError
from hocket.dist.layout.sequence.arguments import Call, replace_first, replace_output
from hocket.dist.layout.sequence.blocks import SequenceBlocks
from hocket.dist.layout.sequence.exchange import Axis, cut, gather

_CUTS = ("colwise", "packed_colwise")
_INSIDE = (*_CUTS, "rowwise", "replicated_with_grad_allreduce")
"""The styles that go with cut sequences."""
_NORM = re.compile(r"(layer|rms)_?norm", re.IGNORECASE)
"""Classes of norms that act on each position by itself."""


def add_sequence_styles(styles: Mapping[str, Style], blocks: SequenceBlocks) -> dict[str, Style]:
    """Return the styles with those of the norms, whose parameters act on cut activations.

    Args:
        styles: The plan's, by names of modules.
        blocks: The stack.

    Raises:
        ConfigError: A block has a style that does not go with sequence parallelism.
        ModelError: A block has parameters of its own.
    """
    added = dict(styles)
    for name, block in blocks.blocks.items():
        for key, style in styles.items():
            kind = split_style(style)[0] if isinstance(style, str) else type(style).__name__
            if key.startswith(f"{name}.") and kind not in _INSIDE:
                raise ConfigError(
                    f"the tensor-parallel plan has {kind!r} for `{key}`, and `sequence_parallel` goes with "
                    f"{', '.join(f'{one!r}' for one in _INSIDE)} inside `{blocks.name}`. Change the plan, or "
                    "leave `sequence_parallel` out"
                )
        for key, _, is_norm in modules_between(name, block, styles):
            if is_norm:
                added[key] = "replicated_with_grad_allreduce"
    return added


def attach_sequence(
    model: nn.Module, styles: Mapping[str, Style], blocks: SequenceBlocks, mesh: DeviceMesh
) -> None:
    """Gather and cut activations around the modules inside the blocks, by hooks.

    Args:
        model: Cut by the styles.
        styles: With those that `add_sequence_styles` added.
        blocks: The stack.
        mesh: The axis `tp`.
    """
    (axis,) = (one for one in blocks.axes if one.name == mesh.mesh_dim_names[0])  # type: ignore[index]
    hooks = _InnerHooks(blocks, axis, mesh)
    for name, block in blocks.blocks.items():
        for key in takers(name, styles):
            # Before the hooks of the styles, which take what this one returns.
            model.get_submodule(key).register_forward_pre_hook(
                hooks.gather_once, prepend=True, with_kwargs=True
            )
        for _, module, is_norm in modules_between(name, block, styles):
            if not is_norm:
                module.register_forward_pre_hook(hooks.gather, with_kwargs=True)
                module.register_forward_hook(hooks.cut)


def takers(block: str, styles: Mapping[str, Style]) -> set[str]:
    """Return the modules in a block that take whole activations and cut them by features.

    That is the module around the cut layers, such as attention, which takes the length of the sequence from
    its input; or the layer itself, directly in the block.
    """
    names = {key for key, style in styles.items() if _is_cut(style) and key.startswith(f"{block}.")}
    return {key if (parent := key.rpartition(".")[0]) == block else parent for key in names}


class _InnerHooks:
    """The hooks of modules inside the blocks."""

    def __init__(self, blocks: SequenceBlocks, axis: Axis, mesh: DeviceMesh) -> None:
        self._blocks, self._axis, self._mesh = blocks, axis, mesh

    def gather_once(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Gather the input of cut layers; backward adds up the gradients of all of them and cuts the sum."""
        if not self._blocks.is_cut:
            return None
        return replace_first((args, kwargs), self._as_whole)

    def _as_whole(self, part: torch.Tensor) -> torch.Tensor:
        cut_tensor = DTensor.from_local(part, self._mesh, [Shard(1)], run_check=False)
        return cut_tensor.redistribute(placements=[Replicate()])

    def gather(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Gather the input of a module that each rank has whole and computes whole."""
        if not self._blocks.is_cut:
            return None
        return replace_first((args, kwargs), lambda part: gather(part, self._axis))

    def cut(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Cut the output of such a module."""
        return replace_output(output, lambda whole: cut(whole, self._axis)) if self._blocks.is_cut else output


def modules_between(
    name: str, module: nn.Module, styles: Mapping[str, Style]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules with parameters that act on activations between cut layers; and if they are norms.

    Raises:
        ModelError: A module between them has parameters of its own beside cut layers.
    """
    for key, _ in module.named_parameters(recurse=False):
        raise ModelError(
            f"`{name}.{key}` stands beside layers that the plan cuts, and `sequence_parallel` "
            "does not know how to add up its gradients. Move it into a module of its own, or leave "
            "`sequence_parallel` out"
        )
    for key, child in module.named_children():
        inside = f"{name}.{key}"
        if inside in styles or _has_cut_layers(inside, styles):
            continue
        if _NORM.search(type(child).__name__):
            yield inside, child, True
        elif any(other.startswith(f"{inside}.") for other in styles):
            yield from modules_between(inside, child, styles)
        elif any(True for _ in child.parameters()):
            yield inside, child, False


def _has_cut_layers(name: str, styles: Mapping[str, Style]) -> bool:
    """Return whether the plan cuts the outputs of layers directly inside a module, as those of attention."""
    return any(_is_cut(style) and key.rpartition(".")[0] == name for key, style in styles.items())


def _is_cut(style: Style) -> bool:
    return isinstance(style, str) and split_style(style)[0] in _CUTS
