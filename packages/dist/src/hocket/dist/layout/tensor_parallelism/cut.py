"""Tensor parallelism of a model: its matrices cut over the axis `tp` of the mesh, before `fully_shard`."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim import Optimizer

from hocket.dist.config.axes import TP
from hocket.dist.config.tensor_parallel import Plan, Style
from hocket.dist.errors import ModelError
from hocket.dist.layout.deferred_init import find_ties, tie
from hocket.dist.layout.sequence.blocks import SequenceBlocks
from hocket.dist.layout.tensor_parallelism.loss import find_head
from hocket.dist.layout.tensor_parallelism.plan_check import PlanCheck
from hocket.dist.layout.tensor_parallelism.plans import DIVIDED, check_heads, find_plan
from hocket.dist.layout.tensor_parallelism.sequence import add_sequence_styles, attach_sequence
from hocket.dist.layout.tensor_parallelism.styles import apply_style, cut_dim
from hocket.dist.layout.used_parameters import param_groups

_log = logging.getLogger("hocket.dist")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """The result of cutting a model.

    Attributes:
        cut: Names of the modules that are cut.
        whole: Names of the parameters that are whole on every rank of the axis.
        check: The comparison with whole matrices, which forward passes make.
    """

    cut: list[str]
    whole: list[str]
    check: PlanCheck

    def describe(self, degree: int) -> str:
        """Return the layout in words, with `*` for the numbers of blocks."""
        kinds = dict.fromkeys(re.sub(r"\d+", "*", name.rpartition(".")[0] or name) for name in self.whole)
        names = list(kinds)
        shown = ", ".join(f"`{name}`" for name in names[:6]) + (
            f" and {len(names) - 6} more" if len(names) > 6 else ""
        )
        text = f"{len(self.cut)} modules cut over {degree} ranks of `{TP}`"
        return f"{text}, whole on each of them: {shown}" if names else text


def cut_model(
    model: nn.Module,
    plan: Plan | None,
    mesh: DeviceMesh,
    *,
    blocks: SequenceBlocks | None = None,
    has_cut_loss: bool = False,
    is_own: Callable[[str], bool] = lambda _: True,
) -> TensorLayout:
    """Cut the modules that a plan names over `mesh`, in place. No communication.

    Args:
        model: Plain, with the same values on all ranks, or on the meta device.
        plan: The user's; None finds the model's own.
        mesh: The axis `tp`.
        blocks: The blocks between which sequences are cut over the axis; None if they are whole.
        has_cut_loss: Whether the loss takes logits of which each rank has its part of the vocabulary.
        is_own: Tells by its name whether a module has its parameters here, and not in another stage.

    Raises:
        ConfigError: The plan does not fit the model.
        ModelError: Heads, vocabulary or other sizes do not divide, or a tied parameter would be cut in two
            ways.
    """
    styles = plan_cuts(model, plan, mesh.size())
    ties = find_ties(model)
    head = find_head(model, styles) if has_cut_loss else None
    styles = {name: style for name, style in styles.items() if is_own(name)}
    inner = {name: style for name, style in styles.items() if name != head}
    check = PlanCheck(model, inner, mesh, blocks=blocks, is_given=plan is not None)
    if blocks is not None:
        styles = add_sequence_styles(styles, blocks)
    for name, style in styles.items():
        module = model.get_submodule(name)
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            raise ModelError(f"the tensor-parallel plan cuts `{name}` twice. Name each module once")
        is_inside = blocks is not None and name.startswith(f"{blocks.name}.")
        apply_style(
            style,
            name,
            module,
            mesh,
            blocks=blocks if is_inside else None,
            keeps_logits_cut=name == head,
        )
    if blocks is not None:
        attach_sequence(model, styles, blocks, mesh)
    tie(model, ties)
    divide_numbers(model, styles, mesh.size())
    check.attach()
    _warn_of_dropout(model, mesh)
    whole = [name for name, one in model.named_parameters() if not isinstance(one, DTensor)]
    return TensorLayout(cut=list(styles), whole=whole, check=check)


def plan_cuts(model: nn.Module, plan: Plan | None, degree: int) -> dict[str, Style]:
    """Return the style of each module that `cut_model` cuts for this many ranks; nothing is changed.

    Raises:
        ConfigError, ModelError: As `cut_model`.
    """
    styles = find_plan(model, plan)
    check_heads(model, styles, degree)
    return _without_half_ties(model, styles, find_ties(model), is_given=plan is not None)


def spread_whole(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give parameters that no plan cuts the placement `Replicate` on the axes beside those of `fully_shard`.

    Torch places them on the data-parallel axes alone, so that ranks would differ in who holds them: they
    would be saved once for each rank of `tp`, and optimizers would meet tensors of two meshes. The parameters
    become new objects.

    Args:
        model: Sharded.
        mesh: All axes by name, those of `fully_shard` among them.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in param_groups(module):
            for one in group.fsdp_params:
                if not one.is_dtensor:
                    _spread(one, mesh)


class CopyCheck:
    """A check, before the first update, that the ranks of `tp` have equal gradients of whole parameters.

    They have not if a plan forgets a parameter that acts on cut activations, such as a norm of each head:
    every rank then has the gradient of its own part, and the copies would drift apart without a sign in the
    loss.

    Args:
        model: Laid out.
        whole: The names of the parameters that the plan does not cut.
        mesh: The axis `tp`.
        add_up: Sums a CPU tensor over all ranks of the job. Collective.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: list[str],
        mesh: DeviceMesh,
        add_up: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._model: nn.Module | None = model
        self._whole, self._mesh, self._add_up = whole, mesh, add_up

    def watch(self, optimizer: Optimizer) -> None:
        """Check at the next step of an optimizer, and then never again."""
        optimizer.register_step_pre_hook(self._run)

    def _run(self, *_: object) -> None:
        # The hook stays: removing it here would disturb the optimizer's walk over hooks after it.
        model, self._model = self._model, None
        if model is None:
            return
        found = [(name, model.get_parameter(name).grad) for name in self._whole]
        gradients = {
            name: local
            for name, one in found
            if one is not None
            and (local := one.to_local() if isinstance(one, DTensor) else one).numel()
            and not local.is_complex()
        }
        marks = [torch.zeros(3)] * (not gradients) + [_marks_of(one) for one in gradients.values()]
        table = torch.stack([mark.to(self._mesh.device_type) for mark in marks])
        tables = [torch.empty_like(table) for _ in range(self._mesh.size())]
        dist.all_gather(tables, table, group=self._mesh.get_group())
        stacked = torch.stack(tables)
        spread = (stacked.amax(0) - stacked.amin(0)).amax(1)
        is_other = spread > _LIKENESS * stacked[:, :, 0].amax(0) + 1e-12
        names = [name for name, is_bad in zip(gradients, is_other.tolist(), strict=False) if is_bad]
        total = self._add_up(torch.tensor([float(len(names))], dtype=torch.float64, device="cpu"))
        if total.item():
            shown = f", the first `{names[0]}`" if names else ""
            raise ModelError(
                f"the ranks of `{TP}` have different gradients of parameters that the tensor-parallel plan "
                f"does not cut{shown}: they act on cut activations, of which each rank has its own. Give "
                "them the style 'replicated_with_grad_allreduce' in `plan`, or cut them, too"
            )


_LIKENESS = 0.05
"""The part of a gradient's norm by which copies may differ, as low precision makes them differ."""


def _marks_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norm of a gradient and two sums that tell it from others."""
    flat = gradient.detach().flatten().float()
    waves = torch.arange(flat.numel(), device=flat.device, dtype=torch.float32)
    return torch.stack([flat.norm(), flat @ waves.mul(1.7).cos(), flat @ waves.mul(0.6).sin()])


def _spread(one: Any, mesh: DeviceMesh) -> None:
    """Exchange the placement of one of `fully_shard`'s records of a parameter."""
    old, spec = one.sharded_param, one._sharding_spec
    placement_of = dict(zip(spec.mesh.mesh_dim_names or (), spec.placements, strict=True))
    placements = tuple(placement_of.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ())
    one._sharding_spec = DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)
    getattr(one, "_sharding_spec_by_dtype", {}).clear()
    with torch.no_grad():
        new = nn.Parameter(one.to_sharded_dtensor(old.to_local()), requires_grad=old.requires_grad)
    if hasattr(old, "grad_dtype") and old.grad_dtype != new.grad_dtype:
        new.grad_dtype = old.grad_dtype
    one.sharded_param = new
    one._setattr_on_modules(new)


def _without_half_ties(
    model: nn.Module, styles: dict[str, Style], ties: Mapping[str, list[str]], *, is_given: bool
) -> dict[str, Style]:
    """Return the styles without those of tied modules of which not all are cut alike.

    Raises:
        ModelError: The user's plan cuts tied modules in different ways.
    """
    kept = dict(styles)
    for first, others in ties.items():
        modules = [name.rpartition(".")[0] for name in (first, *others)]
        dims = {
            name: cut_dim(styles[name], model.get_submodule(name)) if name in styles else None
            for name in modules
        }
        if len(set(dims.values())) == 1:
            continue
        if is_given:
            told = ", ".join(f"`{name}` {styles.get(name, 'not at all')!s}" for name in modules)
            raise ModelError(
                f"`{first}` and `{others[0]}` are one tied parameter, and the tensor-parallel plan cuts it "
                f"in different ways: {told}. Cut all of them along the same dim ('embedding_rowwise' and "
                "'colwise_gather_output' do), or none"
            )
        for name in modules:
            kept.pop(name, None)
    return kept


def divide_numbers(model: nn.Module, styles: Mapping[str, Style], degree: int) -> None:
    """Give attention modules that count their own heads the number of this rank's."""
    for parent in {name.rpartition(".")[0] for name in styles}:
        module = model.get_submodule(parent)
        for number in DIVIDED.get(type(module).__name__, ()):
            setattr(module, number, getattr(module, number) // degree)


def _warn_of_dropout(model: nn.Module, mesh: DeviceMesh) -> None:
    if mesh.get_rank() != 0:
        return
    names = [name for name, one in model.named_modules() if isinstance(one, nn.Dropout) and one.p > 0]
    if names:
        _log.warning(
            "%s has dropout (`%s`): ranks of `%s` draw the same masks, also for features and heads of which "
            "each rank has other ones. Set the rates to 0 for the update of one process",
            type(model).__name__,
            names[0],
            TP,
        )
