"""A stack of blocks between which activations are cut along the sequence.

The first block cuts its input, and the last block's output is gathered, so that all around the stack, such as
embeddings, masks, positions and the loss, has whole sequences.
"""

import functools
import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from hocket.dist.config.axes import CP, TP
from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.errors import ModelError
from hocket.dist.layout.checks.first_passes import FirstPasses
from hocket.dist.layout.sequence.arguments import (
    Call,
    drawn_like,
    first_output,
    first_tensor,
    part_of_positions,
    positional_names,
    replace_first,
    replace_output,
    without_cache,
)
from hocket.dist.layout.sequence.attention import SequenceAttention, check_attention
from hocket.dist.layout.sequence.exchange import Axis, cut, gather
from hocket.dist.layout.sequence.ring import RingAttention
from hocket.dist.layout.sequence.ulysses import UlyssesAttention

_log = logging.getLogger("hocket.dist")

_LIKENESS = 0.05
"""The part of its norm by which a block's change may differ, as low precision makes it differ."""


class SequenceBlocks:
    """The blocks of a stack, whose activations are cut over some axes.

    Args:
        name: The stack's name.
        blocks: Its blocks by name, in the order of their calls.
        axes: The axes over which the sequence is cut, the outermost first.
        positions: The axis over which blocks get a part of the positions; None if they get all of them.

    Attributes:
        is_cut: Whether activations are cut now; the hooks of modules inside the blocks look at it.
        enter: Functions that are called before each block's forward pass.
        leave: Functions that are called after it, also after one that failed.
        verify: Functions that are called once for each class of blocks, after its forward pass.
    """

    def __init__(
        self, name: str, blocks: dict[str, nn.Module], axes: Sequence[Axis], *, positions: Axis | None = None
    ) -> None:
        self.name, self.blocks, self.axes, self.positions = name, blocks, axes, positions
        self.is_cut = False
        self.enter: list[Callable[[], None]] = []
        self.leave: list[Callable[[], None]] = []
        self.verify: list[Callable[[], None]] = []
        self._size = math.prod(axis.size for axis in axes)
        self._multiple = math.lcm(self._size, *(axis.num_parts for axis in axes))
        self._passes: dict[type, tuple[str, FirstPasses]] = {}
        self._forwards: dict[str, Callable[..., Any]] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._is_inside = False

    def attach(self, model: nn.Module) -> None:
        """Replace the blocks' forward methods, and register hooks at them and at the model.

        Call it before `fully_shard`, which gathers parameters before the hooks, and before activation
        checkpointing, which calls the forward method again.
        """
        model.register_forward_pre_hook(self._begin_pass)
        model.register_forward_hook(self._end_pass)
        for index, (name, block) in enumerate(self.blocks.items()):
            forward = block.forward
            self._names[name] = positional_names(forward)
            block.forward = functools.wraps(forward)(functools.partial(self._run, name, forward))
            hooks = _BlockHooks(self, name, forward, is_first=not index)
            block.register_forward_pre_hook(
                hooks.before_first if not index else hooks.before, with_kwargs=True
            )
            if index == len(self.blocks) - 1:
                block.register_forward_hook(hooks.after_last)

    def attach_inside(self, *, first: Collection[str], last: Collection[str]) -> None:
        """Replace the blocks' forward methods by ones that also cut and gather, as stages of a pipeline need.

        The stages decide around the forward method whether a block runs at all, after all hooks, and call
        `try_block` before the first batch.

        Args:
            first: The blocks that get whole sequences.
            last: The blocks that return whole sequences.
        """
        for name, block in self.blocks.items():
            self._forwards[name] = forward = block.forward
            self._names[name] = positional_names(forward)
            run = functools.partial(self._run_whole, name, forward, name in first, name in last)
            block.forward = functools.wraps(forward)(run)

    @property
    def is_pending(self) -> bool:
        """Whether a class of blocks has yet to be compared."""
        return not all(passes.has_ended for _, passes in self._passes.values()) or not self._passes

    def leave_out_pass(self) -> None:
        """Count a pass in which nothing is compared."""
        for _, passes in self._passes.values():
            passes.is_due()

    def _begin_pass(self, *_: Any) -> None:
        self._is_inside = False  # the last pass may have failed

    def _end_pass(self, *_: Any) -> None:
        if self._is_inside and not _is_uncounted():
            raise ModelError(self._order_refusal(f"the last block of `{self.name}` is not called"))

    def begin_block(self, name: str, *, is_first: bool) -> None:
        """Refuse a block that gets a part of a sequence in place of all of it, or the other way round.

        Raises:
            ModelError: The first block is called within the stack, or another one outside of it.
        """
        if _is_uncounted():
            return
        if is_first == self._is_inside:
            where = "again before the last one" if is_first else "before the first one or after the last one"
            raise ModelError(self._order_refusal(f"`{name}` is called {where}"))
        self._is_inside = True

    def end_last(self) -> None:
        """End the stack: what follows has whole sequences."""
        if not _is_uncounted():
            self._is_inside = False

    def _order_refusal(self, fact: str) -> str:
        axes = " and ".join(f"`{axis.name}`" for axis in self.axes)
        return (
            f"{fact}, and the cut of sequences over {axes} begins with the first block and ends with the "
            "last one. Call these two once in a pass, before and after all others, or leave out the cut of "
            f"sequences over {axes}"
        )

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sequence, dim 1.

        Raises:
            ModelError: The ranks cannot share the sequence evenly.
        """
        self.check_length(whole)
        for axis in self.axes:
            whole = cut(whole, axis)
        return whole

    def check_length(self, whole: torch.Tensor) -> None:
        """Refuse activations of whole sequences that the ranks cannot share evenly.

        Raises:
            ModelError: They cannot.
        """
        if whole.ndim != 3 or whole.shape[1] % self._multiple:
            names = " × ".join(f"`{axis.name}`" for axis in self.axes)
            raise ModelError(
                f"the input of `{self.name}` has the shape {tuple(whole.shape)}, expected (batch, sequence, "
                f"features) with a sequence that {self._size} ranks of {names} can share evenly. Pad or cut "
                f"sequences to a multiple of {self._multiple}, or choose another degree"
            )

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence."""
        for axis in reversed(self.axes):
            part = gather(part, axis)
        return part

    def _run(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a block's forward method, with cut activations."""
        call = (args, kwargs)
        if self.positions is not None:
            length = first_tensor(call).shape[1] * self._size
            call = part_of_positions(call, self.positions, length, self._names[name])
        self.is_cut = True
        try:
            for function in self.enter:
                function()
            return forward(*call[0], **call[1])
        finally:
            self.is_cut = False
            for function in self.leave:
                function()

    def _run_whole(
        self,
        name: str,
        forward: Callable[..., Any],
        is_first: bool,
        is_last: bool,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        call: Call = (args, kwargs)
        if is_first:
            call = replace_first(call, self.cut)
        output = self._run(name, forward, *call[0], **call[1])
        return replace_output(output, self.gather) if is_last else output

    def try_block(self, name: str, call: Call) -> None:
        """Check a block as `check`, on random activations in place of those of a call. Collective.

        Args:
            name: The block, on which `attach_inside` was called.
            call: The arguments, with activations of whole sequences.

        Raises:
            ModelError: As `check`.
        """
        with torch.no_grad():
            drawn = replace_first(call, lambda hidden: self.cut(drawn_like(hidden)))
            self.check(name, self.blocks[name], self._forwards[name], drawn)

    def check(self, name: str, block: nn.Module, forward: Callable[..., Any], call: Call) -> None:
        """Check, once for each class of blocks, that a block does the same with whole sequences. Collective.

        A block that does not change its input, as some initialisers have it, is checked in later passes.

        Raises:
            ModelError: It does not, since it uses other positions in a way that is not known.
        """
        first, passes = self._passes.setdefault(type(block), (name, FirstPasses()))
        if name != first or _is_computed_again() or not passes.is_due():
            return
        modes = {module: module.training for module in block.modules()}
        call, before = without_cache(call), first_tensor(call)
        try:
            block.eval()  # without dropout
            with torch.no_grad():
                args, kwargs = replace_first(call, self.gather)
                expected = self.cut(first_output(forward(*args, **kwargs)))
                found = self._found(name, block, forward, call)
        finally:
            for module, mode in modes.items():
                module.training = mode
        for function in self.verify:
            function()
        # A compiler that traces it with gradients cannot always cut its program in two.
        with torch.no_grad():
            is_other, is_changed = self._differs(found, expected, before.detach())
        if is_other:
            raise ModelError(self._refusal(name, block))
        if is_changed:
            passes.end()

    def _found(self, name: str, block: nn.Module, forward: Callable[..., Any], call: Call) -> torch.Tensor:
        try:
            return first_output(self._run(name, forward, *call[0], **call[1]))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"{self._refusal(name, block)} ({error})") from error

    def _refusal(self, name: str, block: nn.Module) -> str:
        axes = " and ".join(f"`{axis.name}`" for axis in self.axes)
        kind = type(block).__name__.removeprefix("FSDP")
        return (
            f"`{name}`, a {kind}, does not compute with a part of the sequence what it computes with all of "
            "it: it lets positions act on each other by something else than `scaled_dot_product_attention`, "
            "takes the length of the sequence for that of its input, or makes positions itself. Give "
            "positions and masks as arguments, take shapes from the outputs of its layers, or leave out the "
            f"cut of sequences over {axes}"
        )

    def _differs(
        self, found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor
    ) -> tuple[bool, bool]:
        """Return whether outputs differ on any rank, and whether the block changes its input on any."""
        is_like = found.shape == expected.shape == before.shape
        size = expected.new_zeros(())
        if is_like:
            size = (expected - before).float().norm()
            difference = (found - expected).float().norm()
            rounding = torch.finfo(expected.dtype).eps * expected.float().norm()
            is_like = bool(difference <= _LIKENESS * size + rounding + 1e-6)
        flags = torch.stack([torch.full_like(size, not is_like), size > 0]).float()
        for axis in self.axes:
            dist.all_reduce(flags, group=axis.group)
        is_other, is_changed = flags.tolist()
        return bool(is_other), bool(is_changed)


class _BlockHooks:
    """The hooks of one block."""

    def __init__(
        self, owner: SequenceBlocks, name: str, forward: Callable[..., Any], *, is_first: bool
    ) -> None:
        self._owner, self._name, self._forward, self._is_first = owner, name, forward, is_first

    def before_first(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = replace_first((args, kwargs), self._owner.cut)
        self.before(block, *call)
        return call

    def before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._owner.begin_block(self._name, is_first=self._is_first)
        self._owner.check(self._name, block, self._forward, (args, kwargs))

    def after_last(self, _block: nn.Module, _args: Any, output: Any) -> Any:
        self._owner.end_last()
        return replace_output(output, self._owner.gather)


def _is_uncounted() -> bool:
    """Return whether a block is compiled, or computed again in a backward pass, in another order."""
    return torch.compiler.is_compiling() or _is_computed_again()


def _is_computed_again() -> bool:
    """Return whether a block is computed again in a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def find_blocks(model: nn.Module, option: str) -> tuple[str, dict[str, nn.Module]]:
    """Return the name of the list of blocks that has most of the model's parameters, and its blocks by name.

    Args:
        model: Plain.
        option: The setting that needs it, for messages.

    Raises:
        ModelError: There is no list of blocks, or there are several, as those of encoder and decoder.
    """
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") for other in found)
        kinds = {type(child) for child in module.children() if any(True for _ in child.parameters())}
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(kinds) == 1
        if is_list and not is_inside and not kinds & {nn.Linear, nn.Embedding}:
            found[name] = sum(one.numel() for one in module.parameters())
    names = sorted(found, key=lambda name: -found[name])
    if not names:
        raise ModelError(
            f"{type(model).__name__} has no `ModuleList` of equal blocks, between which {option} would cut "
            f"activations. Put its blocks into one, or leave {option} out"
        )
    if len(names) > 1 and found[names[1]] * 4 > found[names[0]]:
        raise ModelError(
            f"{type(model).__name__} has several lists of blocks, `{names[0]}` and `{names[1]}`, and "
            f"{option} cuts the activations of one. Leave {option} out"
        )
    blocks = model.get_submodule(names[0]).named_children()
    return names[0], {f"{names[0]}.{name}": block for name, block in blocks}


def blocks_of(
    model: nn.Module,
    context: Axis | None,
    tensor_mesh: DeviceMesh | None,
    *,
    context_parallel: ContextParallelConfig | None = None,
    found: tuple[str, dict[str, nn.Module]] | None = None,
) -> SequenceBlocks:
    """Return the blocks of a model between which sequences are cut.

    Args:
        model: Plain.
        context: The ranks that share sequences; None if none do.
        tensor_mesh: The axis `tp`, if its ranks have parts of the sequences, too.
        context_parallel: How the ranks of `context` attend; None for the default.
        found: The name of the list of blocks and its blocks by name; None to find them.

    Raises:
        ModelError: The model has no list of blocks, the ranks cannot share its attention, or its blocks have
            the checkpointing of transformers or a norm with statistics of all positions.
    """
    axes = [] if context is None else [context]
    option = "`sequence_parallel`" if context is None else f"`{CP}`"
    name, modules = found or find_blocks(model, option)
    for key, block in modules.items():
        # It is in the forward method of the block's class, of which `fully_shard` makes a subclass: around
        # the method that cuts it would not act, and within it the second pass would have whole sequences.
        if getattr(block, "gradient_checkpointing", False):
            raise ModelError(
                f"`{key}` has the checkpointing of transformers, which does not act beside {option}. Call "
                "`gradient_checkpointing_disable()`, and set `activation_checkpointing` in `fsdp`"
            )
        for inside, one in block.named_modules(prefix=key):
            # The trial pass of a block, in evaluation, does not show it.
            if isinstance(one, _BatchNorm) or getattr(one, "track_running_stats", False):
                raise ModelError(
                    f"`{inside}` is a {type(one).__name__}, whose statistics are of all positions, and under "
                    f"{option} each rank sees a part of them. Use a norm that acts on each position by "
                    f"itself, such as LayerNorm, or leave {option} out"
                )
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
        check_attention(model, CP)
        config = context_parallel or ContextParallelConfig()
        attention: SequenceAttention = (
            RingAttention(context, name, config) if config.is_ring else UlyssesAttention(context, name)
        )
        blocks.enter.append(attention.enter)
        blocks.leave.append(attention.leave)
        blocks.verify.append(attention.check)
    return blocks


def refuse_generation(*, has_context: bool, has_parts: bool) -> None:
    """Refuse generation where ranks share each sequence.

    Args:
        has_context: Whether they share it along `cp`.
        has_parts: Whether they share it along `tp`, by `sequence_parallel`.

    Raises:
        ModelError: They do.
    """
    if has_context or has_parts:
        name = "`cp`" if has_context else "`sequence_parallel`"
        raise ModelError(
            f"`generate` does not work with {name}: it computes one token at a time, of which the ranks "
            f"cannot have parts. Leave {name} out of `parallelism_config`, or generate from a checkpoint"
        )
