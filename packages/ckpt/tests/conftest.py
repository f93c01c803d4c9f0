"""Fixtures of the checkpoint tests: object store, prefixes, jobs of four ranks, and failing system calls."""

import importlib.util
import os
import shutil
import subprocess
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from support.ranks import run_ranks


@pytest.fixture
def server(s3d, monkeypatch):
    """Return the run's object store, with its credentials in the environment."""
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    return s3d


@pytest.fixture(params=["disk", "store"])
def prefix(request, tmp_path, server):
    """Return an unused location for checkpoints: a folder that does not exist, or a store's empty prefix."""
    if request.param == "disk":
        return str(tmp_path / "runs")
    return server.uri(f"prefix/{os.urandom(4).hex()}")


class FourRanks(NamedTuple):
    """The files and results of the jobs of four ranks."""

    folder: Path
    """The folder with a subfolder of files for each job, named after the job."""
    found: dict[str, list[Any]]
    """The results of each job, by rank."""


def module_beside(name: str) -> ModuleType:
    """Import a test module of this folder by path, as a rank must that imports this file only."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_jobs(folder, uri):
    """Run all jobs that need four ranks, and return their results by name."""
    warnings.simplefilter("ignore")  # torch warns of a backend without a device
    return {
        "meshes": module_beside("test_torch_meshes").job(f"{folder}/meshes", uri),
        "stages": module_beside("test_torch_stages").job(f"{folder}/stages"),
    }


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory, s3d):
    """Run the jobs of `test_torch_meshes` and `test_torch_stages` in one group of four ranks."""
    folder = tmp_path_factory.mktemp("four-ranks")
    uri = s3d.uri(f"four-ranks/{os.urandom(4).hex()}")
    by_rank = run_ranks(run_jobs, 4, str(folder), uri, init="gloo", timeout_s=280, env=s3d.env)
    return FourRanks(folder, {name: [found[name] for found in by_rank] for name in by_rank[0]})


# A library that wraps calls of the C library: for files that match `FAULT_FILE`, the call named by
# `FAULT_CALL` fails with `FAULT_ERRNO`, or stops the process if `FAULT_ERRNO` is 0.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
static int fails(const char *call, int fd) {
    const char *name = getenv("FAULT_CALL"), *file = getenv("FAULT_FILE"), *number = getenv("FAULT_ERRNO");
    char link[64], path[4096] = {0};
    if (!name || !file || !number || strcmp(name, call)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) < 0 || !strstr(path, file)) return 0;
    if (!atoi(number)) return raise(SIGSTOP);
    errno = atoi(number);
    return 1;
}
#define SHIM(result, name, call, parameters, ...) result name parameters { \\
    return fails(call, fd) ? -1 : ((result (*) parameters) dlsym(RTLD_NEXT, #name))(__VA_ARGS__); }
SHIM(ssize_t, pwrite64, at ? "data" : "header", (int fd, const void *data, size_t size, off_t at),
     fd, data, size, at)
SHIM(ssize_t, write, "write", (int fd, const void *data, size_t size), fd, data, size)
SHIM(int, fsync, "fsync", (int fd), fd)
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """Return the path of the preloadable library that makes calls fail, or None without a C compiler."""
    if shutil.which("cc") is None:
        return None
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    command = ["cc", "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"]
    subprocess.run(command, timeout=60, check=True)
    return str(folder / "shim.so")
