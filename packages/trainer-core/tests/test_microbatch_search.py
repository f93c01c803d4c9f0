"""`device_train_microbatch_size="auto"`: the search for a size, and runs that equal those of a fixed size."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hocket.trainer import Callback, Trainer
from hocket.trainer.errors import MemoryExhaustedError, TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.step.microbatch_note import read_note, write_note
from hocket.trainer.step.microbatch_search import MicrobatchSearch, even_share, samples_that_fit
from support.ranks import RankError, run_ranks
from support.training import FileStore, Net, Recorder, data, loader, make, parameters

FIXED, PER_SAMPLE = 1000, 100


class RowsMeter:
    """A memory meter on which a pass of `rows` samples takes `FIXED + PER_SAMPLE * rows` bytes."""

    def __init__(self, limit: int, per_sample: int = PER_SAMPLE) -> None:
        self.limit = limit
        self.per_sample = per_sample
        self.rows = 0

    def start(self) -> None:
        self.rows = 0

    def peak_bytes(self) -> int:
        return FIXED + self.per_sample * self.rows

    def limit_bytes(self) -> int:
        return self.limit


class Measured(Net):
    """A model that reports the rows of each pass to its meter, and runs out of memory above `most` rows."""

    def __init__(self, meter: RowsMeter | None = None, *, most: int | None = None, **options) -> None:
        super().__init__(**options)
        self.norm = nn.BatchNorm1d(5)
        self.meter = meter
        self.most = most
        self.sizes: list[int] = []

    def forward(self, batch):
        rows = len(batch[0])
        self.sizes.append(rows)
        if self.meter is not None:
            self.meter.rows = max(self.meter.rows, rows)
        outputs = self.layers(self.norm(batch[0])) if rows > 1 else self.layers(batch[0])
        if self.most is not None and rows > self.most:
            raise torch.OutOfMemoryError(f"no memory for {rows} rows")
        return outputs


def auto(meter, *, headroom=0.0):
    return MicrobatchSearch(meter=meter, headroom=headroom)


def trained(model, *, size, steps="5ba", callbacks=None, optimizer=torch.optim.AdamW, **options):
    options.setdefault("train_dataloader", loader(40, 8))
    with make(
        model=model,
        optimizers=optimizer(model.parameters(), lr=0.01),
        device_train_microbatch_size=size,
        callbacks=callbacks,
        **options,
    ) as trainer:
        trainer.fit(steps)
        return trainer


@pytest.mark.parametrize(
    ("points", "limit", "most", "expected"),
    [
        (((1, 1100), (2, 1200)), 1800, 100, 8),
        (((1, 1100), (2, 1200)), 1899, 100, 8),
        (((1, 1100), (2, 1200)), 9999, 16, 16),
        (((1, 1100), (2, 1200)), 1000, 16, 1),
        (((1, 1100), (2, 1100)), 1, 16, 16),
        (((1, 1100), (8, 1800)), 1300, 16, 3),
    ],
)
def test_the_samples_that_fit_follow_from_a_line_through_two_measurements(points, limit, most, expected):
    assert samples_that_fit(points, limit, most) == expected


def test_microbatches_are_as_even_as_possible():
    assert [even_share(size, 8) for size in (8, 7, 5, 4, 3, 2, 1)] == [8, 4, 4, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("limit", "headroom", "size"),
    [(9999, 0.0, 8), (1500, 0.0, 4), (1500, 0.2, 2), (1399, 0.0, 3), (1100, 0.0, 1)],
)
def test_the_largest_share_that_fits_is_chosen(limit, headroom, size):
    meter, logger = RowsMeter(limit), InMemoryLogger()
    model = Measured(meter)
    trainer = trained(model, size=auto(meter, headroom=headroom), loggers=logger)
    assert trainer.state.device_train_microbatch_size == size
    assert dict(logger.data["trainer/device_train_microbatch_size"]) == {0: size}
    assert max(model.sizes[-8 // size :]) == size


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
def test_the_search_does_not_change_the_run(optimizer):
    meter = RowsMeter(1500)
    searched, fixed = Measured(meter, dropout=0.3), Measured(dropout=0.3)
    seen, expected = Recorder(), Recorder()
    found = trained(searched, size=auto(meter), callbacks=seen, optimizer=optimizer)
    stated = trained(fixed, size=4, callbacks=expected, optimizer=optimizer)
    assert found.state.device_train_microbatch_size == 4
    for name, value in parameters(stated).items():
        assert torch.equal(value, parameters(found)[name]), name
    assert len(searched.sizes) > len(fixed.sizes)
    assert seen.events == expected.events
    (mine,), (theirs,) = found.state.optimizers, stated.state.optimizers
    assert str(mine.state_dict()) == str(theirs.state_dict())


def test_the_optimizers_state_exists_during_the_measurement():
    seen = []

    class Steps(torch.optim.AdamW):
        def step(self, closure=None):
            seen.append(sum(len(slots) for slots in self.state.values()))
            return super().step(closure)

    meter = RowsMeter(1500)
    trained(Measured(meter), size=auto(meter), optimizer=Steps, steps="2ba")
    # The step of the measurement, then two steps of the run; only the third one finds state.
    assert seen[:2] == [0, 0]
    assert seen[2] > 0
    assert len(seen) == 3


def test_out_of_memory_in_a_later_step_repeats_it_with_half_the_size():
    meter = RowsMeter(9999)
    tight = Measured(meter, dropout=0.3)

    class Tighten(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.counts.batch == 2:
                tight.most = 3

    logger = InMemoryLogger()
    found = trained(tight, size=auto(meter), callbacks=Tighten(), loggers=logger)
    assert found.state.device_train_microbatch_size == 2
    # Two steps of 8 rows; batch 3 is tried with 8, then with 4, and made with 2.
    assert tight.sizes[-14:] == [8, 4, *[2] * 12]
    assert dict(logger.data["trainer/device_train_microbatch_size"])[2] == 2

    class Change(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.counts.batch == 2:
                state.device_train_microbatch_size = 2

    stated = trained(Measured(dropout=0.3), size=8, callbacks=Change())
    for name, value in parameters(stated).items():
        assert torch.equal(value, parameters(found)[name]), name


def test_out_of_memory_during_the_search_halves_the_size():
    meter = RowsMeter(9999)
    model = Measured(meter, most=3)
    assert trained(model, size=auto(meter)).state.device_train_microbatch_size in (2, 3)


def test_a_single_sample_that_does_not_fit_raises_with_the_reason():
    meter = RowsMeter(9999)
    with pytest.raises(MemoryExhaustedError, match=r"one sample at a time.*\n.*memory of this rank"):
        trained(Measured(meter, most=0), size=auto(meter))


def test_auto_on_a_cpu_and_invalid_sizes_raise():
    with pytest.raises(TrainerConfigError, match=r"measures the memory of a CUDA device.*state a number"):
        make(device_train_microbatch_size="auto")
    with pytest.raises(TrainerConfigError, match=r"'largest'.*`'auto'`"):
        make(device_train_microbatch_size="largest")
    with pytest.raises(TrainerConfigError, match=r"`headroom`.*a share"):
        MicrobatchSearch(headroom=1.0)


def test_the_size_is_in_the_checkpoint_and_grows_only_when_asked(tmp_path):
    meter = RowsMeter(1500)
    store = FileStore(tmp_path)
    trained(
        Measured(meter), size=auto(meter), steps="2ba", checkpointing={"store": store}, save_interval="1ba"
    )
    roomy, model = RowsMeter(9999), Measured()
    with make(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        train_dataloader=loader(40, 8),
        device_train_microbatch_size=auto(roomy),
        checkpointing={"store": store},
        autoresume=True,
    ) as trainer:
        trainer.fit("2ba")  # this first call of the resumed run has finished already
        trainer.fit("2ba")
        assert trainer.state.device_train_microbatch_size == 4
        assert model.sizes == [4] * 4  # nothing was measured
        model.meter = roomy
        trainer.fit("1ba", device_train_microbatch_size=auto(roomy))
        assert trainer.state.device_train_microbatch_size == 8
        trainer.fit("1ba", device_train_microbatch_size=2)
        assert model.sizes[-4:] == [2] * 4


def train_on_a_rank(limits, most, size, fsdp=False):
    rank = int(os.environ["RANK"])
    meter = RowsMeter(limits[rank])
    model = Measured(meter, most=most if rank == 1 else None)
    model.norm = nn.Identity()
    with make(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        train_dataloader=loader(64, 8, shuffle=False),
        device_train_microbatch_size=auto(meter) if size is None else size,
        **({"fsdp_config": {}} if fsdp else {}),
    ) as trainer:
        trainer.fit("3ba")
        values = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
            for name, value in parameters(trainer).items()
        }
        return trainer.state.device_train_microbatch_size, values


def agree_on_a_rank(limits):
    for fsdp in (False, True):
        found, values = train_on_a_rank(limits, None, None, fsdp)
        assert found == 4
        assert train_on_a_rank(limits, None, 4, fsdp) == (4, values)


def restart_on_a_rank(limits, folder):
    tempfile.tempdir = folder  # a `TMPDIR` of their own would make the ranks new interpreters
    found, values = train_on_a_rank(limits, 5, None)
    assert train_on_a_rank(limits, 5, 4) == (4, values)
    return found


def test_ranks_agree_on_the_smallest_size_whatever_the_layout():
    run_ranks(agree_on_a_rank, 2, (9999, 1400), timeout_s=180, init="gloo")


def test_out_of_memory_on_one_rank_restarts_all_with_half_the_size(tmp_path):
    attempt = {"TORCHELASTIC_RUN_ID": "oom", "TORCHELASTIC_RESTART_COUNT": "0"}
    arguments = (9999, 9999), str(tmp_path)
    with pytest.raises(RankError, match=r"the next attempt of this job starts with.*4.*was 8") as failed:
        run_ranks(restart_on_a_rank, 2, *arguments, env=attempt, timeout_s=180, init="gloo")
    assert failed.value.rank == 1
    again = attempt | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert run_ranks(restart_on_a_rank, 2, *arguments, env=again, timeout_s=180, init="gloo") == [4, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_by_its_allocator():
    # 64 MiB for each sample's activations: a batch of 4096 fits no device.
    model = nn.Sequential(nn.Linear(5, 1 << 22), nn.Tanh(), nn.Linear(1 << 22, 3))
    with Trainer(
        model=model,
        loss_fn=nn.functional.cross_entropy,
        train_dataloader=DataLoader(data(8192), batch_size=4096),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        device_train_microbatch_size="auto",
        max_duration="1ba",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        assert 1 < trainer.state.device_train_microbatch_size < 4096


def test_without_a_temporary_folder_no_note_is_written_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    assert write_note(4) is False
    assert read_note() is None
