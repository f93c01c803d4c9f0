"""`StreamingDataLoader`: collation, workers and their shared memory, epochs, lengths and arguments."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset
from hocket.stream.errors import ConfigError, StreamError
from hocket.stream.read.dataset_reader import RankBatch
from hocket.stream.torch.worker_messages import ReceivedBatches, WorkerInbox, WorkerOutbox, small_together


def collate_ids(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([sample["id"] for sample in samples])


@pytest.mark.parametrize("workers", [0, 1])
def test_columns_become_tensors_and_lists(tmp_path: Path, workers: int) -> None:
    columns = {
        "a_int": "int",
        "b_half": "float16",
        "c_tokens": "ndarray:uint16:2,3",
        "d_any": "ndarray",
        "e_typed": "ndarray:float64",
        "f_bytes": "bytes",
        "g_str": "str",
        "h_json": "json",
        "i_mixed": "ndarray",
    }
    with MDSWriter(columns=columns, out=tmp_path) as writer:
        for number in range(4):
            writer.write(
                {
                    "a_int": number,
                    "b_half": number / 2,
                    "c_tokens": np.full((2, 3), number, np.uint16),
                    "d_any": np.arange(number + 1, dtype=np.int32),
                    "e_typed": np.full((1, number + 1), 0.5),
                    "f_bytes": bytes([number]),
                    "g_str": "é" * number,
                    "h_json": {"n": number},
                    "i_mixed": np.ones(number + 1, np.uint8 if number else np.int16),
                }
            )
    (batch,) = StreamingDataLoader(StreamingDataset(local=tmp_path), batch_size=4, num_workers=workers)
    assert list(batch) == list(columns)
    assert batch["a_int"].tolist() == [0, 1, 2, 3]
    assert batch["a_int"].dtype == torch.int64
    assert batch["b_half"].dtype == torch.float16
    assert batch["c_tokens"].shape == (4, 2, 3)
    assert batch["c_tokens"].dtype == torch.uint16
    assert [value.tolist() for value in batch["d_any"]] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert [value.shape for value in batch["e_typed"]] == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert batch["f_bytes"] == [b"\0", b"\1", b"\2", b"\3"]
    assert batch["g_str"] == ["", "é", "éé", "ééé"]
    assert batch["h_json"] == [{"n": number} for number in range(4)]
    assert [(value.dtype, len(value)) for value in map(torch.as_tensor, batch["i_mixed"])] == [
        (torch.int16, 1), (torch.uint8, 2), (torch.uint8, 3), (torch.uint8, 4),
    ]  # fmt: skip
    batch["d_any"][1][0] = 9
    assert [value.tolist() for value in batch["d_any"]] == [[0], [9, 1], [0, 1, 2], [0, 1, 2, 3]]


def write_varied(folder: Path) -> str:
    """Write samples of several columns, fixed and of varying sizes."""
    columns = {"id": "int", "x": "ndarray", "text": "str", "pair": "ndarray:uint8:2", "data": "bytes"}
    with MDSWriter(columns=columns, out=folder, size_limit=4000) as writer:
        for number in range(210):
            writer.write(
                {
                    "id": number,
                    "x": np.full(3 if number // 40 % 2 else 1 + number % 3, number, np.int16),
                    "text": "é" * (number % 5),
                    "pair": np.full(2, number, np.uint8),
                    "data": bytes([number]) * (number % 7),
                }
            )
    return str(folder)


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch as lists, each tensor with its dtype."""

    def turn(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (value.dtype, value.tolist())
        return [turn(item) for item in value] if isinstance(value, list) else value

    return {name: turn(column) for name, column in batch.items()}


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_of_workers_equal_those_without_workers(tmp_path: Path, workers: int) -> None:
    folder = write_varied(tmp_path)
    options: dict[str, Any] = {"local": folder, "batch_size": 8, "shuffle": False}
    expected = [plain(batch) for batch in StreamingDataLoader(StreamingDataset(**options))]
    loader = StreamingDataLoader(StreamingDataset(**options), num_workers=workers)
    found = []
    for number, batch in enumerate(loader):
        found.append(plain(batch))
        assert loader.state_dict()["batch"] == number + 1
        batch["pair"].zero_()  # the next batches do not share this memory
    assert found == expected
    state = loader.state_dict() | {"epoch": 0, "batch": 5}
    loader.load_state_dict(state)
    assert [plain(batch) for batch in loader] == expected[5:]


def test_small_batches_are_sent_in_growing_groups(write: Callable[..., str]) -> None:
    dataset = StreamingDataset(local=write(400), batch_size=4)
    groups = list(small_together(dataset.read_batches(epoch=0, first=0)))
    assert [batch.number for group in groups for batch in group] == list(range(100))
    assert [len(group) for group in groups] == [1, 2, 4, 8, *[16] * 5, 5]


def test_a_workers_shared_memory_is_reused_once_its_tensors_are_freed() -> None:
    inbox = WorkerInbox()
    outbox = WorkerOutbox(inbox.number, worker=3)

    def send(number: int, size: int = 1000) -> tuple[int, bool, ReceivedBatches]:
        message = outbox.pack([RankBatch(number, 1, 1, {"x": np.full((1, size), number, np.int16)})])
        function, given = message.__reduce__()
        return message.index, message.block is not None, function(*given)

    def take(received: ReceivedBatches) -> torch.Tensor:
        ((_, _, _, columns),) = received.unpack()
        return columns["x"]

    index, is_new, first = send(0)
    assert (index, is_new) == (0, True)
    kept = take(first)[0, 5:]
    del first
    index, is_new, second = send(1)
    assert (index, is_new) == (1, True)  # `kept` is a view of the first block, which stays in use
    numbers = take(second).numpy()
    del second
    assert send(2)[:2] == (2, True)
    assert send(3)[:2] == (2, False)
    assert (kept.tolist(), numbers.tolist()) == ([0] * 995, [[1] * 1000])
    del kept
    assert send(4, size=1200)[:2] == (0, False)
    assert send(5, size=5000)[:2] == (2, True)  # replaces a block that is too small
    assert take(send(6, size=5000)[2]).unique().tolist() == [6]
    assert numbers.tolist() == [[1] * 1000]


def test_batches_that_the_caller_keeps_do_not_change(write: Callable[..., str]) -> None:
    folder = write(400)
    expected = [batch["tokens"].tolist() for batch in StreamingDataset(local=folder, batch_size=2).batches()]
    kept = {}
    for number, batch in enumerate(
        StreamingDataLoader(StreamingDataset(local=folder, batch_size=2), num_workers=2)
    ):
        if number % 7 == 0:
            kept[number] = batch["tokens"]
    assert {number: tokens.tolist() for number, tokens in kept.items()} == {
        number: expected[number] for number in range(0, 200, 7)
    }


def test_large_batches_are_sent_alone_and_those_before_an_error_first() -> None:
    def batches(num_bytes: int) -> Iterator[RankBatch]:
        for number in range(20):
            yield RankBatch(number, 1, 1, {"x": np.zeros((1, num_bytes), np.uint8)})
        raise ValueError("the end")

    def take(num_bytes: int, sizes: list[int]) -> None:
        for group in small_together(batches(num_bytes)):
            sizes.append(len(group))

    def groups(num_bytes: int) -> list[int]:
        sizes: list[int] = []
        with pytest.raises(ValueError, match="the end"):
            take(num_bytes, sizes)
        return sizes

    assert groups(2 << 20) == [1] * 20
    assert groups(1 << 20) == [1, *[2] * 9, 1]
    assert groups(10) == [1, 2, 4, 8, 5]


def test_stacked_columns_share_the_readers_memory(write: Callable[..., str]) -> None:
    dataset = StreamingDataset(local=write(8), batch_size=4)
    batch = next(dataset.batches())
    assert batch["tokens"].flags.writeable
    tensor = torch.from_numpy(batch["tokens"])
    tensor[0, 0] = 9
    assert batch["tokens"][0, 0] == 9
    assert not batch["tokens"].flags.owndata


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_gets_samples(write: Callable[..., str], workers: int) -> None:
    dataset = StreamingDataset(local=write(20), batch_size=8)
    batches = list(StreamingDataLoader(dataset, num_workers=workers, collate_fn=collate_ids))
    assert [batch.tolist() for batch in batches] == [list(range(8)), list(range(8, 16)), list(range(16, 20))]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_start_with_any_method_after_the_parent_has_read(
    write: Callable[..., str], context: str
) -> None:
    dataset = StreamingDataset(local=write(40), batch_size=8, shuffle=True)
    parent = dataset.batches()
    next(parent)
    loader = StreamingDataLoader(dataset, num_workers=2, multiprocessing_context=context, timeout_s=60)
    expected = [dataset.sample_ids(number, epoch=1) for number in range(5)]
    assert [batch["id"].tolist() for batch in loader] == expected
    del parent


@pytest.mark.parametrize("kind", ["loader", "workers", "batches", "samples", "torch"])
def test_a_new_iteration_starts_an_epoch_from_its_beginning(write: Callable[..., str], kind: str) -> None:
    dataset = StreamingDataset(local=write(40), batch_size=8, shuffle=True)
    reads: dict[str, Callable[[], Iterator[Any]]] = {
        "loader": lambda: iter(StreamingDataLoader(dataset)),
        "workers": lambda: iter(StreamingDataLoader(dataset, num_workers=1)),
        "batches": dataset.batches,
        "samples": lambda: iter(dataset),
        "torch": lambda: iter(DataLoader(dataset, batch_size=8)),
    }

    def take(count: int | None) -> list[int]:
        taken = itertools.islice(reads[kind](), count)
        return [int(number) for item in taken for number in np.atleast_1d(item["id"])]

    epochs = [[i for k in range(5) for i in dataset.sample_ids(k, epoch=epoch)] for epoch in range(7)]
    assert take(0) == []
    assert take(None) == epochs[0]
    first = take(1)
    assert first == epochs[1][: len(first)]
    assert take(None) == epochs[2]
    state = dataset.state_dict()
    assert (state["epoch"], state["batch"]) == (3, 0)
    dataset.load_state_dict(state | {"epoch": 4, "batch": 3})
    first = take(1)
    assert first == epochs[4][24 : 24 + len(first)]
    assert take(None) == epochs[5]
    dataset.load_state_dict(state | {"epoch": 5, "batch": 3})
    assert take(None) == epochs[5][24:]
    assert take(None) == epochs[6]
    dataset.set_epoch(2)
    assert take(None) == epochs[2]


def test_an_epoch_that_is_ended_early_is_over_in_the_state(write: Callable[..., str]) -> None:
    folder = write(12)
    loader, other = (
        StreamingDataLoader(StreamingDataset(local=folder, batch_size=2, shuffle=True)) for _ in range(2)
    )
    batches = iter(loader)
    next(batches)
    other.load_state_dict(loader.state_dict())
    for part in (loader, other):
        part.end_epoch()
        assert (part.state_dict()["epoch"], part.state_dict()["batch"]) == (1, 0)
        epoch = [batch["id"].tolist() for batch in part]
        assert epoch == [part.dataset.sample_ids(number, epoch=1) for number in range(6)]


@pytest.mark.parametrize("batch", [0, 2])
def test_an_iteration_draws_no_random_numbers_in_this_process(write: Callable[..., str], batch: int) -> None:
    loader = StreamingDataLoader(StreamingDataset(local=write(12), batch_size=2), num_workers=1)
    loader.load_state_dict(loader.state_dict() | {"batch": batch})
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


def draw(samples: list[Any]) -> list[Any]:
    """Return the samples' numbers with random numbers of all generators, and of the worker's seed."""
    numbers = [sample["id"] if isinstance(sample, dict) else sample for sample in samples]
    return [*numbers, float(torch.rand(())), random.random(), np.random.random(), torch.initial_seed()]


def test_workers_draw_the_same_numbers_after_a_resume(write: Callable[..., str]) -> None:
    folder = write(24)

    def load(rank: int = 0) -> StreamingDataLoader:
        dataset = StreamingDataset(local=folder, batch_size=2, shuffle=True, rank=rank, world_size=2)
        return StreamingDataLoader(dataset, num_workers=2, collate_fn=draw)

    torch.manual_seed(5)
    loader = load()
    whole = [list(loader), list(loader)]
    # Epochs, batches, ranks and seeds of the process have other numbers.
    drawn = [tuple(batch[2:]) for batch in [*chain(*whole), *load(1)]]
    assert len(set(drawn)) == len(drawn) == 18
    first = load()
    for number, _ in enumerate(chain(first, first)):
        if number == 8:
            break
    generator = torch.get_rng_state()
    torch.manual_seed(6)
    assert next(iter(load()))[2:] != whole[0][0][2:]
    torch.set_rng_state(generator)
    rest = load()
    rest.load_state_dict(first.state_dict())
    assert list(rest) == whole[1][3:]


class Doubled(StreamingDataset):
    """A data set that transforms its samples, as subclasses of mosaicml-streaming's do."""

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return {"id": 2 * sample["id"], "at": at, "text": sample["text"].upper()}


class Pairs(StreamingDataset):
    """A data set whose samples are pairs, one of which is looked up elsewhere."""

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(at)["id"], super().__getitem__((at + 1) % self.size)["id"]


class Same(StreamingDataset):
    """A subclass that overrides nothing of the samples."""


@pytest.mark.parametrize("workers", [0, 2])
def test_an_overridden_getitem_makes_the_samples(write: Callable[..., str], workers: int) -> None:
    folder = write(23)
    options = {"local": folder, "batch_size": 4, "shuffle": True}
    order = [sample["id"] for sample in StreamingDataset(**options)]
    doubled = Doubled(**options)
    loaded = list(StreamingDataLoader(doubled, num_workers=workers))
    assert torch.cat([batch["id"] for batch in loaded]).tolist() == [2 * number for number in order]
    assert torch.cat([batch["at"] for batch in loaded]).tolist() == order
    assert [text for batch in loaded for text in batch["text"]] == ["X" * (number % 50) for number in order]
    collated = StreamingDataLoader(Pairs(**options), num_workers=workers, collate_fn=list)
    pairs = [(number, (number + 1) % 23) for number in order]
    assert list(chain(*collated)) == pairs
    assert list(Pairs(**options)) == pairs
    torch_loader = DataLoader(Pairs(**options), batch_size=4, num_workers=workers, collate_fn=list)
    assert sorted(chain(*torch_loader)) == sorted(pairs)
    assert [doubled[3]["id"], doubled[-1]["at"]] == [6, -1]
    assert [sample["id"] for sample in doubled.__getitems__([1, 2])] == [2, 4]


def test_stored_columns_are_not_what_an_overridden_getitem_makes(write: Callable[..., str]) -> None:
    folder = write(8)
    with pytest.raises(ConfigError, match="`Doubled` makes samples by a `__getitem__` of its own"):
        next(Doubled(local=folder, batch_size=4).batches())
    assert len(list(Same(local=folder, batch_size=4).batches())) == 2


def test_an_iteration_that_fails_at_once_does_not_use_up_its_position(
    write: Callable[..., str], tmp_path: Path
) -> None:
    folder = Path(write(40))
    dataset = StreamingDataset(local=folder, batch_size=8)
    folder.rename(tmp_path / "away")
    with pytest.raises(StreamError):
        next(dataset.batches())
    (tmp_path / "away").rename(folder)
    assert [batch["id"].tolist() for batch in dataset.batches()] == [
        dataset.sample_ids(number, epoch=0) for number in range(5)
    ]


def test_a_rank_without_a_share_of_the_batch_gets_one_sample(write: Callable[..., str]) -> None:
    folder = write(17)
    shares = []
    for rank in range(4):
        dataset = StreamingDataset(local=folder, global_batch_size=8, rank=rank, world_size=4, shuffle=True)
        loader = StreamingDataLoader(dataset)
        *_, last = loader
        shares.append(loader.batch_share())
        assert len(last["id"]) == 1
        assert len(list(StreamingDataset(local=folder, global_batch_size=8, rank=rank, world_size=4))) == len(
            dataset
        )
    assert shares == [(0, 1), (0, 1), (0, 1), (1, 1)]


def test_lengths_count_batches_and_the_ranks_samples(write: Callable[..., str]) -> None:
    dataset = StreamingDataset(local=write(21), batch_size=4, rank=1, world_size=2)
    loader = StreamingDataLoader(dataset)
    assert (len(loader), dataset.num_batches, dataset.size) == (3, 3, 21)
    # Global batches of 8, 8 and 5 samples, of which rank 1 has 4, 4 and 3.
    assert len(dataset) == 11
    assert loader.data_parallel == dataset.data_parallel == (1, 2)


def test_the_batch_size_is_given_exactly_once(write: Callable[..., str]) -> None:
    folder = write(20)
    with pytest.raises(ConfigError, match="no batch size"):
        StreamingDataLoader(StreamingDataset(local=folder))
    with pytest.raises(ConfigError, match="was set to 8"):
        StreamingDataLoader(StreamingDataset(local=folder, batch_size=8), batch_size=4)
    with pytest.raises(ConfigError, match="one of them"):
        StreamingDataset(local=folder, batch_size=8, global_batch_size=8)
    assert len(StreamingDataLoader(StreamingDataset(local=folder, batch_size=8), batch_size=8)) == 3


def test_leaving_the_loop_ends_the_threads(write: Callable[..., str]) -> None:
    before = set(threading.enumerate())
    loader = StreamingDataLoader(StreamingDataset(local=write(400), batch_size=4))
    for _ in loader:
        break
    names = {Path(f"/proc/self/task/{task.name}/comm").read_text().strip() for task in tasks()}
    assert not {name for name in names if name.startswith(("hocket-plan", "hocket-batch", "hocket-fetch"))}
    assert set(threading.enumerate()) == before


def tasks() -> list[Path]:
    return list(Path("/proc/self/task").iterdir())


def test_unsupported_dataloader_arguments_raise_with_the_alternative(write: Callable[..., str]) -> None:
    dataset = StreamingDataset(local=write(8), batch_size=4)
    for name, message in [
        ("drop_last", "tail='drop'"),
        ("persistent_workers", "workers begin anew"),
        ("timeout", "`timeout_s`"),
    ]:
        with pytest.raises(ConfigError, match=f"`{name}` is torch's own.*{message}"):
            StreamingDataLoader(dataset, **{name: True})
    with pytest.raises(
        TypeError, match="`StreamingDataLoader` has no argument `workers`; did you mean `num_workers`"
    ):
        StreamingDataLoader(dataset, workers=2)
    with pytest.raises(ConfigError, match="`pin_memory` is 'yes'"):
        StreamingDataLoader(dataset, pin_memory="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_are_pinned_if_there_is_an_accelerator(write: Callable[..., str], workers: int) -> None:
    dataset = StreamingDataset(local=write(8), batch_size=4)
    for batch in StreamingDataLoader(dataset, num_workers=workers, pin_memory=True):
        assert batch["tokens"].is_pinned() == torch.accelerator.is_available()
        assert len(batch["text"]) == 4


def test_the_repr_names_the_data_the_batches_and_the_position(write: Callable[..., str]) -> None:
    folder = write(20)
    dataset = StreamingDataset(local=folder, rank=1, world_size=2)
    assert repr(dataset) == (
        f"<StreamingDataset '{folder}': 20 samples an epoch, no batch size yet, at batch 0 of epoch 0, "
        "rank 1 of 2>"
    )
    loader = StreamingDataLoader(dataset, batch_size=5)
    next(iter(loader))
    assert repr(loader) == (
        f"<StreamingDataLoader of <StreamingDataset '{folder}': 20 samples an epoch, 10 a global batch, "
        "at batch 1 of epoch 0, rank 1 of 2>: 0 workers>"
    )
