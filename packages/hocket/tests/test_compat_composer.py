"""`hocket.compat.composer`: Composer's names, past spellings, and a script run unchanged."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import hocket.compat.composer as composer
from hocket.compat.composer.absent import Absent, NotInstalled
from hocket.compat.composer.command import main as composer_command
from hocket.compat.composer.docs_page import render
from hocket.compat.composer.install import MODULES, install
from hocket.compat.composer.load_paths import find_checkpoint
from hocket.compat.composer.spellings import SPELLINGS, translate
from hocket.dist.launch.options import parse
from hocket.trainer import Trainer
from hocket.trainer.errors import TrainerConfigError
from support.ranks import run_ranks

HERE = Path(__file__).parent
#: Modules that `hocket` does not require.
EXTRAS = ("torchvision", "transformers", "timm", "peft", "wandb", "mlflow", "tensorboard", "diffusers")
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
NAMES: dict[str, list[str]] = json.loads((HERE / "composer_names.json").read_text())
TRAINER_ARGUMENTS = {row.new for row in SPELLINGS if row.of == "Trainer"} - {None}


def run(*arguments: object) -> str:
    """Run `python -m hocket.compat.composer`; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "hocket.compat.composer", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_public_name_exists_or_raises_with_its_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    answering, absent = [], []
    for module, names in NAMES.items():
        ours = importlib.import_module(MODULES[module])
        for name in names:
            found = getattr(ours, name)
            if isinstance(found, NotInstalled):
                continue
            is_absent = isinstance(found, Absent) or name in _ABSENT_LOGGERS
            (absent if is_absent else answering).append(f"{module}.{name}")
            if is_absent:
                with pytest.raises(NotImplementedError, match=rf"Hocket has no `.*{name}`; \w+"):
                    found()
    total = len(answering) + len(absent)
    with capsys.disabled():
        print(f"\n{len(answering)} of Composer's {total} public names answer, {len(absent)} say what to use")
    assert len(answering) / total >= 0.95


_ABSENT_LOGGERS = {
    "CometMLLogger",
    "MosaicMLLogger",
    "NeptuneLogger",
    "SlackLogger",
}


def test_absent_names_raise_on_subclassing_and_attributes_and_have_no_instances() -> None:
    absent: Any = composer.callbacks.MLPerfCallback
    with pytest.raises(NotImplementedError, match="mlperf_logging"):
        type("Mine", (), {}) if not isinstance(1, absent) and absent.any_name else None
    with pytest.raises(NotImplementedError, match="mlperf_logging"):

        class Mine(absent):
            pass


def test_all_names_of_each_module_are_imported_without_extras_which_are_named_at_use() -> None:
    script = f"""
import importlib.metadata as metadata, sys
extras, found = {EXTRAS!r}, metadata.distribution
sys.modules.update(dict.fromkeys(extras))
def distribution(name):
    if name in extras:
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.distribution = distribution  # torchmetrics asks for versions
import hocket.compat.composer
hocket.compat.composer.install()
for module in {list(MODULES)!r}:
    exec(f"from {{module}} import *")
print(MAP)
for use in ("MAP()", "MAP.higher_is_better", "class Mine(MAP): pass"):
    try:
        exec(use)
    except hocket.trainer.errors.MissingExtraError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("`MAP` needs `torchvision`, which is not installed: pip install 'hocket-") == 4


def test_an_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        composer.callbacks.NoSuchThing  # noqa: B018


def test_the_translation_table_names_existing_arguments_of_the_trainer() -> None:
    assert set(inspect.signature(Trainer).parameters) >= TRAINER_ARGUMENTS


def test_the_docs_page_on_composer_is_current_and_its_snippet_runs() -> None:
    page = (HERE.parent / "docs" / "coming_from_composer.md").read_text(encoding="utf-8")
    assert page == render(), "write it with `python -m hocket.compat.composer.docs_page FILE`"
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(snippet, "coming_from_composer.md", "exec"), {"__name__": "snippet"})


def test_past_arguments_are_translated_to_current_ones() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(9, 1)), batch_size=9)
    assert translate("Trainer", {"grad_accum": 2, "train_dataloader": loader, "precision": "amp"}) == {
        "device_train_microbatch_size": 5,
        "train_dataloader": loader,
        "precision": "amp_fp16",
    }
    assert translate("LabelSmoothing", {"alpha": 0.2}) == {"smoothing": 0.2}
    with pytest.raises(TrainerConfigError, match="`alpha` and `smoothing` are both given"):
        translate("LabelSmoothing", {"alpha": 0.2, "smoothing": 0.1})
    with pytest.raises(TrainerConfigError, match="`grad_accum` is 2"):
        translate("Trainer", {"grad_accum": 2})
    found = translate("Trainer", {"grad_accum": "auto", "train_dataloader": loader})
    assert found["device_train_microbatch_size"] == "auto"


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [("single_auto_sync", "last"), ("multi_auto_sync", "every"), ("forced_sync", "every"), (None, None)],
)
def test_a_ddp_sync_strategy_becomes_a_gradient_sync_policy(strategy: str | None, policy: str | None) -> None:
    found = translate("Trainer", {"ddp_sync_strategy": strategy})
    assert found == ({} if policy is None else {"loop": {"gradient_sync": policy}})
    with pytest.raises(TrainerConfigError, match="`ddp_sync_strategy` is 'never'; expected one of"):
        translate("Trainer", {"ddp_sync_strategy": "never"})


class Plain(composer.ComposerModel):
    """A model that does not call `super().__init__()`."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(2, 1)
        self.layer._activation_checkpointing = True

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[1])


@pytest.mark.parametrize("precision", ["amp", "fp16", "bf16", "amp_bf16", "fp32"])
def test_a_model_trains_in_every_precision_on_a_cpu(precision: str) -> None:
    with composer.Trainer(
        model=(model := Plain()),
        train_dataloader=DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4),
        max_duration="20ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        precision=precision,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        before = model.layer.weight.detach().clone()
        trainer.fit()
    assert not torch.equal(model.layer.weight, before)


LAYOUTS: list[dict[str, Any]] = [
    {"deepspeed_config": {}},
    {"deepspeed_config": {"train_batch_size": 8, "fp16": {"enabled": True}}},
    {
        "fsdp_config": {
            "sharding_strategy": "FULL_SHARD",
            "activation_checkpointing": True,
            "mixed_precision": "PURE",
            "cpu_offload": False,
            "backward_prefetch": "BACKWARD_PRE",
            "limit_all_gathers": True,
            "verbose": True,
            "activation_cpu_offload": False,
        },
        "precision": "bf16",
    },
]


def train_with_layouts() -> list[tuple[str, str, int, bool]]:
    found = []
    for layout in LAYOUTS:
        with composer.Trainer(
            model=(model := Plain()),
            train_dataloader=DataLoader(TensorDataset(torch.ones(16, 2), torch.ones(16, 1)), batch_size=4),
            max_duration=1,
            device="cpu",
            progress_bar=False,
            **layout,
        ) as trainer:
            trainer.fit()
            state = trainer.state
            is_sharded = composer.utils.is_model_fsdp(model)
            optimizer = type(state.optimizers[0]).__name__
            found.append((optimizer, state.precision, state.timestamp.batch.value, is_sharded))
    return found


@pytest.mark.slow
def test_published_layouts_and_composers_default_optimizer_work_on_two_ranks() -> None:
    for found in run_ranks(train_with_layouts, 2, init="gloo", timeout_s=120):
        assert found == [
            ("DecoupledSGDW", "fp32", 2, True),
            ("DecoupledSGDW", "amp_fp16", 2, True),
            ("DecoupledSGDW", "amp_bf16", 2, True),
        ]


def test_the_newest_checkpoint_of_an_empty_folder_raises_unless_autoresume(tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match="there is none"):
        find_checkpoint(tmp_path / "latest-rank0.pt")
    assert find_checkpoint(tmp_path / "latest-rank0.pt", autoresume=True) is None


def test_checkpoints_are_replaced_with_save_overwrite(tmp_path: Path) -> None:
    for overwrites in (False, True):
        model = Plain()
        with composer.Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4),
            max_duration=1,
            save_folder=tmp_path,
            save_overwrite=overwrites,
            device="cpu",
            progress_bar=False,
        ) as trainer:
            trainer.fit()
    assert [path.name for path in tmp_path.iterdir()] == ["ep1-ba2"]


class Older(composer.ComposerModel):
    """A model written for Composer's first releases."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.measured = MulticlassAccuracy(num_classes=3, average="micro")

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    def validate(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self(batch), batch[1]

    def metrics(self, train: bool = False) -> Any:
        return {} if train else self.measured


def test_the_launchers_compat_option_runs_the_script_through_the_layer() -> None:
    options = parse(["--compat", "composer", "-n", "2", "train.py", "--lr", "1"])
    assert (options.module, options.training_script) == (True, "hocket.compat.composer")
    assert options.training_script_args == ["train.py", "--lr", "1"]
    options = parse(["--compat", "composer", "-m", "pkg.train"])
    assert options.training_script_args == ["-m", "pkg.train"]
    for wrong in (["--compat", "nothing", "train.py"], ["--compat", "composer", "-c", "train"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_composers_own_launcher_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_launcher.py").write_text("def main():\n    return 7\n")
    info = tmp_path / "mosaicml-0.32.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mosaicml\nVersion: 0.32.1\n")
    (info / "entry_points.txt").write_text("[console_scripts]\ncomposer = their_launcher:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert composer_command() == 7
    sys.modules.pop("their_launcher", None)


SCRIPT = """
import sys
import composer
from composer.utils import dist

dist.initialize_dist("cpu")
ranks = dist.all_gather_object(dist.get_global_rank())
print(composer.__name__, ranks, dist.get_world_size(), sys.argv[1:], flush=True)
"""


def test_the_composer_command_imports_no_torch_before_it_can_fork_ranks() -> None:
    source = "import sys, hocket.compat.composer.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


@pytest.mark.slow
def test_the_composer_command_starts_a_script_on_two_machines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = "import sys; from hocket.compat.composer.command import main; sys.exit(main())"
    options = ["-n", "1", "--world_size", "2", "--master_addr", "127.0.0.1"]
    options += ["--master_port", str(composer.utils.get_free_tcp_port())]
    machines = [
        subprocess.Popen(
            [sys.executable, "-c", command, *options, "--node_rank", str(number), str(script), "--lr", "1"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for machine in machines:
        printed, _ = machine.communicate(timeout=280)
        assert machine.returncode == 0
        assert "hocket.compat.composer [0, 1] 2 ['--lr', '1']" in printed


def test_an_older_model_and_a_file_logger_with_past_arguments(tmp_path: Path) -> None:
    model = Older()
    loader = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, dtype=torch.long)), batch_size=4)
    with composer.Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        train_dataloader=loader,
        eval_dataloader=loader,
        max_duration="4ep",
        loggers=composer.loggers.FileLogger(str(tmp_path / "training_log.txt"), flush_interval=50),
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        print("a printed line")
    lines = [json.loads(line) for line in (tmp_path / "training_log.txt").read_text().splitlines()]
    measured = [line for line in lines if "metrics/eval/MulticlassAccuracy" in line]
    assert measured[-1]["metrics/eval/MulticlassAccuracy"] == 1.0
    assert {"stdout": "a printed line"} in lines


def test_install_raises_if_composer_is_installed_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    other = type(sys)("composer")
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "composer", other)
    with pytest.raises(TrainerConfigError, match="force=True"):
        install()
    install(force=True)
    assert sys.modules["composer"] is composer
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_names_are_imported_from_the_modules_that_define_them_in_composer() -> None:
    script = """
import hocket.compat.composer as ours
ours.install()
from composer.algorithms.gated_linear_units.gated_linear_unit_layers import BERTGatedFFOutput
from composer.algorithms.stochastic_depth.stochastic_layers import make_resnet_bottleneck_stochastic
from composer.algorithms.utils import augmentation_sets
from composer.algorithms.utils.augmentation_primitives import augmentation_sets as same_sets
from composer.checkpoint.download import download_monolithic_checkpoint
from composer.checkpoint.state_dict import get_model_state_dict
from composer.checkpoint.upload import upload_file
from composer.devices.device_tpu import DeviceTPU
from composer.distributed.prepare_distributed import parallelize_composer_model
from composer.distributed.shared_utils import get_summon_params_fn
from composer.metrics import map as map_module
from composer.utils.object_store.uc_object_store import UCObjectStore
from composer.utils.object_store.utils import build_remote_backend
assert augmentation_sets is same_sets and "all" in augmentation_sets
assert get_model_state_dict is ours.checkpoint.get_model_state_dict
assert map_module is ours.metrics
"""
    if HAS_TORCHVISION:
        script += "from composer.metrics.map import MAP\nassert MAP is ours.metrics.MAP\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_published_script_runs_unchanged_and_resumes(tmp_path: Path) -> None:
    script = HERE / "composer_scripts" / "digits.py"
    first = run(script, tmp_path, 3)
    assert "batches=24 at=24 microbatch=32" in first
    assert "lr-DecoupledSGDW/group0" in first
    assert "metrics/eval/MulticlassAccuracy" in first
    assert "throughput/batches_per_sec" in first
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["ep2-ba16", "ep3-ba24"]
    second = run(script, tmp_path, 4, folder / "latest-rank0.pt")
    assert "batches=8 at=32 " in second
    accuracy = re.search(r"accuracy=([\d.]+)", second)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.85


def test_heavy_modules_are_imported_on_first_use_only() -> None:
    script = """
import sys
import hocket.compat.composer as composer
composer.install()
from composer import Time, Trainer, State
from composer.core import DataSpec
assert not {"torchmetrics", "torchvision", "transformers"} & set(sys.modules)
import composer.algorithms.blurpool.blurpool as blurpool
assert blurpool.BlurPool is composer.algorithms.BlurPool
import composer.metrics
from composer.callbacks.speed_monitor import SpeedMonitor
assert composer.callbacks.speed_monitor.SpeedMonitor is SpeedMonitor
assert composer.optim.scheduler.StepScheduler and composer.core.time.Time is composer.Time
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
