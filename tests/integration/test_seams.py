"""`hocket.dist` and `hocket.ckpt` pass the conformance suites that the trainer publishes."""

from __future__ import annotations

import pytest
import torch

from hocket.ckpt.torch import provide as provide_checkpoints
from hocket.dist.provider import provide as provide_parallelism
from hocket.trainer.testing import check_checkpoint_store, check_parallelism
from support.ranks import run_ranks


def hold_parallelism(config):
    parallelism = provide_parallelism(config, device="cpu", timeout_s=50)
    try:
        check_parallelism(lambda: parallelism)
    finally:
        parallelism.close()
    return parallelism.data_parallel


@pytest.mark.parametrize("config", [None, {}], ids=["replicated", "sharded"])
def test_parallelism_passes_the_conformance_suite(config):
    assert run_ranks(hold_parallelism, 2, config) == [(0, 2), (1, 2)]


def hold_store(folder):
    opened = []

    def make():
        opened.append(provide_checkpoints(folder))
        return opened[-1]

    try:
        check_checkpoint_store(make)
    finally:
        for store in opened:
            store.close()
    return torch.distributed.is_initialized()


def test_the_checkpoint_store_of_one_process_passes_the_suite(tmp_path):
    assert hold_store(str(tmp_path / "run")) is False


def test_the_checkpoint_store_of_two_ranks_passes_the_suite(tmp_path):
    assert run_ranks(hold_store, 2, str(tmp_path / "run"), init="gloo") == [True, True]
