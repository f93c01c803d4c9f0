"""The default count and split of batches: what they divide, and what they refuse by name."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from hocket.trainer import ComposerModel, DataSpec
from hocket.trainer.data.batch_tree import to_device
from hocket.trainer.data.batches import num_samples
from hocket.trainer.errors import DataError
from support.training import make, parameters

transformers = pytest.importorskip("transformers", reason="needs `uv sync --group transformers`")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Fields:
    x: torch.Tensor
    names: list[str]
    note: str = "of all"


class Graph:
    """An object of a class that the trainer does not know."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.edges = torch.zeros(2, 7)


def boxes(*numbers):
    return [{"boxes": torch.full((number, 4), float(number)), "id": number} for number in numbers]


def images(num, rows=3):
    return [torch.full((rows, 2, 2), float(index)) for index in range(num)]


def plain(part):
    """Return a batch with lists in place of tensors and arrays, so that it can be compared."""
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return part.tolist()
    if isinstance(part, (dict, transformers.BatchEncoding)):
        return {name: plain(value) for name, value in part.items()}
    if isinstance(part, (tuple, list)):
        return [plain(item) for item in part]
    return plain(vars(part)) if isinstance(part, Fields) else part


FOUR = torch.arange(4)
WIDE = torch.arange(12).view(4, 3)

# A batch of 4 samples, and its samples 1 and 2.
SPLIT = {
    "values of all samples": (
        {"x": WIDE, "scale": torch.tensor(2.0), "none": None, "text": "abcd", "number": 4, "rate": 0.5},
        {"x": WIDE[1:3], "scale": torch.tensor(2.0), "none": None, "text": "abcd", "number": 4, "rate": 0.5},
    ),
    "nested": ({"in": {"x": WIDE, "ids": [5, 6, 7, 8]}}, {"in": {"x": WIDE[1:3], "ids": [6, 7]}}),
    "stacked images and lists of boxes": ((WIDE, boxes(1, 2, 3, 4)), (WIDE[1:3], boxes(2, 3))),
    "boxes that are as many as images": ((WIDE, boxes(4, 4, 4, 1)), (WIDE[1:3], boxes(4, 4))),
    "lists of images and boxes": ((images(4), boxes(1, 2, 3, 4)), (images(4)[1:3], boxes(2, 3))),
    "images with as many channels": ((images(4, 4), boxes(1, 2, 3, 4)), (images(4, 4)[1:3], boxes(2, 3))),
    "a list of samples": (boxes(3, 1, 2, 1), boxes(1, 2)),
    "samples with as many rows as samples": (
        [{"x": row, "y": 1} for row in torch.zeros(4, 5)],
        [{"x": row, "y": 1} for row in torch.zeros(2, 5)],
    ),
    "pairs": ([(row, 1) for row in WIDE], [(row, 1) for row in WIDE[1:3]]),
    "ragged": ([WIDE[:1], WIDE[:3], WIDE[:2], WIDE[:4]], [WIDE[:3], WIDE[:2]]),
    "two views": ([[WIDE, WIDE], FOUR, 0.5], [[WIDE[1:3], WIDE[1:3]], FOUR[1:3], 0.5]),
    "two mappings": (({"x": WIDE}, {"x": FOUR}), ({"x": WIDE[1:3]}, {"x": FOUR[1:3]})),
    "a named tuple": (Pair(WIDE, FOUR), Pair(WIDE[1:3], FOUR[1:3])),
    "a dataclass": (Fields(WIDE, ["a", "b", "c", "d"]), Fields(WIDE[1:3], ["b", "c"])),
    "arrays": ({"x": np.arange(4), "y": FOUR}, {"x": np.arange(1, 3), "y": FOUR[1:3]}),
    "an encoding": (
        transformers.BatchEncoding({"input_ids": WIDE, "labels": FOUR}),
        transformers.BatchEncoding({"input_ids": WIDE[1:3], "labels": FOUR[1:3]}),
    ),
}


@pytest.mark.parametrize("case", SPLIT)
def test_samples_are_taken_from_each_part(case):
    batch, expected = SPLIT[case]
    spec = DataSpec([], get_num_samples_in_batch=lambda batch: 4)
    part = spec.split(batch, 1, 3)
    assert plain(part) == plain(expected)
    assert type(part) is type(expected)
    assert spec.split(batch, 0, 4) is batch


REFUSED = {
    r"`batch\['prior'\]` has the shape \[3\], and the batch has 4 samples": {
        "x": WIDE,
        "prior": torch.zeros(3),
    },
    r"`batch\['in'\]\['w'\]` has the shape \[2, 4\]": {"in": {"x": WIDE, "w": torch.zeros(2, 4)}},
    r"`batch\['names'\]` has 2 items, and the batch has 4": {"x": WIDE, "names": ["cat", "dog"]},
    r"`batch\['targets'\]` has the shape \[11\]": {"x": WIDE, "targets": torch.zeros(11)},
    r"`batch\[1\]` has 4 items, each of them with 4 rows.*either may be the samples": (
        WIDE,
        boxes(4, 4, 4, 4),
    ),
    # A column without a shape, whose rows have that many numbers by chance.
    r"`batch\['tokens'\]` has 4 items, each of them with 4 rows.*either may be the samples": {
        "x": WIDE,
        "tokens": [FOUR, FOUR, FOUR, FOUR],
    },
    r"`batch\.names` has 4 items, each of them with 4 rows": Fields(WIDE, [FOUR, FOUR, FOUR, FOUR]),
    r"`batch\[1\]` has 4 items, each of them with 4 rows.*pass": (WIDE, [FOUR, FOUR, FOUR, FOUR]),
    r"`batch\['queue'\]`, a `deque`, cannot be split": {"x": WIDE, "queue": deque([1, 2, 3, 4])},
    r"`batch\['rows'\]`, a `range`, cannot be split": {"x": WIDE, "rows": range(4)},
    r"`batch\['rows'\]`, a `list_iterator`, cannot be split": {"x": WIDE, "rows": iter([1, 2, 3, 4])},
    r"the batch has 2 items, with rows of the lengths \[3, 4\]": (WIDE, torch.zeros(3)),
    r"the batch, a `Graph`, cannot be split": Graph(WIDE),
    r"`batch\[0\]`, of the layout `torch.sparse_coo`, cannot be sliced": (torch.eye(4).to_sparse(), FOUR),
    r"`batch\[0\]`, a nested tensor, cannot be sliced": (
        torch.nested.nested_tensor([WIDE[:1], WIDE[:3], WIDE[:2], WIDE], layout=torch.jagged),
        FOUR,
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_part_without_a_row_for_each_sample_is_refused(message):
    spec = DataSpec([], get_num_samples_in_batch=lambda batch: 4)
    with pytest.raises(DataError, match=message) as caught:
        spec.split(REFUSED[message], 1, 3)
    assert "split_batch=" in str(caught.value)


def test_lists_of_samples_are_not_counted_by_the_rows_of_their_items():
    for batch in (
        [{"image": torch.zeros(3, 8, 8), "label": 1} for _ in range(8)],
        [(torch.zeros(3, 8, 8), 1) for _ in range(8)],
        [{"x": torch.zeros(5), "y": torch.zeros(5)} for _ in range(4)],
    ):
        with pytest.raises(DataError, match=r"may be samples.*get_num_samples_in_batch=.*split_batch="):
            num_samples(batch)
    assert num_samples([{"x": torch.zeros(5)}, {"x": torch.zeros(5)}]) == 5
    assert num_samples([(torch.zeros(5), torch.zeros(5)), (torch.zeros(5), torch.zeros(5))]) == 5
    assert num_samples(Fields(WIDE, ["a", "b", "c", "d"])) == 4


def test_a_dataclass_is_copied_to_the_device():
    moved = to_device(Fields(WIDE, ["a"]), torch.device("meta"))
    assert (moved.x.device.type, moved.names) == ("meta", ["a"])


class Detector(ComposerModel):
    """Predicts boxes of images; the loss of an image is the mean over its boxes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(12, 4)

    def forward(self, batch):
        return [self.head(image.flatten()) for image in batch[0]]

    def loss(self, outputs, batch):
        losses = [(box - sample["boxes"]).abs().mean() for box, sample in zip(outputs, batch[1], strict=True)]
        return torch.stack(losses).mean()


def detection_batch():
    generator = torch.Generator().manual_seed(1)
    pictures = [torch.randn(3, 2, 2, generator=generator) for _ in range(5)]
    # As many boxes as images in some of them.
    samples = [{"boxes": torch.randn(number, 4, generator=generator)} for number in (5, 1, 5, 2, 3)]
    return pictures, samples


@pytest.mark.parametrize("size", [1, 2, 5])
def test_microbatches_of_detection_targets_give_the_update_of_the_whole_batch(size):
    expected = Detector()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected.loss(expected(detection_batch()), detection_batch()).backward()
    optimizer.step()
    model = Detector()
    spec = DataSpec([detection_batch()], get_num_samples_in_batch=lambda batch: len(batch[0]))
    with make(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=spec,
        device_train_microbatch_size=size,
        max_duration="1ba",
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.sample == "5sp"
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(parameters(trainer)[name], value)
