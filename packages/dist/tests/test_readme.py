"""The README's script and snippets run unchanged."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_script_of_the_readme_runs(tmp_path: Path) -> None:
    script = next(
        text for text in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "import" in text
    )
    path = tmp_path / "script.py"
    path.write_text(script)
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "hocket.dist.launch", "-n", "2", str(path)],
        cwd=tmp_path,
        env={**env, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rank, size, norm = done.stdout.splitlines()[-1].split()  # older versions of gloo print, too
    assert (rank, size) == ("0", "2")
    assert float(norm) > 0


def test_the_other_snippets_run() -> None:
    texts = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (snippet,) = (text for text in texts if "translate_deepspeed" in text)
    exec(snippet, {})
