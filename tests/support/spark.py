"""A Spark of this machine for the tests of a run, in a Java machine that ends with it."""

from __future__ import annotations

import gc
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from support import leaks
from support.s3d import Server

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
}


@pytest.fixture(scope="session")
def spark(s3d: Server) -> Iterator[Any]:
    """Return Spark's session, for the whole run, since a process starts Spark once.

    It has two tasks at a time, tries each three times, and its tasks find the server `s3d`.
    """
    sql = pytest.importorskip("pyspark.sql", reason="needs `uv sync --group spark`")
    pytest.importorskip("pyarrow", reason="needs `uv sync --group datasets`")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        builder = sql.SparkSession.builder.master("local[2,3]")
        for name, value in [
            *_SETTINGS.items(),
            *((f"spark.executorEnv.{key}", s3d.env[key]) for key in s3d.env),
        ]:
            builder = builder.config(name, value)
        interrupt = signal.getsignal(signal.SIGINT)
        session = builder.getOrCreate()
        # Spark sets a handler of its own, and the trainer leaves a user's handler alone: the tests of Ctrl-C
        # that this process runs later must not find it.
        signal.signal(signal.SIGINT, interrupt)
    for pid in leaks._children():
        leaks.keep_process(pid)
    yield session
    gateway = session.sparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(60)
    # Spark leaves sockets open; collect them here, so that their warning fails no later test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del session, gateway, builder
        gc.collect()
