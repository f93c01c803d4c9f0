"""`flatten` and `unflatten` of state trees: round trips, names, and values that raise."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.ckpt.document.tree import clean_key, flatten, unflatten
from hocket.ckpt.errors import CheckpointStateError


class Tensor:
    """A stand-in for a tensor, which the tree module never looks into."""

    def __init__(self, shape=()):
        self.shape = shape


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text(alphabet="abcdefgh_", min_size=1, max_size=8)
trees = st.recursive(
    scalars | st.builds(Tensor) | st.tuples(scalars, scalars),
    lambda child: st.lists(child, max_size=4) | st.dictionaries(keys, child, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(keys, trees, min_size=1))
def test_a_tree_is_rebuilt_from_its_leaves(tree):
    flat = flatten(tree, tensor_type=Tensor)
    leaves = [(leaf.path, leaf.value) for leaf in (*flat.tensors.values(), *flat.values.values())]
    assert unflatten(leaves) == tree


def test_names_are_joined_paths_without_wrapper_prefixes():
    weight = Tensor()
    flat = flatten(
        {
            "model": {"module._orig_mod.blocks.0._checkpoint_wrapped_module.fc.weight": weight},
            "lrs": [1.0, {"a": 2}],
            "config": {"module.lr": 3},
        },
        tensor_type=Tensor,
    )
    assert flat.tensors["model.blocks.0.fc.weight"].value is weight
    assert flat.tensors["model.blocks.0.fc.weight"].path == ("model", "blocks.0.fc.weight")
    assert {name: leaf.value for name, leaf in flat.values.items()} == {
        "lrs.0": 1.0,
        "lrs.1.a": 2,
        "config.module.lr": 3,
    }


@pytest.mark.parametrize(
    ("key", "cleaned"),
    [
        ("module.fc.weight", "fc.weight"),
        ("_orig_mod.module.fc.weight", "fc.weight"),
        ("block.module.weight", "block.module.weight"),
        ("block._orig_mod.weight", "block.weight"),
        ("a._checkpoint_wrapped_module.b._orig_mod.c", "a.b.c"),
        ("module", "module"),
    ],
)
def test_clean_key_removes_wrapper_prefixes(key, cleaned):
    assert clean_key(key) == cleaned


def test_a_dict_with_integer_keys_is_one_leaf_unless_it_holds_tensors():
    flat = flatten({"state": {0: {"m": Tensor()}}, "table": {1: "a", 2: "b"}}, tensor_type=Tensor)
    assert flat.tensors["state.0.m"].path == ("state", 0, "m")
    assert flat.values["table"].value == {1: "a", 2: "b"}


def test_dicts_with_integer_keys_are_not_rebuilt_as_lists():
    state = {"module.state": {0: {"m": Tensor()}, 1: {"m": Tensor()}}, "list": [Tensor(), {0: [Tensor(), 1]}]}
    flat = flatten(state, tensor_type=Tensor)
    assert flat.integer_keyed == {("state",), ("list", 1)}
    leaves = [(leaf.path, leaf.value) for leaf in (*flat.tensors.values(), *flat.values.values())]
    assert unflatten(leaves, flat.integer_keyed) == {"state": state["module.state"], "list": state["list"]}


def test_an_optimizer_that_has_not_stepped_has_an_empty_state():
    unstepped = SimpleNamespace(slots_like={"fc.weight": Tensor()})
    flat = flatten({"state": unstepped}, tensor_type=Tensor)
    assert flat.values["state"].value == {}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": object()}}, r"`a\.b` is a `builtins\.object`"),
        ({"a": [1, {2, 3}]}, r"`a\.1` is a `builtins\.set`"),
        ({"a.b": Tensor(), "a": {"b": Tensor()}}, r"name `a\.b`"),
        ({"a.b": 1, "a": {"b": Tensor()}}, r"name `a\.b`"),
        ({"x": {"module.w": Tensor(), "w": Tensor()}}, r"name `x\.w`"),
        ({"a": (Tensor(), 1)}, r"`a` is a tuple with a tensor"),
        ({"a": {"\ud800": Tensor()}}, r"the name 'a\.\\ud800' is not valid Unicode"),
        ({"\ud800": 1}, r"the name '\\ud800' is not valid Unicode"),
        ({"": Tensor()}, "a tensor has the name ``; expected a tree that names it"),
        ({"__metadata__": Tensor()}, "a tensor has the name `__metadata__`; expected"),
        (Tensor(), "the state is a single tensor; expected a tree that names it"),
        ({"a": {(1, 2): Tensor()}}, r"`a` holds tensors under the key \(1, 2\)"),
    ],
)
def test_unsupported_values_raise_with_their_path(state, message):
    with pytest.raises(CheckpointStateError, match=message):
        flatten(state, tensor_type=Tensor)


def test_a_tree_that_contains_itself_raises():
    state = {"a": {}}
    state["a"]["again"] = state
    with pytest.raises(CheckpointStateError, match="holds itself"):
        flatten(state, tensor_type=Tensor)
