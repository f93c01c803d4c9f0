"""The program of each rank of `notebook_launcher`: `python -m hocket.dist.launch.notebook_rank FOLDER`."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]


def main(folder: str) -> None:
    """Run the function in the file `call`, and write its result to `result-RANK`."""
    function, args = pickle.loads(Path(folder, "call").read_bytes())
    result = cloudpickle.dumps(function(*args))
    Path(folder, f"result-{os.environ['RANK']}").write_bytes(result)


if __name__ == "__main__":
    main(sys.argv[1])
