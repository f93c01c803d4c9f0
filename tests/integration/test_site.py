"""The site builds strictly, holds every public name and argument, and its search finds pages in a browser."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hocket.native.cli.explain import sections
from hocket.trainer import Trainer
from support.browser import CHROMIUM, Browser
from support.tools import load_tool

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tools/docs/mkdocs.yml"
REFERENCE = load_tool("docs/reference_pages")
# Composer's names are in Composer's own reference, recipes may change, and commands have their `--help`.
LEFT_OUT = re.compile(r"hocket\.(compat\.composer|recipes)|.*\.(cli|launch)$")


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "-f", str(config), "-d", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs `uv sync --group docs`")
    out = tmp_path_factory.mktemp("site")
    done = build(CONFIG, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def modules_of(site: Path) -> list[str]:
    return sorted(page.stem for page in (site / "reference").glob("hocket*.html"))


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    missing = []
    assert len(modules_of(site)) > 25
    for module in modules_of(site):
        page = (site / "reference" / f"{module}.html").read_text()
        ids = set(re.findall(r'id="([^"]+)"', page))
        for name in getattr(importlib.import_module(module), "__all__", ()):
            if not name.startswith("_") and not {f"{module}.{name}", name.lower()} & ids:
                missing.append(f"{module}.{name}")
    assert missing == []


@pytest.mark.slow
def test_every_documented_module_has_a_page(site: Path) -> None:
    faces = {"trainer", "algos", "dist", "ckpt", "ckpt.torch", "ckpt.dcp", "stream", "stream.torch", "native"}
    trainer = [
        path.parent.name for path in ROOT.glob("packages/trainer-core/src/hocket/trainer/*/__init__.py")
    ]
    public = [
        name for name in trainer if hasattr(importlib.import_module(f"hocket.trainer.{name}"), "__all__")
    ]
    assert {f"hocket.{name}" for name in (*faces, *(f"trainer.{name}" for name in public))} <= set(
        modules_of(site)
    )


def test_the_names_of_each_package_and_of_each_snippet_are_in_the_reference() -> None:
    found = set()
    for path in ROOT.glob("packages/*/src/hocket/**/__init__.py"):
        module = ".".join(path.parts[path.parts.index("src") + 1 : -1])
        if not LEFT_OUT.match(module) and re.search(r"^__all__ = ", path.read_text(), re.M):
            found |= {(module, name) for name in REFERENCE.public_names(module)}
    for page in ROOT.glob("packages/**/*.md"):
        for module, names in re.findall(r"^from (hocket[\w.]*) import ([\w, ]+)$", page.read_text(), re.M):
            found |= {(module, name.strip()) for name in names.split(",")}
    places = {REFERENCE.canonical(*one) for one in found if not LEFT_OUT.match(one[0])}
    modules = {module for listed in REFERENCE.MODULES.values() for module in listed}
    assert len(places) > 200
    assert sorted(places - set(REFERENCE.owners()) - modules) == []


@pytest.mark.slow
def test_the_page_of_codes_has_an_anchor_for_each(site: Path) -> None:
    page = (site / "reference/error_codes.html").read_text()
    codes = [section.code for section in sections()]
    assert len(codes) > 60
    assert [code for code in codes if f'id="{code.lower()}"' not in page] == []
    assert "HKT-" in (site / "search/search_index.json").read_text()


@pytest.mark.slow
def test_the_table_of_arguments_has_every_argument(site: Path) -> None:
    page = (site / "reference/arguments.html").read_text()
    cells = re.findall(r"<tr>\s*<td><code>(\w+)</code></td>", page)
    for function in (Trainer, Trainer.fit):
        arguments = [name for name in inspect.signature(function).parameters if name != "self"]
        assert len(arguments) > 10
        assert set(arguments) <= set(cells)


@pytest.mark.slow
def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="([^"]+)"', page.read_text())
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page


@pytest.mark.parametrize(
    ("page", "summary"),
    [
        ("# A\n\n```python\nimport torch\n\nfrom hocket import x\n```\n\nTells it. More.\n", "Tells it."),
        (
            "# A\n\nMixes two images ([Zhang et al. 2017](x.md)). More.\n",
            "Mixes two images (Zhang et al. 2017).",
        ),
        ("# A\n\n`hocket.x`: a loop that you\ncan read. More.\n", "`hocket.x`: a loop that you can read."),
        ("---\nname: a\n---\n\n# A\n\n| a |\n|---|\n\nIt reads:\n\n```sh\nls\n```\n", "It reads."),
        ("# A\n\nThis page is generated from `x` (`y`).\n\n## B\n\nKeys by name. More.\n", "Keys by name."),
        ("# A\n\nReads files, e.g. of zip, vs. folders. More.\n", "Reads files, e.g. of zip, vs. folders."),
    ],
)
def test_the_summary_of_a_page_is_its_first_sentence_of_prose(page: str, summary: str) -> None:
    assert load_tool("docs/llms").summary_of(page) == summary


def test_every_page_has_a_sentence_as_its_summary() -> None:
    summary_of = load_tool("docs/llms").summary_of
    pages = [*ROOT.glob("packages/*/docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
    pages += ROOT.glob("packages/algos/src/hocket/algos/*/README.md")
    assert len(pages) > 80
    bad = {
        page.relative_to(ROOT).as_posix(): summary
        for page in pages
        # A capital, code or a number begins it, and a stop ends it; commands alone say nothing.
        if not re.fullmatch(
            r"([A-Z0-9]|`(?!pip |uv )).{24,}\.", summary := summary_of(page.read_text("utf-8"))
        )
    }
    assert bad == {}


@pytest.mark.slow
def test_llms_txt_names_pages_that_are_there(site: Path) -> None:
    places = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text())
    assert len(places) == len(set(places)) > 80
    for place in places:
        assert (site / place).read_text().strip()
        assert (site / place).with_suffix(".html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("link", ["[there](no_page.md)", "[there](index.md#no-such-heading)"])
def test_a_broken_link_or_anchor_fails_the_build(link: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs `uv sync --group docs`")
    (tmp_path / "docs").mkdir()
    own = "docs_dir: docs\nnav: [index.md]\nhooks: []\nplugins: []\nextra_javascript: []\nextra_css: []\n"
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {CONFIG}\n{own}")
    for text, code in (("# Home\n\n[here](#home)\n", 0), (f"# Home\n\n{link}\n", 1)):
        (tmp_path / "docs/index.md").write_text(text)
        done = build(tmp_path / "mkdocs.yml", tmp_path / "out")
        assert done.returncode == code, done.stdout + done.stderr
    assert "no_page.md" in done.stderr or "no-such-heading" in done.stderr


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs `apt-get install chromium`")
def test_the_search_and_the_filter_work_in_a_browser(address: str, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{address}/index.html")
        home = browser.screenshot(tmp_path / "home.png")
        browser.evaluate("document.querySelector('.md-search__input').focus()")
        browser.evaluate(
            "(field => {field.value = 'autoresume'; for (const name of ['keyup', 'input'])"
            " field.dispatchEvent(new Event(name))})(document.querySelector('.md-search__input'))"
        )
        found = browser.wait_for(
            "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href).join(' ')"
        )
        assert "tasks/resume.html" in found.split()[0]
        results = browser.screenshot(tmp_path / "search.png")
        assert home[:8] == results[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(home) > 20_000
        assert home != results

        browser.open(f"{address}/reference/arguments.html")
        rows = "[...document.querySelectorAll('tbody tr')].filter(row => !row.hidden).length"
        before = browser.evaluate(rows)
        browser.evaluate(
            "(field => {field.value = 'retention'; field.dispatchEvent(new Event('input'))})"
            "(document.querySelector('.table-filter'))"
        )
        assert 0 < browser.evaluate(rows) < before / 10
