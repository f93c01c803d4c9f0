"""The blocks of a rank's stages: which of them run, where activations arrive and leave, and their check."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hocket.dist.errors import DistError, ModelError
from hocket.dist.layout.pipeline.arguments import Beside, beside, check_beside, warn_of_kept
from hocket.dist.layout.pipeline.outer_buffers import OuterBuffers, keeping_buffers
from hocket.dist.layout.pipeline.stages import Stages
from hocket.dist.layout.sequence.arguments import Call, first_tensor
from hocket.dist.layout.sequence.blocks import SequenceBlocks
from hocket.dist.layout.tensor_parallelism.loss import whole_logits
from hocket.dist.layout.tensor_parallelism.plan_check import PlanCheck
from hocket.dist.ranks.diagnosis import is_collective_failure

_HOOK_NODES = ("RegisterPostBackwardFunctionBackward", "ToCopyBackward0")


class EndOfStageError(Exception):
    """Ends a forward pass after the last block of a stage.

    Attributes:
        output: The output of that block.
    """

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__("the stage ends here")
        self.output = output


class StageBlocks:
    """The blocks of a model, of which this rank runs those of its stages.

    Args:
        model: The model, whose parameters of other stages are stand-ins.
        stages: Its stages.
        own: Those of this rank.
        stand_ins: The stand-ins by name.

    Attributes:
        hidden: The activations that the blocks got in the last check, as this rank's zeros give them.
        stages: The stages.
        names: The names of all blocks.
        own_stages: The stages of this rank.
        buffers: The buffers outside of the blocks.
        sequences: The blocks of this rank between which a stage has parts of the sequences; None for no such.
        plan_check: The comparison of blocks with whole matrices; None if none are cut.
        outside: Called for a block outside of a training step, with its index, forward method and arguments.
    """

    def __init__(
        self, model: nn.Module, stages: Stages, own: Sequence[int], stand_ins: dict[str, torch.Tensor]
    ) -> None:
        self._model, self.stages, self.own_stages, self._stand_ins = model, stages, own, stand_ins
        self._running = range(0)
        self._mode: Literal["off", "check", "run"] = "off"
        self._received: torch.Tensor | None = None
        self.names = list(stages.blocks)
        self.buffers = OuterBuffers(model, stages)
        self.sequences: SequenceBlocks | None = None
        self.plan_check: PlanCheck | None = None
        self._failure, self._has_agreed = "", False
        self.outside: Callable[[int, Callable[..., Any], Call], torch.Tensor] | None = None
        self._called = self._expected = 0
        self._beside: list[Beside] = []
        self.hidden: torch.Tensor | None = None
        self._entry: torch.Tensor | None = None
        self._between: torch.Tensor | None = None
        self._last_node: Any = None
        self._is_side_checked = self._is_stepping = False
        self._watched: set[int] = set()
        for index, block in enumerate(stages.blocks.values()):
            forward = block.forward
            # That of the class is looked up in each call: transformers' checkpointing acts in the forward
            # method of the last subclass alone, and `fully_shard` makes one.
            called = forward if "forward" in vars(block) else functools.partial(_forward_of_class, block)
            block.forward = functools.wraps(forward)(functools.partial(self._call, index, called))

    @property
    def own(self) -> list[int]:
        """The indices of the blocks of this rank's stages."""
        return [index for stage in self.own_stages for index in self.stages.own_blocks(stage)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages."""
        return list(self._model.parameters())

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters of one of this rank's stages."""
        named = self._model.named_parameters()
        return [one for name, one in named if stage in self.stages.holders(name)]

    @property
    def is_busy(self) -> bool:
        """Whether a stage runs, or a check."""
        return self._mode != "off"

    def run(self, stage: int, batch: Any, received: torch.Tensor | None) -> Any:
        """Run a stage on a microbatch; return activations, or the model's outputs at the last stage."""
        self._mode, self._received, self._running = "run", received, self.stages.own_blocks(stage)
        self._expected = 0
        # What precedes the blocks runs in each pass of this rank; it counts in that of the first stage alone.
        is_again = stage > 0 and 0 in self.own_stages and self._model.training
        try:
            with self.buffers.keeping_first() if is_again else contextlib.nullcontext():
                self.buffers.begin_step()
                outputs = self._model(batch)
                if self._running.stop == len(self.names):
                    self._check_order(len(self.names))
                    self.buffers.end_step_part("after")
        finally:
            self._mode, self._received = "off", None
        if self._last_node is not None:
            self._check_sides(outputs, "outputs")
        return outputs

    def check_loss(self, loss: torch.Tensor) -> None:
        """Refuse, in the first pass, a loss that takes more of the blocks than their last activations.

        Raises:
            ModelError: It does, and other stages do not send it.
        """
        if self._last_node is not None:
            self._check_sides(loss, "loss")
            self._last_node, self._is_side_checked = None, True

    def _check_order(self, index: int) -> None:
        if index != self._expected:
            raise ModelError(
                f"{type(self._model).__name__} leaves out or repeats `{self.names[self._expected]}` in a "
                f"microbatch, and each stage of `pp` gets the activations of all blocks of "
                f"`{self.stages.list_name}` before it. Call each block once in every pass, or leave `pp` out"
            )
        self._expected = index + 1

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Let blocks run with gradients outside of `run`, as activation checkpointing does in `backward`."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def _check_sides(self, results: Any, what: str) -> None:
        """Refuse results that blocks give beside their activations, which other stages do not send.

        Raises:
            ModelError: There are such.
        """
        inside = {id(one) for block in self.stages.blocks.values() for one in block.parameters()}
        if any(id(leaf) in inside for leaf in _leaves_of(results, {self._last_node})):
            raise ModelError(
                f"the {what} of {type(self._model).__name__} took more from the blocks of "
                f"`{self.stages.list_name}` than the activations of the last one, such as the logits of "
                f"routers, which `pp` does not send from stage to stage. Leave them out of the {what}, or "
                "leave `pp` out"
            )

    @contextlib.contextmanager
    def checking(self, gather: Callable[[Any], list[Any]]) -> Iterator[None]:
        """Let forward passes skip all blocks and compute the rest, with zeros for parameters elsewhere.

        Their outputs have the right shapes and the wrong values. Random generators and buffers stay as they
        are. An error of one rank is told to the others, which wait in `agree`.

        Args:
            gather: As for `agree`.
        """
        own = [(name, one, one.requires_grad) for name, one in self._model.named_parameters()]
        devices = {one.device for _, one, _ in own if one.device.type == "cuda"}
        self._mode, self._called, self._has_agreed = "check", 0, False
        self._beside = []
        try:
            with (
                keeping_buffers(self._model),
                whole_logits(),
                torch.random.fork_rng(devices=list(devices)),
                torch.enable_grad(),
            ):
                for _, one, _ in own:
                    if one.is_floating_point():
                        one.requires_grad_(True)
                self.buffers.begin()
                yield
        except Exception as error:
            if not isinstance(error, DistError):
                error.add_note(
                    f"raised in a pass that skips the blocks of `{self.stages.list_name}`, before the first "
                    "batch: with `pp`, what follows the blocks gets one tensor, the activations, and nothing "
                    "that blocks keep as attributes"
                )
            if not self._has_agreed and not is_collective_failure(error):
                gather(describe_error(error))
            raise
        finally:
            self._mode = "off"
            self._entry = self._between = None
            with torch.no_grad():
                for name, one, needs_gradient in own:
                    one.requires_grad_(needs_gradient)
                    # What `fully_shard` has gathered in the pass stays, and would be trained in the next one.
                    self._model.get_parameter(name).requires_grad_(needs_gradient)

    def check(self, results: Any) -> None:
        """Refuse a model that does not compute as its stages would, after a pass within `checking`.

        Args:
            results: The outputs and the loss of the pass.

        Raises:
            ModelError: Blocks are not called once each in their order, or something before the blocks is
                used after them.
        """
        model, count = type(self._model).__name__, len(self.names)
        if self._called != count:
            raise ModelError(
                f"{model} calls {self._called} of the {count} blocks of `{self.stages.list_name}`, expected "
                "each once. Leave `pp` out"
            )
        assert self._entry is not None
        self.buffers.end_part("after")
        names = {id(tensor): name for name, tensor in self._stand_ins.items()}
        names |= {id(tensor): name for name, tensor in self._model.named_parameters()}
        last = self.stages.num_stages - 1
        for results_of, stage, side in ((self._entry, 0, "before"), (results, last, "after")):
            for used in _leaves_of(results_of):
                if used is self._between:
                    raise ModelError(
                        f"{model} uses activations from between the blocks of `{self.stages.list_name}` "
                        "after them, which are on another stage of `pp`. Leave out such outputs "
                        "(`output_hidden_states` in a config of transformers), or leave `pp` out"
                    )
                if (name := names.get(id(used))) is not None and stage not in self.stages.holders(name):
                    raise ModelError(
                        f"{model} uses `{name}` {side} the blocks of `{self.stages.list_name}`, and it is "
                        f"part of stage {self.stages.stage_of[name]}, expected {stage}. Register what is "
                        "used before the blocks before them and the rest after them, in modules of their "
                        "own, and what is used on both sides under two names, as in `head.weight = "
                        "embedding.weight`, or leave `pp` out"
                    )

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Let all ranks know what was found in passes, and refuse it alike. Collective.

        Args:
            gather: Returns the values of all ranks of the pipeline.

        Raises:
            ModelError: A block does not compute with parts of sequences, a pass within `checking` failed on
                another rank, blocks get other arguments on other ranks, or two stages change a buffer.
        """
        self._has_agreed = True
        for index, failure in enumerate(gather(self._failure)):
            if failure:
                raise ModelError(f"rank {index} of `pp`: {failure}")
        check_beside(gather(self._beside))
        self._beside = []
        self.buffers.agree(gather)

    def _call(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call: Call = (args, kwargs)
        if self._mode != "off" and not torch.is_grad_enabled():
            raise ModelError(
                f"`{self.names[index]}` runs without gradients in a training step, as in activation "
                "checkpointing with `use_reentrant=True`, which loses the gradients that `pp` sends from "
                "stage to stage. Checkpoint with `use_reentrant=False`"
            )
        if self._mode == "check":
            return self._skip(index, call)
        if self._mode == "off" and self._is_stepping and torch.is_grad_enabled():
            return forward(*args, **kwargs)  # activation checkpointing computes the block again
        if self._mode == "off":
            assert self.outside is not None
            return self.outside(index, forward, call)
        own = self._running
        self._check_order(index)
        if not index:
            self.buffers.end_step_part("before")
        if index < own.start:
            is_before = index == own.start - 1 and self._received is not None
            return self._received if is_before else first_tensor(call)
        if index >= own.stop:
            raise EndOfStageError(first_tensor(call))
        output = self._watch(index, forward, call) if index not in self._watched else forward(*args, **kwargs)
        if not isinstance(output, torch.Tensor):
            raise ModelError(
                f"`{self.names[index]}` returns a {type(output).__name__}, expected a tensor: `pp` sends "
                "the activations alone to the next stage. Return the activations, or leave `pp` out"
            )
        if index == len(self.names) - 1:
            self.buffers.begin_step()
            if not self._is_side_checked:
                self._last_node = output.grad_fn
        return output

    def _watch(self, index: int, forward: Callable[..., Any], call: Call) -> Any:
        """Run a block for the first time, and note the buffers outside of the blocks that it changes."""
        self._watched.add(index)
        self.buffers.begin()
        output = forward(*call[0], **call[1])
        self.buffers.end_part("between")
        warn_of_kept(self.names[index], self.stages.blocks[self.names[index]])
        return output

    def _skip(self, index: int, call: Call) -> torch.Tensor:
        """Return a block's input as its output, and check how the model calls it."""
        hidden = first_tensor(call)
        name = self.names[index]
        if index != self._called or (index and _origin(hidden) is not self._between):
            raise ModelError(
                f"`{name}` does not get the output of the block before it, which `pp` sends from stage to "
                "stage. Let blocks return the activations alone, and follow each other in the order of their "
                "list, without computation between them, or leave `pp` out"
            )
        others = [one for one in _tensors(call) if one is not hidden and one.requires_grad]
        if others:
            raise ModelError(
                f"`{name}` gets, beside the activations, a tensor of the shape {tuple(others[0].shape)} that "
                "is computed with parameters, which `pp` does not send to the other stages. Compute it in "
                "the block, or leave `pp` out"
            )
        self._beside += beside(name, hidden, tree_leaves(call))
        self._try(index, call)
        if not index:
            self.buffers.end_part("before")
            self._entry, self.hidden = hidden, hidden.detach()
        self._called += 1
        # Detached, so that what comes after the blocks is told from what comes before them.
        if self._called == len(self.names):
            self.buffers.end_part("between")
            return hidden.detach().requires_grad_()
        if not index:
            self._between = hidden = hidden.detach().requires_grad_()
        return hidden

    def _try(self, index: int, call: Call) -> None:
        """Check a block of this rank with parts of sequences or matrices, and note why it fails so."""
        if self.sequences is not None and not index:
            self.sequences.check_length(first_tensor(call))
        tried = self.sequences or self.plan_check  # the former includes the latter
        if tried is not None and index in self.own:
            try:
                tried.try_block(self.names[index], call)
            except ModelError as error:  # told by `agree`, so that all stages refuse it
                self._failure = self._failure or str(error)


class Stage(nn.Module):
    """The module that torch's schedule calls: a stage on the microbatch of an index.

    Args:
        blocks: The blocks of this rank.
        number: The index of the stage.
    """

    def __init__(self, blocks: StageBlocks, number: int) -> None:
        super().__init__()
        self.blocks, self.number = blocks, number
        self.microbatches: list[Any] = []
        self.loss_of: Callable[[Any, int], torch.Tensor] | None = None
        self.forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters of the stage; some schedules compute their gradients in a pass of its own."""
        return iter(self.blocks.parameters_of(self.number))

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the activations; of the last stage, the loss from which the backward pass starts."""
        number = int(index)
        with self.forward_context():
            output = self.blocks.run(
                self.number, self.microbatches[number], received[0] if received else None
            )
            if self.loss_of is None:
                activations: torch.Tensor = output
                return activations.contiguous()  # as torch sends it
            # Here, and not in torch's schedule, so that the outputs of a model may be anything.
            self.blocks.buffers.begin_step()
            loss = self.loss_of(output, number)
            self.blocks.check_loss(loss)
            self.blocks.buffers.end_step_part("after")
            return loss.reshape(1).to(torch.float32)


def describe_error(error: Exception) -> str:
    """Return an error as other ranks raise it, with the class of one that is not a refusal of ours."""
    return str(error) if isinstance(error, DistError) else f"{type(error).__name__}: {error}"


def _forward_of_class(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _origin(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor from before the hooks of `fully_shard`, which cast the inputs of a block."""
    node = tensor.grad_fn
    while node is not None and type(node).__name__ in _HOOK_NODES:
        node = next((following for following, _ in node.next_functions if following is not None), None)
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, torch.Tensor) else tensor


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _leaves_of(results: Any, stops: Iterable[Any] = ()) -> list[torch.Tensor]:
    """Return the tensors without history that results are computed of, not through the nodes `stops`."""
    found: list[torch.Tensor] = []
    nodes = []
    for tensor in _tensors(results):
        if tensor.grad_fn is not None and tensor.grad_fn not in stops:
            nodes.append(tensor.grad_fn)
        elif tensor.requires_grad:
            found.append(tensor)
    seen = {*nodes, *stops}
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found
