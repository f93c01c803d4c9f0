"""The snippets of the guide and of docstrings run."""

import doctest
import re
from pathlib import Path

import pytest
import torch

from hocket.ckpt.torch import functions, load, save, store

# torch warns when the world has one process only.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

DOCS = Path(__file__).parents[1] / "docs"


def test_the_snippets_of_the_guide_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / "torch.md").read_text(), re.DOTALL)
    assert len(snippets) >= 2
    exec(compile("\n".join(snippets), "torch.md", "exec"), {"__name__": "torch.md"})
    assert (tmp_path / "checkpoints/run/step-300/checkpoint.json.zst").exists()


@pytest.mark.parametrize("module", [store, functions])
def test_the_examples_in_docstrings_run(tmp_path, module):
    names = {"folder": str(tmp_path), "torch": torch, "save": save, "load": load}
    names["CheckpointStore"] = store.CheckpointStore
    ran = doctest.testmod(module, globs=names)
    assert ran.attempted >= 2
    assert ran.failed == 0
