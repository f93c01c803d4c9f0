"""The samples of any step of a run, from its checkpoints and the order of its data; no journal is needed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from hocket.ckpt import Checkpoint, list_checkpoints
from hocket.ckpt import open as open_checkpoint
from hocket.ckpt.errors import CheckpointError, CheckpointIncompatibleError, CheckpointNotFoundError
from hocket.native.cli.text import columns, console, count, print_json
from hocket.native.paths import is_uri
from hocket.stream import Stream, StreamingDataset
from hocket.stream.errors import ConfigError
from hocket.stream.read.lookup import SamplePlace

__all__ = ["StepSamples", "samples_of", "show"]

_RULES = (
    *("num_canonical_nodes", "shuffle", "shuffle_seed", "shuffle_block_size"),
    *("tail", "batching_method", "sampling_method", "sampling_granularity"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """The samples of a step, in the order of the batch."""

    step: int
    epoch: int
    batch: int
    """Number of the batch in its epoch, from 0."""
    checkpoint: str
    """The checkpoint that the position was counted from."""
    rank: int | None
    """The data-parallel rank whose part this is; None for the batch over all ranks."""
    num_ranks: int
    samples: list[SamplePlace]


@dataclass(frozen=True, slots=True)
class _Position:
    """The position in the data after `step` steps, as a checkpoint has it."""

    uri: str
    step: int
    loader: dict[str, Any]
    num_ranks: int

    @property
    def is_resized(self) -> bool:
        """Whether the epoch was begun with another batch size."""
        return "sample" in self.loader


def samples_of(
    run: str | os.PathLike[str],
    step: int,
    *,
    data: Sequence[str | os.PathLike[str]] = (),
    dataset: StreamingDataset | None = None,
    rank: int | None = None,
    num_ranks: int | None = None,
) -> StepSamples:
    """Return the samples that a step of a run was or will be trained on; reads no sample.

    Step N is the one after which N batches were trained on, as loggers count. The position is counted from
    the nearest checkpoint on either side of the step. If the run has one before and one after it, both have
    to agree.

    Args:
        run: The folder of a run's checkpoints, or a checkpoint; or a URI.
        step: The step, from 1 on.
        data: The data sets in the order of the run's streams, each a folder or URI.
        dataset: The data set itself, in place of `data`, for streams with weights.
        rank: A data-parallel rank, for its part of the batch.
        num_ranks: The number of data-parallel ranks; by default, those that trained the step.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointIncompatibleError: The checkpoints have no position of `hocket.stream`'s own order, do not
            agree on the step, or the epoch was begun with another batch size.
        StateMismatchError: The data or its order is not that of the run; the message names what differs.
        ConfigError: An argument is invalid.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ConfigError(f"`step` is {step!r}: expected an integer from 1 on")
    if (dataset is None) == (not data):
        raise ConfigError("expected the run's data, as either `data` or `dataset`")
    before, after = _around(os.fspath(run), step)
    near = after or before
    assert near is not None
    ranks = near.num_ranks if num_ranks is None else num_ranks
    if ranks < 1 or (rank is not None and not 0 <= rank < ranks):
        raise ConfigError(f"`rank` is {rank} of {ranks}: expected a number from 0 to {ranks - 1}")
    with ExitStack() as made:
        opened = dataset or _open(near, data, made)
        origin, epoch, batch = _locate(opened, before, after, step)
        opened.load_state_dict(origin.loader)
        if rank is None:
            ids = opened.sample_ids(batch, epoch=epoch)
        else:
            order = opened.plan.passes(epoch, batch)
            number = batch - order.start
            has_share = order.order.share(number, rank, ranks)[0] > 0
            ids = order.order.rank_ids(number, rank, ranks) if has_share else []
        return StepSamples(
            step=step,
            epoch=epoch,
            batch=batch,
            checkpoint=origin.uri,
            rank=rank,
            num_ranks=ranks,
            samples=opened.places(ids),
        )


def _around(run: str, step: int) -> tuple[_Position | None, _Position | None]:
    """Return the last position before a step and the first one after it; None where there is none."""
    try:
        opened = open_checkpoint(run)
    except CheckpointError:
        listed = [one for one in list_checkpoints(run) if one.status == "committed" and one.step is not None]
        if not listed:
            raise CheckpointNotFoundError(f"`{run}` has no committed checkpoint") from None
        earlier = [one.uri for one in listed if (one.step or 0) < step]
        later = [one.uri for one in listed if (one.step or 0) >= step]
        before = _position(open_checkpoint(earlier[-1])) if earlier else None
        after = _position(open_checkpoint(later[0])) if later else None
        return before, after
    position = _position(opened)
    return (position, None) if position.step < step else (None, position)


def _position(checkpoint: Checkpoint) -> _Position:
    """Return the position in the data that a checkpoint of the trainer has.

    Raises:
        CheckpointIncompatibleError: It has none of `hocket.stream`'s own order.
    """
    contents = checkpoint.contents
    values = {name: record.value for name, record in contents.values.items()}
    nodes = [
        name.removesuffix("fingerprint")
        for name in values
        if name.startswith("loader.") and name.endswith(".fingerprint")
    ]
    if len(nodes) != 1 or f"{nodes[0]}global_batch_size" not in values:
        raise CheckpointIncompatibleError(
            f"`{checkpoint.uri}` has no position in the order of `hocket.stream`, such as a "
            "`StreamingDataLoader` saves with `order='native'`; for other loaders the samples of a step are "
            "not known from a checkpoint"
        )
    state = {
        name.removeprefix(nodes[0]): value for name, value in values.items() if name.startswith(nodes[0])
    }
    num_ranks = contents.world_size
    for own in contents.per_rank.ranks[:1] if contents.per_rank else ():
        if isinstance(own, dict) and own.get("data_parallel"):
            num_ranks = own["data_parallel"][1]
    step = values.get("timestamp.batch", contents.step)
    return _Position(checkpoint.uri, step, state, num_ranks)


def _open(near: _Position, data: Sequence[str | os.PathLike[str]], made: ExitStack) -> StreamingDataset:
    """Open the data of a run with the settings of its order."""
    state = near.loader
    streams = []
    for place in [os.fspath(one) for one in data]:
        # Of a remote data set the index alone is read, which is not left in the cache.
        is_remote = is_uri(place) and not place.startswith("file://")
        cache = made.enter_context(tempfile.TemporaryDirectory(prefix="hocket-")) if is_remote else None
        streams.append(Stream(remote=place, local=cache))
    rules = {name: state[name] for name in _RULES}
    if state["mixture"] != "whole":
        rules["epoch_size"] = state["epoch_size"]
    return StreamingDataset(
        streams=streams, global_batch_size=state["global_batch_size"], rank=0, world_size=1, **rules
    )


def _locate(
    dataset: StreamingDataset, before: _Position | None, after: _Position | None, step: int
) -> tuple[_Position, int, int]:
    """Return the checkpoint that a step is counted from, and the step's epoch and batch.

    Raises:
        CheckpointIncompatibleError: The positions do not agree, or the epoch was begun with another batch
            size.
    """
    if after is not None:
        batch = int(after.loader["batch"]) - (after.step - step + 1)
        if batch >= 0 and not after.is_resized:
            return after, int(after.loader["epoch"]), batch
    if before is None:
        assert after is not None
        if after.is_resized:
            raise CheckpointIncompatibleError(
                f"`{after.uri}` is in an epoch that was begun with another batch size, and no checkpoint is "
                f"before step {step}"
            )
        dataset.load_state_dict(after.loader)
        return after, *_moved_alone(dataset, after, step)
    dataset.load_state_dict(before.loader)
    if after is not None:
        expected = _moved(dataset, before, after.step - before.step)
        found = _moved(dataset, after, 0)
        if expected != found:
            raise CheckpointIncompatibleError(
                f"from `{before.uri}` on, step {after.step} would begin batch {expected[1]} of epoch "
                f"{expected[0]}, and `{after.uri}` is at batch {found[1]} of epoch {found[0]}: epochs were "
                f"cut short, or batches left out, between them, so the samples of step {step} are not known"
            )
        return before, *_moved(dataset, before, step - 1 - before.step)
    return before, *_moved_alone(dataset, before, step)


def _moved_alone(dataset: StreamingDataset, position: _Position, step: int) -> tuple[int, int]:
    """Return the epoch and batch of a step, counted from one checkpoint.

    Raises:
        CheckpointIncompatibleError: They are in another epoch, and the run's epochs were not whole.
    """
    epoch, batch = _moved(dataset, position, step - 1 - position.step)
    here, passed = int(position.loader["epoch"]), int(position.loader["batch"])
    if epoch != here and dataset.plan.num_batches(0) * here + passed != position.step:
        raise CheckpointIncompatibleError(
            f"`{position.uri}` is at batch {passed} of epoch {here} after {position.step} steps: the epochs "
            f"before were cut short, or had another batch size, so the samples of step {step}, in another "
            "epoch, are not known from it"
        )
    return epoch, batch


def _moved(dataset: StreamingDataset, position: _Position, num_batches: int) -> tuple[int, int]:
    """Return the epoch and batch that are some batches after a position, or before it."""
    epoch, batch = int(position.loader["epoch"]), int(position.loader["batch"]) + num_batches
    while batch < 0 and epoch > 0:
        epoch -= 1
        batch += dataset.plan.num_batches(epoch)
    while batch >= (length := dataset.plan.num_batches(epoch)):
        batch -= length
        epoch += 1
    return epoch, batch


def show(
    run: str,
    step: int,
    *,
    data: Sequence[str],
    rank: int | None,
    num_ranks: int | None,
    limit: int,
    as_json: bool,
) -> None:
    """Print the samples of a step."""
    found = samples_of(run, step, data=data, rank=rank, num_ranks=num_ranks)
    if as_json:
        print_json(asdict(found))
        return
    out = console()
    part = "" if found.rank is None else f", rank {found.rank} of {found.num_ranks}"
    out.print(
        f"step {found.step}: batch {found.batch} of epoch {found.epoch}{part}, "
        f"{count(len(found.samples), 'sample')}"
    )
    shown = found.samples[: limit or None]
    for line in columns([[str(one.number), f"{one.origin}/{one.shard}", f"row {one.row}"] for one in shown]):
        out.print(line)
    if len(shown) < len(found.samples):
        out.print(f"… {len(found.samples) - len(shown)} more (`--limit 0` shows all)")
