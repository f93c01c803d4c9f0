"""The cuts of sequences that a layout asks for: over `cp`, over `tp`, or over both."""

import logging

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hocket.dist.config.parallelism import CP, TP
from hocket.dist.layout.sequence.blocks import SequenceBlocks, find_blocks
from hocket.dist.layout.sequence.exchange import Axis
from hocket.dist.layout.sequence.ulysses import UlyssesAttention, check_attention
from hocket.dist.layout.tensor_parallelism.plans import check_heads

_log = logging.getLogger("hocket.dist")


def blocks_of(
    model: nn.Module, context: Axis | None, tensor_mesh: DeviceMesh | None, *, tensor_degree: int
) -> SequenceBlocks:
    """Return the blocks of a model between which sequences are cut.

    Args:
        model: Plain.
        context: The ranks that share sequences; None if none do.
        tensor_mesh: The axis `tp`, if its ranks have parts of the sequences, too.
        tensor_degree: The degree of tensor parallelism.

    Raises:
        ModelError: The model has no list of blocks, or the ranks cannot share its attention.
    """
    axes = [] if context is None else [context]
    name, modules = find_blocks(model, "`sequence_parallel`" if context is None else f"`{CP}`")
    if tensor_mesh is not None:
        axes.append(
            Axis(
                name=TP,
                group=tensor_mesh.get_group(),
                rank=tensor_mesh.get_local_rank(),
                size=tensor_mesh.size(),
            )
        )
    blocks = SequenceBlocks(name, modules, axes, positions=context)
    names = [key for key, one in model.named_modules() if isinstance(one, nn.Dropout) and one.p > 0]
    if names and all(axis.rank == 0 for axis in axes):
        _log.warning(
            "%s has dropout (`%s`): ranks that share a sequence draw the same masks for their parts of it. "
            "Set the rates to 0 for masks that do not repeat along the sequence",
            type(model).__name__,
            names[0],
        )
    if context is not None:
        shown = f"`{CP}`" if tensor_degree == 1 else f"`{CP}` × `{TP}`"
        check_heads(model, None, context.size * tensor_degree, axes=shown)
        check_attention(model, CP)
        attention = UlyssesAttention(context, name)
        blocks.enter.append(attention.enter)
        blocks.leave.append(attention.leave)
        blocks.verify.append(attention.check)
    return blocks
