"""Sequence length warmup: short sequences first."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hocket.algos.checks import check_choice, check_count, check_fraction
from hocket.algos.errors import AlgorithmConfigError, IncompatibleError
from hocket.algos.order import Order
from hocket.algos.progress import elapsed_fraction
from hocket.algos.traits import Trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class SeqLengthWarmup(Algorithm):
    """Trains on short sequences first, whose length grows linearly over the first part of training.

    Args:
        duration: Share of the training over which the length grows, 0 to 1.
        min_seq_length: First length.
        max_seq_length: Last length; at least the first. Longer sequences are shortened to it.
        step_size: Lengths differ by multiples of it; 8 suits tensor cores.
        truncate: Cut sequences off. With False, a batch is reshaped into more, shorter sequences, which keeps
            its tokens; all its tensors must have the shape of `input_ids` then.
        preserve_end_of_sequence: Keep the last token (and label) of a cut sequence at its end.

    Raises:
        AlgorithmConfigError: An argument is out of range.

    Example:
        >>> SeqLengthWarmup(duration=0.3, max_seq_length=512)
        SeqLengthWarmup(duration=0.3, min_seq_length=8, max_seq_length=512, step_size=8, truncate=True)

    Source: Li et al., Curriculum Learning: A Regularization Method for Efficient and Stable Billion-Scale GPT
    Model Pre-Training, 2021.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.AFTER_DATALOADER})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.CUTS_SEQUENCES})
    order = Order.SEQ_LENGTH_WARMUP

    def __init__(
        self,
        duration: float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        preserve_end_of_sequence: bool = False,
    ) -> None:
        check_fraction("duration", duration)
        for name, value in (
            ("min_seq_length", min_seq_length),
            ("max_seq_length", max_seq_length),
            ("step_size", step_size),
        ):
            check_count(name, value)
        _check_flags(truncate, preserve_end_of_sequence)
        if max_seq_length < min_seq_length:
            raise AlgorithmConfigError(
                f"`max_seq_length` is {max_seq_length} and `min_seq_length` {min_seq_length}, expected a "
                "larger maximum"
            )
        self.duration = duration
        self.min_seq_length = min_seq_length
        self.max_seq_length = max_seq_length
        self.step_size = step_size
        self.truncate = truncate
        self.preserve_end_of_sequence = preserve_end_of_sequence

    def length_at(self, elapsed: float) -> int:
        """Return the sequence length after a share of the training, 0 to 1."""
        if elapsed >= self.duration:
            return self.max_seq_length
        num_steps = (self.max_seq_length - self.min_seq_length) // self.step_size
        # Rounded, so that a share such as 0.1 * 3 is not just below the step that it reaches.
        return self.min_seq_length + self.step_size * int(round(num_steps * elapsed / self.duration, 9))

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Shorten the sequences of `state.batch`, and log their length and number."""
        length = self.length_at(elapsed_fraction(state))
        state.batch = set_batch_sequence_length(
            state.batch, length, self.truncate, self.preserve_end_of_sequence
        )
        rows = next(value.shape[0] for value in state.batch.values() if isinstance(value, torch.Tensor))
        logger.log_metrics({"seq_length_warmup/curr_seq_len": length, "seq_length_warmup/curr_bs": rows})

    def __repr__(self) -> str:
        return (
            f"SeqLengthWarmup(duration={self.duration!r}, min_seq_length={self.min_seq_length!r}, "
            f"max_seq_length={self.max_seq_length!r}, step_size={self.step_size!r}, "
            f"truncate={self.truncate!r})"
        )


def set_batch_sequence_length(
    batch: Mapping[str, torch.Tensor],
    curr_seq_len: int,
    truncate: bool = True,
    preserve_end_of_sequence: bool = False,
) -> dict[str, torch.Tensor]:
    """Return a batch with sequences of at most a given length; needs no trainer.

    Args:
        batch: Tensors `(B, L)` or `(B, L, ...)`. Masks `(B, L, L)`, whose names end with `mask`, are cut in
            both dims.
        curr_seq_len: The length, at least 1; a batch with shorter sequences is returned as it is.
        truncate: Cut sequences off; with False, reshape to `(B * L // curr_seq_len, curr_seq_len)` and drop
            the tokens that are left over.
        preserve_end_of_sequence: Keep the last token that `attention_mask` marks, at the end of the result.

    Raises:
        AlgorithmConfigError: `curr_seq_len` is below 1.
        IncompatibleError: The batch is no mapping of such tensors, or lacks one that is needed.

    Source: Li et al., Curriculum Learning, 2021, section 3.
    """
    check_count("curr_seq_len", curr_seq_len)
    _check_flags(truncate, preserve_end_of_sequence)
    length = _length_of(batch)
    if curr_seq_len >= length:
        return dict(batch)
    if not truncate:
        return _reshape(batch, curr_seq_len)
    shortened = {name: value[:, :curr_seq_len].contiguous() for name, value in batch.items()}
    pairwise = [
        name for name, value in batch.items() if name.endswith("mask") and value.shape[1:] == (length, length)
    ]
    for name in pairwise:
        shortened[name] = shortened[name][..., :curr_seq_len].contiguous()
    if preserve_end_of_sequence and pairwise:
        raise IncompatibleError(
            f"`preserve_end_of_sequence=True` needs masks of shape (B, L), but `{pairwise[0]}` has "
            f"{tuple(batch[pairwise[0]].shape)}. Leave it at False, or make the mask in the model"
        )
    if preserve_end_of_sequence:
        if "attention_mask" not in batch:
            raise IncompatibleError(
                "`preserve_end_of_sequence=True` needs `attention_mask` in the batch, which has "
                f"{', '.join(map(repr, batch))}"
            )
        rows = torch.arange(batch["attention_mask"].shape[0], device=batch["attention_mask"].device)
        last = batch["attention_mask"].sum(dim=1).long() - 1
        for name, value in batch.items():
            shortened[name][rows, last.clamp(max=curr_seq_len - 1)] = value[rows, last]
    return shortened


def _length_of(batch: Mapping[str, torch.Tensor]) -> int:
    if not isinstance(batch, Mapping):
        raise IncompatibleError(
            f"sequence length warmup needs a batch that maps names to tensors (B, L), but it is a "
            f"{type(batch).__name__}"
        )
    lengths = set()
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            kind = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise IncompatibleError(
                f"sequence length warmup needs tensors of shape (B, L, ...), but `{name}` has {kind}. Remove "
                "it from the batch"
            )
        lengths.add(value.shape[1])
    if len(lengths) != 1:
        raise IncompatibleError(f"the batch's tensors have the lengths {sorted(lengths)}, expected one")
    return lengths.pop()


def _reshape(batch: Mapping[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    if "input_ids" not in batch:
        raise IncompatibleError(
            f"`truncate=False` needs `input_ids` in the batch, which has {', '.join(map(repr, batch))}"
        )
    shape = batch["input_ids"].shape
    num_kept = shape.numel() // length * length
    for name, value in batch.items():
        if value.shape != shape:
            raise IncompatibleError(
                f"`truncate=False` needs tensors of one shape, but `{name}` has {tuple(value.shape)} and "
                f"`input_ids` {tuple(shape)}"
            )
    return {name: value.reshape(-1)[:num_kept].view(-1, length) for name, value in batch.items()}


def _check_flags(truncate: Any, preserve_end_of_sequence: Any) -> None:
    check_choice("truncate", truncate, (False, True))
    check_choice("preserve_end_of_sequence", preserve_end_of_sequence, (False, True))
    if preserve_end_of_sequence and not truncate:
        raise AlgorithmConfigError(
            "`preserve_end_of_sequence=True` needs `truncate=True`: a reshaped batch loses no ends"
        )
