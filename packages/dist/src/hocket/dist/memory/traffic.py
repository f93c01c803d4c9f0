"""The bytes that a rank sends in a step, by axis."""

from collections.abc import Mapping, Sequence

from hocket.dist.config.axes import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP
from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.tensor_parallel import TensorParallelConfig
from hocket.dist.memory.activations import ForwardPass, Span
from hocket.dist.memory.estimate import GroupSize, is_sharded
from hocket.dist.memory.shares import Share


def traffic_of(
    share: Share,
    config: FSDPConfig,
    sizes: Mapping[str, int],
    *,
    microbatches: int,
    whole: ForwardPass,
    tensor_parallel: TensorParallelConfig,
    context_parallel: ContextParallelConfig,
) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, by axis.

    Args:
        share: What the rank computes.
        config: The sharding.
        sizes: The ranks along each axis.
        microbatches: Those of a step.
        whole: The forward pass of the whole model.
        tensor_parallel: Whether ranks of `tp` share activations and logits.
        context_parallel: How ranks of `cp` attend.
    """
    boundary = whole.boundary_bytes
    context, tensor, experts = sizes[CP], sizes[TP], sizes[EP]
    # Blocks that are recomputed run their forward pass twice.
    forwards = 2 if config.activation_checkpointing else 1
    # Rows go to their experts and back, and so do the gradients.
    routed = share.span.routed * 2 * (forwards + 1) / context * (experts - 1) / experts
    # The end is gathered, and so are the gradients of the beginning.
    ends = 2 * boundary * max(len(share.stages), 1)
    attended = _attention_traffic(share.span, context, forwards, is_ring=context_parallel.is_ring)
    is_staged = sizes[PP] > 1
    along = {
        # The gradients of weights that two stages share are added up once a batch.
        PP: boundary * share.num_sends * microbatches + share.tied_bytes / (sizes[DP_SHARD] * context),
        **_data_traffic(share.groups, config, sizes, microbatches=1 if is_staged else microbatches),
        CP: (attended + ends * (context - 1) / context) * microbatches,
        TP: _tensor_traffic(share, config, sizes, microbatches=microbatches)
        + ends * tensor_parallel.sequence_parallel * (tensor - 1) / tensor / context * microbatches,
        EP: routed * microbatches,
    }
    return {axis: sent for axis, sent in along.items() if sent}


def _tensor_traffic(
    share: Share, config: FSDPConfig, sizes: Mapping[str, int], *, microbatches: int
) -> float:
    """Return the bytes that a rank of `tp` sends for its modules."""
    # `fully_shard` adds up gradients over `tp` where it reduces them.
    num_sums = microbatches
    if is_sharded(share.groups, config, sizes[DP_REPLICATE] * sizes[DP_SHARD] * sizes[CP]):
        num_sums = 1 if sizes[PP] > 1 or config.sync_policy == "last" else microbatches
    total = 0.0
    for one in share.tensor:
        sent = one.once + one.again * bool(config.activation_checkpointing)
        total += sent / (sizes[CP] if one.is_inside else 1) * microbatches + one.gradients * num_sums
    return total


def _attention_traffic(span: Span, ranks: int, forwards: int, *, is_ring: bool) -> float:
    """Return the bytes that a rank of `cp` sends for the attention of a microbatch.

    Args:
        span: The figures of its blocks, of whole sequences.
        ranks: The ranks that share a sequence.
        forwards: The forward passes.
        is_ring: Whether keys travel, and not heads.
    """
    if not is_ring:
        # Queries, keys, values and results change hands, and so do their gradients.
        return span.attended / ranks * (forwards + 1) * (ranks - 1) / ranks
    # Keys and values go to each other rank in each pass. Their gradients visit all ranks and return.
    return span.keyed * (forwards + 1) * (ranks - 1) / ranks + span.key_gradients * (ranks > 1)


def _data_traffic(
    groups: Sequence[GroupSize], config: FSDPConfig, sizes: Mapping[str, int], *, microbatches: int
) -> dict[str, float]:
    """Return the bytes of parameters and gradients; with stages these travel once a batch.

    A rank gathers parameters for each pass, and reduces gradients as `gradient_sync` says. Experts are
    gathered and reduced by the ranks that have the same ones, and in place by those of copies alone.
    """
    copies, experts = sizes[DP_REPLICATE], sizes[EP]
    all_ranks = sizes[DP_SHARD] * sizes[CP]
    gathers = (2 if config.should_reshard else 1) * microbatches
    shard = copy = 0.0
    for group in groups:
        part, ranks = (group.part(experts), all_ranks // experts) if group.is_stack else (group, all_ranks)
        is_in_place = group.is_stack and ranks == 1
        reductions = 1 if config.sync_policy == "last" and not is_in_place else microbatches
        shard += (ranks - 1) / ranks * (part.gathered * gathers + part.reduced * reductions)
        reductions = microbatches if config.sync_policy == "every" or is_in_place else 1
        copy += 2 * (copies - 1) / copies * part.reduced / ranks * reductions
    return {DP_REPLICATE: copy, DP_SHARD: shard}
