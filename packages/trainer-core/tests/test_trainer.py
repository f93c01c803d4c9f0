"""The trainer's arguments: their effects, and the values that raise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler

from hocket.trainer import Algorithm, Callback, LoggerDestination, Trainer
from hocket.trainer.errors import (
    DataError,
    DurationReachedError,
    TrainerClosedError,
    TrainerConfigError,
)
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.ranks.single_process import SingleProcess
from support.training import Net, Watch, data, loader, make, parameters


def test_three_arguments_are_enough_to_train(capfd):
    trainer = Trainer(model=Net(), train_dataloader=loader(), max_duration="2ba")
    trainer.fit()
    assert trainer.state.timestamp.batch == "2ba"
    assert trainer.state.timestamp.sample == "8sp"
    trainer.close()
    # The summary at the start; the progress bar below it prints samples a second.
    told = capfd.readouterr().err.partition("[train")[0]
    for part in ("one process on", "4 samples", "one process takes all of it; as stored", "2 batches"):
        assert told.count(part) == 1


def test_the_loss_is_logged_at_its_step():
    logger = InMemoryLogger()
    losses = {}
    watch = Watch(lambda state: losses.__setitem__(state.timestamp.counts.batch, float(state.loss)))
    with make(loggers=logger, callbacks=watch, max_duration="3ba", device_train_microbatch_size=3) as trainer:
        trainer.fit()
        logged = dict(logger.data["loss/train/total"])
    assert logged.keys() == {1, 2, 3}
    assert logged == pytest.approx(losses)


class Reads(TorchDispatchMode):
    """Records where a tensor's value is read, which on a GPU would wait for the device."""

    def __init__(self):
        super().__init__()
        self.places = []
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        if function is torch.ops.aten._local_scalar_dense.default or "nonzero" in function.name():
            self.places.append("".join(traceback.format_stack(limit=8)))
        return function(*args, **(kwargs or {}))


class Never(Algorithm):
    def match(self, event, state):
        return False

    def apply(self, event, state, logger):
        """Not called."""


def test_callbacks_algorithms_and_loggers_may_be_iterators():
    names = ("callbacks", "algorithms", "loggers")
    parts = Callback(), Never(), InMemoryLogger()
    with make(max_duration="1ba", **{n: iter([part]) for n, part in zip(names, parts, strict=True)}) as one:
        assert one.state.callbacks[0] is parts[0]
        assert one.state.algorithms == [parts[1]]
        assert parts[2] in one.logger.destinations
    with pytest.raises(TrainerConfigError, match="`callbacks` has the class `Callback`"):
        make(callbacks=iter([Callback]))


@pytest.mark.parametrize("size", [None, 2])
def test_the_loop_reads_no_tensor_while_it_logs(size):
    # The batches are in a list, because torch's loader reads a seed each epoch.
    with make(
        train_dataloader=list(loader()),
        loggers=InMemoryLogger(),
        device_train_microbatch_size=size,
        max_duration="10ba",
    ) as trainer:
        with Reads() as reads:
            trainer.fit()
        assert reads.calls > 100
        assert reads.places == []
        assert len(trainer.logger.destinations[0].data["loss/train/total"]) == 10
    with Reads() as reads:
        float(torch.ones(()))
    assert len(reads.places) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_the_loop_waits_for_no_gpu(precision):
    model = Net().cuda()
    trainer = Trainer(
        model=model,
        train_dataloader=loader(pin_memory=True),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        loggers=InMemoryLogger(),
        progress_bar=False,
        precision=precision,
        device_train_microbatch_size=3,
        max_duration="50ba",
    )
    trainer.fit("5ba")
    forbid = Watch(
        lambda state: torch.cuda.set_sync_debug_mode("error" if state.timestamp < "45ba" else "default")
    )
    trainer.state.callbacks.append(forbid)
    try:
        trainer.fit("45ba")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # In the mode "error" torch raises where the host waits for the GPU.
    assert trainer.state.timestamp.batch == 50
    trainer.close()


def test_a_duration_of_fit_counts_from_the_current_time_in_its_unit():
    with make() as trainer:
        with pytest.raises(TrainerConfigError, match="no training duration"):
            trainer.fit()
        trainer.fit("1ep")
        assert trainer.state.timestamp.counts[:3] == (0, 1, 5)
        trainer.fit(duration="1ba")
        assert trainer.state.timestamp.counts[:3] == (0, 1, 6)
        assert trainer.state.timestamp.batch_in_epoch == "1ba"
        assert trainer.state.max_duration == "6ba"
        trainer.fit("6sp")
        assert trainer.state.timestamp.sample == "32sp"
        with pytest.raises(DurationReachedError):
            trainer.fit()


@pytest.mark.parametrize("duration", ["0ba", "10sec", "0.5dur", "-1ep"])
def test_an_invalid_duration_raises(duration):
    with pytest.raises(TrainerConfigError, match="cannot end a training"):
        make(max_duration=duration)


def test_a_second_fit_continues_as_an_uninterrupted_one():
    with make(max_duration="7ba", train_dataloader=loader(shuffle=True)) as trainer:
        trainer.fit()
        expected = parameters(trainer)
    with make(train_dataloader=loader(shuffle=True)) as trainer:
        trainer.fit("3ba")
        trainer.fit("4ba")
        assert all(torch.equal(expected[name], value) for name, value in parameters(trainer).items())


def test_the_seed_determines_the_run_and_without_one_torchs_seed_does():
    def end(**arguments):
        torch.manual_seed(arguments.pop("torch_seed", 0))
        with make(
            max_duration="3ba", train_dataloader=loader(shuffle=True), model=Net(dropout=0.5), **arguments
        ) as t:
            t.fit()
            return torch.cat([value.flatten() for value in parameters(t).values()])

    assert torch.equal(end(seed=5, torch_seed=1), end(seed=5, torch_seed=2))
    assert not torch.equal(end(seed=5), end(seed=6))


def test_amp_bf16_computes_in_bf16_and_trains():
    seen = []

    class Typed(Net):
        def loss(self, outputs, batch):
            seen.append(outputs.dtype)
            return super().loss(outputs, batch)

    with make(model=Typed(), precision="amp_bf16", max_duration="2ba") as trainer:
        trainer.fit()
    assert seen == [torch.bfloat16] * 2
    with pytest.raises(TrainerConfigError, match="`amp_fp7`; expected one of `fp32`, `amp_bf16`, `amp_fp16`"):
        make(precision="amp_fp7")


def test_amp_fp16_unscales_before_gradients_are_seen():
    norms = {}

    def train(precision):
        with make(precision=precision) as trainer:
            from hocket.trainer import Callback

            class Norm(Callback):
                def after_train_batch(self, state, logger):
                    norms[precision] = float(
                        torch.nn.utils.get_total_norm([p.grad for p in state.model.parameters()])
                    )

            trainer.state.callbacks.append(Norm())
            trainer.fit("1ba")
            return parameters(trainer)

    for one, other in zip(train("fp32").values(), train("amp_fp16").values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    assert norms["amp_fp16"] == pytest.approx(norms["fp32"], rel=1e-2)


class Ranked:
    """A loader that states its data-parallel rank."""

    data_parallel = (1, 4)

    def __iter__(self):
        yield data()[:4]


class Served(SingleProcess):
    """A parallelism with a given data-parallel rank; these tests sum no values over ranks."""

    def __init__(self, data_parallel):
        super().__init__(torch.device("cpu"))
        self.data_parallel = data_parallel


def test_a_loader_for_other_ranks_raises():
    with pytest.raises(DataError, match=r"rank 1 of 4 \(the loader's `data_parallel`\).*rank 0 of 1"):
        make(train_dataloader=Ranked())
    sampler = DistributedSampler(data(), num_replicas=2, rank=0)
    with pytest.raises(DataError, match=r"rank 0 of 2 \(its `DistributedSampler`\).*rank 1 of 2"):
        make(train_dataloader=loader(sampler=sampler), parallelism=Served((1, 2)))


def test_a_loader_without_batches_raises():
    once = iter([data()[:4]])
    with pytest.raises(DataError, match="no batch in a whole epoch"):
        make(train_dataloader=once, max_duration="3ba").fit()


def test_errors_of_the_loader_are_raised_with_the_time():
    def broken():
        yield data()[:4]
        raise OSError("shard 3 is gone")

    class Broken:
        def __iter__(self):
            return broken()

    with pytest.raises(OSError, match="shard 3") as raised:
        make(train_dataloader=Broken(), max_duration="3ba").fit()
    assert "while training, at epoch 0, batch 0" in raised.value.__notes__[0]


def test_a_distributed_sampler_shuffles_each_epoch_anew():
    seen = []
    sampler = DistributedSampler(data(8), num_replicas=1, rank=0, shuffle=True)
    with make(
        train_dataloader=DataLoader(data(8), batch_size=8, sampler=sampler),
        callbacks=Watch(lambda state: seen.append(state.batch[0])),
        max_duration="2ep",
    ) as trainer:
        trainer.fit()
    assert not torch.equal(seen[0], seen[1])


def test_unknown_arguments_and_invalid_models_raise():
    with pytest.raises(TypeError, match="eval_loader"):
        Trainer(model=Net(), eval_loader=loader())
    with pytest.raises(TrainerConfigError, match=r"`Linear`.*`loss"):
        Trainer(model=torch.nn.Linear(2, 2))
    with pytest.raises(TrainerConfigError, match="state one of them"):
        make(fsdp_config={}, parallelism_config={"fsdp": {}})
    with pytest.raises(TrainerConfigError, match=r"unknown keys \['zp'\]"):
        make(parallelism_config={"zp": {}})
    with pytest.raises(TrainerConfigError, match="`device` is `tpux`"):
        Trainer(model=Net(), device="tpux")
    trainer = make(train_dataloader=None, max_duration="1ba")
    with pytest.raises(TrainerConfigError, match="`train_dataloader` is required"):
        trainer.fit()
    trainer.close()
    with pytest.raises(TrainerClosedError, match="closed"):
        trainer.fit()


WITHOUT_SIBLINGS = """
import importlib.metadata
import sys

real = importlib.metadata.entry_points
def hidden(**selection):
    return [] if selection.get("group") == "hocket.providers" else real(**selection)
importlib.metadata.entry_points = hidden

from support.training import make
from hocket.trainer.errors import MissingProviderError

make(max_duration="1ba").close()
for argument, value in (("save_folder", "x"), ("load_path", "x/y"), ("fsdp_config", {{}})):
    try:
        make(**{{argument: value}})
    except MissingProviderError as error:
        print(error)
import os
os.environ |= {{"RANK": "0", "WORLD_SIZE": "2"}}
try:
    make()
except MissingProviderError as error:
    print(error)
siblings = ("hocket.ckpt", "hocket.dist", "hocket.stream")
print(sorted(name for name in sys.modules if name.startswith(siblings)))
"""


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(WITHOUT_SIBLINGS.format()))
    tests = os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["support"].__file__)))
    told = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = told.stdout.splitlines()
    assert len(lines) == 5, told.stderr
    expected = [
        r"`save_folder` needs.*`pip install hocket-ckpt`",
        r"`load_path` needs.*`pip install hocket-ckpt`.*`checkpointing=..store': …}`",
        r"`fsdp_config` needs.*`pip install hocket-dist`.*`parallelism=`",
        r"a job of 2 ranks needs.*`pip install hocket-dist`",
    ]
    for line, pattern in zip(lines[:4], expected, strict=True):
        assert re.match(pattern, line)
    assert lines[4] == "[]"


def test_a_given_parallelism_lays_out_the_model():
    class Doubled(SingleProcess):
        def lay_out(self, model, optimizers):
            self.seen = (model, list(optimizers))
            return super().lay_out(model, optimizers)

    parallelism = Doubled(torch.device("cpu"))
    with make(parallelism=parallelism, fsdp_config={"anything": 1}, max_duration="1ba") as trainer:
        assert parallelism.seen == (trainer.state.model, trainer.state.optimizers)
        trainer.fit()


def test_the_error_of_a_failing_logger_is_raised_when_the_trainer_closes():
    class Full(LoggerDestination):
        def log_metrics(self, metrics, step):
            raise OSError("disk full")

    trainer = make(loggers=Full(), max_duration="2ba")
    trainer.fit()
    assert trainer.state.timestamp.batch == "2ba"
    with pytest.raises(Exception, match="disk full"):
        trainer.close()


def test_parts_are_closed_if_the_trainer_cannot_be_built(monkeypatch):
    import hocket.trainer.setup.assembly as module

    class Provided(SingleProcess):
        closed = 0

        def close(self):
            self.closed += 1

    provided = Provided(torch.device("cpu"))
    monkeypatch.setattr(module, "find_provider", lambda name, asked_by: lambda config, **options: provided)
    watch = Watch(lambda state: None)
    with pytest.raises(DataError, match="rank 1 of 4"):
        make(train_dataloader=Ranked(), callbacks=watch, fsdp_config={})
    assert provided.closed == 1
    trainer = make(callbacks=watch, fsdp_config={})
    trainer.close()
    trainer.close()
    assert provided.closed == 2


@pytest.mark.parametrize("name", ["meta", "hpu", "xpu"])
def test_unsupported_devices_raise(name):
    with pytest.raises(TrainerConfigError, match=f"`device` is `{name}`; Hocket trains on"):
        Trainer(model=Net(), device=name)


def test_deterministic_mode_ends_with_the_trainer():
    assert not torch.are_deterministic_algorithms_enabled()
    with make(deterministic_mode=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_autoresume_needs_a_run_name_if_the_folder_contains_it(tmp_path):
    with pytest.raises(TrainerConfigError, match=r"`autoresume`.*set `run_name`"):
        make(save_folder=str(tmp_path / "{run_name}"), autoresume=True)


def test_a_given_run_name_is_kept(tmp_path):
    with make(save_folder=str(tmp_path), run_name="first", max_duration="1ba") as trainer:
        trainer.fit()
    load = {"load_path": str(tmp_path / "ep0-ba1")}
    with make(run_name="second", **load) as trainer:
        assert trainer.state.run_name == "second"
    with make(**load) as trainer:
        assert trainer.state.run_name == "first"


def test_only_weights_are_saved_and_loaded_if_configured(tmp_path):
    with make(save_folder=str(tmp_path / "whole"), max_duration="2ba") as trainer:
        trainer.fit()
        trained = parameters(trainer)
        trainer.save_checkpoint(f"{tmp_path}/once/weights-{{batch}}", weights_only=True)
    for path in ("whole/ep0-ba2", "once/weights-2"):
        with make(load_path=str(tmp_path / path), load_weights_only=True, max_duration="1ba") as trainer:
            assert trainer.state.timestamp.batch == "0ba"
            for name, value in parameters(trainer).items():
                assert torch.equal(value, trained[name])
            trainer.fit()


def test_parts_of_a_checkpoint_may_be_ignored(tmp_path):
    with make(save_folder=str(tmp_path), max_duration="2ba") as trainer:
        trainer.fit()
        trained = parameters(trainer)
    fresh = Net(seed=5)
    before = fresh.layers[3].bias.detach().clone()
    with make(
        model=fresh, load_path=str(tmp_path / "ep0-ba2"), load_ignore_keys=["model/layers.3.*", "timestamp"]
    ) as trainer:
        assert torch.equal(parameters(trainer)["layers.3.bias"], before)
        assert torch.equal(parameters(trainer)["layers.0.bias"], trained["layers.0.bias"])
    with pytest.raises(TrainerConfigError, match=r"`modle/\*` to ignore matches nothing"):
        make(load_path=str(tmp_path / "ep0-ba2"), load_ignore_keys=["modle/*"])


def test_fit_accepts_other_data_and_reset_time():
    other = loader(8, 2)
    with make(max_duration="3ba") as trainer:
        trainer.fit()
        trainer.fit("2ba", train_dataloader=other)
        assert trainer.state.train_dataloader is other
        assert trainer.state.timestamp.counts[:4] == (0, 1, 5, 3 * 4 + 2 * 2)
        trainer.fit("1ba", reset_time=True)
        assert trainer.state.timestamp.counts[:3] == (0, 0, 1)


def test_arguments_are_logged_as_hyperparameters():
    logger = InMemoryLogger()
    with make(loggers=logger, auto_log_hparams=True, max_duration="1ba") as trainer:
        trainer.fit()
    assert logger.hyperparameters["max_duration"] == "1ba"
    assert logger.hyperparameters["model"] == "Net"
    assert logger.hyperparameters["loop"]["prefetch_depth"] == 1


def test_the_loss_is_logged_at_the_configured_interval():
    logger = InMemoryLogger()
    with make(loggers=logger, loop={"log_every": 2}, max_duration="5ba") as trainer:
        trainer.fit()
        assert [step for step, _ in logger.data["loss/train/total"]] == [2, 4]


def test_a_compiled_model_trains_as_the_plain_one():
    with make(max_duration="2ba") as trainer:
        trainer.fit()
        expected = parameters(trainer)
    with make(max_duration="2ba", compile_config={"backend": "eager"}) as trainer:
        trainer.fit()
        for name, value in parameters(trainer).items():
            torch.testing.assert_close(value, expected[name])


def test_runs_started_in_the_same_second_have_different_names(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1.8e9)
    names = set()
    for _ in range(3):
        with make(max_duration="1ba") as trainer:
            names.add(trainer.state.run_name)
    assert len(names) == 3
    assert all(re.fullmatch(r"run-20270115-080000-[0-9a-f]{4}", name) for name in names)


def test_the_repr_names_the_model_the_time_and_whether_it_is_closed():
    with make(max_duration="2ba") as trainer:
        trainer.fit()
        assert repr(trainer) == "<Trainer of Net: at 2ba of 2ba>"
    assert repr(trainer) == "<Trainer of Net: at 2ba of 2ba, closed>"
