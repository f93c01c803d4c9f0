"""The cut of a stage's matrices over `tp` and of its sequences over `cp`, before `fully_shard`."""

from collections.abc import Collection

from torch import nn

from hocket.dist.config.axes import PP
from hocket.dist.config.tensor_parallel import TensorParallelConfig
from hocket.dist.errors import ConfigError
from hocket.dist.layout.pipeline.stage_ranks import StageRanks
from hocket.dist.layout.pipeline.stages import Stages
from hocket.dist.layout.sequence.blocks import SequenceBlocks, blocks_of
from hocket.dist.layout.tensor_parallelism.cut import TensorLayout, cut_model
from hocket.dist.layout.tensor_parallelism.plans import check_sequence_heads


def cut_stage(
    model: nn.Module,
    stages: Stages,
    own: Collection[int],
    ranks: StageRanks,
    tensor: TensorParallelConfig,
) -> tuple[TensorLayout | None, SequenceBlocks | None]:
    """Cut the modules and sequences of a rank's stages, in place. No communication.

    Between stages, activations are whole: the first block of a stage cuts them, and the last one gathers
    them.

    Args:
        model: Plain, its parameters of other stages already replaced.
        stages: Its stages.
        own: Those of this rank.
        ranks: The ranks of a stage.
        tensor: The plan of tensor parallelism, and what is cut beside matrices.

    Returns:
        The cut of the matrices, and the blocks between which sequences are cut; None for no such.

    Raises:
        ConfigError, ModelError: As `cut_model` and `blocks_of`.
    """
    tensor_mesh, context = ranks.tensor_mesh, ranks.context
    sequences = None
    names = list(stages.blocks)
    has_parts = tensor_mesh is not None and tensor.sequence_parallel
    if context is not None or has_parts:
        inside = {names[index] for stage in own for index in stages.own_blocks(stage)}
        blocks = {name: one for name, one in stages.blocks.items() if name in inside}
        sequences = blocks_of(
            model,
            context,
            tensor_mesh if has_parts else None,
            context_parallel=ranks.context_parallel,
            found=(stages.list_name, blocks),
        )
    if context is not None:
        check_sequence_heads(model, ranks.context_parallel, ranks.tensor)

    tied = {
        name for names in stages.ties.items() for name in names if not stages.holders(name).isdisjoint(own)
    }

    def is_own(name: str) -> bool:
        if f"{stages.list_name}.".startswith(f"{name}." if name else ""):
            raise ConfigError(
                f"the tensor-parallel plan names `{name}`, which has the blocks of all stages of `{PP}`. "
                "Name modules in the blocks or beside them"
            )
        if stages.stage_of_entry(f"{name}.") in own:
            return True
        module = model.get_submodule(name)
        return any(f"{name}.{key}" in tied for key in module._parameters)

    layout = None
    if tensor_mesh is not None:
        layout = cut_model(
            model,
            tensor.plan,
            tensor_mesh,
            blocks=sequences if has_parts else None,
            has_cut_loss=tensor.loss_parallel,
            is_own=is_own,
        )
        for name in layout.cut:
            head = model.get_submodule(name)
            if stages.stage_of_entry(f"{name}.") not in own and isinstance(head, nn.Linear):
                # Only its tied matrix is here, which takes no plain stand-in of a bias. Without a bias the
                # outputs, which do not count on this stage, have the right shapes, too.
                head.__dict__.pop("bias", None)
                head.register_parameter("bias", None)
    if sequences is not None:
        ranges = [stages.own_blocks(stage) for stage in own]
        sequences.attach_inside(
            first={names[one.start] for one in ranges}, last={names[one.stop - 1] for one in ranges}
        )
    return layout, sequences
