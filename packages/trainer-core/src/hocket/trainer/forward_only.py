"""The mode in which evaluation and prediction run the model, without an effect on training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hocket.trainer.rank_zero_buffers import rank_zero_buffers
from hocket.trainer.rng import capture_rng, restore_rng
from hocket.trainer.state import State


@contextlib.contextmanager
def forward_only(state: State, loader: Any) -> Iterator[None]:
    """Put the model into evaluation mode, and restore the state of the training afterwards.

    Restored are each module's own training mode, the random generators of this process and those of the
    loader, and the attributes of `state` that describe the current batch and loader. Training with an
    evaluation in between is therefore bit-identical to training without.

    Args:
        state: The state of the run; its model changes mode.
        loader: The loader that the model runs on.
    """
    modes = [(module, module.training) for module in state.model.modules()]
    generators = capture_rng(state.device)
    loader_states = [(generator, generator.get_state()) for generator in _generators(loader)]
    names = ("batch", "outputs", "loss", "dataloader", "dataloader_label", "dataloader_len")
    old_values = {name: getattr(state, name) for name in names}
    state.model.eval()
    try:
        with torch.no_grad(), rank_zero_buffers(state.model, state.parallelism):
            yield
    finally:
        _restore_modes(modes)
        restore_rng(generators, state.device)
        for generator, position in loader_states:
            generator.set_state(position)
        for name, value in old_values.items():
            setattr(state, name, value)


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    # Not `model.train()`, because a module that the user keeps in evaluation mode, such as a frozen batch
    # norm, has to stay in it.
    for module, mode in modes:
        module.training = mode


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the loader's own random generators, from which its order is drawn."""
    owners = (loader, getattr(loader, "sampler", None))
    generators = {id(one): one for one in (getattr(owner, "generator", None) for owner in owners)}
    return [one for one in generators.values() if isinstance(one, torch.Generator)]
