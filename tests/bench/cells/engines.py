"""One cell of `tests/bench/stream_engines.py`: one engine writes a data set from Parquet on two cores.

Prints one JSON object. `start_s` is the time until the engine has run a task, `write_s` that of the rows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def write_convert(source: str, out: str, columns: dict[str, str] | None) -> tuple[float, float]:
    """Write with `convert`, in one process."""
    from hocket.stream.convert import from_parquet

    start = time.perf_counter()
    from_parquet(source, out, columns=columns)
    return 0.0, time.perf_counter() - start


def write_ray(source: str, out: str, columns: dict[str, str] | None) -> tuple[float, float]:
    """Write from Ray Data, with two workers."""
    import ray

    from hocket.stream.ray import write_mds

    start = time.perf_counter()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    assert ray.data.range(2).count() == 2
    begin = time.perf_counter()
    write_mds(ray.data.read_parquet(source), out, columns=columns)
    return begin - start, time.perf_counter() - begin


def write_spark(source: str, out: str, columns: dict[str, str] | None) -> tuple[float, float]:
    """Write from Spark, with two local tasks at once."""
    from pyspark.sql import SparkSession

    from hocket.stream.spark import write_mds

    start = time.perf_counter()
    builder: Any = SparkSession.builder
    spark = builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    assert spark.range(2).count() == 2
    begin = time.perf_counter()
    write_mds(spark.read.parquet(source), out, columns=columns)
    return begin - start, time.perf_counter() - begin


def main() -> None:
    """Run one cell and print what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["convert", "ray", "spark"])
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument(
        "--columns", type=json.loads, help="encodings of all columns, so that none is inferred"
    )
    options = parser.parse_args()
    begin, seconds = globals()[f"write_{options.engine}"](options.source, options.out, options.columns)
    index = json.loads(Path(options.out, "index.json").read_text())
    rows = sum(shard["samples"] for shard in index["shards"])
    num_bytes = sum(shard["raw_data"]["bytes"] for shard in index["shards"])
    figures = {"rows": rows, "rows_s": rows / seconds, "mb_s": num_bytes / seconds / 1e6}
    print(json.dumps(figures | {"start_s": begin, "write_s": seconds}), flush=True)


if __name__ == "__main__":
    main()
