"""Formats of torch and Hugging Face: Hocket reads their files, their readers open ours, `diff` compares."""

import collections
import pickle
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import hocket.ckpt
import hocket.ckpt.torch
from hocket.ckpt.cli.app import app
from hocket.ckpt.document.dtypes import DTYPES
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
)
from hocket.ckpt.formats.pickling import dumps
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.diff import diff
from support.sampling import cases
from support.stored import check_stored

# torch warns when the world has one process only, and when its own tools unpickle.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def tree():
    """Return a state of all dtypes, with views, tied tensors, an optimizer's integer keys and values."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 5, generator=generator)
    model = {"weight": weight, "tied": weight, "turned": torch.randn(6, 4, generator=generator).t()}
    model["every second"] = torch.arange(10)[::2]
    model["spread"] = torch.randn(3, 1, generator=generator).expand(3, 4)
    for name, (_, _, torch_name, _) in DTYPES.items():
        bits = torch.randint(0, 2, (2, 3, 8), generator=generator, dtype=torch.uint8)
        model[f"of.{name}"] = bits.view(getattr(torch, torch_name))
        model[f"0-d.{name}"] = bits.reshape(-1)[:8].view(getattr(torch, torch_name))[0].clone()
        model[f"empty.{name}"] = torch.empty(0, 3, dtype=getattr(torch, torch_name))
    slots = {0: {"step": torch.tensor(3.0), "m": torch.ones(2)}, 1: {"m": torch.zeros(3)}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]
    return {
        "model": model,
        "optimizer": {"state": slots, "param_groups": groups},
        "note": "é",
        "large": 2**80,
        "bytes": b"\x00\xff",
        "nothing": None,
        "loss": float("inf"),
    }


def leaves(node, path=""):
    if isinstance(node, torch.Tensor):
        return {path: node}
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found = {}
    for key, child in items:
        found |= leaves(child, f"{path}.{key}" if path else str(key))
    return found


def raw(tensor):
    if not tensor.numel():
        return b""  # torch cannot view an empty tensor as bytes
    # `clone` sets stride 1, which a view as bytes needs: one element is contiguous at any stride.
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def check(uri, expected):
    return check_stored(uri, expected, raw)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("interop") / "state.pt"
    torch.save(tree(), path)
    return path


def writers():
    from torch.distributed.checkpoint._extension import ZStandard

    return {
        "one file": {},
        "threads": {"thread_count": 4},
        "a file an item": {"single_file_per_rank": False},
        "zstd": {"_extensions": [ZStandard()]},
    }


@pytest.mark.parametrize("form", ["one file", "threads", "a file an item", "zstd"])
def test_checkpoints_saved_by_dcp_are_read(tmp_path, form):
    writer = dcp.FileSystemWriter(str(tmp_path / "x"), **writers()[form])
    dcp.save(tree(), storage_writer=writer, no_dist=True)
    values = check(tmp_path / "x", leaves(tree())).contents.values
    assert values["optimizer.param_groups.0.betas"].value == (0.9, 0.99)
    assert values["large"].value == 2**80
    assert values["bytes"].value == b"\x00\xff"


def test_files_of_torch_save_are_read(saved):
    contents = check(saved, leaves(tree())).contents
    assert contents.tensors["model.tied"].same_as == "model.weight"
    assert contents.values["loss"].value == float("inf")
    assert contents.values["note"].value == "é"


NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u8", "f4", "f8"]


def test_rng_states_and_timestamps_of_a_trainers_file_are_read(tmp_path):
    """Read random generators' states and timestamps as in Composer's `ep0-ba1-rank0.pt`."""
    import datetime as dt
    import random

    random.seed(0)
    state = {
        "state": {"model": {"w": torch.ones(2)}, "timestamp": {"total_wct": dt.timedelta(seconds=3)}},
        "rng": [{"python": random.getstate(), "numpy": np.random.RandomState(0).get_state()}],
        "best": {code: np.array([-1 if code[0] != "u" else 2**63]).astype(code)[0] for code in NUMBERS},
        "array": np.arange(3),
    }
    torch.save(state, tmp_path / "ep0-ba1-rank0.pt")
    checkpoint = hocket.ckpt.open(str(tmp_path / "ep0-ba1-rank0.pt"))
    np.testing.assert_array_equal(checkpoint["state.model.w"], np.ones(2, "f4"))
    assert checkpoint.contents.values["rng.0.python"].value == random.getstate()
    numbers = {code: checkpoint.contents.values[f"best.{code}"].value for code in NUMBERS}
    assert [(code, type(value), value) for code, value in numbers.items()] == [
        (code, type(value.item()), value.item()) for code, value in state["best"].items()
    ]
    opaque = checkpoint.contents.opaque
    assert opaque.keys() == {"rng.0.numpy", "array", "state.timestamp.total_wct"}
    assert opaque["array"] == "a numpy.ndarray, which cannot be read here"
    ids = tuple(range(400_000))
    items = {"w": torch.ones(2), **state["best"], "x": state["array"], "ids": ids}
    dcp.save(items, checkpoint_id=tmp_path / "d", no_dist=True)
    contents = hocket.ckpt.open(str(tmp_path / "d")).contents
    assert {code: contents.values[code].value for code in NUMBERS} == numbers
    assert contents.opaque == {"x": opaque["array"]}
    assert contents.values["ids"].value == ids


def test_conjugate_and_negative_views_raise_with_their_names(tmp_path):
    items = torch.arange(1, 7).reshape(2, 3) * (1 + 2j)
    lazy = {"conj": items.conj(), "neg": items.clone().conj().imag}
    torch.save({**lazy, "w": items}, tmp_path / "x.pt")
    checkpoint = hocket.ckpt.open(str(tmp_path / "x.pt"))
    assert checkpoint["w"].tobytes() == raw(items)
    assert set(checkpoint) == {"w"}
    for name in lazy:
        with pytest.raises(CheckpointIncompatibleError, match=rf"`{name}`.* `\.resolve_conj\(\)`"):
            checkpoint[name]
    assert set(convert(checkpoint.uri, str(tmp_path / "h"), to="hocket").left_out) == set(lazy)
    # `.metadata` does not record the conjugate bit: it is found when the item is read.
    dcp.save({"w": items.conj()}, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    with pytest.raises(CheckpointIncompatibleError, match=r"__0_0\.distcp.* `\.resolve_conj\(\)`"):
        hocket.ckpt.open(str(tmp_path / "d"))["w"]


def test_values_that_torch_loads_with_weights_only_are_read_or_named(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = "kept by torch alone"
    scales = torch.ones(1), torch.zeros(1)
    told = {
        "bytearray": bytearray(b"x"), "complex": 1j, "collections.Counter": collections.Counter("aab"),
        "torch.device": torch.device("cpu"), "torch.qint32": torch.qint32, "torch.layout": torch.strided,
        "sparse tensor": torch.eye(2).to_sparse(), "meta": torch.ones(2, device="meta"),
        "quantized tensor": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        # torch 2.9's `quantize_per_channel` to qint32 has an instruction that some processors do not know.
        "by channel": torch._make_per_channel_quantized_tensor(torch.ones(1, 4).int(), *scales, 0),
    }  # fmt: skip
    state = {"parameter": parameter, "x": list(told.values())}
    torch.save(state, tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=True)
    # `weights_only` accepts all `bytes` but empty ones, which protocol 2 writes as a call.
    torch.save({**state, "empty": b""}, tmp_path / "x.pt")
    checkpoint = hocket.ckpt.open(str(tmp_path / "x.pt"))
    assert checkpoint["parameter"].tobytes() == raw(parameter.detach())
    assert checkpoint.contents.values["empty"].value == b""
    reasons = checkpoint.contents.opaque
    assert reasons.keys() == {f"x.{place}" for place in range(len(told))}
    for kind, reason in zip(told, reasons.values(), strict=True):
        assert kind.replace("by channel", "quantized tensor") in reason


def test_sound_but_unsupported_files_raise_incompatible_and_not_corrupt(tmp_path):
    itself = {}
    itself["x"] = itself
    for state, why in [
        ({"a": {"b": 1}, "a.b": 2}, "the name `a.b`"), ({1: torch.ones(1), "1": 2}, "the name `1`"),
        ({"x": "\ud800"}, "a surrogate"), (itself, "holds itself"),
    ]:  # fmt: skip
        torch.save(state, tmp_path / "x.pt")
        with pytest.raises(CheckpointIncompatibleError, match=why):
            hocket.ckpt.open(str(tmp_path / "x.pt"))
    with zipfile.ZipFile(tmp_path / "d.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("d/data.pkl", b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointIncompatibleError, match=r"`d/data\.pkl` .* compressed"):
        hocket.ckpt.open(str(tmp_path / "d.pt"))


def test_standard_readers_open_converted_files(saved, tmp_path):
    expected = leaves(tree())
    for to, name in [("hocket", "h"), ("dcp", "d"), ("safetensors", "s"), ("torch", "t.pt")]:
        convert(str(saved), str(tmp_path / name), to=to)
        check(tmp_path / name, expected)
    loaded = torch.load(tmp_path / "t.pt", weights_only=True)
    assert {name: raw(tensor) for name, tensor in leaves(loaded).items()} == {
        name: raw(tensor) for name, tensor in expected.items()
    }
    assert loaded["optimizer"]["state"].keys() == {0, 1}
    assert loaded["optimizer"]["param_groups"] == tree()["optimizer"]["param_groups"]
    assert loaded["model"]["tied"].data_ptr() == loaded["model"]["weight"].data_ptr()
    into = {"model": {name: torch.empty_like(tensor) for name, tensor in tree()["model"].items()}}
    into["model"]["spread"] = torch.empty(3, 4)
    dcp.load(into, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    for name, tensor in tree()["model"].items():
        assert raw(into["model"][name]) == raw(tensor), name
    dcp_to_torch_save(str(tmp_path / "d"), str(tmp_path / "d.pt"))
    again = torch.load(tmp_path / "d.pt", weights_only=True)
    assert again["optimizer"]["param_groups"] == tree()["optimizer"]["param_groups"]
    assert again["optimizer"]["state"].keys() == {"0", "1"}
    with safe_open(str(tmp_path / "s/model.safetensors"), framework="pt") as file:
        assert set(file.keys()) == set(expected)
        for name, tensor in expected.items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
            assert raw(read) == raw(tensor), name
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("number", [2**2039 - 1, 2**2039, -(2**2039), -(2**8000)])
def test_integers_of_any_size_are_pickled(number):
    assert pickle.loads(dumps(number)) == number


@pytest.mark.parametrize("shard_bytes", [1 << 20, 100], ids=["one file", "many"])
def test_torchs_hugging_face_reader_loads_converted_files(saved, tmp_path, shard_bytes):
    known = ("F64", "F32", "F16", "BF16")
    convert(
        str(saved), str(tmp_path / "s"), to="safetensors", max_shard_bytes=shard_bytes,
        include=["model.weight", "model.turned", *(f"model.*.{name}" for name in known)],
    )  # fmt: skip
    assert (len(list((tmp_path / "s").glob("*.safetensors"))) > 1) == (shard_bytes == 100)
    names = {"model.weight", "model.turned"}
    names |= {f"model.{form}.{name}" for form in ("of", "0-d", "empty") for name in known}
    expected = {name: tensor for name, tensor in leaves(tree()).items() if name in names}
    assert set(hocket.ckpt.open(str(tmp_path / "s"))) == names == set(expected)
    into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "s")), no_dist=True)
    for name, tensor in expected.items():
        assert raw(into[name]) == raw(tensor), name


@settings(
    max_examples=cases(full=200, sample=4), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.data())
def test_any_chain_of_conversions_gives_the_original_back(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("chain")
    tensors = {}
    for number in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(sorted(DTYPES)))
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        seed = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
        bits = torch.randint(0, 2, (*shape, 8), generator=seed, dtype=torch.uint8)
        tensors[f"t{number}"] = bits.view(getattr(torch, DTYPES[name].torch))[..., 0]
    torch.save(tensors, folder / "0.pt")
    source = folder / "0.pt"
    for step in range(data.draw(st.integers(1, 3))):
        to = data.draw(st.sampled_from(["hocket", "dcp", "safetensors", "torch"]))
        target = folder / (f"{step}.out.pt" if to == "torch" else f"{step}.out")
        convert(
            str(source),
            str(target),
            to=to,
            max_shard_bytes=data.draw(st.integers(1, 99)),
            memory_bytes=16 << 20,
        )
        source = target
    check(source, tensors)
    assert diff(str(folder / "0.pt"), str(source)).is_empty


def test_an_optimizers_state_survives_every_conversion_to_torch(tmp_path, capsys):
    def adam():
        weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        return weight, torch.optim.AdamW([weight], lr=0.1)

    weight, optimizer = adam()
    (weight**2).sum().backward()
    optimizer.step()
    state = {"o": optimizer.state_dict()}
    hocket.ckpt.torch.save(state, str(tmp_path / "saved"), step=3, user="me")
    torch.save(state, tmp_path / "a.pt")
    convert(str(tmp_path / "a.pt"), str(tmp_path / "by way of"), to="hocket")
    for number, source in enumerate(["saved", "by way of"]):
        for renamed in ({}, {"o": "p.q"}):
            target = tmp_path / f"{number}-{len(renamed)}.pt"
            done = convert(str(tmp_path / source), str(target), to="torch", rename=renamed)
            assert ("(user)" in done.left_out, done.text_keyed) == (source == "saved", ())
            loaded = torch.load(target, weights_only=True)
            _, fresh = adam()
            fresh.load_state_dict(loaded["p.q" if renamed else "o"])
            for slot, tensor in optimizer.state[weight].items():
                assert torch.equal(next(iter(fresh.state.values()))[slot], tensor), slot
    # A distributed checkpoint does not record that keys are integers, and the command reports this.
    convert(str(tmp_path / "saved"), str(tmp_path / "d"), to="dcp")
    with pytest.raises(SystemExit):
        app(["convert", str(tmp_path / "d"), str(tmp_path / "d.pt"), "--to", "torch"])
    assert "keys of o.state are text" in capsys.readouterr().out
    # `diff` compares the step, user and per-rank values, too, and `convert` names those that are lost.
    hocket.ckpt.torch.save(state, str(tmp_path / "other"), step=4, user="me", per_rank={"n": 1})
    assert diff(str(tmp_path / "saved"), str(tmp_path / "other")).values == {
        "(step)": (3, 4), "(per rank)": (None, [{"n": 1}])
    }  # fmt: skip
    with pytest.raises(CheckpointIncompatibleError, match=r"is a file of torch\.save.*HocketReader"):
        hocket.ckpt.torch.load(str(tmp_path / "a.pt"), state)


def test_convert_casts_selects_and_renames_tensors(saved, tmp_path):
    done = convert(
        str(saved), str(tmp_path / "x"), to="safetensors", dtype="BF16",
        include=["model.*"], exclude=["*0-d*", "*of.*", "*empty*"], rename={"model": ""}, max_shard_bytes=100,
    )  # fmt: skip
    checkpoint = hocket.ckpt.open(str(tmp_path / "x"))
    assert set(checkpoint) == {"weight", "tied", "turned", "every second", "spread"}
    assert done.files == len(list((tmp_path / "x").iterdir())) > 2
    expected = tree()["model"]["weight"].to(torch.bfloat16)
    assert checkpoint["weight"].dtype == ml_dtypes.bfloat16
    assert checkpoint["weight"].tobytes() == raw(expected)
    assert checkpoint["every second"].dtype == np.int64
    with pytest.raises(CheckpointExistsError):
        convert(str(saved), str(tmp_path / "x"), to="safetensors", max_shard_bytes=100)


def test_a_failed_conversion_keeps_finished_files_and_continues(saved, tmp_path, monkeypatch):
    def fail(*_args, **_options):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr("hocket.ckpt.Checkpoint.read", fail)
        with pytest.raises(OSError, match="gone"):
            convert(str(saved), str(tmp_path / "x"), to="dcp", max_shard_bytes=50)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left
    assert all(name.endswith(".distcp") and not name.startswith(".") for name in left), left
    assert convert(str(saved), str(tmp_path / "x"), to="dcp", max_shard_bytes=50).files_found == len(left)
    assert diff(str(saved), str(tmp_path / "x")).is_empty


def test_diff_finds_the_differences(saved, tmp_path, capsys):
    changed = tree()
    changed["model"]["weight"] = changed["model"]["weight"].clone()
    changed["model"]["weight"][2, 1] += 0.5
    changed["model"]["turned"] = changed["model"]["turned"][:2]
    changed["model"]["every second"] = changed["model"]["every second"].to(torch.int32)
    changed["loss"] = 1.0
    del changed["model"]["spread"]
    torch.save(changed, tmp_path / "b.pt")
    found = diff(str(saved), str(tmp_path / "b.pt"))
    assert {tensor.name: tensor.kind for tensor in found.tensors} == {
        "model.weight": "values", "model.turned": "shape", "model.every second": "dtype"
    }  # fmt: skip
    weight = next(tensor for tensor in found.tensors if tensor.kind == "values")
    assert weight.num_items == 1
    assert weight.largest_absolute == pytest.approx(0.5)
    assert (found.only_a, found.only_b, list(found.values)) == (["model.spread"], [], ["loss"])
    for arguments, code in [((saved, saved), 0), ((saved, tmp_path / "b.pt"), 1)]:
        with pytest.raises(SystemExit) as ended:
            app(["diff", *map(str, arguments)])
        assert ended.value.code == code
        assert ("equal: " if code == 0 else "different: 3 tensors differ") in capsys.readouterr().out


def test_conversions_between_stores(saved, tmp_path, server):
    for to, name in [("dcp", "dcp"), ("torch", "x.pt"), ("safetensors", "hf"), ("hocket", "h")]:
        uri = server.uri(f"interop/{name}")
        convert(str(saved), uri, to=to, max_shard_bytes=400)
        check(uri, leaves(tree()))
        assert set(diff(uri, str(saved)).only_b) <= set(hocket.ckpt.open(str(saved)).contents.values)


def test_the_command_converts_and_shows_without_torch(saved, tmp_path):
    script = (
        "import sys, json\n"
        "from hocket.ckpt.cli import main\n"
        f"src, dst = {str(saved)!r}, {str(tmp_path / 'd')!r}\n"
        "for args in (['inspect', src], ['verify', src], ['convert', src, dst, '--to', 'dcp', '--json'],\n"
        "             ['inspect', dst, '--tensor', 'model.weight'], ['verify', dst], ['diff', src, dst]):\n"
        "    sys.argv = ['hocket-ckpt', *args]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, args\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    assert "file of torch.save" in done.stdout


def test_transformers_loads_converted_files(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs `uv sync --group transformers`")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    convert(str(tmp_path / "model.pt"), str(tmp_path / "hf"), to="safetensors", max_shard_bytes=4000)
    config.save_pretrained(tmp_path / "hf")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_file_from_before_torch_1_6_raises_with_its_path(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointIncompatibleError, match=r"old\.pt.*before torch 1\.6.*save it once"):
        hocket.ckpt.open(tmp_path / "old.pt")


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_tensor_with_the_item_of_another_raises_and_is_named(tmp_path, is_compressed):
    from torch.distributed.checkpoint._extension import ZStandard

    extensions = [ZStandard()] if is_compressed else None
    writer = dcp.FileSystemWriter(tmp_path, _extensions=extensions)
    transposed = torch.arange(12.0).reshape(3, 4).T
    dcp.save({"a": transposed, "b": torch.zeros(2, 3, 4)}, storage_writer=writer, no_dist=True)
    with (tmp_path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    items = {index.fqn: index for index in metadata.storage_data}
    metadata.storage_data[items["b"]] = metadata.storage_data[items["a"]]
    with (tmp_path / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    checkpoint = hocket.ckpt.open(str(tmp_path))
    for _ in range(2):
        np.testing.assert_array_equal(checkpoint["a"], transposed.numpy())
        with pytest.raises(
            CheckpointCorruptError, match=r"^Tensor `b`: .*`\.metadata` says F32 of shape \[2, 3, 4\]"
        ):
            checkpoint["b"]
