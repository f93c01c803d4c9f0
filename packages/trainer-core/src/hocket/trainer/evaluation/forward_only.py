"""The mode in which evaluation and prediction run the model, without an effect on training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hocket.trainer.process.rng import capture_rng, loader_generators, loader_rng, restore_rng
from hocket.trainer.protocols import Parallelism
from hocket.trainer.state import State


@contextlib.contextmanager
def forward_only(state: State, loader: Any) -> Iterator[None]:
    """Put the model into evaluation mode, and restore the state of the training afterwards.

    Restored are each module's own training mode, the random generators of this process and those of the
    loader, and the attributes of `state` that describe the current batch and loader. Training with an
    evaluation in between is therefore bit-identical to training without. A checkpoint that is saved meanwhile
    has the generators of the training.

    Args:
        state: The state of the run; its model changes mode.
        loader: The loader that the model runs on.
    """
    modes = [(module, module.training) for module in state.model.modules()]
    generators = capture_rng(state.device)
    loader_states = [(generator, generator.get_state()) for generator in loader_generators(loader)]
    names = ["batch", "outputs", "loss", "dataloader", "dataloader_label", "dataloader_len"]
    if state.evaluation_depth > 1:  # the one around it goes on counting
        names += ["eval_timestamp", "predict_timestamp"]
    old_values = {name: getattr(state, name) for name in names}
    is_outermost = state.training_rng is None
    if is_outermost:
        state.training_rng = lambda own: {**generators, **loader_rng(own, dict(loader_states))}
    state.model.eval()
    try:
        with torch.no_grad(), rank_zero_buffers(state.model, state.parallelism):
            yield
    finally:
        restore_modes(modes)
        restore_rng(generators, state.device)
        for generator, position in loader_states:
            generator.set_state(position)
        for name, value in old_values.items():
            setattr(state, name, value)
        if is_outermost:
            state.training_rng = None


@contextlib.contextmanager
def evaluating(state: State) -> Iterator[None]:
    """Count an evaluation or prediction in `state.evaluation_depth`, from its first event to its last.

    If an exception ends it, the algorithms restore what they changed for it.
    """
    state.evaluation_depth += 1
    try:
        yield
    except BaseException as error:
        for algorithm in state.algorithms:
            try:
                getattr(algorithm, "abandon_evaluation", _nothing)(state)
            except Exception as later:  # noqa: BLE001 - the first error is the one to raise
                error.add_note(f"and then: {type(later).__name__}: {later}")
        raise
    finally:
        state.evaluation_depth -= 1


def _nothing(state: State) -> None:
    """Stand for the method of an algorithm without the base class."""


def restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    """Give each module the training mode that it is listed with."""
    # Not `model.train()`, because a module that the user keeps in evaluation mode, such as a frozen batch
    # norm, has to stay in it.
    for module, mode in modes:
        module.training = mode


@contextlib.contextmanager
def rank_zero_buffers(model: nn.Module, parallelism: Parallelism) -> Iterator[None]:
    """Give every rank the buffers of rank 0, as a checkpoint has them, and restore its own afterwards.

    A training step updates the statistics of a batch norm from each rank's own samples. Collective with
    several ranks.

    Args:
        model: The model, whose saved and unsharded floating-point buffers are replaced.
        parallelism: The parallelism, which sums the buffers of rank 0 and zeros of the other ranks.
    """
    buffers = _buffers(model) if parallelism.data_parallel[1] > 1 else []
    own_values = [buffer.clone() for buffer in buffers]
    if buffers:
        # Either dtype holds the buffers exactly; on a CPU, `reduce_async` takes float64.
        is_wide = buffers[0].device.type == "cpu" or any(one.dtype is torch.float64 for one in buffers)
        flat = torch.cat([one.flatten().to(torch.float64 if is_wide else torch.float32) for one in buffers])
        contribution = flat if parallelism.data_parallel[0] == 0 else torch.zeros_like(flat)
        summed = parallelism.reduce_async(contribution).wait()
        parts = torch.split(summed, [one.numel() for one in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.reshape(buffer.shape))
    try:
        yield
    finally:
        for buffer, own_value in zip(buffers, own_values, strict=True):
            buffer.copy_(own_value)


def _buffers(model: nn.Module) -> list[torch.Tensor]:
    saved = model.state_dict()
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name in saved and buffer.is_floating_point() and buffer.numel() and not hasattr(buffer, "to_local")
    ]
