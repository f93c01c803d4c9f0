"""Files of a source: links, hidden files, partitions, splits, and files that stand for others."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hocket.stream import StreamingDataset, convert
from hocket.stream.cli.app import app
from hocket.stream.errors import ConfigError, SampleError

FORMATS = ["jsonl", "csv", "parquet", "arrow", "webdataset"]


def write(path: Path, numbers: list[int], **columns: Any) -> None:
    """Write samples with the number `n`, and other columns, in the format that the suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"n": number, **columns} for number in numbers]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        lines = [list(rows[0]), *(row.values() for row in rows)]
        path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    elif path.suffix == ".tar":
        import tarfile

        with tarfile.open(path, "w") as tar:
            for number, row in enumerate(rows):
                for name, value in row.items():
                    member = tarfile.TarInfo(f"{number}.{'cls' if name == 'n' else name}")
                    data = str(value).encode()
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    else:
        arrow = pytest.importorskip("pyarrow", reason="needs `uv sync --group datasets`")
        table = arrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            with arrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)


def suffix(kind: str) -> str:
    return {"webdataset": "tar"}.get(kind, kind)


def read(folder: Path) -> list[dict[str, Any]]:
    return StreamingDataset(local=folder, batch_size=8)[:]


def numbers(folder: Path) -> list[int]:
    return [sample.get("n", sample.get("cls")) for sample in read(folder)]


@pytest.mark.parametrize("kind", FORMATS)
def test_links_to_folders_are_followed_without_circles_and_hidden_files_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    end = suffix(kind)
    source = tmp_path / "in"
    write(source / f"a.{end}", [1])
    write(tmp_path / "elsewhere" / f"b.{end}", [2])
    write(tmp_path / "elsewhere" / "deep" / f"c.{end}", [3])
    for name in (".ipynb_checkpoints", "__MACOSX", "_temporary", ".cache"):
        write(source / name / f"a.{end}", [9])
    write(source / f".hidden.{end}", [9])
    (source / "link").symlink_to(tmp_path / "elsewhere")
    (source / "link" / "circle").symlink_to(source)
    (source / "up").symlink_to(source)
    convert.convert(source, tmp_path / "out")
    assert numbers(tmp_path / "out") == [1, 2, 3]
    assert not caplog.records
    (source / "other").symlink_to(tmp_path / "elsewhere")
    convert.convert(source, tmp_path / "twice")
    assert sorted(numbers(tmp_path / "twice")) == [1, 2, 2, 3, 3]
    assert "are one folder: its samples come twice" in caplog.text


@pytest.mark.parametrize("kind", FORMATS)
def test_partitions_become_columns(tmp_path: Path, kind: str) -> None:
    end = suffix(kind)
    source = tmp_path / "in"
    for number, place in enumerate(("date=2020-01-01/n_days=1", "date=2020-01-02/n_days=12")):
        write(source / place / f"x.{end}", [number])
    done = convert.convert(source, tmp_path / "out")
    assert (done.columns["date"], done.columns["n_days"]) == ("str", "int")
    found = [(sample["date"], sample["n_days"]) for sample in read(tmp_path / "out")]
    assert found == [("2020-01-01", 1), ("2020-01-02", 12)]
    if kind == "parquet":
        dataset = pytest.importorskip("pyarrow.dataset").dataset(source, partitioning="hive")
        rows = dataset.to_table(columns=["date", "n_days"]).to_pylist()
        assert [(row["date"], row["n_days"]) for row in rows] == found
    done = convert.convert(source, tmp_path / "given", columns={"n_days": "str"})
    assert [sample["n_days"] for sample in read(tmp_path / "given")] == ["1", "12"]


def test_partitions_may_be_null_quoted_and_in_the_files_too(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for place in ("month=01/key=a%2Fb", "month=02/key=__HIVE_DEFAULT_PARTITION__"):
        write(source / place / "x.jsonl", [1], month=int(place[7]))
    assert convert.convert(source, tmp_path / "out").columns == {"n": "int", "month": "int", "key": "json"}
    assert [(row["month"], row["key"]) for row in read(tmp_path / "out")] == [(1, "a/b"), (2, None)]
    write(source / "month=03" / "x.jsonl", [1], month=4)
    with pytest.raises(
        SampleError, match=r"has a sample with 4 in column `month`, and is in a folder `month=03`"
    ):
        convert.convert(source, tmp_path / "again")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("train/a", "test/a"),
        ("data/train-00000-of-00002", "data/test-00000-of-00001"),
        ("x.train", "x.val"),
        ("training_set/x", "dev/x"),
    ],
)
@pytest.mark.parametrize("kind", FORMATS)
def test_files_of_several_splits_are_not_merged(tmp_path: Path, kind: str, first: str, second: str) -> None:
    end = suffix(kind)
    source = tmp_path / "in"
    write(source / f"{first}.{end}", [1])
    write(source / f"{second}.{end}", [2])
    with pytest.raises(ConfigError, match=r"files of the splits \[.*'train'.*\].*give `split`, as `train`"):
        convert.convert(source, tmp_path / "out")
    convert.convert(source, tmp_path / "out", split="train")
    assert numbers(tmp_path / "out") == [1]
    convert.convert(source, tmp_path / "all", split="all")
    assert sorted(numbers(tmp_path / "all")) == [1, 2]
    with pytest.raises(ConfigError, match="`split` is `extra`: expected a split"):
        convert.convert(source, tmp_path / "none", split="extra")


def test_one_split_and_other_words_are_read(tmp_path: Path) -> None:
    for place in ("train/test_1", "train/a", "contest/latest", "mytrain"):
        write(tmp_path / "in" / f"{place}.jsonl", [1])
    assert convert.convert(tmp_path / "in", tmp_path / "out").num_samples == 4


@pytest.mark.parametrize(
    "name", ["x.jsonl", "x.parquet", "x.csv.gz", "x.tar", "a/x.jpg", "x.arrow", "x.json"]
)
def test_pointers_to_other_files_are_named(tmp_path: Path, name: str) -> None:
    if name in ("x.parquet", "x.arrow"):
        pytest.importorskip("pyarrow", reason="needs `uv sync --group datasets`")
    path = tmp_path / "in" / name
    path.parent.mkdir(parents=True)
    for begin, message in (
        ("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", r"git-LFS.*`git lfs pull`"),
        ("/annex/objects/SHA256E-s9--00", r"git-annex.*`git annex get`"),
    ):
        path.write_text(begin)
        for source in (tmp_path / "in", path) if name != "a/x.jpg" else (tmp_path / "in",):
            with pytest.raises(ConfigError, match=rf"{path.name}` is a {message}"):
                convert.convert(source, tmp_path / "out")
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"is a link to `.*nothing`, which does not exist"):
        convert.convert(tmp_path / "in", tmp_path / "out")
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(ConfigError, match=rf"{path.name}` cannot be read"):
        convert.convert(tmp_path / "in", tmp_path / "out")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in" / "x.jsonl", [1])
    convert.convert("~/in/x.jsonl", "~/out")
    assert read(tmp_path / "out") == [{"n": 1}]
    assert StreamingDataset(remote="~/out", batch_size=1)[0] == {"n": 1}
    assert not (tmp_path / "~").exists()


def test_the_command_takes_a_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in ("train", "test"):
        write(tmp_path / "in" / place / "x.jsonl", [1])
    for options, code in (([], 2), (["--split", "test"], 0)):
        with pytest.raises(SystemExit) as ended:
            app(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--json", *options])
        assert ended.value.code == code
    out, error = capsys.readouterr()
    assert "give `--split`" in error
    assert json.loads(out)["num_samples"] == 1


def image_bytes(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (number + 1, 3)).save(out, format="PNG")
    return out.getvalue()


def test_an_image_folder_has_the_labels_of_torchvision(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision.datasets", reason="needs `uv sync --group models`")
    source = tmp_path / "in"
    for number, place in enumerate(("b/1", "b/deep/2", "d/_3")):
        path = source / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(number))
    (tmp_path / "classes" / "more").mkdir(parents=True)
    (tmp_path / "classes" / "more" / "4.png").write_bytes(image_bytes(4))
    (source / "a").symlink_to(tmp_path / "classes")
    (source / "c").symlink_to(source / "b")
    (source / "d" / "link.png").symlink_to(source / "b" / "1.png")
    (source / "d" / "more").symlink_to(tmp_path / "classes" / "more")
    expected = torchvision.ImageFolder(source)
    convert.convert(source, tmp_path / "out")
    found = read(tmp_path / "out")
    samples = sorted((os.path.relpath(path, source), label) for path, label in expected.samples)
    assert sorted((sample["path"], sample["label"]) for sample in found) == samples
    assert {sample["class"]: sample["label"] for sample in found} == expected.class_to_idx
    (source / ".ipynb_checkpoints").mkdir()
    (source / ".ipynb_checkpoints" / "1-checkpoint.png").write_bytes(image_bytes(1))
    convert.convert(source, tmp_path / "again")
    assert read(tmp_path / "again")[0]["class"] == "a"
    (source / "e").symlink_to(source)
    convert.convert(source, tmp_path / "circle")
    assert {sample["class"] for sample in read(tmp_path / "circle")} == {"a", "b", "c", "d"}
    (source / "e").unlink()
    (source / "e").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"in/e` is a link to `.*nothing`, which does not exist"):
        convert.convert(source, tmp_path / "third")
    (source / "e").unlink()
    (source / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the folders \['empty'\].*have no image"):
        convert.convert(source, tmp_path / "third")
    (source / "empty" / "1.ppm").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"1.ppm` is an image of a format that no encoding holds"):
        convert.convert(source, tmp_path / "third")


def test_an_image_folder_with_splits_has_the_classes_of_one(tmp_path: Path) -> None:
    for place in ("train/cat/1", "train/dog/2", "val/cat/3"):
        path = tmp_path / "in" / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(1))
    with pytest.raises(ConfigError, match=r"files of the splits \['train', 'validation'\]"):
        convert.convert(tmp_path / "in", tmp_path / "out")
    convert.convert(tmp_path / "in", tmp_path / "out", split="train")
    found = [(sample["path"], sample["class"], sample["label"]) for sample in read(tmp_path / "out")]
    assert found == [("cat/1.png", "cat", 0), ("dog/2.png", "dog", 1)]
