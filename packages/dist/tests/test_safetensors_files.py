"""Weights are read from object stores and from a hub straight into shards."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hocket.dist import provide
from hocket.dist.errors import WeightsError
from hocket.dist.layout.safetensors_files import open_folder
from hocket.dist.layout.safetensors_load import load_safetensors
from support.hub import Hub
from support.s3d import Server
from support.standing_ranks import StandingRanks

NAME = "models/owner/model"
INDEX = "model.safetensors.index.json"


class Model(nn.Module):
    """A model with matrices, a vector and a scalar, for loading only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 10) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.small = nn.Parameter(torch.ones(5, 3, dtype=torch.bfloat16))


def make_files(seed: int) -> dict[str, bytes]:
    """Return a folder of two files with an index."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(seed)
    state = {name: torch.randn_like(value) for name, value in Model().state_dict().items()}
    parts = {f"model-{half + 1:05}-of-00002.safetensors": list(state)[half::2] for half in range(2)}
    files = {file: safetensors.save({name: state[name] for name in names}) for file, names in parts.items()}
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    return files | {INDEX: json.dumps(index).encode(), "config.json": b"{}"}


def load(place: str, env: Mapping[str, str], config: Mapping[str, object]) -> list[bytes]:
    """Lay a model out with the weights of a folder, and return the bytes of its whole values."""
    with patch.dict(os.environ, env):
        with torch.device("meta"):
            model = Model()
        with provide({**config, "initial_weights": place}, device="cpu", timeout_s=60) as parallelism:
            parallelism.lay_out(model)
            values = [
                value.full_tensor() if isinstance(value, DTensor) else value for value in model.parameters()
            ]
            return [value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for value in values]


def expected(files: Mapping[str, bytes]) -> list[bytes]:
    """Return the bytes of the values in a folder, in the order of the model's parameters."""
    safetensors = pytest.importorskip("safetensors.torch")
    state = {}
    for file, data in files.items():
        state |= safetensors.load(data) if file.endswith(".safetensors") else {}
    names = [name for name, _ in Model().named_parameters()]
    return [state[name].reshape(-1).view(torch.uint8).numpy().tobytes() for name in names]


def test_weights_of_a_hub_are_equal_on_any_number_of_ranks_though_it_moves(
    one_rank: None, two_ranks: StandingRanks, tmp_path: Path
) -> None:
    with Hub() as hub:
        env, repository, files = hub.clean_env(tmp_path), hub.repository(NAME), make_files(1)
        first = repository.commit(files)
        assert load("hf://owner/model", env, {}) == expected(files)
        # Whichever rank asks first, the other finds a later commit.
        later = [make_files(seed) for seed in range(2, 5)]
        hub.after_revision = lambda: repository.commit(later.pop() if later else {})
        found = two_ranks.run(load, "hf://owner/model@main", env, {})
        assert found == [expected(files)] * 2
        assert len(later) == 1
        assert found == two_ranks.run(load, f"hf://owner/model@{first}", env, {})


def test_weights_of_an_object_store_are_read_by_rows(
    one_rank: None, two_ranks: StandingRanks, s3d: Server
) -> None:
    files, place = make_files(7), f"dist-weights-{os.urandom(3).hex()}"
    from hocket.native import Store

    with patch.dict(os.environ, s3d.env):
        store = Store(s3d.uri(place))
        for name, data in files.items():
            store.put(name, data)
    for ranks in (
        two_ranks.run(load, s3d.uri(place), dict(s3d.env), {}),
        [load(s3d.uri(place), s3d.env, {})],
    ):
        assert all(found == expected(files) for found in ranks)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "its header would have 0 bytes"),
        (struct.pack("<Q", 1 << 40) + b"{}", "its header would have 1099511627776 bytes"),
        (struct.pack("<Q", 2) + b"[]", "is no safetensors file"),
        (struct.pack("<Q", 4) + b"{bad", "is no safetensors file"),
    ],
)
def test_a_damaged_file_is_named(data: bytes, words: str) -> None:
    from hocket.native import Store

    place = f"memory://weights-{os.urandom(3).hex()}"
    Store(place).put("model.safetensors", data)
    with pytest.raises(WeightsError, match=words) as caught:
        load_safetensors(Model(), place)
    assert f"{place}/model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}, "has the dtype 'F99'"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "expected 8 bytes within 4"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "expected 8 bytes within 4"),
    ],
)
def test_an_entry_that_does_not_fit_the_file_is_refused(entry: object, words: str) -> None:
    from hocket.native import Store

    place, header = f"memory://weights-{os.urandom(3).hex()}", json.dumps({"scale": entry}).encode()
    Store(place).put("model.safetensors", struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(WeightsError, match=words):
        load_safetensors(Model(), place)


def test_tensors_of_rarer_types_are_read_and_unknown_ones_are_in_the_way_of_no_other() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    from hocket.native import Store

    store = Store(f"memory://weights-{os.urandom(3).hex()}")
    dtypes = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.bool)
    state = {f"x.{dtype}": torch.arange(6).reshape(3, 2).to(dtype) for dtype in dtypes}
    model = Model()
    state |= {"x.new": torch.ones(4, dtype=torch.uint8)} | model.state_dict()
    data = safetensors.save(state).replace(b'"dtype":"U8"', b'"dtype":"F4"')
    store.put("model.safetensors", data)
    other = Model()
    load_safetensors(other, store.uri)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    with open_folder(store.uri).open("model.safetensors") as file:
        for dtype in dtypes:
            found = file.get_slice(f"x.{dtype}")[1:3]
            assert (found.dtype, tuple(found.shape)) == (dtype, (2, 2))
            assert torch.equal(found.view(torch.uint8), state[f"x.{dtype}"][1:3].view(torch.uint8))
        with pytest.raises(WeightsError, match=r"`x.new` in memory://.* has the dtype 'F4', expected one of"):
            file.get_slice("x.new")


@pytest.mark.parametrize("index", [b"{}", b"[1]", b"{bad", b'{"weight_map": ["a"]}'])
def test_a_damaged_index_is_named(index: bytes) -> None:
    from hocket.native import Store

    store = Store(f"memory://weights-{os.urandom(3).hex()}")
    store.put(INDEX, index)
    with pytest.raises(WeightsError, match=r"weights-.*/model.safetensors.index.json is no index of"):
        load_safetensors(Model(), store.uri)


def test_a_folder_without_the_files_of_its_index_is_refused() -> None:
    from hocket.native import Store

    store = Store(f"memory://weights-{os.urandom(3).hex()}")
    with pytest.raises(WeightsError, match="has no safetensors files"):
        load_safetensors(Model(), store.uri)
    store.put(INDEX, b'{"weight_map": {"scale": "a.safetensors"}}')
    with pytest.raises(WeightsError, match=r"names 1 files that are absent, the first .*/a.safetensors"):
        load_safetensors(Model(), store.uri)
