"""Logging of images, tables and files: conversion, limits of the queue, and destinations."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from hocket.trainer.errors import LoggerError
from hocket.trainer.log.logger import Logger
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.timestamp import Timestamp

STATE = SimpleNamespace(counts=Timestamp(batch=3).counts)


def test_images_are_captured_as_bytes_when_logged():
    memory = InMemoryLogger()
    logger = Logger(STATE, [memory])
    batch = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 3, 4, 5).clone()
    logger.log_images(batch, "unit", masks={"truth": torch.arange(40).reshape(2, 4, 5)})
    batch.fill_(9)
    logger.log_images(torch.tensor([[-2.0, 0.0], [2.0, 2.0]]), "one")
    logger.log_images([torch.full((4, 5, 1), 7)], "last", channels_last=True, step=9)
    logger.close(20)
    ((step, unit),) = memory.images["unit"]
    assert step == 3
    assert [tuple(image.shape) for image in unit.images] == [(4, 5, 3)] * 2
    assert [image.unique().tolist() for image in unit.images] == [[0], [255]]
    assert unit.masks["truth"][1][0, 0] == 20
    ((_, one),) = memory.images["one"]
    assert one.images[0].squeeze(-1).tolist() == [[0, 127], [255, 255]]
    ((step, last),) = memory.images["last"]
    assert (step, last.images[0].unique().tolist()) == (9, [7])


def test_images_of_other_shapes_raise():
    logger = Logger(STATE, [InMemoryLogger()])
    with pytest.raises(LoggerError, match=r"shape \(1, 2, 3, 4, 5\)"):
        logger.log_images(torch.zeros(1, 2, 3, 4, 5))
    with pytest.raises(LoggerError, match="`truth` has 1 images and `images` has 2"):
        logger.log_images(torch.zeros(2, 3, 4, 4), masks={"truth": torch.zeros(1, 4, 4)})
    with pytest.raises(LoggerError, match="2 values; expected 1"):
        logger.log_table(["a"], [[1], [1, 2]])
    logger.log_images(torch.zeros(5, 4, 4))
    with pytest.raises(LoggerError, match="5 channels"):
        logger.close(20)


def test_a_slow_destination_keeps_few_images_in_the_queue(caplog):
    class Slow(LoggerDestination):
        media_capacity = 2

        def __init__(self):
            self.can_go_on = threading.Event()
            self.steps = []

        def log_table(self, columns, rows, name="Table", step=0):
            assert self.can_go_on.wait(20)
            self.steps.append(step)

    slow, memory = Slow(), InMemoryLogger()
    logger = Logger(STATE, [slow, memory])
    for step in range(5):
        logger.log_table(["x"], [[step]], step=step)
    slow.can_go_on.set()
    logger.close(20)
    assert slow.steps == [0, 1]
    assert len(memory.tables["Table"]) == 5
    assert "`Slow` was too slow: 3 images or tables were dropped" in caplog.text


def test_files_go_to_destinations_that_accept_files(tmp_path):
    class Shelf(LoggerDestination):
        def __init__(self):
            self.files = {}

        def can_upload_files(self):
            return True

        def upload_file(self, remote_file_name, file_path, *, overwrite=False):
            self.files[remote_file_name] = file_path.read_text(), overwrite

    shelf, memory = Shelf(), InMemoryLogger()
    logger = Logger(STATE, [shelf, memory])
    (tmp_path / "a.txt").write_text("x")
    logger.upload_file("kept/a.txt", tmp_path / "a.txt", overwrite=True)
    with pytest.raises(FileNotFoundError, match=r"b\.txt"):
        logger.upload_file("b.txt", tmp_path / "b.txt")
    logger.close(20)
    assert shelf.files == {"kept/a.txt": ("x", True)}
    with pytest.raises(NotImplementedError, match="`InMemoryLogger` stores no files"):
        memory.download_file("a.txt", "here")


def test_metrics_may_be_logged_to_some_destinations_only():
    one, other = InMemoryLogger(), InMemoryLogger()
    logger = Logger(STATE, [one, other])
    logger.log_metrics({"x": 1}, to=[other])
    logger.close(20)
    assert (one.data, other.data) == ({}, {"x": [(3, 1)]})
