"""Muon for the matrices of a model, and AdamW for its other parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Literal

from torch import nn
from torch.optim import AdamW, Optimizer

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim.muon.optimizer import Muon
from hocket.trainer.optim.param_groups import experts, matrices, norms_and_biases, owned_parameters

OUTPUT_LAYERS = ("head.weight", "*.head.weight", "*lm_head.weight", "*classifier.weight", "*embed_out.weight")
"""Globs of the names that output layers commonly have."""


def muon_with_adamw(
    model: nn.Module,
    lr: float = 1e-3,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] = "match_rms_adamw",
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16",
    adamw_lr: float | None = None,
    adamw_weight_decay: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    adamw: Sequence[str] = OUTPUT_LAYERS,
) -> list[Optimizer]:
    """Return a `Muon` for the hidden matrices and a fused `AdamW` for all other parameters.

    Experts that a layer keeps in one parameter of three dims are hidden matrices, too.
    Embeddings, output layers, norms, biases and convolutions go to AdamW; norms and biases are not decayed.
    Pass the list as `Trainer(optimizers=…)`: schedules multiply the rates of both.

    Args:
        model: The model, before it is sharded or compiled.
        lr: The learning rate of the matrices. With `"match_rms_adamw"` an update has the size of AdamW's, so
            that one rate serves both.
        weight_decay: The decay of the matrices, multiplied by the learning rate as in torch.
        momentum: Muon's momentum.
        nesterov: Use Nesterov's momentum.
        adjust_lr_fn: The scaling of the update by a matrix's shape, as in `torch.optim.Muon`.
        ns_dtype: The dtype in which updates are made orthogonal; see `Muon`.
        adamw_lr: The learning rate of the other parameters; `lr` if None.
        adamw_weight_decay: The decay of the other parameters of two dims and more; `weight_decay` if None.
        betas: AdamW's decay rates of the two moments.
        eps: The term that AdamW adds to the denominator.
        adamw: Globs of matrices that AdamW updates, too; by default the usual names of output layers.

    Raises:
        TrainerConfigError: If the model has no hidden matrix.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is
    Scalable for LLM Training, 2025, section 2.2 for `"match_rms_adamw"`.
    """
    hidden: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for owned in owned_parameters(model):
        if norms_and_biases(owned):
            others.append(owned.parameter)
        elif (matrices(owned) or experts(owned)) and not any(
            fnmatch.fnmatchcase(owned.name, glob) for glob in adamw
        ):
            hidden.append(owned.parameter)
        else:
            decayed.append(owned.parameter)
    if not hidden:
        raise TrainerConfigError(
            f"`{type(model).__name__}` has no matrix for Muon: all of its parameters are embeddings, output "
            f"layers ({', '.join(f'`{glob}`' for glob in adamw)}) or not matrices; use an AdamW"
        )
    muon = Muon(
        hidden,
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        adjust_lr_fn=adjust_lr_fn,
        ns_dtype=ns_dtype,
    )
    groups = [
        {
            "params": decayed,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        },
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return [muon]
    return [muon, AdamW(groups, lr=lr if adamw_lr is None else adamw_lr, betas=betas, eps=eps, fused=True)]
