"""The walk over the tensors of a batch: containers of every type, and what is a leaf."""

from collections import UserDict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from hocket.trainer.data.batch_tree import leaves, map_tensors, tensors

ONE, TWO = torch.ones(2, 3), torch.zeros(2)
Pair = namedtuple("Pair", "left right")  # noqa: PYI024


@dataclass
class Fields:
    x: torch.Tensor
    rest: list
    made: int = field(default=7, init=False)


TREES = [
    (ONE, TWO),
    [ONE, {"y": TWO}],
    Pair(ONE, TWO),
    {"x": ONE, "y": [TWO, "text"]},
    UserDict({"x": ONE, "y": TWO}),
    Fields(ONE, [TWO]),
    SimpleNamespace(x=ONE, rest=(TWO, None)),
    deque([ONE, TWO]),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_every_container_is_walked_and_keeps_its_type(tree):
    check_walk(tree)


def test_containers_of_transformers_are_walked_and_keep_their_type():
    transformers = pytest.importorskip("transformers", reason="needs `uv sync --group transformers`")
    check_walk(transformers.BatchEncoding({"x": ONE, "y": TWO}))
    check_walk(transformers.modeling_outputs.SequenceClassifierOutput(loss=ONE, logits=TWO))


def check_walk(tree):
    assert [id(tensor) for tensor in tensors(tree)] == [id(ONE), id(TWO)]
    moved = map_tensors(lambda tensor: tensor.to("meta"), tree)
    assert type(moved) is type(tree)
    assert [tensor.device.type for tensor in tensors(moved)] == ["meta", "meta"]
    assert [path for path, _ in leaves(moved)] == [path for path, _ in leaves(tree)]
    assert [id(tensor) for tensor in tensors(tree)] == [id(ONE), id(TWO)], "the tree itself has changed"


def test_objects_are_leaves_where_the_caller_says_so():
    tree = [Fields(ONE, []), SimpleNamespace(x=ONE), TWO]
    assert [path for path, _ in leaves(tree, into_objects=False)] == [(0,), (1,), (2,)]
    assert list(tensors(tree, into_objects=False)) == [TWO]


def test_a_path_leads_to_its_leaf():
    tree = {"a": [ONE, {"b": "text"}], "c": Fields(TWO, [])}
    assert dict(leaves(tree)) == {("a", 0): ONE, ("a", 1, "b"): "text", ("c", "x"): TWO, ("c", "made"): 7}
