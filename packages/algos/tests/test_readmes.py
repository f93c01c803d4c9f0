"""Every snippet of the READMEs runs, in the order of the page."""

import re
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1]
READMES = sorted([PACKAGE / "README.md", *PACKAGE.glob("src/hocket/algos/*/README.md")])

NO_METHODS = {"algos", "surgery"}


def test_every_method_has_a_readme() -> None:
    folders = [path.parent for path in PACKAGE.glob("src/hocket/algos/*/__init__.py")]
    assert folders
    assert {folder / "README.md" for folder in folders} <= set(READMES)


@pytest.mark.parametrize("readme", [page for page in READMES if page.parent.name not in NO_METHODS])
def test_each_readme_states_the_methods_effect_and_its_measurement(readme: Path) -> None:
    _, _, measured = " ".join(readme.read_text().split()).partition("**Measured.** ")
    assert re.search(r"`tests/bench/\w+\.py|; a test holds that", measured), (
        "state what was measured, and by which script"
    )


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_snippets_run(readme: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    assert snippets
    if readme.parent.name in ("aug_mix", "rand_augment"):
        pytest.importorskip("torchvision", reason="needs `uv sync --group algos`")
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, str(readme), "exec"), names)
