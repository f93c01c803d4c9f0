"""The HTML report that a run writes."""

from __future__ import annotations

import copy
import html.parser
import logging
import math
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.trainer import Callback
from hocket.trainer.callbacks import (
    GoodputMonitor,
    LRMonitor,
    MemoryMonitor,
    RunReport,
    RuntimeEstimator,
    SpeedMonitor,
)
from hocket.trainer.callbacks.report_page import PageContents, render
from hocket.trainer.callbacks.series import MetricSeries
from hocket.trainer.loggers import FileLogger
from support.training import FileStore, Net, loader, make

VOID = {"meta"}


class Balance(html.parser.HTMLParser):
    """Checks that tags close in order, and collects the text and the references of the page."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts, self.links = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


@pytest.mark.parametrize("kind", [RunReport, FileLogger])
def test_a_writer_of_files_is_copied_and_pickled_until_it_is_in_use(tmp_path, kind):
    original = kind(tmp_path / "{run_name}.out")
    for number, other in enumerate((pickle.loads(pickle.dumps(original)), copy.deepcopy(original))):
        with make(loggers=other, max_duration="1ba", run_name=f"run-{number}") as trainer:
            trainer.fit()
            with pytest.raises(TypeError, match=f"`{kind.__name__}`.* cannot be copied or pickled"):
                pickle.dumps(other)
        assert "loss/train/total" in (tmp_path / f"run-{number}.out").read_text()


def train(folder, *, duration="10ba", name="calm <otter>", **arguments):
    report = RunReport(str(folder / "{run_name}.html"))
    callbacks = [report, SpeedMonitor(), MemoryMonitor(), LRMonitor(), *arguments.pop("more", ())]
    trainer = make(callbacks=callbacks, max_duration=duration, run_name=name, **arguments)
    with trainer:
        trainer.logger.log_hyperparameters({"width": 8})
        trainer.fit()
    return report


def test_the_report_is_one_file_with_curves_events_and_settings(tmp_path):
    report = train(tmp_path, eval_dataloader=loader(8), eval_interval="1ep")
    page = report.path.read_text()
    seen = Balance(page)
    text = "\n".join(seen.texts)
    assert seen.links == []
    assert "calm <otter>" in text
    assert "Training has ended." in text
    assert "2 epochs, 10 batches, 40 samples, of 10 batches" in text
    for name in (
        "loss/train/total",
        "throughput/samples_per_sec",
        "memory/host_rss_mem",
        "lr-SGD/group0",
        "width",
    ):
        assert name in text
    assert {"epoch 1 is complete", "evaluated on eval", "training ends"} <= set(seen.texts)
    points = re.search(r"<figcaption>loss/train/total.*?points=\"([^\"]*)\"", page).group(1).split()
    assert len(points) == 10
    assert all(0 <= float(part) <= 480 for point in points for part in point.split(","))


def test_the_report_has_units_on_memory_and_time_and_shows_seconds_as_seconds(tmp_path):
    more = [GoodputMonitor(interval="1ba"), RuntimeEstimator(time_unit="minutes")]
    page = train(tmp_path, more=more).path.read_text()
    rows = dict(re.findall(r"<tr><td>([^<]*)</td>(?:<td class=\"n\">[^<]*</td>){3}<td>([^<]*)</td>", page))
    assert rows["memory/host_rss_mem"] == "GB"
    assert rows["time/train"] == "hours"
    assert rows["time/remaining_estimate"] == "minutes"
    assert rows["goodput/data_seconds"] == "seconds"
    assert rows["goodput/ratio"] == rows["loss/train/total"] == ""
    assert "<figcaption>memory (GB)</figcaption>" in page
    assert "<figcaption>goodput (seconds)</figcaption>" in page
    # Metrics of two units have a chart each.
    assert "<figcaption>time (hours)</figcaption>" in page
    assert "<figcaption>time (minutes)</figcaption>" in page
    (told,) = re.findall(r"<th>time</th><td>([^<]*) of training</td>", page)
    assert re.fullmatch(r"[0-9.e-]+ s", told), told


def test_the_report_of_a_failed_run_has_the_error_and_the_warnings(tmp_path):
    class Broken(Net):
        def forward(self, batch):
            raise ZeroDivisionError("no & more")

    class Warn(Callback):
        def batch_start(self, state, logger):
            logging.getLogger("hocket.test").warning("look at <this>")

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, name="bad", model=Broken(), more=[Warn()])
    text = "\n".join(Balance((tmp_path / "bad.html").read_text()).texts)
    assert "Ended by ZeroDivisionError at batch 0." in text
    assert "ZeroDivisionError: no & more" in text
    assert "warning: look at <this>" in text
    assert not logging.getLogger("hocket").handlers


def test_a_resumed_run_has_one_report(tmp_path):
    store = {
        "checkpointing": {"store": FileStore(tmp_path / "c")},
        "save_interval": "5ba",
        "autoresume": True,
    }
    train(tmp_path, duration="5ba", name="one", **store)
    report = train(tmp_path, duration="10ba", name="one", **store)
    steps = [step for step, _ in report._series["loss/train/total"].points()]
    assert steps == list(range(1, 11))
    page = report.path.read_text()
    assert page.count("training starts") == 2


@given(st.integers(4, 40), st.integers(0, 400))
def test_a_series_keeps_few_points_and_the_last_one(limit, num):
    series = MetricSeries(limit)
    for step in range(num):
        series.add(step, float(step))
    points = series.points()
    assert len(points) <= limit + 1
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert points[-1:] == ([(num - 1, float(num - 1))] if num else [])
    if num:
        assert points[0][0] <= 2 * num / limit + 1


def test_a_series_replaces_points_of_repeated_steps():
    series = MetricSeries(10, [(1, 1.0), (2, 2.0), (3, 3.0)])
    series.add(2, 9.0)
    assert series.points() == [(1, 1.0), (2, 9.0)]


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.just(0.0)


@given(
    st.dictionaries(
        st.text(max_size=12), st.lists(st.tuples(st.integers(0, 10**9), numbers), min_size=1, max_size=5)
    )
)
def test_any_values_make_a_valid_report(series):
    page = render(PageContents(run_name="<x>", outcome="&", series=series))
    Balance(page)
    for points in re.findall(r'points="([^"]*)"', page):
        assert all(math.isfinite(float(part)) for point in points.split() for part in point.split(","))
