"""Checks of a model and its optimizers before they are cut into stages, alike on every rank."""

import logging
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hocket.dist.errors import ModelError, OptimizerError
from hocket.dist.layout.optimizers import GroupNames
from hocket.dist.layout.pipeline.stages import Stages

_log = logging.getLogger("hocket.dist")


def check_values(model: nn.Module) -> None:
    """Refuse a model without values.

    Raises:
        ModelError: It has parameters on the meta device.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ModelError(
            f"{len(empty)} parameters are on the meta device, the first `{empty[0]}`, and `pp` needs "
            "values. Build the model on a real device"
        )


def check_stages(model: nn.Module, stages: Stages) -> None:
    """Refuse a stage of which nothing is trained, since every optimizer has parameters of each stage.

    Raises:
        ModelError: There is one.
    """
    named = model.named_parameters()
    trained = {stage for name, one in named if one.requires_grad for stage in stages.holders(name)}
    if missing := set(range(stages.num_stages)) - trained:
        raise ModelError(
            f"stage {min(missing)} of {stages.num_stages} of `pp` has no parameter that requires a gradient. "
            "Cut the blocks by `split` so that each stage has one, or use fewer stages"
        )


def check_optimizers(optimizers: Sequence[Optimizer], names: Sequence[GroupNames], stages: Stages) -> None:
    """Refuse optimizers that cannot be cut into stages.

    Args:
        optimizers: Over the parameters of the whole model.
        names: The names of the parameters of each optimizer, by group.
        stages: The stages of the model.

    Raises:
        OptimizerError: One has no parameter of a stage, or state.
    """
    for optimizer, groups in zip(optimizers, names, strict=True):
        held = {stage for group in groups for name in group for stage in stages.holders(name)}
        if missing := set(range(stages.num_stages)) - held:
            raise OptimizerError(
                f"{type(optimizer).__name__} has no parameter of stage {min(missing)} of `pp`. Give it "
                "parameters of all stages, or leave `pp` out"
            )
        if optimizer.state:
            raise OptimizerError(
                f"{type(optimizer).__name__} has state already, which `pp` does not cut into stages. "
                "Build a new optimizer, of a kind that makes its state in the first step: Adagrad, for "
                "one, makes it when it is built"
            )


def warn_of_dropout(model: nn.Module) -> None:
    """Say that each stage draws masks of its own, if the model has dropout."""
    dropout = [name for name, one in model.named_modules() if isinstance(one, nn.Dropout) and one.p > 0]
    if dropout:
        _log.warning(
            "%s has dropout (`%s`): each stage of `pp` draws masks of its own, so that the update is not "
            "bit for bit that of one process",
            type(model).__name__,
            dropout[0],
        )
