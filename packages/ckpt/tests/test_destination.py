"""A destination or option that no conversion can use is refused before the source is opened."""

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.demo import write_demo
from hocket.native.errors import StoreConfigError, StorePermissionError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dir.pt").mkdir()
    os.symlink(tmp_path / "gone", tmp_path / "link")
    for name, marker in {
        "dcp": ".metadata",
        "st": "model.safetensors",
        "shards": "model.safetensors.index.json",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / marker).touch()
    write_demo(str(tmp_path / "demo"))
    return tmp_path


DESTINATIONS = {
    "a saved checkpoint": ("demo", "hocket", CheckpointExistsError, "of step 1000, and was not touched"),
    "a Hocket checkpoint for dcp": ("demo", "dcp", CheckpointExistsError, "not touched"),
    "a Hocket checkpoint for safetensors": ("demo", "safetensors", CheckpointExistsError, "not touched"),
    "dcp for hocket": ("dcp", "hocket", CheckpointExistsError, "not touched"),
    "safetensors for dcp": ("st", "dcp", CheckpointExistsError, "not touched"),
    "shards for hocket": ("shards", "hocket", CheckpointExistsError, "not touched"),
    "a file": ("file", "hocket", CheckpointNotFoundError, "`.*/file` is a file or a dangling link"),
    "below a file": ("file/x/y.pt", "torch", CheckpointNotFoundError, "`.*/file` is a file"),
    "below a link": ("link/x.safetensors", "safetensors", CheckpointNotFoundError, "dangling link"),
    "a folder": ("dir.pt", "torch", CheckpointExistsError, "is a folder; expected the name of a file"),
    "a suffix": ("x.zip", "torch", ValueError, "expected a file name that ends in one of .pt"),
    "plain HTTP": ("https://host/x", "hocket", StoreConfigError, "cannot be written to: plain HTTP"),
    "a hub": ("hf://owner/name", "hocket", StoreConfigError, "cannot be written to: a repository of a hub"),
    "a scheme": ("ftp://host/x", "dcp", StoreConfigError, "unknown scheme `ftp`"),
    "a slash": ("s3:/host/x", "dcp", StoreConfigError, "one slash after `s3:`"),
}
OPTIONS = {
    "format": ({"to": "zip"}, "`to` is 'zip'"),
    "dtype": ({"to": "dcp", "dtype": "BF17"}, "BF17"),
    "level": ({"to": "hocket", "compression": "zstd:99"}, "`compression` is 'zstd:99'"),
    "compression": ({"to": "dcp", "compression": "zstd:3"}, "only `hocket` compresses"),
    "step": ({"to": "torch", "step": 3}, "recorded by `hocket` only"),
    "a negative step": ({"to": "hocket", "step": -1}, "`step` is -1"),
    "user": ({"to": "hocket", "user": object()}, "`builtins.object` cannot be stored"),
    "memory": ({"to": "hocket", "memory_bytes": 5}, "`memory_bytes` is 5"),
}


@pytest.mark.parametrize("case", DESTINATIONS)
def test_a_destination_is_refused_before_a_source_that_does_not_exist(folder, case):
    name, to, error, message = DESTINATIONS[case]
    destination = name if ":/" in name else folder / name
    with pytest.raises(error, match=message):
        convert(folder / "no source", destination, to=to)
    with pytest.raises(CheckpointNotFoundError, match="no source"):
        convert(folder / "no source", folder / "free", to="hocket")


def test_no_request_for_the_source_is_sent_before_a_refusal(folder, server):
    source = server.uri(f"refused/{folder.name}/a.safetensors")
    save_file({"w": np.ones(4)}, folder / "a.safetensors")
    server.reset()
    for name, to, error, message in DESTINATIONS.values():
        with pytest.raises(error, match=message):
            convert(source, name if ":/" in name else folder / name, to=to)
    for options, message in OPTIONS.values():
        with pytest.raises((CheckpointError, ValueError), match=message):
            convert(source, folder / "free.pt", **options)
    assert server.stats()["requests"] == {}
    with pytest.raises(CheckpointNotFoundError):
        convert(source, folder / "free", to="hocket")
    assert server.stats()["requests"] != {}


def test_a_folder_that_cannot_be_written_to_is_refused_first(folder):
    locked = folder / "locked"
    locked.mkdir(mode=0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        for name, to in {"a": "hocket", "b/a.pt": "torch"}.items():
            with pytest.raises(StorePermissionError, match=f"no access to `{locked}/{name}`: the folder"):
                convert(folder / "no source", locked / name, to=to)
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_file_of_another_program_is_refused_before_the_source(tmp_path):
    import torch  # imported here, because the other tests need no torch
    import torch.distributed.checkpoint as dcp

    torch.save({"w": torch.ones(2)}, tmp_path / "own.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "empty.pt").touch()
    for name, to in {"own.pt": "torch", "old.pt": "torch", "empty.pt": "torch", "dcp": "dcp"}.items():
        with pytest.raises(CheckpointExistsError, match="and was not touched"):
            convert(tmp_path / "no source", tmp_path / name, to=to)


def test_the_command_names_the_destination_first(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        app(["convert", str(folder / "no source"), str(folder / "demo"), "--to", "hocket"])
    assert ended.value.code == 4
    assert "of step 1000, and was not touched" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "to"), {"h": "hocket", "d": "dcp", "s": "safetensors", "t.pt": "torch"}.items()
)
def test_a_finished_conversion_is_found_where_nothing_can_be_written(tmp_path, name, to):
    save_file({"w": np.ones(4)}, tmp_path / "a.safetensors")
    target = tmp_path / "out" / name
    num_files = convert(tmp_path / "a.safetensors", target, to=to).files
    os.chmod(target.parent, 0o555)
    assert convert(tmp_path / "a.safetensors", target, to=to).files_found >= num_files - 1
    os.chmod(target.parent, 0o755)
