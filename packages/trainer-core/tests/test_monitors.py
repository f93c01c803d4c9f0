"""Callbacks that measure and report, in whole trainings."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn

from hocket.trainer import Callback, ComposerModel, Evaluator
from hocket.trainer.callbacks import (
    ActivationMonitor,
    EvalOutputLogging,
    FreeOutputs,
    GoodputMonitor,
    GradNormMonitor,
    ImageVisualizer,
    MemoryMonitor,
    MemorySnapshot,
    NaNMonitor,
    OOMObserver,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    SpikeWatcher,
    SystemMetricsMonitor,
)
from hocket.trainer.callbacks.peak_flops import peak_flops_of
from hocket.trainer.errors import DataError, DivergedError, TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from support.training import FileStore, Net, Watch, loader, make, parameters


def fit(*callbacks, max_duration="10ba", **arguments):
    """Train, and return the trainer and the logged points."""
    memory = InMemoryLogger()
    with make(callbacks=list(callbacks), loggers=memory, max_duration=max_duration, **arguments) as trainer:
        trainer.fit()
    return trainer, memory


class Scaled(Net):
    """A classifier that multiplies the loss of one batch by a number."""

    def __init__(self, factor, at):
        super().__init__()
        self.factor, self.at, self.count = factor, at, 0

    def loss(self, outputs, batch):
        self.count += 1
        return super().loss(outputs, batch) * (self.factor if self.count == self.at else 1.0)


def test_nan_monitor_ends_the_training_and_names_the_batch():
    with pytest.raises(DivergedError, match="the loss of batch 3 is not finite; go on from"):
        fit(NaNMonitor(), model=Scaled(math.nan, 3), loop={"nonfinite_loss": "ignore"})
    with pytest.raises(DivergedError, match="batch 10"):
        fit(NaNMonitor(), model=Scaled(math.inf, 10), loop={"nonfinite_loss": "ignore"})
    # Without the monitor the trainer itself raises, before the update.
    with pytest.raises(DivergedError, match="the loss of batch 3 on rank 0 is nan"):
        fit(model=Scaled(math.nan, 3))
    fit(NaNMonitor())


def test_monitors_that_run_every_batch_read_no_device(monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor was read on the training thread")

    callbacks = [SpeedMonitor(), MemoryMonitor(), GradNormMonitor(), OptimizerMonitor(batch_log_interval=1)]

    class Guard(Callback):
        def after_train_batch(self, state, logger):
            for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__"):
                monkeypatch.setattr(torch.Tensor, name, refuse)

        def batch_end(self, state, logger):
            monkeypatch.undo()

    class Devices:
        """A destination that accepts points without reading their values."""

        destinations = (object(),)

        def log_metrics(self, metrics, step=None, **options):
            assert metrics

    guard, logger = Guard(), Devices()
    with make(max_duration="1ba") as trainer:
        trainer.fit()
        state = trainer.state
        for parameter in state.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        guard.after_train_batch(state, logger)
        for callback in callbacks:
            callback.after_train_batch(state, logger)
        for callback in callbacks:
            callback.batch_end(state, logger)
        guard.batch_end(state, logger)


@pytest.mark.parametrize(
    ("factor", "pattern"),
    [(1e4, r"[\d.e+]+, and was [\d.]+ ± [\d.]+ in the 11 batches before"), (math.nan, "nan")],
)
def test_a_loss_spike_raises(factor, pattern):
    watcher = SpikeWatcher("raise", min_batches=5)
    with pytest.raises(DivergedError, match=f"a spike at batch 12: the loss is {pattern}"):
        fit(watcher, model=Scaled(factor, 12), max_duration="4ep", loop={"nonfinite_loss": "ignore"})


def test_a_skipped_spike_does_not_change_the_run(caplog):
    kept = {}

    def keep(state):
        if state.timestamp.counts.batch in (11, 12):
            momenta = [slots["momentum_buffer"].clone() for slots in state.optimizers[0].state.values()]
            weights = [parameter.detach().clone() for parameter in state.model.parameters()]
            kept[state.timestamp.counts.batch] = [*momenta, *weights]

    watcher = SpikeWatcher("skip", min_batches=5, watch_grad_norm=True)
    _, memory = fit(Watch(keep), watcher, model=Scaled(1e4, 12), max_duration="4ep")
    assert all(torch.equal(one, other) for one, other in zip(kept[11], kept[12], strict=True))
    assert [step for step, is_spike in memory.data["spike/loss"] if is_spike] == [12]
    assert [step for step, is_spike in memory.data["spike/grad_norm"] if is_spike] == [12]
    assert "a spike at batch 12, whose update is skipped" in caplog.text
    restored = SpikeWatcher("skip", watch_grad_norm=True)
    restored.load_state_dict(watcher.state_dict())
    assert restored.state_dict() == watcher.state_dict()
    assert len(watcher.state_dict()["loss"]) == 19


def test_too_many_skipped_batches_in_a_row_raise():
    class Broken(Net):
        def loss(self, outputs, batch):
            return super().loss(outputs, batch) * math.nan

    with pytest.raises(DivergedError, match="number 3 in a row"):
        fit(SpikeWatcher("skip", max_skipped_in_a_row=2), model=Broken(), loop={"nonfinite_loss": "ignore"})
    with pytest.raises(TrainerConfigError, match=r"`policy` is `forget`; expected one of .*`ignore`"):
        SpikeWatcher("forget")


def test_training_continues_after_a_spike_with_action_warn(caplog):
    trainer, _ = fit(SpikeWatcher("warn", min_batches=5), model=Scaled(1e4, 12), max_duration="4ep")
    assert trainer.state.timestamp.counts.batch == 20
    assert "a spike at batch 12: the loss is" in caplog.text


def test_an_ignored_spike_is_only_logged(caplog):
    watcher = SpikeWatcher("ignore", min_batches=5)
    trainer, memory = fit(watcher, model=Scaled(1e4, 12), max_duration="4ep")
    assert trainer.state.timestamp.counts.batch == 20
    assert next(step for step, is_spike in memory.data["spike/loss"] if is_spike) == 12
    assert "a spike" not in caplog.text


def test_logged_norms_equal_the_norms_of_the_tensors():
    seen = {}

    class Look(Callback):
        def after_train_batch(self, state, logger):
            named = dict(state.model.named_parameters())
            seen["grad"] = {name: value.grad.clone() for name, value in named.items()}
            seen["before"] = {name: value.detach().clone() for name, value in named.items()}

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trainer, memory = fit(
        Look(),
        OptimizerMonitor(batch_log_interval=10),
        GradNormMonitor(10),
        model=model,
        optimizers=optimizer,
    )
    logged = {name: value for name, value in memory.most_recent_values.items() if "/" in name}
    slots = {name: optimizer.state[value] for name, value in trainer.state.model.named_parameters()}
    for name, after in parameters(trainer).items():
        grad, update = seen["grad"][name], after - seen["before"][name]
        expected = {
            f"l2_norm/grad/{name}": grad.norm(),
            f"l2_norm/param/{name}": after.norm(),
            f"l2_norm/update/{name}": update.norm(),
            f"l2_norm/moment/{name}": slots[name]["exp_avg"].norm(),
            f"l2_norm/second_moment_sqrt/{name}": slots[name]["exp_avg_sq"].sqrt().norm(),
            f"cosine/update_grad/{name}": torch.cosine_similarity(update.flatten(), grad.flatten(), dim=0),
        }
        for key, value in expected.items():
            assert logged[key] == pytest.approx(float(value), rel=1e-4, abs=1e-6), key
    whole = torch.cat([grad.flatten() for grad in seen["grad"].values()]).norm()
    assert logged["l2_norm/grad/global"] == pytest.approx(float(whole), rel=1e-5)
    assert len(memory.data["l2_norm/grad/global"]) == 2  # one of each monitor


def test_activations_are_measured_at_intervals():
    _, memory = fit(ActivationMonitor("5ba", ignore_module_types=["Tanh"], only_log_wandb=False))
    assert [step for step, _ in memory.data["activations/l2_norm/layers.0_input.0"]] == [5, 10]
    names = {name.split("/")[2] for name in memory.data if name.startswith("activations/")}
    assert {"_output.0", "layers.0_input.0", "layers.3_output.0"} <= names
    assert not any(name.startswith("layers.1_") for name in names)
    assert memory.most_recent_values["activations/kurtosis/layers.3_output.0"] >= 1.0
    trainer, memory = fit(ActivationMonitor("5ba"))
    assert not any(name.startswith("activations/") for name in memory.data)
    assert not any(module._forward_hooks for module in trainer.state.model.modules())


def test_speed_monitor_counts_flops_and_excludes_evaluation():
    class Counted(Net):
        def flops_per_batch(self, batch):
            return 1000.0 * len(batch[0])

    class Pause(Callback):
        def eval_start(self, state, logger):
            time.sleep(0.2)

    clocks = []
    speed = SpeedMonitor(gpu_flops_available=1e6, time_unit="seconds")
    trainer, memory = fit(
        speed,
        Pause(),
        Watch(lambda state: clocks.append(state.timestamp.counts.total_wct)),
        model=Counted(),
        eval_dataloader=loader(8),
        eval_interval="1ep",
    )
    last = memory.most_recent_values
    # Rates use the training's clock, which excludes the evaluation between two batches.
    assert last["throughput/batches_per_sec"] == pytest.approx((len(clocks) - 1) / (clocks[-1] - clocks[0]))
    assert last["throughput/flops_per_sec"] == pytest.approx(4000 * last["throughput/batches_per_sec"])
    assert last["throughput/device/mfu"] == pytest.approx(last["throughput/flops_per_sec"] / 1e6)
    assert 0.2 <= last["time/val"] < 5
    assert last["time/total"] == pytest.approx(last["time/train"] + last["time/val"])
    assert last["time/train"] == pytest.approx(trainer.state.timestamp.counts.total_wct)
    assert speed.state_dict()["eval_s"] >= 0.4


@pytest.mark.parametrize(
    ("name", "column", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "half", 989e12),
        ("NVIDIA H100 PCIe", "half", 756e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA A10G", "half", 70e12),
        ("Tesla T4", "fp32", 8.1e12),
        ("AMD Instinct MI300X", "half", 1307e12),
        ("NVIDIA GeForce RTX 4090", "half", 165e12),
        ("NVIDIA B200", "fp8", 4500e12),
        ("Tesla T4", "fp8", None),
        ("Some Card 9", "half", None),
    ],
)
def test_peak_flops_are_found_by_device_name(name, column, expected):
    assert peak_flops_of(name, column) == expected


def test_the_time_left_is_estimated():
    _, memory = fit(
        RuntimeEstimator(skip_batches=2, time_unit="seconds"), Watch(lambda state: time.sleep(0.05))
    )
    points = memory.data["time/remaining_estimate"]
    assert [step for step, _ in points] == list(range(3, 11))
    assert points[-1][1] == 0.0
    assert 0.3 < points[0][1] < 60  # seven batches of at least 0.05 s are left
    assert memory.hyperparameters == {"time/remaining_estimate_unit": "seconds"}


def test_memory_is_logged_on_a_cpu():
    _, memory = fit(MemoryMonitor(dist_aggregate_batch_interval=5))
    own = [number for _, number in memory.data["memory/host_rss_mem"]]
    assert len(own) == 10
    assert all(0.05 < number < 50 for number in own)
    assert [step for step, _ in memory.data["memory/host_rss_mem_max"]] == [5, 10]
    assert memory.data["memory/host_rss_mem_avg"][1] == (10, own[9])


def test_system_metrics_are_logged(monkeypatch):
    pytest.importorskip("psutil")
    _, memory = fit(SystemMetricsMonitor(log_all_data=True, interval="5ba"))
    last = memory.most_recent_values
    assert 0 < last["system/cpu_memory_percent_max"] <= 100
    assert last["system/cpu_memory_percent_max_rank"] == 0
    assert last["system/cpu_percent_rank0"] == last["system/cpu_percent_min"]
    assert last["system/disk_read_mb_max"] >= 0


def test_goodput_accounts_for_all_time_across_a_restart(tmp_path):
    class Slow(FileStore):
        def save(self, *args, **options):
            time.sleep(0.2)
            return super().save(*args, **options)

    def run(duration):
        goodput = GoodputMonitor("5ba")
        arguments = {"checkpointing": {"store": Slow(tmp_path)}, "save_interval": "1ep", "autoresume": True}
        pause = Watch(lambda state: time.sleep(0.02))
        _, memory = fit(pause, goodput, max_duration=duration, **arguments)
        return goodput, memory.most_recent_values

    started = time.time()
    first, logged = run("5ba")
    assert logged["goodput/train_seconds"] >= 0.1
    seconds = first.seconds()
    assert seconds["save"] + seconds["other"] >= 0.15
    assert seconds["restart"] == 0
    time.sleep(0.5)
    second, logged = run("10ba")
    seconds = second.seconds()
    assert seconds["restart"] >= 0.5
    assert seconds["train"] >= 0.2
    assert sum(seconds.values()) <= time.time() - started + 0.1
    assert 0 < logged["goodput/ratio"] < 1


def test_an_out_of_memory_error_reports_the_uses_of_memory(tmp_path):
    class Hungry(Net):
        def forward(self, batch):
            if self.training and self.count == 3:
                raise torch.OutOfMemoryError("out of memory: tried to allocate 20 GiB")
            self.count += 1
            return super().forward(batch)

        count = 0

    model = Hungry()
    observer = OOMObserver(folder=str(tmp_path / "{run_name}"))
    trainer = make(model=model, callbacks=observer, max_duration="1ep", run_name="big")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.fit()
    notes = "\n".join(raised.value.__notes__)
    held = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    assert f"parameters         {held:.3f} GB" in notes
    assert "`device_train_microbatch_size` is the whole batch of a rank: halve it" in notes
    report = (tmp_path / "big" / "rank0_oom.txt").read_text()
    assert report.startswith("out of memory: tried to allocate 20 GiB")
    assert "optimizer state" in report


def test_other_errors_get_no_memory_report(tmp_path):
    trainer = make(callbacks=OOMObserver(folder=str(tmp_path)), max_duration="1ep", model=Scaled("x", 2))
    with pytest.raises(TypeError) as raised:
        trainer.fit()
    assert "memory of this rank" not in "".join(raised.value.__notes__)
    assert list(tmp_path.iterdir()) == []


def test_a_memory_snapshot_without_cuda_warns(caplog, tmp_path):
    fit(MemorySnapshot(folder=str(tmp_path)))
    assert "on `cpu` it does nothing" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_memory_snapshot_is_written_on_cuda(tmp_path):
    memory = InMemoryLogger()
    model = Net()
    from hocket.trainer import Trainer

    with Trainer(
        model=model,
        train_dataloader=loader(),
        max_duration="1ep",
        device="gpu",
        callbacks=[MemorySnapshot(interval="2ba", folder=str(tmp_path)), OOMObserver(), MemoryMonitor()],
        loggers=memory,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert {path.suffix for path in tmp_path.iterdir()} == {".pickle", ".html"}
    assert memory.most_recent_values["memory/peak_allocated_mem"] > 0


class Segmenter(ComposerModel):
    """A class for each pixel."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def images(num=12):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(num, 3, 6, 6, generator=generator)
    targets = torch.randint(0, 4, (num, 6, 6), generator=generator)
    return [(inputs[start : start + 4], targets[start : start + 4]) for start in range(0, num, 4)]


def test_images_and_their_masks_are_logged():
    model = Segmenter()
    arguments = {"model": model, "optimizers": torch.optim.SGD(model.parameters(), lr=0.1)}
    arguments |= {"train_dataloader": images(), "eval_dataloader": images(4), "max_duration": "2ep"}
    _, memory = fit(ImageVisualizer("4ba", num_images=3), **arguments)
    assert [step for step, _ in memory.images["Images/Train"]] == [0, 4]
    _, shown = memory.images["Images/Train"][0]
    expected = (images()[0][0][:3] * 255).to(torch.uint8).permute(0, 2, 3, 1)
    assert torch.equal(torch.stack(shown.images), expected)
    assert len(memory.images["Images/eval"]) == 2
    arguments["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1)
    _, memory = fit(ImageVisualizer(mode="segmentation"), **arguments)
    _, shown = memory.images["Images/Train"][0]
    assert torch.equal(torch.stack(shown.masks["ground truth"]), images()[0][1])
    assert shown.masks["prediction"][0].shape == (6, 6)
    for options, message in (
        ({"mode": "outputs"}, "expected `input` or `segmentation`"),
        ({"num_images": 0}, "`num_images` is 0; expected a whole number from 1 on"),
        ({"interval": -1}, "expected at least 1, or 0 for no images"),
    ):
        with pytest.raises(TrainerConfigError, match=message):
            ImageVisualizer(**options)


@pytest.mark.parametrize("mode", ["input", "segmentation"])
def test_images_of_a_batch_in_microbatches_are_logged_once(mode):
    model = Segmenter()
    evaluator = Evaluator(label="eval", dataloader=images(4), device_eval_microbatch_size=1)
    arguments = {"model": model, "optimizers": torch.optim.SGD(model.parameters(), lr=0.1)}
    arguments |= {"train_dataloader": images(), "device_train_microbatch_size": 2, "max_duration": "1ep"}
    _, memory = fit(ImageVisualizer("2ba", mode=mode), eval_dataloader=evaluator, **arguments)
    assert [step for step, _ in memory.images["Images/Train"]] == [0, 2]
    assert len(memory.images["Images/eval"]) == 1
    wrong = ImageVisualizer(mode=mode, input_key="image")
    arguments["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(DataError, match="there is no 'image' in the batch"):
        fit(wrong, **arguments)


def test_outputs_of_evaluation_are_logged():
    _, memory = fit(EvalOutputLogging(num_samples=2), eval_dataloader=loader(8), eval_interval="1ep")
    (step, columns, rows), *_ = memory.tables["eval_outputs/eval"]
    assert (step, columns, len(rows)) == (5, ["input", "output", "target"], 2)
    assert rows[0][1] in {"0", "1", "2"}
    assert len(rows[0][0].split(", ")) == 5


def test_outputs_are_freed_after_the_loss():
    seen = []

    class Look(Callback):
        def before_backward(self, state, logger):
            seen.append(state.outputs)

    freed, _ = fit(FreeOutputs(), Look())
    kept, _ = fit()
    assert seen == [None] * 10
    assert all(
        torch.equal(one, other)
        for one, other in zip(parameters(freed).values(), parameters(kept).values(), strict=True)
    )
