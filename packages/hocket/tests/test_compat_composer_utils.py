"""`composer.utils` of the layer: names, files, object stores, retries, states, layouts and batches."""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hocket.compat import composer
from hocket.compat.composer import checkpoint, distributed, utils
from hocket.compat.composer.loggers import RemoteUploaderDownloader
from hocket.compat.composer.models import Initializer
from hocket.compat.composer.utils import reproducibility
from hocket.compat.composer.utils.object_store import maybe_create_object_store_from_uri
from hocket.dist import FSDPConfig
from hocket.trainer import Timestamp, TimeUnit
from hocket.trainer.errors import TrainerConfigError
from support.ranks import run_ranks


def make_trainer(folder: Path | None = None, **arguments: Any) -> composer.Trainer:
    torch.manual_seed(3)
    model = composer.models.ComposerClassifier(torch.nn.Linear(2, 3), num_classes=3)
    data = TensorDataset(torch.randn(16, 2), torch.arange(16) % 3)
    return composer.Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4),
        max_duration="1ep",
        optimizers=composer.optim.DecoupledAdamW(model.parameters(), lr=0.01),
        device="cpu",
        run_name="run",
        progress_bar=False,
        **arguments,
    )


def test_names_are_formatted_with_run_rank_and_time() -> None:
    time = Timestamp(epoch=2, batch=9, batch_in_epoch=1)
    assert utils.partial_format("{a}-{b:03d}-{c}", a=1, c=3) == "1-{b:03d}-3"
    assert (
        utils.format_name_with_dist("{run_name}/r{rank}of{world_size}/{epoch}", "run") == "run/r0of1/{epoch}"
    )
    assert (
        utils.format_name_with_dist_and_time("ep{epoch}-ba{batch}.{x}", "run", time, x="pt") == "ep2-ba9.pt"
    )
    state: Any = SimpleNamespace(run_name="run", timestamp=time)
    assert utils.get_save_filename(state) == "ep2-ba9-rank0"
    path = utils.PartialFilePath("ba{batch}.pt", "s3://bucket/{run_name}/")
    assert path.format(state) == "s3://bucket/run/ba9.pt"
    assert path.format(state, keep_placeholders=True) == "s3://bucket/{run_name}/ba{batch}.pt"
    assert "{batch_wct}" in utils.FORMAT_NAME_WITH_DIST_AND_TIME_TABLE


def test_helpers_for_folders_links_and_compressed_files(tmp_path: Path) -> None:
    utils.ensure_folder_is_empty(tmp_path)
    (tmp_path / "ep3-ba7-rank0.pt").write_bytes(b"weights")
    with pytest.raises(FileExistsError, match="not empty"):
        utils.ensure_folder_is_empty(tmp_path)
    name = "ep{epoch}-ba{batch}-rank{rank}.pt"
    utils.ensure_folder_has_no_conflicting_files(tmp_path, name, Timestamp(epoch=3, batch=7))
    with pytest.raises(FileExistsError, match="later time"):
        utils.ensure_folder_has_no_conflicting_files(tmp_path, name, Timestamp(epoch=2, batch=6))
    utils.create_symlink_file("folder/ep3", tmp_path / "latest.symlink")
    assert utils.extract_path_from_symlink(str(tmp_path / "latest.symlink")) == "folder/ep3"
    assert utils.is_tar("a.tar.gz")
    assert not utils.is_tar("a.pt")
    assert utils.is_tar("a.tar.unknown")
    assert utils.is_compressed_pt("a.pt.gz")
    assert utils.is_compressed_pt("a.pt.unknown")
    assert not utils.is_compressed_pt("a.pt.symlink")
    assert io.BufferedReader(utils.IteratorFileStream(iter([b"ab", b"", b"cd"]))).read() == b"abcd"
    with pytest.raises(ValueError, match="no compressor is known"):
        utils.get_compressor("a.rar")
    compressor = utils.get_compressor("a.pt.gz")
    assert compressor.exists == (shutil.which("gzip") is not None)
    with compressor.compress(tmp_path / "a.pt.gz") as stream:
        stream.write(b"zeros" * 100)
    assert (tmp_path / "a.pt.gz").stat().st_size < 100
    with compressor.decompress(tmp_path / "a.pt.gz") as stream:
        assert stream.read() == b"zeros" * 100


def test_an_object_store_uploads_downloads_and_lists(tmp_path: Path) -> None:
    store = maybe_create_object_store_from_uri("memory://bucket")
    assert store is not None
    assert maybe_create_object_store_from_uri("folder/file") is None
    (tmp_path / "a").write_bytes(b"abc")
    calls: list[tuple[int, int]] = []
    store.upload_object("runs/a", tmp_path / "a", lambda *numbers: calls.append(numbers))
    assert calls == [(3, 3)]
    assert store.get_uri("runs/a") == "memory://bucket/runs/a"
    assert store.get_object_size("runs/a") == 3
    assert store.list_objects("ru") == ["runs/a"]
    utils.get_file("memory://bucket/runs/a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"abc"
    with pytest.raises(FileExistsError, match="overwrite=True"):
        utils.get_file("memory://bucket/runs/a", tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        store.get_object_size("runs/none")
    utils.get_file(str(tmp_path / "a"), tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == b"abc"
    utils.validate_credentials(store, ".credentials")
    with pytest.raises(TrainerConfigError, match="AWS_ACCESS_KEY_ID"):
        utils.S3ObjectStore("bucket", aws_access_key_id="key")
    assert utils.build_remote_backend("gs", {"bucket": "b", "prefix": "p"}).get_uri("o") == "gs://b/p/o"
    with pytest.raises(TrainerConfigError, match="expected one of"):
        utils.build_remote_backend("ftp", {})
    checkpoint.download_monolithic_checkpoint("memory://bucket/runs/a", tmp_path / "deep" / "d")
    assert (tmp_path / "deep" / "d").read_bytes() == b"abc"
    checkpoint.upload_file("memory://bucket/more", tmp_path / "a").result()
    with pytest.raises(FileExistsError):
        checkpoint.upload_file("memory://bucket/more", tmp_path / "a", async_upload=False)
    assert "more/a" in store.list_objects()


def test_a_store_of_the_script_need_not_list_its_objects(tmp_path: Path) -> None:
    class Folder(utils.ObjectStore):
        def get_uri(self, object_name: str) -> str:
            return f"folder://{object_name}"

        def upload_object(self, object_name: str, filename: Any, callback: Any = None, **kwargs: Any) -> None:
            shutil.copy(filename, tmp_path / object_name)

        def get_object_size(self, object_name: str) -> int:
            return (tmp_path / object_name).stat().st_size

        def download_object(
            self, object_name: str, filename: Any, overwrite: bool = False, callback: Any = None
        ) -> None:
            shutil.copy(tmp_path / object_name, filename)

    store = Folder()
    sample = torch.ones(2, 2)
    utils.export_for_inference(torch.nn.Linear(2, 1), "torch_export", "model.pt2", store, sample_input=sample)
    assert store.get_object_size("model.pt2") > 0
    with pytest.raises(NotImplementedError, match="`Folder` does not list its objects"):
        store.list_objects()


def test_files_are_uploaded_during_the_training(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    uploader = utils.RemoteUploader("memory://uploads", num_concurrent_uploads=2)
    wait = uploader.check_remote_files_exist_async(["a"], wait_before_next_try_in_seconds=0.01)
    uploader.upload_file_async("a", tmp_path / "a", overwrite=False)
    assert wait.result(20) is utils.RemoteFilesExistingCheckStatus.EXIST
    uploader.upload_file_async("a", tmp_path / "a", overwrite=False)
    with pytest.raises(FileExistsError):
        uploader.wait_and_close()
    logger = RemoteUploaderDownloader(
        "memory://logged", file_path_format_string="{run_name}/{remote_file_name}"
    )
    with make_trainer(loggers=[logger]) as trainer:
        trainer.logger.upload_file("weights/a", tmp_path / "a")
    assert logger.get_uri_for_file("weights/a") == "memory://logged/run/weights/a"
    logger.download_file("weights/a", str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == b"abc"
    make = utils.maybe_create_remote_uploader_downloader_from_uri
    assert make("memory://logged/x", [logger]) is None
    assert make("memory://other/x", [logger]) is not None


def test_retry_repeats_a_failed_call() -> None:
    calls: list[int] = []

    @utils.retry(OSError, num_attempts=3, initial_backoff=0.0, max_jitter=0.0)
    def flaky(fails: int) -> str:
        calls.append(fails)
        if len(calls) <= fails:
            raise OSError("not yet")
        return "done"

    assert flaky(2) == "done"
    calls.clear()
    with pytest.raises(OSError, match="not yet"):
        flaky(3)
    assert utils.retry(len)("abc") == 3

    @utils.retry(OSError, num_attempts=3, initial_backoff=0.0, max_jitter=0.0)
    def numbered(start: int, retry_index: int) -> int:
        if retry_index < 2:
            raise OSError
        return start + retry_index

    assert numbered(5) == 7


def test_settings_are_converted_to_plain_values() -> None:
    class Owner:
        def __init__(self) -> None:
            self.local_hparams = {"lr": 0.1}

    found = utils.extract_hparams({"self": 1, "_private": 2, "lr": 0.1, "owner": Owner(), "nets": [Owner, 3]})
    assert found == {"lr": 0.1, "owner": {"Owner": {"lr": 0.1}}, "nets": ["Owner", 3]}
    flat = utils.convert_nested_dict_to_flat_dict({"a": {"b": 1, "c": {"d": 2}}, "e": 3})
    assert flat == {"a/b": 1, "a/c/d": 2, "e": 3}
    assert utils.convert_flat_dict_to_nested_dict(flat) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


def test_the_machine_is_reported_after_an_exception(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert utils.get_composer_env_dict()["torch_version"] == torch.__version__
    assert not utils.is_notebook()
    assert not utils.is_hpu_installed()
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    utils.configure_excepthook()
    sys.excepthook(ValueError, ValueError("ended"), None)
    printed = capsys.readouterr().err
    assert "ValueError: ended" in printed
    assert f"torch_version: {torch.__version__}" in printed
    utils.disable_env_report()
    sys.excepthook(ValueError, ValueError("ended"), None)
    assert "torch_version" not in capsys.readouterr().err
    utils.enable_env_report()


def test_random_generators_are_restored_after_a_seeded_block() -> None:
    states = reproducibility.get_rng_state()
    with reproducibility.seed_context(7):
        inside = torch.rand(2)
    after = torch.rand(2)
    reproducibility.load_rng_state(states)
    assert torch.equal(torch.rand(2), after)
    with reproducibility.seed_context(7):
        assert torch.equal(torch.rand(2), inside)
    with pytest.raises(ValueError, match="states of 0 ranks"):
        reproducibility.load_rng_state([])


def test_a_transform_is_added_before_or_after_the_tensor_conversion() -> None:
    def add(one: Any) -> Any:
        return one

    transforms = pytest.importorskip("torchvision.transforms", reason="needs `uv sync --group models`")
    dataset = SimpleNamespace(transform=transforms.Compose([transforms.ToTensor()]))
    utils.add_vision_dataset_transform(dataset, add)
    assert dataset.transform.transforms[0] is add
    utils.add_vision_dataset_transform(dataset, add, is_tensor_transform=True)
    assert dataset.transform.transforms[2] is add
    bare = SimpleNamespace(transform=None)
    utils.add_vision_dataset_transform(bare, add)
    assert bare.transform is add


def test_weights_are_initialised_by_name() -> None:
    norm, linear = torch.nn.BatchNorm2d(3), torch.nn.Linear(3, 4)
    torch.nn.Sequential(norm, linear).apply(Initializer("bn_uniform").get_initializer())
    assert 0 < norm.weight[0].item() < 1
    norm.apply(Initializer.BN_ONES.get_initializer())
    assert norm.weight.tolist() == [1.0] * 3
    linear.apply(Initializer("linear_log_constant_bias").get_initializer())
    assert linear.bias.tolist() == pytest.approx([-1.386294] * 4)
    before = linear.weight.clone()
    linear.apply(Initializer("kaiming_normal").get_initializer())
    assert not torch.equal(linear.weight, before)


def test_a_state_is_saved_and_loaded_without_a_trainer(tmp_path: Path) -> None:
    with make_trainer() as trainer:
        trainer.fit()
        path = utils.save_checkpoint(trainer.state, str(tmp_path / "ep{epoch}-ba{batch}-rank{rank}"))
        weights = {name: value.clone() for name, value in trainer.state.model.state_dict().items()}
    assert path == str(tmp_path / "ep1-ba4")
    with make_trainer() as trainer:
        utils.load_checkpoint(path, trainer.state, trainer.logger)
        assert trainer.state.timestamp.batch == 4
        torch.testing.assert_close(trainer.state.model.state_dict(), weights)
        steps = [slots["step"] for slots in trainer.state.optimizers[0].state.values()]
        assert [int(step) for step in steps] == [4, 4]


def test_states_are_read_and_written_as_dicts() -> None:
    with make_trainer() as trainer:
        trainer.fit()
        model, optimizer = trainer.state.model, trainer.state.optimizers[0]
        assert list(checkpoint.get_model_state_dict(model, include_keys="*.bias")) == ["module.bias"]
        halved = checkpoint.get_model_state_dict(model, precision="bf16", ignore_keys=["*.bias"])
        assert [value.dtype for value in halved.values()] == [torch.bfloat16]
        slots = checkpoint.get_optim_state_dict(model, optimizer)["state"]["module.weight"]
        assert {"exp_avg", "exp_avg_sq"} <= set(slots)
        assert checkpoint.get_metadata_state_dict(model, precision="fp32")["precision"] == "fp32"
        resumption = checkpoint.get_resumption_state_dict(trainer.state)
        assert resumption["timestamp"]["batch"] == 4
        assert len(resumption["rng"]) == 1


def test_a_model_is_exported(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    sample = torch.ones(2, 2)
    store = maybe_create_object_store_from_uri("memory://exports")
    assert store is not None
    utils.export_for_inference(model, "torch_export", "model.pt2", store, sample_input=sample)
    utils.get_file("memory://exports/model.pt2", tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(sample), model(sample))
    logger: Any = SimpleNamespace(has_file_destination=lambda: False)
    utils.export_with_logger(
        model, utils.ExportFormat.TORCH_EXPORT, str(tmp_path / "b.pt2"), logger, sample_input=sample
    )
    assert (tmp_path / "b.pt2").is_file()
    with pytest.raises(TrainerConfigError, match="TorchScript"):
        utils.export_for_inference(model, "torchscript", str(tmp_path / "c"), sample_input=sample)


def test_trainer_export_accepts_composers_arguments_and_sample_inputs(tmp_path: Path) -> None:
    at_end = composer.callbacks.ExportForInferenceCallback("torch_export", str(tmp_path / "{run_name}.pt2"))
    with make_trainer(callbacks=[at_end]) as trainer:
        trainer.fit()
        model, batch = trainer.state.model.eval(), (torch.randn(4, 2), torch.zeros(4, dtype=torch.long))
        samples = {"batch": batch, "arguments": (batch,), "named": (batch, {})}
        for name, sample in samples.items():
            trainer.export_for_inference("torch_export", str(tmp_path / f"{name}.pt2"), sample_input=sample)
        for name in samples:
            program = torch.export.load(tmp_path / f"{name}.pt2").module()
            torch.testing.assert_close(program(batch), model(batch))
        program = torch.export.load(tmp_path / "run.pt2").module()
        torch.testing.assert_close(program(list(batch)), model(batch))  # a loader's batch is a list


def test_a_checkpointsaver_replaces_the_trainers_save_arguments(tmp_path: Path) -> None:
    saver = composer.callbacks.CheckpointSaver(tmp_path, save_interval="2ba", num_checkpoints_to_keep=1)
    with make_trainer(callbacks=[saver]) as trainer:
        trainer.fit()
    assert sorted(os.listdir(tmp_path)) == ["ep0-ba4"]
    with pytest.raises(TrainerConfigError, match="two series"):
        make_trainer(callbacks=[saver], save_folder=str(tmp_path))


def lay_out() -> tuple[bool, list[int], bool, float]:
    utils.dist.initialize_dist("cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    replica = distributed.prepare_ddp_module(torch.nn.Linear(2, 2), find_unused_parameters=False)
    assert distributed.get_summon_params_fn(model) is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = utils.FSDP2Config(mixed_precision="FULL")
    assert isinstance(config, FSDPConfig)
    distributed.parallelize_composer_model(model, optimizer, config)
    is_sharded = utils.is_model_fsdp2(model)
    summon = distributed.get_summon_params_fn(model)
    assert summon is not None
    with summon(model):
        shape = list(model[0].weight.shape)
        with torch.no_grad():
            model[0].weight.fill_(float(5))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weight: Any = model[0].weight
    return is_sharded, shape, hasattr(replica, "no_sync"), float(weight.full_tensor().mean()) - 5


@pytest.mark.slow
def test_a_model_is_sharded_without_a_trainer() -> None:
    for is_sharded, shape, is_replica, change in run_ranks(lay_out, 2, init="gloo", timeout_s=120):
        assert is_sharded
        assert shape == [4, 4]
        assert is_replica
        assert 0 < abs(change) < 0.2
    with pytest.raises(TrainerConfigError, match="data_parallel_shard_degree"):
        utils.FSDP2Config(device_mesh=object())


def test_a_glob_filter_deletes_parts_of_a_tree_in_place() -> None:
    tree: dict[str, Any] = {
        "state": {"model": {"head.weight": 1, "body.weight": 2}, "parts": ["a", {"b": 1, "c": 2}, "d"]},
        "rng": [1, 2],
    }
    utils.glob_filter(["state/model/head.*", "rng", "state/parts/0", "state/parts/1/b"])(tree)
    assert tree == {"state": {"model": {"body.weight": 2}, "parts": [{"c": 2}, "d"]}}
    with pytest.warns(UserWarning, match="the key `state/none` to ignore matches nothing"):
        utils.glob_filter(["state/none"])(tree)


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_a_tuple_indexes_an_array_and_parts_of_other_batches(make: Any) -> None:
    batch = make([[1, 2, 3], [4, 5, 6]])
    assert int(utils.batch_get(batch, (1, 2))) == 6
    assert utils.batch_get(batch, [slice(0, 2), 1]).tolist() == [2, 5]
    assert utils.batch_set(batch, (0, 1), 9)[0, 1] == 9
    columns = make([10, 20, 30, 40])
    first, second = utils.batch_get(columns, [slice(0, 1), slice(2, 4)])
    assert (first.tolist(), second.tolist()) == ([10], [30, 40])
    assert utils.batch_get({"a": 1, "b": 2}, ["a", "b"]) == (1, 2)
    assert utils.batch_set((1, 2, 3), [0, 2], [7, 8]) == (7, 2, 8)


def test_functions_read_and_set_parts_of_a_batch() -> None:
    def double(batch: dict[str, int], value: int) -> dict[str, int]:
        return {**batch, "a": 2 * value}

    assert utils.batch_set({"a": 1}, double, 4) == {"a": 8}
    assert utils.batch_set({"a": 1}, (lambda batch: batch["a"], double), 4) == {"a": 8}
    with pytest.raises(ValueError, match="`key` has 3 functions; expected a pair"):
        utils.batch_get({"a": 1}, [double] * 3)
    with pytest.raises(ValueError, match="shorter"):
        utils.batch_set({"a": 1, "b": 2}, ["a", "b"], [3])


def test_uris_and_settings_are_parsed_as_in_composer() -> None:
    assert utils.parse_uri("oci://bucket@namespace/a/b") == ("oci", "bucket", "a/b")
    assert utils.extract_hparams({"unit": TimeUnit.EPOCH, "size": 3}) == {"unit": "ep", "size": 3}
    assert utils.partial_format("{foo} {} {}", "a") == "{foo} a {}"
    array = np.arange(3)
    assert utils.ensure_tuple(array)[0] is array
    assert utils.ensure_tuple(bytearray(b"ab")) == (b"ab",)


def test_an_enum_member_is_made_from_its_name_or_value() -> None:
    class Kind(utils.StringEnum):
        FIRST = "one"

    assert Kind("ONE") is Kind("first") is Kind(Kind.FIRST) is Kind.FIRST
    assert Kind.FIRST == "One"
    with pytest.raises(ValueError, match="not a valid"):
        Kind("two")
    with pytest.raises(TypeError, match="expected a text or one of its members"):
        Kind(1)
