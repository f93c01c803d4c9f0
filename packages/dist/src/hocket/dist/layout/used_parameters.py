"""Gradients of sharded models of which ranks use different parameters, or of which parameters stay whole.

`fully_shard` packs the gradients that a rank has into one reduce-scatter for each group. Ranks that have
gradients of different parameters would add up gradients that do not belong together. Therefore parameters
without a gradient take part with zeros, and the ranks exchange which parameters they used: a parameter that
no rank used has no gradient afterwards, so that optimizers leave it alone, as in a job of one process.

The exchange is a small all-reduce at the end of a backward pass. If in the first pass every rank uses every
parameter, there is no further exchange, and a later pass that leaves a parameter out raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from hocket.dist.errors import ModelError

_ADVICE = (
    "Freeze parameters that are not trained with `requires_grad_(False)` before the training, or set "
    "`find_unused_parameters=True` in `fsdp_config`, with which ranks exchange in each backward pass which "
    "parameters they used"
)


class UsedParameters:
    """The agreement between ranks on the parameters of which a backward pass computed gradients.

    Args:
        model: Sharded, on several ranks; its groups call this object before they reduce gradients.
        whole: The parameters by name that are whole on every rank. Their gradients are averaged here.
        add_up: Sums a CPU tensor over the ranks that share the model. Collective.
        num_ranks: Number of these ranks.
        always_exchanges: Exchange in each backward pass, also if the first one used everything.
        group: The process group of these ranks; None if they are all ranks of the job.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: dict[str, nn.Parameter],
        *,
        add_up: Callable[[torch.Tensor], torch.Tensor],
        num_ranks: int,
        always_exchanges: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.is_syncing = True
        """Whether the next backward pass completes the gradients of a batch."""
        self._whole = whole
        self._add_up = add_up
        self._num_ranks = num_ranks
        self._always_exchanges = always_exchanges
        self._process_group = group
        self._exchanges = True
        self._is_queued = False
        self._groups = [
            _Group(group, self._before_reduction)
            for module in model.modules()
            if isinstance(module, FSDPModule)
            for group in param_groups(module)
        ]
        self._model: Any = model
        self._reduce_zeros(True)

    def _reduce_zeros(self, when: bool) -> None:
        if hasattr(self._model, "set_reduce_scatter_unused_params"):
            self._model.set_reduce_scatter_unused_params(when)
            return
        for group in self._groups:  # before torch 2.13
            group.adds_zeros = when

    def _before_reduction(self, group: _Group) -> None:
        """Note the parameters of a group without a gradient; raise where none can come any more."""
        if self._exchanges or self._whole or group.is_reduced_again:
            group.note()
            if not self._is_queued:
                self._is_queued = True
                Variable._execution_engine.queue_callback(self._finish)
        elif missing := group.find_missing():
            self._refuse([group.parameters[index]._param_fqn for index in missing])

    def _finish(self) -> None:
        """Complete the gradients at the end of a backward pass. Collective."""
        self._is_queued = False
        for group in self._groups:
            group.end_pass()
        if not all(group.is_complete for group in self._groups):
            return
        whole = {name: one for name, one in self._whole.items() if one.requires_grad and self.is_syncing}
        if self._exchanges:
            self._exchange(list(whole.values()))
        else:
            lost = [one.parameters[index]._param_fqn for one in self._groups for index in one.missing or ()]
            lost += [name for name, parameter in whole.items() if parameter.grad is None]
            if lost:
                self._refuse(lost)
        self._average([one.grad for one in whole.values() if one.grad is not None])
        for group in self._groups:
            group.forget()

    def _exchange(self, whole: Sequence[nn.Parameter]) -> None:
        """Agree on the parameters that were used, and take the gradients of the others away again."""
        used = [flag for group in self._groups for flag in (group.is_active, *group.used())]
        used += [parameter.grad is not None for parameter in whole]
        counts = self._add_up(torch.tensor(used, dtype=torch.float64, device="cpu")).int().tolist()
        is_everything_used = set(counts) == {self._num_ranks}
        for group in self._groups:
            self._check_activity(group, counts.pop(0))
            for index in range(len(group.parameters)):
                if not counts.pop(0):
                    group.clear(index)
        for parameter, count in zip(whole, counts, strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if is_everything_used and not self._always_exchanges:
            self._exchanges = False
            self._reduce_zeros(False)

    def _check_activity(self, group: _Group, num_active: int) -> None:
        if num_active not in (0, self._num_ranks):
            raise ModelError(
                f"{num_active} of {self._num_ranks} ranks ran `{group.name}` in a backward pass. Every rank "
                "has to run it, since its parameters are gathered from all ranks. Let the branches be in one "
                "group: set `_fsdp_wrap = False` on these modules, or `auto_wrap=False` in `fsdp_config`"
            )

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        # Gradients of earlier microbatches that were averaged are equal on all ranks; this mean keeps them.
        over = self._process_group
        for work in [dist.all_reduce(gradient, group=over, async_op=True) for gradient in gradients]:
            work.wait()
        for gradient in gradients:
            gradient.div_(self._num_ranks)

    def _refuse(self, names: Sequence[str]) -> None:
        raise ModelError(
            f"a backward pass on rank {dist.get_rank()} gave no gradient to {len(names)} parameters, the "
            f"first `{names[0]}`, unlike the first backward pass. Other ranks may have a gradient of it, and "
            f"have to know. {_ADVICE}"
        )


class _Group:
    """A parameter group of `fully_shard`, which calls `before_reduction` before it reduces gradients.

    Attributes:
        missing: The indices of the trainable parameters without a gradient; None before the first reduction.
        is_active: Whether the group ran.
        is_reduced_again: Whether a backward pass reduces the group several times, as one that runs several
            times does.
        adds_zeros: Whether a reduction gets zeros for parameters without a gradient from here; torch adds
            them itself from 2.13 on.
    """

    def __init__(self, group: Any, before_reduction: Callable[[_Group], None]) -> None:
        self._group = group
        self._post_backward = group.post_backward
        self._before_reduction = before_reduction
        self._num_reductions = 0
        self.is_reduced_again = False
        self.adds_zeros = False
        self.forget()
        group.post_backward = self._reduce

    def forget(self) -> None:
        """Begin with the gradients of the next batch."""
        self.missing: list[int] | None = None
        self.is_active = False
        self._had_none: set[int] = set()

    @property
    def name(self) -> str:
        """The name of the group's module, or "(root)"."""
        return str(self._group._module_fqn or "(root)")

    @property
    def parameters(self) -> list[Any]:
        """Torch's records of the group's parameters."""
        parameters: list[Any] = self._group.fsdp_params
        return parameters

    def _reduce(self, *unused: Any) -> None:
        if self._group.reduce_grads:
            self._before_reduction(self)
            if self.adds_zeros:
                self._add_zeros()
        self._post_backward(*unused)

    def _add_zeros(self) -> None:
        """Give zeros to parameters without a gradient, so that all ranks reduce the same parameters."""
        for index in self.find_missing():
            # The memory of the whole parameter may be free by now, unlike its shape.
            if (whole := getattr(self.parameters[index], "_unsharded_param", None)) is not None:
                whole.grad = torch.zeros_like(whole)
        if any(parameter.unsharded_accumulated_grad is not None for parameter in self.parameters):
            # A reduction takes gradients of one dtype. Those of earlier passes have that of the reduction.
            for parameter in self.parameters:
                if hasattr(parameter, "_unsharded_param") and parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()

    def find_missing(self) -> list[int]:
        """Return the indices of the parameters that need a gradient and have none to reduce."""
        return [index for index, parameter in enumerate(self._group.fsdp_params) if _has_none(parameter)]

    def note(self) -> None:
        """Update `missing` and `is_active` before a reduction."""
        self._num_reductions += 1
        self.is_active |= self._group._training_state.name == "PRE_BACKWARD"
        missing = self.find_missing()
        if self.missing is None:
            self.missing = missing
            self._had_none = {index for index in missing if self.parameters[index].sharded_param.grad is None}
        else:
            self.missing = [index for index in self.missing if index in missing]

    def end_pass(self) -> None:
        """Update `is_reduced_again` at the end of a backward pass."""
        self.is_reduced_again |= self._num_reductions > 1
        self._num_reductions = 0

    @property
    def is_complete(self) -> bool:
        """Whether backward passes reduce gradients over all ranks now, not only over some or none."""
        return bool(self._group.reduce_grads and self._group.all_reduce_grads)

    def used(self) -> list[bool]:
        """Return for each parameter whether it has a gradient, or needs none."""
        missing = set(self.missing or ())
        return [index not in missing for index in range(len(self.parameters))]

    def clear(self, index: int) -> None:
        """Take away the gradient of a parameter that had none before."""
        if index in self._had_none:
            self.parameters[index].sharded_param.grad = None


def _has_none(parameter: Any) -> bool:
    """Return whether a parameter needs a gradient, and has none to reduce."""
    if not parameter.sharded_param.requires_grad:
        return False
    whole = getattr(parameter, "_unsharded_param", None)
    # Before torch 2.13, gradients of passes without a reduction are kept apart.
    return whole is None or (whole.grad is None and parameter.unsharded_accumulated_grad is None)


def param_groups(module: FSDPModule) -> list[Any]:
    """Return torch's records of the groups of parameters of a sharded module."""
    state: Any = module._get_fsdp_state()
    one = getattr(state, "_fsdp_param_group", None)
    groups: list[Any] = getattr(state, "_fsdp_param_groups", [] if one is None else [one])
    return groups
