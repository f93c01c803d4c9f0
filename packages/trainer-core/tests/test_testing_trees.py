"""The conformance suites' comparison of trees finds every difference, and none between equal trees."""

import pytest
import torch

from hocket.trainer.testing.trees import describe_difference

NAN, INF = float("nan"), float("inf")


def tree(*values, dtype=torch.float32):
    return {"a": [torch.tensor(values, dtype=dtype)], "b": (1, "x", NAN)}


@pytest.mark.parametrize("values", [(1.0, NAN, INF, -INF), (), (0.0,)])
def test_equal_trees_have_no_difference(values):
    assert describe_difference(tree(*values), tree(*values)) is None


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((NAN,), (0.0,)),
        ((INF,), (torch.finfo(torch.float32).max,)),
        ((INF,), (-INF,)),
        ((1.0, 2.0), (1.0, 2.5)),
        ((1.0,), (1.0, 1.0)),
    ],
)
def test_a_differing_tensor_is_named(left, right):
    found = describe_difference(tree(*left), tree(*right))
    assert found is not None
    assert "`a.0`" in found


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ({"a": 1}, {"b": 1}, "on one side only"),
        ({"a": 1}, {"a": True}, "`a` is a `int`"),
        ({"a": [1]}, {"a": [1, 2]}, "has 1 items"),
        ({"a": torch.ones(1)}, {"a": 1.0}, "a tensor on one side only"),
        ({"a": torch.ones(1)}, {"a": torch.ones(1, dtype=torch.int64)}, "torch.float32"),
        ({"a": "x"}, {"a": "y"}, "`'x'`"),
    ],
)
def test_other_differences_are_described(left, right, message):
    assert message in (describe_difference(left, right) or "")
