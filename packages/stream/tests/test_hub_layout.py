"""Configurations and splits of data sets on a hub are those of `datasets`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from hocket.stream.errors import ConfigError
from hocket.stream.read.hub.layout import HubLayout
from hocket.stream.read.hub.patterns import match
from support.hub import Hub

SHARDS = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
REPOSITORIES: dict[str, tuple[list[str], str]] = {
    "sharded": ([*SHARDS, "data/extra_sft-00000-of-00001.parquet", "other/test.parquet"], ""),
    "alone": (["a.parquet", "b/c.parquet", ".hidden/d.parquet", "__x__/e.parquet", "b/.f.parquet"], ""),
    "names": (["my-train.parquet", "valid_0.parquet", "x/eval.parquet", "training-1.parquet"], ""),
    "folders": (["train/0.parquet", "dev/0.parquet", "dev/test.parquet", "x/my test/1.parquet"], ""),
    "words": (["trainer.parquet", "latest/0.parquet", "contest.parquet"], ""),
    "digits": (["train1/0.parquet", "train.parquet/0.parquet", "test2.parquet"], ""),
    "listed": (
        ["en/a-0.parquet", "en/a-1.parquet", "en/b.parquet", "fr/x/y/z.parquet", "fr/t.parquet"],
        """configs:
- config_name: en
  default: true
  data_files:
  - split: train
    path: en/a-*.parquet
  - split: heldout.v1
    path: ["en/b.parquet"]
- config_name: fr
  data_files: fr/**
- config_name: named
  data_dir: fr
""",
    ),
    "one": (
        ["x/1.parquet", "x/[2].parquet", "x/3?.parquet"],
        "configs:\n- config_name: only\n  data_files: ['x/[13]*.parquet', 'x/[!13]*.parquet']\n",
    ),
    "titled": (["train.parquet", "test.parquet"], "license: mit\ndataset_info:\n  features: []\n"),
}
PEER = """
import json, sys
from datasets import load_dataset_builder, get_dataset_config_names
found = {}
for name in sys.argv[1:]:
    repository = f"owner/{name}"
    default = None
    try:
        default = load_dataset_builder(repository).config.name
    except ValueError:
        pass
    found[name] = {"default": default, "configs": {}}
    for config in get_dataset_config_names(repository):
        files = load_dataset_builder(repository, config).config.data_files
        found[name]["configs"][config] = {
            str(split): sorted({path.partition("@")[2].partition("/")[2] for path in paths})
            for split, paths in files.items()
        }
print(json.dumps(found))
"""


def card(configs: str) -> bytes:
    return f"---\n{configs}---\n# Title\nconfigs: none\n".encode() if configs else b"# Title\n"


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the configurations, splits and files of each repository as `datasets` resolves them."""
    pytest.importorskip("datasets")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": [1]}), sink)
    data = sink.getvalue().to_pybytes()
    home = tmp_path_factory.mktemp("home")
    with Hub() as hub:
        for name, (keys, configs) in REPOSITORIES.items():
            files = dict.fromkeys(keys, data) | {"README.md": card(configs)}
            hub.repository(f"datasets/owner/{name}").commit(files)
        own = ("HF_", "HUGGING_FACE_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        env = clean | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", PEER, *REPOSITORIES]
        done = subprocess.run(command, env=env, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", REPOSITORIES)
def test_configurations_and_splits_are_those_of_datasets(peer: dict[str, Any], name: str) -> None:
    keys, configs = REPOSITORIES[name]
    keys = [*keys, "README.md", ".gitattributes"]
    expected = peer[name]

    def choose(config: str | None, split: str | None) -> list[str]:
        layout = HubLayout(config=config, split=split)
        return sorted(layout.choose("hf://datasets/o/n", keys, lambda key: card(configs)))

    assert expected["configs"]
    for config, splits in expected["configs"].items():
        for split, files in splits.items():
            assert choose(config, split) == files, (config, split)
        everything = sorted({key for files in splits.values() for key in files})
        assert choose(config, "all") == everything
        if len(splits) > 1:
            with pytest.raises(ConfigError, match="has the splits") as caught:
                choose(config, None)
            assert str(list(splits)) in str(caught.value)
    if expected["default"] is not None:
        assert choose(None, "all") == choose(expected["default"], "all")


def choose(keys: list[str], readme: bytes = b"", **options: Any) -> set[str]:
    if readme:
        keys = [*keys, "README.md"]
    return HubLayout(**options).choose("hf://datasets/o/n@abc", keys, lambda key: readme)


def test_a_missing_split_or_configuration_is_named_with_those_there_are() -> None:
    two = card(
        "configs:\n- config_name: en\n  data_files: a.parquet\n- config_name: fr\n  data_files: b.parquet\n"
    )
    keys = ["a.parquet", "b.parquet"]
    with pytest.raises(ConfigError, match=r"`split` is `tets`, and .* has the splits \['train', 'test'\]"):
        choose(["train.parquet", "test.parquet"], split="tets")
    with pytest.raises(ConfigError, match=r"`config` is `de`, and .* has the configurations \['en', 'fr'\]"):
        choose(keys, two, config="de")
    with pytest.raises(ConfigError, match=r"\['en', 'fr'\], none of which is the default"):
        choose(keys, two)
    with pytest.raises(ConfigError, match=r"the configuration `fr` of .* has the splits \['train'\]"):
        choose(keys, two, config="fr", split="validation")
    assert choose(keys, two, config="fr", split="train") == {"b.parquet"}
    assert choose(["a-dev.parquet", "a-train.parquet"], split="val") == {"a-dev.parquet"}


@pytest.mark.parametrize(
    ("readme", "words"),
    [
        (card("configs: [1]\n"), "each with a text as `config_name`"),
        (card("configs:\n- config_name: 2023\n"), "each with a text as `config_name`"),
        (card("configs:\n- config_name: a\n  data_files:\n  - split: x\n"), "`split` and `path`"),
        (card("configs:\n- config_name: a\n  data_files: 'hf://datasets/o/m/x'\n"), "of another place"),
        (card("configs:\n- config_name: a\n  data_files: 'x**.parquet'\n"), "as a whole part"),
        (card("configs: [\n"), "not valid YAML"),
    ],
)
def test_a_readme_that_cannot_be_followed_is_refused(readme: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose(["a.parquet"], readme)


def test_other_formats_are_refused_with_the_way_to_the_conversion() -> None:
    with pytest.raises(ConfigError, match=r"`hf://datasets/o/n@refs/convert/parquet`") as caught:
        choose(["train.jsonl", "notes.parquet"], split="train")
    assert "{'.jsonl': 1}" in str(caught.value)
    with pytest.raises(ConfigError, match=r"0 files in Parquet and \{'.jpg': 2\} others"):
        choose(["a.jpg", "b.jpg"])
    with pytest.raises(ConfigError, match="`hf://datasets/o/n@abc` has no files: expected Parquet"):
        choose([])


def test_the_hubs_own_conversion_has_folders_of_configurations_and_splits() -> None:
    keys = ["en/train/0000.parquet", "en/test/0000.parquet", "fr/train/0000.parquet", "fr/train/0001.parquet"]
    options = {"is_converted": True, "split": "train"}
    assert choose(keys, config="fr", **options) == set(keys[2:])
    assert choose(keys, config="en", **options) == {keys[0]}
    with pytest.raises(ConfigError, match=r"\['en', 'fr'\]"):
        choose(keys, **options)


def test_patterns_do_not_match_across_folders_but_by_two_stars() -> None:
    keys = ["a.parquet", "x/a.parquet", "x/y/a.parquet", "x/b-c.parquet"]
    assert match("*.parquet", keys) == keys[:1]
    assert match("x/*", keys) == [keys[1], keys[3]]
    assert match("**/a.parquet", keys) == keys[:3]
    assert match("x/**", keys) == keys[1:]
    assert match("x/[-a]*", keys) == [keys[1]]
    assert match("x/?-c.parquet", keys) == [keys[3]]
