"""Batches: items that are replaced, and samples that are selected, in a copy."""

from collections import namedtuple
from typing import Any

import torch

from hocket.algos.batches import get_item, select_rows, with_item

Named = namedtuple("Named", ["x", "y"])  # noqa: PYI024  # what torch's collate makes of one


def test_an_item_of_a_named_tuple_has_a_name_and_an_index() -> None:
    batch = Named(1, 2)
    assert get_item(batch, "y") == 2
    assert with_item(batch, "y", 3) == with_item(batch, 1, 3) == Named(1, 3)
    assert batch == Named(1, 2)


def test_samples_are_selected_in_every_entry_that_has_one_for_each() -> None:
    x = torch.arange(6.0).view(3, 2)
    batch: Any = {
        "pair": Named(x, (x[:, 0], torch.ones(2))),
        "names": ["a", "b", "c"],
        "boxes": [[1], [], [2]],
        "count": 3,
        "scale": torch.tensor(2.0),
    }
    for rows in (torch.tensor([2, 0]), slice(1, 3)):
        selected = select_rows(batch, rows, 3)
        assert type(selected["pair"]) is Named
        assert torch.equal(selected["pair"].x, x[rows])
        assert torch.equal(selected["pair"].y[0], x[rows, 0])
        assert selected["pair"].y[1] is batch["pair"].y[1]
        assert (selected["count"], selected["scale"]) == (3, batch["scale"])
    assert select_rows(batch, torch.tensor([2, 0]), 3)["names"] == ["c", "a"]
    assert selected["boxes"] == [[], [2]]
    assert len(batch["names"]) == len(batch["pair"].x) == 3
    assert select_rows(7, rows, 3) == 7
