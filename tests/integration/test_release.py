"""The packages share their metadata, workflows run scripts that exist, and licences are accepted ones."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from support.tools import load_tool

TOOL = load_tool("release")
ROOT: Path = TOOL.ROOT
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_every_package_has_the_shared_metadata() -> None:
    wrong = [path for path, text in TOOL.expected(ROOT).items() if path.read_text() != text]
    assert not wrong, "run `python tools/release.py write`"
    number = TOOL.version(ROOT)
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        assert project["version"] == number
        assert project["classifiers"] == list(TOOL.CLASSIFIERS)
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
    assert cargo["workspace"]["package"]["version"] == number


def test_a_new_version_reaches_packages_requirements_and_crates(tmp_path: Path) -> None:
    for path in (*TOOL.expected(ROOT), ROOT / "pyproject.toml", *ROOT.glob("crates/*/Cargo.toml")):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    root = tmp_path / "pyproject.toml"
    urls = "".join(f'{title} = "https://example.org/{title}"\n' for title in TOOL.ADDRESSES)
    text = root.read_text().replace(f'version = "{TOOL.version(ROOT)}"', 'version = "7.8.9"', 1)
    root.write_text(f"{text}\n[project.urls]\n{urls}")
    texts = {str(path.relative_to(tmp_path)): text for path, text in TOOL.expected(tmp_path).items()}
    project = tomllib.loads(texts["packages/hocket/pyproject.toml"])["project"]
    own = [line for line in project["dependencies"] if line.startswith("hocket")]
    assert len(own) == 6
    assert all(line.endswith("==7.8.9") for line in own)
    extras = tomllib.loads(texts["packages/ckpt/pyproject.toml"])["project"]["optional-dependencies"]
    assert extras["s3"] == ["hocket-native[s3]==7.8.9"]
    assert project["urls"] == {title: f"https://example.org/{title}" for title in TOOL.ADDRESSES}
    for path, written in TOOL.expected(tmp_path).items():
        path.write_text(written)
    assert {path: path.read_text() for path in TOOL.expected(tmp_path)} == TOOL.expected(tmp_path)
    assert TOOL.missing_for_release(tmp_path, "v7.8.9") == []
    crates = tomllib.loads(texts["Cargo.lock"])["package"]
    assert {one["version"] for one in crates if "source" not in one} == {"7.8.9"}


def test_a_release_needs_the_tag_of_its_version_and_addresses(tmp_path: Path) -> None:
    text = '[project]\nversion = "1.2.3"\n[project.urls]\nRepository = "https://example.org"\n'
    (tmp_path / "pyproject.toml").write_text(text)
    tag, urls = TOOL.missing_for_release(tmp_path, "v1.2.4")
    assert tag == "the tag is `v1.2.4`, expected `v1.2.3`"
    assert urls.startswith("pyproject.toml has no Documentation, Changelog, Issues under `[project.urls]`")
    assert TOOL.HEADING in urls


def test_what_a_maintainer_fills_in_stands_in_one_place() -> None:
    section = (ROOT / TOOL.PAGE).read_text().split(f"## {TOOL.HEADING}\n")[1].split("\n## ")[0]
    for path in ROOT.glob("packages/*/pyproject.toml"):
        assert f"`{tomllib.loads(path.read_text())['project']['name']}`" in section
    for title in TOOL.ADDRESSES:
        assert f"{title} = " in section
    publish = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["publish"]
    assert f"`{publish['environment']}`" in section
    # Nothing here is published, so no address is known and none may be invented.
    assert "://" not in section.replace("https://…", "")
    assert not TOOL.addresses(ROOT) or all("…" not in one for one in TOOL.addresses(ROOT).values())


def test_the_notes_are_the_section_of_the_changelog() -> None:
    assert TOOL.notes(ROOT, TOOL.version(ROOT)).startswith("###")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_workflow_runs_scripts_that_can_be_run_by_hand(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# By hand")
    jobs = yaml.safe_load(text)["jobs"]
    steps = [step for job in jobs.values() for step in job.get("steps", ())]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands or path.stem == "release"
    for command in commands:
        found = re.findall(r"(?:\.ci|tools)/[\w.]+|poe \w+|cargo install --locked cargo-deny", command)
        assert found, f"`{command}` runs no script of this repository"
        assert all((ROOT / name).exists() for name in found if "/" in name)
    for job in jobs.values():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
        else:
            assert job["timeout-minutes"] <= 90


def test_the_release_has_no_token_and_waits_for_the_tests() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert set(jobs["publish"]["needs"]) == {"tests", "wheels"}
    assert jobs["publish"]["permissions"]["id-token"] == "write"
    assert "secrets." not in text


@pytest.mark.skipif(shutil.which("cargo") is None, reason="needs a Rust toolchain")
def test_each_crate_may_be_used_under_an_accepted_licence() -> None:
    accepted = tomllib.loads((ROOT / "tools/deny.toml").read_text())["licenses"]["allow"]
    subprocess.run(["cargo", "fetch", "--quiet", "--locked"], cwd=ROOT, check=True, timeout=300)
    command = ["cargo", "metadata", "--locked", "--offline", "--format-version", "1"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    crates = json.loads(done.stdout)["packages"]
    assert {one["source"] for one in crates if one["source"]} == {crates_io(crates)}
    refused = {one["name"]: one["license"] for one in crates if not is_accepted(one["license"], accepted)}
    assert not refused


def crates_io(crates: list[dict[str, str]]) -> str:
    """Return the default registry, which most crates come from."""
    sources = [one["source"] for one in crates if one["source"]]
    assert sources[0].startswith("registry+")
    return max(set(sources), key=sources.count)


def is_accepted(licence: str, accepted: list[str]) -> bool:
    """Return whether a licence expression holds with the accepted licences alone."""
    words = re.findall(r"[()]|AND|OR|[\w.-]+(?: WITH [\w.-]+)?", licence.replace("/", " OR "))
    python = {"AND": "and", "OR": "or", "(": "(", ")": ")"}
    return bool(eval(" ".join(python.get(word) or str(word in accepted) for word in words)))


def test_a_licence_is_accepted_as_its_expression_says() -> None:
    assert is_accepted("MIT/Apache-2.0", ["MIT"])
    assert is_accepted("ISC AND (Apache-2.0 OR GPL-3.0)", ["ISC", "Apache-2.0"])
    assert not is_accepted("ISC AND GPL-3.0", ["ISC"])
    assert not is_accepted("Apache-2.0 WITH LLVM-exception", ["Apache-2.0"])
