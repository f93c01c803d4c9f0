"""`CompileMonitor`: it counts recompilations of a compiled model and names their reasons."""

from __future__ import annotations

import logging

import torch
from torch import nn

from hocket.trainer import Algorithm, Event
from hocket.trainer.callbacks import CompileMonitor
from hocket.trainer.loggers import InMemoryLogger
from support.training import Net, loader, make, parameters


class Surgery(Algorithm):
    """Replaces the activation before the third batch."""

    def match(self, event, state):
        return event is Event.BATCH_START and state.timestamp.counts.batch == 2

    def apply(self, event, state, logger):
        state.model.layers[1] = nn.ReLU()


def train(**arguments):
    torch.compiler.reset()
    model, monitor, logger = Net(), CompileMonitor(), InMemoryLogger()
    arguments["compile_config"] = {"backend": "eager", "dynamic": False}
    with make(model=model, callbacks=monitor, loggers=logger, max_duration="5ba", **arguments) as trainer:
        trainer.fit()
        # The trainer adds a monitor only if there is none.
        assert sum(isinstance(one, CompileMonitor) for one in trainer.state.callbacks) == 1
    return monitor, [step for step, _ in logger.data["compile/count"]]


def test_recompilations_by_surgery_and_other_shapes_are_named(caplog):
    with caplog.at_level(logging.WARNING, "hocket.trainer.callbacks.compile_monitor"):
        monitor, steps = train(algorithms=Surgery())
    assert steps == [1, 3]
    (message,) = monitor.messages
    assert "compiled again in batch 3" in message
    assert "`layers.1` from `Tanh` to `ReLU`" in message
    assert message in caplog.text
    monitor, steps = train(train_dataloader=loader(18, batch_size=4))
    assert steps == [1, 5]
    assert "shapes (2, 5), (2,) instead of (4, 5), (4,)" in monitor.messages[0]
    monitor, steps = train()
    assert monitor.messages == []
    assert monitor.num_compilations >= 1


def test_a_compiled_training_equals_the_plain_one():
    def result(**arguments):
        with make(max_duration="5ba", **arguments) as trainer:
            trainer.fit()
            monitors = [one for one in trainer.state.callbacks if isinstance(one, CompileMonitor)]
            return parameters(trainer), monitors

    plain, monitors = result()
    assert monitors == []
    compiled, (monitor,) = result(compile_config={"backend": "eager"})
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0)
    assert monitor.num_compilations >= 1
