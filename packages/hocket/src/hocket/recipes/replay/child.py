"""A replay in a process of its own, or a rank of one: `python -m hocket.recipes.replay.child SPEC`.

SPEC is a JSON file that `hocket.recipes.replay.difference` writes. What is found is written beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hocket.native.errors import HocketError
from hocket.recipes.replay.script import run_within
from hocket.trainer.errors import TrainerError
from hocket.trainer.process.world import global_rank
from hocket.trainer.replay import Replay, StepRecord, TensorRecord


def main(spec_path: str) -> int:
    """Run a replay as a file states it, and return the exit code."""
    place = Path(spec_path)
    spec: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    asked = Replay(
        step=spec["step"],
        run=spec["run"],
        before=spec["before"],
        from_start=spec["before"] == 1,
        records_all=True,
        surveys=spec["surveys"],
    )
    try:
        run_within(asked, spec["script"], spec["arguments"], is_module=spec["is_module"])
    except (HocketError, TrainerError) as error:
        place.with_suffix(".error").write_text(str(error), encoding="utf-8")
        return 1
    if spec["surveys"]:
        if global_rank() == 0:
            found = {"steps": asked.steps, "losses": list(asked.recorded.items()), "location": asked.location}
            place.with_suffix(".found").write_text(json.dumps(found), encoding="utf-8")
        return 0
    with place.with_suffix(f".rank{global_rank()}").open("w", encoding="utf-8") as file:
        for record in asked.records:
            tensors = [[getattr(one, name) for name in FIELDS] for one in record.tensors]
            print(json.dumps([record.step, record.rank, tensors]), file=file)
    return 0


FIELDS = tuple(TensorRecord.__dataclass_fields__)


def read_records(spec_path: Path, rank: int) -> list[StepRecord]:
    """Return the records that a rank has written."""
    records = []
    for line in spec_path.with_suffix(f".rank{rank}").read_text(encoding="utf-8").splitlines():
        step, written_by, tensors = json.loads(line)
        measured = [TensorRecord(**dict(zip(FIELDS, one, strict=True))) for one in tensors]
        records.append(StepRecord(step=step, rank=written_by, tensors=measured))
    return records


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
