"""Fixtures of the checkpoint tests."""

import importlib.util
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from support.ranks import run_ranks


@pytest.fixture
def server(s3d, monkeypatch):
    """The object store of this run, its keys in the environment."""
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    return s3d


@pytest.fixture(params=["disk", "store"])
def prefix(request, tmp_path, server):
    """Where checkpoints go: a folder that is not there yet, and a prefix with nothing under it."""
    if request.param == "disk":
        return str(tmp_path / "runs")
    return server.uri(f"prefix/{os.urandom(4).hex()}")


class FourRanks(NamedTuple):
    """What the jobs of four ranks left."""

    folder: Path
    """Each job's files lie below its name."""
    found: dict[str, list[Any]]
    """What each job returned, by rank."""


def module_beside(name: str) -> ModuleType:
    """The test module of that name, in a rank that knows only this file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_jobs(folder, uri):
    """All that needs the same four ranks."""
    warnings.simplefilter("ignore")  # torch's own, of a backend without a device
    return {
        "meshes": module_beside("test_torch_meshes").job(f"{folder}/meshes", uri),
        "stages": module_beside("test_torch_stages").job(f"{folder}/stages"),
    }


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory, s3d):
    """The jobs of `test_torch_meshes` and `test_torch_stages`, in one start of four ranks."""
    folder = tmp_path_factory.mktemp("four-ranks")
    uri = s3d.uri(f"four-ranks/{os.urandom(4).hex()}")
    by_rank = run_ranks(run_jobs, 4, str(folder), uri, init="gloo", timeout_s=280, env=s3d.env)
    return FourRanks(folder, {name: [found[name] for found in by_rank] for name in by_rank[0]})
