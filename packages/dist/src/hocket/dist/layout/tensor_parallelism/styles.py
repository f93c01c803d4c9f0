"""The styles of tensor parallelism: how a module's matrices are cut over the ranks of the mesh's axis `tp`.

Torch's styles are used where there are any; added are transformers' `Conv1D`, whose weight is transposed,
and several matrices that are stored as one. Activations between modules are plain tensors.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from hocket.dist.config.axes import TP
from hocket.dist.config.tensor_parallel import Style, split_style
from hocket.dist.errors import ModelError
from hocket.dist.layout.sequence.blocks import SequenceBlocks
from hocket.dist.layout.sequence.exchange import refuse_second_derivatives
from hocket.dist.layout.tensor_parallelism.loss import keep_cut
from hocket.dist.layout.tensor_parallelism.packed import PackedOutput

_COLWISE = ("colwise", "colwise_gather_output", "packed_colwise")
_ROWWISE = ("rowwise", "rowwise_split_input")


def apply_style(
    style: Style,
    name: str,
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    blocks: SequenceBlocks | None = None,
    keeps_logits_cut: bool = False,
) -> None:
    """Cut a module's parameters over `mesh`, in place, and have its inputs and outputs follow.

    Values are those that each rank has; nothing is sent.

    Args:
        style: One of `STYLES`, or a style of torch.
        name: The module's name, for messages.
        module: Its parameters are plain.
        mesh: The axis `tp`, of at least two ranks.
        blocks: The blocks between which sequences are cut over the axis; None if they are whole.
        keeps_logits_cut: Whether the loss takes the cut outputs.

    Raises:
        ModelError: The style does not fit the module's class, or the sizes do not divide.
    """
    if isinstance(style, ParallelStyle):
        style.src_data_rank = None
        style._apply(module, mesh)
        return
    kind, num_parts = split_style(style)
    _check_sizes(kind, num_parts, name, module, mesh.size())
    is_summed_in_parts = blocks is not None and kind == "rowwise"
    options: dict[str, Any] = {}
    if is_summed_in_parts:
        options = {"output_layouts": Partial(), "use_local_output": False}
    elif keeps_logits_cut:
        options = {"output_layouts": Shard(-1), "use_local_output": False}
    chosen = _style_of(kind, name, module, options)
    chosen.src_data_rank = None
    chosen._apply(module, mesh)
    if is_summed_in_parts:
        module.register_forward_hook(lambda _module, _inputs, output: _add_up(output, blocks))
    elif keeps_logits_cut:
        module.register_forward_hook(lambda module, _inputs, output: keep_cut(module, output))
    elif kind == "packed_colwise":
        packed = PackedOutput(mesh, num_parts)
        module.register_forward_hook(lambda _module, _inputs, output: packed(output))
    else:
        module.register_forward_hook(lambda _module, _inputs, output: _NoView.apply(output))


def cut_dim(style: Style, module: nn.Module) -> int | None:
    """Return the dim of the module's weight that a style cuts; None if it stays whole or is not known."""
    if isinstance(style, ParallelStyle):
        return None
    kind, _ = split_style(style)
    is_late = is_transposed(module)
    if kind in _COLWISE:
        return int(is_late)
    if kind in _ROWWISE:
        return int(not is_late)
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(kind)


def local_shapes(style: Style, name: str, module: nn.Module, degree: int) -> dict[str, list[int]]:
    """Return the shapes that a module's own parameters have on each of `degree` ranks.

    Raises:
        ModelError: The sizes do not divide.
    """
    shapes = {key: list(one.shape) for key, one in module.named_parameters(recurse=False)}
    dim = cut_dim(style, module)
    if dim is None or isinstance(style, ParallelStyle):
        return shapes
    kind, num_parts = split_style(style)
    _check_sizes(kind, num_parts, name, module, degree)
    for shape in shapes.values():
        if len(shape) == 2:
            shape[dim] = -(-shape[dim] // degree)
        elif kind in _COLWISE:
            shape[0] = -(-shape[0] // degree)
    return shapes


def _add_up(sums: DTensor, blocks: SequenceBlocks | None) -> torch.Tensor:
    """Return the sum over the ranks, of which each rank gets its part of the sequence where that is cut."""
    is_cut = blocks is not None and blocks.is_cut
    total = sums.redistribute(placements=[Shard(1) if is_cut else Replicate()]).to_local()
    result: torch.Tensor = _NoView.apply(total)
    return result


def _style_of(kind: str, name: str, module: nn.Module, options: dict[str, Any]) -> ParallelStyle:
    whole: dict[str, Any] = {"input_layouts": Replicate(), "output_layouts": Replicate()} | options
    cut: dict[str, Any] = {"input_layouts": Shard(-1), "output_layouts": Replicate()} | options
    is_linear, is_late = isinstance(module, nn.Linear), is_transposed(module)
    if kind in _COLWISE and (is_linear or is_late):
        layouts = whole if kind == "colwise_gather_output" else {**whole, "output_layouts": Shard(-1)}
        return ColwiseParallel(**layouts) if is_linear else _Transposed(1, **layouts)
    if kind in _ROWWISE and (is_linear or is_late):
        layouts = cut if kind == "rowwise" else whole
        return RowwiseParallel(**layouts) if is_linear else _Transposed(0, **layouts)
    if isinstance(module, nn.Embedding) and kind == "embedding_rowwise":
        return _CutVocabulary()
    if isinstance(module, nn.Embedding) and kind == "embedding_colwise":
        return ColwiseParallel(**whole)
    if kind == "replicated_with_grad_allreduce":
        return _OnCutActivations()
    if hasattr(module, "base_layer"):
        raise ModelError(
            f"the tensor-parallel plan has {kind!r} for `{name}`, which has adapters, such as those of "
            f"`LoRA`, and adapters cannot be cut. Leave them out, or `{TP}` in `parallelism_config`"
        )
    fitting = "an `nn.Embedding`" if kind.startswith("embedding") else "an `nn.Linear` or a `Conv1D`"
    raise ModelError(
        f"the tensor-parallel plan has {kind!r} for `{name}`, a {type(module).__name__}, expected {fitting}. "
        "Leave the module out of the plan, or give a `ParallelStyle` of torch for it"
    )


def _check_sizes(kind: str, num_parts: int, name: str, module: nn.Module, degree: int) -> None:
    weight = getattr(module, "weight", None)
    dim = cut_dim(f"{kind}:{num_parts}" if kind == "packed_colwise" else kind, module)
    if dim is None or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return
    size = weight.shape[dim]
    if size % (num_parts * degree):
        what = {0: "rows", 1: "columns"}[dim]
        if kind == "embedding_rowwise":
            what = "rows of the vocabulary"
        several = "" if num_parts == 1 else f" in each of {num_parts} parts"
        raise ModelError(
            f"`{name}` has {size} {what}, which {degree} ranks of `tp` cannot share evenly{several}. Choose "
            f"another degree, pad to a multiple of {num_parts * degree}, or give a `plan` without `{name}`"
        )


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose weight is (inputs, outputs), a `Conv1D`."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


class _Transposed(ParallelStyle):
    """The cut of one dim of the weight of a `Conv1D`."""

    def __init__(
        self,
        dim: int,
        *,
        input_layouts: Placement,
        output_layouts: Placement,
        use_local_output: bool = True,
    ) -> None:
        self._dim, self._input, self._output = dim, input_layouts, output_layouts
        self._is_local = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(module.named_parameters(recurse=False)):
                dim = self._dim if parameter.ndim == 2 else 0
                placement = Shard(dim) if parameter.ndim == 2 or self._dim == 1 else Replicate()
                _replace(module, key, parameter, mesh, placement)

        def take(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            given = inputs[0]
            if not isinstance(given, DTensor):
                given = DTensor.from_local(given, mesh, [self._input], run_check=False)
            wanted = Replicate() if self._dim == 1 else Shard(-1)
            # A redistribution that moves nothing adds the gradient up whole in the backward pass, also where
            # only the ranks' parts of the sequence are needed.
            return given if given.placements == (wanted,) else given.redistribute(placements=[wanted])

        def give(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
            placed = output.redistribute(placements=[self._output])
            return placed.to_local() if self._is_local else placed

        return distribute_module(module, device_mesh, partition, take, give)


class _CutVocabulary(ParallelStyle):
    """The cut of an embedding's rows, which a compiled model runs as it is.

    Torch's operator keeps the mask of the positions whose rows other ranks have in its placement of the
    result, one object for all calls of a shape, until the sum over the ranks takes it. A compiler that gets
    the operator and the sum in two graphs, as it does around the hooks of `fully_shard`, leaves a mask
    without values there: later calls fail, or lose the gradient.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for key, parameter in list(module.named_parameters(recurse=False)):
            _replace(module, key, parameter, device_mesh, Shard(0))
        forward = module.forward

        @functools.wraps(forward)
        def look_up(tokens: torch.Tensor) -> Any:
            whole = DTensor.from_local(tokens, device_mesh, [Replicate()], run_check=False)
            return forward(whole).redistribute(placements=[Replicate()]).to_local()

        module.forward = torch.compiler.disable(look_up)  # type: ignore[no-untyped-call]
        return module


class _OnCutActivations(ParallelStyle):
    """Whole parameters that act on activations of which each rank has other rows, such as those of its heads.

    Their gradients are summed over the ranks, because each rank computes the part of its own rows.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(module.named_parameters(recurse=False)):
                _replace(module, key, parameter, mesh, Replicate())

        def take(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            # The rows are independent of each other, so any dim but the last serves to name them.
            return DTensor.from_local(inputs[0], mesh, [Shard(0)], run_check=False)

        return distribute_module(
            module, device_mesh, partition, take, lambda _module, output, _mesh: output.to_local()
        )


def _replace(
    module: nn.Module, key: str, parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement
) -> None:
    sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    module.register_parameter(key, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


class _NoView(torch.autograd.Function):
    """The same tensor, which autograd does not take for a view, and whose values have arrived.

    A DTensor gives its local part as a view, and `fully_shard` warns of views as the outputs of its modules.
    What a collective computes has no memory of its own that activation offload could move.
    torch leaves a DTensor that becomes a plain tensor out of the graph of second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return (output.wait() if isinstance(output, AsyncCollectiveTensor) else output).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        refuse_second_derivatives()
        return gradient
