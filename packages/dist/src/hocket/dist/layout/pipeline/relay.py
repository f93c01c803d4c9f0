"""A pass of the whole model without gradients: evaluation, prediction, and calls by the user.

All ranks of a pipeline have the same inputs. The activations go through the stages one after the other, and
the outputs of the last stage to all of them.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.errors import ModelError
from hocket.dist.layout.pipeline.blocks import EndOfStageError, StageBlocks
from hocket.dist.layout.sequence.arguments import Call, first_tensor, replace_first, without_cache
from hocket.dist.ranks.process_group import RankGroup

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class StageRelay:
    """Lets calls of a model in stages give the outputs of the whole model, on every rank, without gradients.

    The first call of each kind runs a second pass that skips the blocks and refuses outputs that the last
    stage cannot compute, such as hidden states of earlier blocks.

    Args:
        model: The model.
        blocks: Its blocks.
        ranks: The ranks of the pipeline.
        config: The pipeline.
    """

    def __init__(
        self, model: nn.Module, blocks: StageBlocks, ranks: RankGroup, config: PipelineConfig
    ) -> None:
        self._model, self._blocks, self._ranks, self._config = model, blocks, ranks, config
        self._last_index = config.rank_of(config.num_stages - 1)
        self._is_running = False
        self._failure = ""
        self._known: dict[Any, Any] = {}
        self._entered: tuple[Any, torch.dtype] = ((), torch.float32)
        blocks.outside = self._run_block
        name = blocks.stages.list_name
        while name:
            name = name.rpartition(".")[0]
            module = model.get_submodule(name)
            run = functools.partial(self._run, name, module.forward)
            module.forward = functools.wraps(module.forward)(run)

    def _run(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the forward method of a module that has all blocks; collective without gradients."""
        if self._blocks.is_busy or self._is_running or torch.is_grad_enabled():
            try:
                return forward(*args, **kwargs)
            except EndOfStageError as end:
                if name:
                    raise
                return end.output  # here, so that hooks of the model see the end of a forward pass
        call: Call = (args, kwargs)
        self._refuse_cache(call)
        kind = (name, self._model.training, _kind(call))
        if kind not in self._known:
            self._known[kind] = self._check(forward, call)
        self._is_running, self._failure = True, ""
        try:
            outputs = forward(*args, **kwargs)
        finally:
            self._is_running = False
        return self._share(outputs, self._known[kind])

    def _check(self, forward: Callable[..., Any], call: Call) -> Any:
        """Refuse outputs that stages cannot give, by a pass without blocks; return their structure."""
        with torch.inference_mode(False):  # tensors of inference have no history
            args, kwargs = tree_map(_outside_of_inference, call)
            with self._blocks.checking(self._ranks.gather_objects):
                results = forward(*args, **kwargs)
                self._blocks.check(results)
        self._blocks.agree(self._ranks.gather_objects)
        leaves, structure = tree_flatten(results)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)) and not _is_cache(leaf):
                raise ModelError(
                    f"the outputs of {type(self._model).__name__} have a {type(leaf).__name__}, in which "
                    "`pp` finds no tensors to send from the last stage. Return tensors, tuples, lists or "
                    "dicts"
                )
        return structure

    def _refuse_cache(self, call: Call) -> None:
        """Refuse a cache of keys, of which each stage would have a part."""
        args, kwargs = call
        values = [*args, *kwargs.values()]
        mappings = [kwargs, *(one for one in args if isinstance(one, Mapping))]
        values += [value for one in mappings[1:] for value in one.values()]
        if any(map(_is_cache, values)) or any(one.get("past_key_values") is not None for one in mappings):
            raise ModelError(
                f"{type(self._model).__name__} is called with a cache of keys (`past_key_values`), which "
                "`pp` does not keep: a stage has the keys of its own blocks. Pass `use_cache=False` to "
                "`generate`, or load a checkpoint of this run without `pp`"
            )

    def _run_block(self, index: int, forward: Callable[..., Any], call: Call) -> torch.Tensor:
        if not self._is_running:
            blocks = self._blocks
            name, model = blocks.names[index], type(self._model).__name__
            why = "with gradients" if torch.is_grad_enabled() else f"without a call of {model}"
            raise ModelError(
                f"`{name}` runs outside of a training step, {why}, and `pp` has put the blocks of {model} on "
                f"several ranks. Call {model} itself on every rank, within `torch.no_grad()`, or leave `pp` "
                "out"
            )
        hidden = first_tensor(call)
        stage = self._blocks.stages.stage_of_block(index)
        if stage not in self._blocks.own_stages:
            return hidden
        own = self._blocks.stages.own_blocks(stage)
        call = without_cache(call)
        if index == own.start and (source := self._neighbor(stage - 1)) is not None:
            received = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            dist.recv(received, source, group=self._ranks.on_device)
            call = replace_first(call, lambda _: received)
        if index == own.start:
            self._entered = hidden.shape, hidden.dtype
        is_end = index == own.stop - 1
        shape, dtype = self._entered if is_end else (hidden.shape, hidden.dtype)
        output: Any = hidden.new_zeros(shape)
        if not self._failure:
            try:
                output = forward(*call[0], **call[1])
            except ModelError as error:  # raised after the pass, since the next stage waits
                self._failure = str(error)
        if self._failure:
            shown = ""
        elif not isinstance(output, torch.Tensor):
            shown = f"a {type(output).__name__}"
        elif output.dtype != dtype or (output.shape != shape and (is_end or self._blocks.sequences is None)):
            shown = f"a tensor of {tuple(output.shape)} and {output.dtype}"
        else:
            shown = ""
        if shown:  # raised after the pass, since the next stage waits
            self._failure = (
                f"`{self._blocks.names[index]}` returns {shown}, expected a tensor of {tuple(shape)} and "
                f"{dtype} as its input: `pp` sends the activations alone to the next stage"
            )
        result: torch.Tensor = hidden.new_zeros(shape) if shown else output
        if is_end and (target := self._neighbor(stage + 1)) is not None:
            dist.send(result.detach().contiguous(), target, group=self._ranks.on_device)
        return result

    def _neighbor(self, stage: int) -> int | None:
        """Return the global rank that has a stage; None if there is no such stage, or this rank has it."""
        if not 0 <= stage < self._config.num_stages or stage in self._blocks.own_stages:
            return None
        return self._ranks.ranks[self._config.rank_of(stage)]

    def _share(self, outputs: Any, expected: Any) -> Any:
        """Return the outputs of the last stage. Collective.

        Raises:
            ModelError: The outputs of the stages have other shapes, or one of them refuses the pass.
        """
        leaves, structure = tree_flatten(outputs)
        if structure != expected and not self._failure:
            self._failure = (
                f"the outputs of {type(self._model).__name__} have more than the last stage of `pp` "
                "computes, such as attention weights or logits of routers of other stages. Leave out such "
                "outputs (`output_attentions`, `output_router_logits`), or leave `pp` out"
            )
        shapes = [(tuple(one.shape), str(one.dtype)) for one in leaves if isinstance(one, torch.Tensor)]
        told = self._ranks.gather_objects((self._failure, str(structure), shapes))
        last = told[self._last_index]
        for index, (failure, *facts) in enumerate(told):
            if failure:
                raise ModelError(f"rank {index} of `pp`: {failure}")
            if facts != list(last[1:]):
                raise ModelError(
                    f"the outputs of {type(self._model).__name__} are {facts[1]} on rank {index} of `pp`, "
                    f"and {last[2]} on the last stage: their shapes depend on their values. Return "
                    "outputs whose shapes follow from the inputs, or leave `pp` out"
                )
        return tree_unflatten([self._shared(leaf) for leaf in leaves], structure)

    def _shared(self, leaf: Any) -> Any:
        """Return a part of the outputs as the last stage has it. Collective for tensors and numbers."""
        last = self._ranks.ranks[self._last_index]
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            number = torch.tensor(leaf, dtype=torch.int64 if isinstance(leaf, int) else torch.float64)
            dist.broadcast(number, last, group=self._ranks.aside)
            return number.item()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # A model on a GPU may return tensors on the CPU, too.
        group = self._ranks.aside if leaf.device.type == "cpu" else self._ranks.on_device
        if self._ranks.index == self._last_index:
            dist.broadcast(leaf.detach().contiguous(), last, group=group)
            return leaf
        shared = torch.empty_like(leaf, memory_format=torch.contiguous_format)
        dist.broadcast(shared, last, group=group)
        return shared


def _kind(call: Call) -> Any:
    """Return a key that is equal for calls whose outputs differ at most in shapes and values."""
    leaves, structure = tree_flatten(call)
    return str(structure), tuple(
        (one.dtype, one.ndim)
        if isinstance(one, torch.Tensor)
        else one
        if isinstance(one, _PLAIN)
        else type(one)
        for one in leaves
    )


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None))


def _outside_of_inference(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value
