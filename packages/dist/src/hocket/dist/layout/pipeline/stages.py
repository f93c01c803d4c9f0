"""The cut of a model into stages: the parameters of each, and stand-ins for those of the others.

A stage keeps the whole module tree with its names, and its own parameters. A parameter of another stage is
replaced by zeros of its shape that share one element, so that code which looks at shapes, makes masks or
positions still runs, and nothing is stored.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.errors import ConfigError, ModelError
from hocket.dist.layout.deferred_init import find_ties
from hocket.dist.layout.sequence.blocks import find_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The stages of a model.

    Attributes:
        list_name: The name of the list of blocks.
        blocks: All blocks by name, in the order of their calls.
        starts: The index of the first block of each stage, and the number of blocks at the end.
        stage_of: The stage of each parameter, by its name.
        stage_of_module: The stage of each module's own parameters and buffers, by its name.
        ties: For each later name of a weight that is tied over two stages its first name.
    """

    list_name: str
    blocks: Mapping[str, nn.Module]
    starts: Sequence[int]
    stage_of: Mapping[str, int]
    stage_of_module: Mapping[str, int]
    ties: Mapping[str, str]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.starts) - 1

    def own_blocks(self, stage: int) -> range:
        """Return the indices of a stage's blocks."""
        return range(self.starts[stage], self.starts[stage + 1])

    def stage_of_block(self, index: int) -> int:
        """Return the stage of a block."""
        return bisect.bisect_right(self.starts, index) - 1

    def stage_of_entry(self, name: str) -> int:
        """Return the stage of an entry of the model's state, also of one that was added since the cut."""
        module = name.rpartition(".")[0]
        while module not in self.stage_of_module:
            module = module.rpartition(".")[0]
        return self.stage_of_module[module]

    def holders(self, name: str) -> set[int]:
        """Return the stages that have a parameter: one, or both of a weight that is tied over two."""
        first = self.ties.get(name, name)
        names = [first, *(later for later, other in self.ties.items() if other == first)]
        return {self.stage_of_entry(one) for one in names}

    def describe(self) -> str:
        """Return the blocks of each stage in words."""
        names = list(self.blocks)
        return "; ".join(
            f"stage {stage}: {len(self.own_blocks(stage))} blocks from `{names[start]}`"
            for stage, start in enumerate(self.starts[:-1])
        )


def cut_stages(model: nn.Module, config: PipelineConfig) -> Stages:
    """Return the stages of a model; nothing is changed.

    What is outside the list of blocks is of the first stage if it is registered before the list, and of the
    last stage if after it. `StageBlocks.check` finds out whether the model computes in this order.

    Args:
        model: Plain, with values.
        config: With a degree that is a number of ranks.

    Raises:
        ModelError: The model has no list of blocks, fewer blocks than stages, or a block with weights that
            another stage has, too.
        ConfigError: `split` names no blocks in order.
    """
    list_name, blocks = find_blocks(model, "`pp`")
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ModelError(
            f"`output_router_logits` of {type(model).__name__} is True: the logits of the routers of all "
            "blocks are not on the last stage of `pp`. Set it to False, or leave `pp` out"
        )
    if len(blocks) < config.num_stages:
        per_rank = config.stages_per_rank
        each = f" with {per_rank} stages for each rank" if per_rank > 1 else ""
        raise ModelError(
            f"{type(model).__name__} has {len(blocks)} blocks in `{list_name}`, which {config.num_stages} "
            f"stages of `pp` cannot share. Use `pp` {len(blocks) // per_rank} or less{each}, so that each "
            "stage has a block"
        )
    names = list(blocks)
    places: dict[str, int] = {}
    is_after = False
    for key, _ in model.named_modules(remove_duplicate=False):
        index = next((i for i, name in enumerate(names) if f"{key}.".startswith(f"{name}.")), None)
        is_after = is_after or index is not None
        places[key] = index if index is not None else len(names) if is_after else -1
    parameters = model.named_parameters(remove_duplicate=False)
    inside = {key: places[key.rpartition(".")[0]] for key, _ in parameters}
    if config.split is None:
        starts = _least_largest(_costs(model, inside, len(names)), config.num_stages)
    else:
        starts = _given_starts(config.split, names)
    stage_of, stage_of_module = (
        {
            key: max(0, sum(start <= min(index, len(names) - 1) for start in starts[:-1]) - 1)
            for key, index in place.items()
        }
        for place in (inside, places)
    )
    ties = _ties_over_stages(model, stage_of, inside, len(names))
    return Stages(
        list_name=list_name,
        blocks=blocks,
        starts=starts,
        stage_of=stage_of,
        stage_of_module=stage_of_module,
        ties=ties,
    )


def _costs(model: nn.Module, place: Mapping[str, int], num_blocks: int) -> list[int]:
    """Return the multiplications of each block for a position, those before and after beside the end ones.

    An embedding multiplies nothing. A tied weight counts where it multiplies.
    """
    costs = [0] * num_blocks
    embeddings = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    }
    for key, parameter in model.named_parameters(remove_duplicate=False):
        if key not in embeddings:
            costs[min(max(place[key], 0), num_blocks - 1)] += parameter.numel()
    return costs


def _least_largest(costs: Sequence[int], num_stages: int) -> list[int]:
    """Return the starts of consecutive parts whose largest sum is smallest; of several, the most even."""
    best: dict[tuple[int, int], tuple[int, int, list[int]]] = {(0, 0): (0, 0, [0])}
    for stage in range(1, num_stages + 1):
        for stop in range(stage, len(costs) - num_stages + stage + 1):
            best[stage, stop] = min(
                (max(largest, part := sum(costs[start:stop])), squares + part**2, [*starts, stop])
                for start in range(stage - 1, stop)
                if (found := best.get((stage - 1, start))) is not None
                for largest, squares, starts in (found,)
            )
    return best[num_stages, len(costs)][2]


def _given_starts(split: Sequence[str], names: Sequence[str]) -> list[int]:
    starts = [0]
    for name in split:
        found = [index for index, other in enumerate(names) if other == name or other.endswith(f".{name}")]
        if not found or found[0] <= starts[-1]:
            raise ConfigError(
                f"`parallelism_config['pp']['split']` is {list(split)}, and `{name}` is no block after the "
                f"first one of the stage before. Name blocks from `{names[min(1, len(names) - 1)]}` to "
                f"`{names[-1]}`, in their order"
            )
        starts.append(found[0])
    return [*starts, len(names)]


def _ties_over_stages(
    model: nn.Module, stage_of: Mapping[str, int], place: Mapping[str, int], num_blocks: int
) -> dict[str, str]:
    """Return the later names of weights that two stages share, with the first name of each.

    Raises:
        ModelError: Such a weight is part of a block.
    """
    ties: dict[str, str] = {}
    for first, others in find_ties(model).items():
        names = [first, *others]
        if len({stage_of[name] for name in names}) == 1:
            continue
        if inner := [name for name in names if 0 <= place[name] < num_blocks]:
            other = next(name for name in names if stage_of[name] != stage_of[inner[0]])
            raise ModelError(
                f"`{inner[0]}` and `{other}` are one tied weight, and `pp` puts them into the stages "
                f"{stage_of[inner[0]]} and {stage_of[other]}. Weights of an embedding before the blocks and "
                "of a head after them may be tied over stages, and those of blocks may not. Untie them, or "
                "leave `pp` out"
            )
        ties |= dict.fromkeys(others, first)
    return ties


def drop_other_stages(model: nn.Module, stages: Stages, own: Sequence[int]) -> dict[str, torch.Tensor]:
    """Replace the parameters of stages but `own` by stand-ins, in place; return the stand-ins by name.

    A weight that is tied over two stages keeps all of its names on both.
    """
    stand_ins: dict[str, torch.Tensor] = {}
    for key, owner, name in list(_places(model)):
        if not stages.holders(key).isdisjoint(own):
            continue
        parameter = owner._parameters.pop(name, None)
        if parameter is None:  # a module that is registered twice
            stand_ins[key] = owner.__dict__[name]
            continue
        stand_in = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        stand_in.requires_grad_(parameter.is_floating_point())
        owner.__dict__[name] = stand_ins[key] = stand_in
    return stand_ins


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in list(model.named_modules(remove_duplicate=False)):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, module, name
