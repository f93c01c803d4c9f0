"""Sequence packing: several short sequences in one row, instead of padding."""

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch

from hocket.algos.checks import check_choice, check_count
from hocket.algos.errors import IncompatibleError
from hocket.algos.order import Order
from hocket.algos.traits import Trait, has_trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.checks import Described
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

Attention = Literal["causal", "full", "none"]
IGNORED_LABEL = -100


class SequencePacking(Algorithm):
    """Packs the sequences of each batch into as few rows as they need, in the data loader.

    Wraps the loader's `collate_fn` before its first batch is fetched, so packing runs on the host, in the
    loader's workers. Samples are counted in rows.

    Args:
        max_seq_length: Length of a row.
        attention: Same as for `pack_sequences`.
        pad_token_id: Token of the positions that stay empty.

    Raises:
        AlgorithmConfigError: An argument is out of range.

    Example:
        >>> SequencePacking(max_seq_length=2048)
        SequencePacking(max_seq_length=2048, attention='causal', pad_token_id=0)

    Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.BEFORE_LOAD, Event.FIT_START})
    order = Order.SEQUENCE_PACKING

    def __init__(self, max_seq_length: int, attention: Attention = "causal", pad_token_id: int = 0) -> None:
        check_count("max_seq_length", max_seq_length)
        check_choice("attention", attention, get_args(Attention))
        self.max_seq_length = max_seq_length
        self.attention: Attention = attention
        self.pad_token_id = pad_token_id

    def match(self, event: Event, state: "State") -> bool:
        """Return whether the training loader still lacks the packing."""
        if event not in (Event.BEFORE_LOAD, Event.FIT_START) or state.dataloader is None:
            return False
        return not isinstance(_loader_of(state.dataloader).collate_fn, PackingCollator)

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Wrap the loader's `collate_fn`.

        Raises:
            IncompatibleError: The loader has no `collate_fn`.
        """
        loader = _loader_of(state.dataloader)
        loader.collate_fn = PackingCollator(
            self.max_seq_length, self.attention, self.pad_token_id, inner=loader.collate_fn
        )

    def conflict_with(self, other: Any) -> str | None:
        """Refuse a method that cuts packed rows without regard to their sequences."""
        if has_trait(other, Trait.CUTS_SEQUENCES):
            return "rows cut to another length no longer fit their attention masks; use one of them"
        return None

    def __repr__(self) -> str:
        return (
            f"SequencePacking(max_seq_length={self.max_seq_length!r}, attention={self.attention!r}, "
            f"pad_token_id={self.pad_token_id!r})"
        )


class PackingCollator(Described):
    """A `collate_fn` that packs sequences.

    Args:
        max_seq_length: Length of a row.
        attention: Same as for `pack_sequences`.
        pad_token_id: Token of the positions that stay empty.
        inner: A `collate_fn` that first makes a padded batch, whose `attention_mask` gives the sequences'
            lengths; rows without tokens are left out. With None, samples are dicts with `input_ids` and
            perhaps `labels`, not padded.
    """

    def __init__(
        self,
        max_seq_length: int,
        attention: Attention = "causal",
        pad_token_id: int = 0,
        *,
        inner: Callable[[Any], Any] | None = None,
    ) -> None:
        check_count("max_seq_length", max_seq_length)
        check_choice("attention", attention, get_args(Attention))
        self.max_seq_length = max_seq_length
        self.attention: Attention = attention
        self.pad_token_id = pad_token_id
        self.inner = inner

    def __call__(self, samples: Any) -> dict[str, torch.Tensor]:
        """Return the packed batch of the samples."""
        sequences = samples if self.inner is None else _unpadded(self.inner(samples))
        return pack_sequences(
            sequences,
            self.max_seq_length,
            attention=self.attention,
            pad_token_id=self.pad_token_id,
        )


def pack_sequences(
    sequences: Sequence[Mapping[str, Any]],
    max_seq_length: int,
    *,
    attention: Attention = "causal",
    pad_token_id: int = 0,
) -> dict[str, torch.Tensor]:
    """Pack sequences into rows of one length, the longest first, each where it fits best; needs no trainer.

    Args:
        sequences: Each with `input_ids` `(L,)` and perhaps `labels` `(L,)`, which default to the ids. Longer
            ones are cut.
        max_seq_length: Length of a row.
        attention: `"causal"` and `"full"` return masks in which positions attend to their own sequence alone
            (to earlier ones, or to all); `"none"` returns the plain mask of positions that are not empty, for
            models that read `sequence_ids` or restarting `position_ids`.
        pad_token_id: Token of the positions that stay empty.

    Returns:
        `input_ids`, `labels`, `position_ids` (restarting in each sequence) and `sequence_ids` (from 1; 0 is
        empty), each `(rows, max_seq_length)` long; `attention_mask`, `(rows, 1, max_seq_length,
        max_seq_length)` bool, or `(rows, max_seq_length)` long with `"none"`. The first label of each
        sequence is -100, so that a model that shifts labels never predicts across sequences.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        IncompatibleError: There is no sequence, or one without `input_ids`.

    Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.
    """
    check_count("max_seq_length", max_seq_length)
    check_choice("attention", attention, get_args(Attention))
    if not sequences:
        raise IncompatibleError("there is no sequence to pack; expected at least one with tokens")
    ids = [_tokens(sequence, "input_ids")[:max_seq_length] for sequence in sequences]
    rows = _best_fit([len(one) for one in ids], max_seq_length)
    shape = (len(rows), max_seq_length)
    packed = {
        "input_ids": torch.full(shape, pad_token_id, dtype=torch.long),
        "labels": torch.full(shape, IGNORED_LABEL, dtype=torch.long),
        "position_ids": torch.zeros(shape, dtype=torch.long),
        "sequence_ids": torch.zeros(shape, dtype=torch.long),
    }
    for row, members in enumerate(rows):
        start = 0
        for number, index in enumerate(members, 1):
            span = slice(start, start + len(ids[index]))
            start = span.stop
            packed["input_ids"][row, span] = ids[index]
            labels = _tokens(sequences[index], "labels" if "labels" in sequences[index] else "input_ids")
            packed["labels"][row, span] = labels[:max_seq_length]
            packed["labels"][row, span.start] = IGNORED_LABEL
            packed["position_ids"][row, span] = torch.arange(len(ids[index]))
            packed["sequence_ids"][row, span] = number
    packed["attention_mask"] = _mask(packed["sequence_ids"], attention)
    return packed


def _best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into bins, the longest first, each into the fullest bin that has room."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room left and bin, sorted
    for index in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        free_index = bisect.bisect_left(free, (lengths[index], -1))
        if free_index == len(free):
            bins.append([])
            room, number = capacity, len(bins) - 1
        else:
            room, number = free.pop(free_index)
        bins[number].append(index)
        bisect.insort(free, (room - lengths[index], number))
    return bins


def _mask(sequence_ids: torch.Tensor, attention: Attention) -> torch.Tensor:
    if attention == "none":
        return (sequence_ids > 0).long()
    mask = sequence_ids.unsqueeze(2) == sequence_ids.unsqueeze(1)
    if attention == "causal":
        mask = mask.tril()
    # Empty positions attend to each other, so that no row of the softmax is empty.
    return mask.unsqueeze(1)


def _unpadded(batch: Any) -> list[dict[str, torch.Tensor]]:
    if not isinstance(batch, Mapping) or not {"input_ids", "attention_mask"} <= batch.keys():
        received = (
            f"it has {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        )
        raise IncompatibleError(
            f"sequence packing needs a batch with `input_ids` and `attention_mask`, but {received}"
        )
    names = [name for name in ("input_ids", "labels") if name in batch]
    return [
        {name: batch[name][row][mask.bool()] for name in names}
        for row, mask in enumerate(batch["attention_mask"])
        if mask.any()  # a row without tokens takes no place
    ]


def _tokens(sequence: Mapping[str, Any], name: str) -> torch.Tensor:
    if name not in sequence or len(sequence[name]) == 0:
        raise IncompatibleError(f"a sequence to pack has no `{name}`; expected one or more tokens")
    return torch.as_tensor(sequence[name])


def _loader_of(loader: Any) -> Any:
    inner_loader = loader
    while not hasattr(inner_loader, "collate_fn") and hasattr(inner_loader, "loader"):
        inner_loader = inner_loader.loader
    if not callable(getattr(inner_loader, "collate_fn", None)):
        raise IncompatibleError(
            f"`SequencePacking` wraps the loader's `collate_fn`, which a `{type(loader).__name__}` does not "
            "have. Call `pack_sequences` where the batches are made"
        )
    return inner_loader
