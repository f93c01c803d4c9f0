"""Fixtures of the checkpoint tests."""

import os

import pytest


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
