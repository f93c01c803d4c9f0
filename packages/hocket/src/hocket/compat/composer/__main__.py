"""The command `python -m hocket.compat.composer`, which runs a Composer script, or with `-m` a module."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from hocket.compat import streaming
from hocket.compat.composer.install import install


def main() -> int:
    """Run the script or module named on the command line as the main module, with its own arguments."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write("usage: python -m hocket.compat.composer [-m] script.py [arguments of the script]\n")
        return 0 if arguments else 2
    if arguments[0] == "-m" and len(arguments) > 1:
        _install()
        sys.argv = arguments[1:]
        sys.path[0] = ""
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return 0
    script = Path(arguments[0])
    if not script.is_file():
        sys.stderr.write(f"there is no script `{script}`; expected the path of a Python file\n")
        return 2
    _install()
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _install() -> None:
    """Replace `composer`, and `streaming`, with which Composer scripts read their data."""
    install()
    streaming.install()


if __name__ == "__main__":
    sys.exit(main())
