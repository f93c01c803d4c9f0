"""Files and folders of other programs: each is read, or named with the way to a form that is read."""

import os
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hocket.ckpt  # noqa: E402
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointNotFoundError  # noqa: E402
from hocket.ckpt.verbs.convert import convert  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

STATE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3), "h": torch.ones(2, dtype=torch.bfloat16)},
    "parameter": torch.nn.Parameter(torch.zeros(2)),
    "step": 7,
    "large": 2**40,
    "negative": -(2**33),
    "flags": (True, False, None),
    "rate": 0.5,
    "name": "hé\n",
    "bytes": b"\x00abc",
}


def test_files_of_torch_beside_others_are_not_called_corrupt(tmp_path):
    torch.save(STATE, tmp_path / "model.pt")
    torch.save({"lr": 0.1}, tmp_path / "other.pt")
    with pytest.raises(CheckpointNotFoundError, match="2 files could be meant"):
        hocket.ckpt.open(str(tmp_path))
    np.testing.assert_array_equal(
        hocket.ckpt.open(str(tmp_path / "model.pt"))["model.w"], STATE["model"]["w"]
    )
    # As transformers' trainer saves a model.
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert list(hocket.ckpt.open(str(tmp_path))) == ["w"]


def test_pickles_of_every_protocol_that_torch_loads_are_read(tmp_path):
    for protocol in range(1, 6):
        path = tmp_path / f"{protocol}.pt"
        torch.save(STATE, path, pickle_protocol=protocol)
        loaded = torch.load(path, weights_only=False)
        opened = hocket.ckpt.open(str(path))
        for name, expected in {"model.w": loaded["model"]["w"], "parameter": loaded["parameter"]}.items():
            np.testing.assert_array_equal(opened[name], expected.detach().numpy())
        values = {name: record.value for name, record in opened.contents.values.items()}
        assert not opened.contents.opaque
        wanted = {name: value for name, value in loaded.items() if name not in ("model", "parameter")}
        assert values == wanted, protocol
    torch.save(STATE, tmp_path / "0.pt", pickle_protocol=0)
    # torch 2.9 does not say why.
    with pytest.raises(AssertionError, match="must be a tuple" if torch.__version__ >= "2.10" else None):
        torch.load(tmp_path / "0.pt", weights_only=False)
    with pytest.raises(CheckpointIncompatibleError, match="protocol 0"):
        hocket.ckpt.open(str(tmp_path / "0.pt"))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_programs_old_files_and_pickles_are_named(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    torch.export.save(torch.export.export(module, (torch.ones(1, 2),)), tmp_path / "program.pt2")
    torch.jit.save(torch.jit.script(module), tmp_path / "script.pt")
    for protocol in (0, 1, 2, 4):
        path = tmp_path / f"old{protocol}.pt"
        torch.save(STATE, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"w": np.ones(2)}))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    for name in ("pointer.pt", "pointer.safetensors"):
        (tmp_path / name).write_bytes(pointer)
    for name, told in {
        "program.pt2": "program of `torch.export`",
        "script.pt": "program of TorchScript",
        "old*.pt": "before torch 1.6",
        "plain.pt": "plain pickle",
        "pointer.*": "pointer of Git LFS",
    }.items():
        for path in tmp_path.glob(name):
            with pytest.raises(CheckpointIncompatibleError, match=told):
                hocket.ckpt.open(str(path))
    lone = tmp_path / "lone"
    lone.mkdir()
    (tmp_path / "program.pt2").rename(lone / "program.pt2")
    with pytest.raises(CheckpointIncompatibleError, match=r"program of `torch.export`"):
        hocket.ckpt.open(str(lone))


def test_folders_of_other_programs_are_named(tmp_path):
    step = tmp_path / "deepspeed" / "global_step10"
    megatron = tmp_path / "megatron" / "iter_0000010" / "mp_rank_00"
    unfinished = tmp_path / "unfinished"
    for folder in (step, megatron, unfinished):
        folder.mkdir(parents=True)
    (tmp_path / "deepspeed" / "latest").write_text("global_step10")
    part = step / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for path in (part, step / "mp_rank_00_model_states.pt", megatron / "model_optim_rng.pt"):
        torch.save({"module": {"w": torch.ones(2)}}, path)
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("10")
    (unfinished / "__0_0.distcp").write_bytes(b"")
    for path, told in (
        (step.parent, "DeepSpeed.*zero_to_fp32.py"),
        (step, "DeepSpeed.*zero_to_fp32.py"),
        (part, "DeepSpeed.*zero_to_fp32.py"),
        (megatron.parents[1], "Megatron"),
        (megatron.parent, "Megatron"),
        (unfinished, "without its `.metadata`"),
    ):
        with pytest.raises(CheckpointIncompatibleError, match=told):
            hocket.ckpt.open(str(path))
    assert list(hocket.ckpt.open(str(step / "mp_rank_00_model_states.pt"))) == ["module.w"]
    # The same folder with a model that can be read.
    torch.save({"w": torch.ones(2)}, step.parent / "pytorch_model.bin")
    assert list(hocket.ckpt.open(str(step.parent))) == ["w"]


def save_rank_files(folder):
    """Save shards of FSDP2 and other distributed tensors of this rank, each with `torch.save`."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate

    rank = int(os.environ["RANK"])
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)
    fully_shard(model, mesh=mesh)
    whole = torch.arange(4.0)
    spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    states = {
        "fsdp2": model.state_dict(),
        "partial": {"w": DTensor.from_local(whole, mesh, [Partial()])},
        "fsdp1": {"w": sharded_tensor.rand(spec, 4, 2)},
        "replicated": {"w": DTensor.from_local(whole, mesh, [Replicate()])},
    }
    for name, state in states.items():
        torch.save(state, f"{folder}/{name}-rank{rank}.pt")


@pytest.mark.timeout(120)
def test_files_of_single_ranks_are_named_unless_they_hold_whole_tensors(tmp_path):
    run_ranks(save_rank_files, 2, str(tmp_path), init="gloo")
    for name, told in {
        "fsdp2": r"`weight` is a DTensor of shape \[4, 3\] .* part, shape \[2, 3\].*full_state_dict",
        "partial": r"`w` is a DTensor of shape \[4\]",
        "fsdp1": r"`w` is a ShardedTensor of shape \[4, 2\]",
    }.items():
        for rank in range(2):
            path = str(tmp_path / f"{name}-rank{rank}.pt")
            with pytest.raises(CheckpointIncompatibleError, match=told):
                convert(path, str(tmp_path / "out"), to="hocket")
    replicated = hocket.ckpt.open(str(tmp_path / "replicated-rank1.pt"))
    assert (set(replicated), dict(replicated.contents.opaque)) == ({"w"}, {})
    np.testing.assert_array_equal(replicated["w"], np.arange(4, dtype="f4"))
