"""AdamW and SGD whose weight decay does not depend on the learning rate, on torch's kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from hocket.trainer.checks import check_number
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.ranks.sharded_tensors import local_part, whole_tensor

Params: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]"

# Devices with fused kernels. Parameters on `meta` get their device later.
_FUSED_DEVICES = frozenset({"cpu", "cuda", "meta", "mps", "xpu"})
_LARGE_DECAY = 1e-3


class DecoupledAdamW(AdamW):
    """AdamW with the decay `w ← w · (1 - (lr / initial_lr) · weight_decay)`.

    torch's `AdamW` decays by `lr · weight_decay` instead. Here the two can be tuned independently, and a
    decay is typically `1e-5` where torch's would be `1e-2`. A group whose initial learning rate is 0 is not
    decayed.

    The state has the layout of torch's `AdamW`, so checkpoints of one load into the other.

    Args:
        params: Parameters, named parameters or groups.
        lr: The learning rate; its first value is stored as `initial_lr` in each group.
        betas: The decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: The share of each weight that a step at the initial learning rate takes away.
        amsgrad: Use the maximum of the second moments.
        foreach: Use torch's multi-tensor kernels.
        fused: Use torch's fused kernels; the default where every parameter is of a floating type and on a
            device that has them, unless `foreach` is given.
        capturable: Make steps safe to capture in a CUDA graph.
        maximize: Ascend instead.

    Warns:
        UserWarning: If `weight_decay` is 1e-3 or more, which is a usual value for torch's `AdamW` only.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2, with the
    schedule multiplier `lr / initial_lr`.
    """

    steps_local_parts: ClassVar[bool] = True
    """Tells layouts that sharded and whole parameters may share a group: kernels get this rank's parts."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        maximize: bool = False,
    ) -> None:
        _warn_of_decay(self, weight_decay)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            maximize=maximize,
        )
        _choose_kernel(self, lr)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and store its learning rate as `initial_lr`."""
        super().add_param_group(param_group)
        _check_numbers(self.param_groups[-1])
        _store_initial_rate(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return the result of `closure`, if there is one.

        Raises:
            TrainerConfigError: If a gradient is sparse, or the state of a sharded parameter is not sharded.
        """
        loss = _evaluate(closure)
        for group in self.param_groups:
            params = _with_gradients(self, group)
            if not params:
                continue
            states = [self._state_of(param, group) for param in params]
            initial_lr = group["initial_lr"]
            # The update is elementwise, so that of this rank's shards needs no `DTensor`, nor its dispatch.
            adamw(
                [local_part(param) for param in params],
                [local_part(param.grad) for param in params],
                _local_slots(params, states, "exp_avg"),
                _local_slots(params, states, "exp_avg_sq"),
                _local_slots(params, states, "max_exp_avg_sq") if group["amsgrad"] else [],
                [state["step"] for state in states],
                foreach=group["foreach"],
                fused=group["fused"],
                capturable=group["capturable"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                has_complex=any(map(torch.is_complex, params)),
                amsgrad=group["amsgrad"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                # The kernel multiplies by `lr`, which leaves `lr / initial_lr`.
                weight_decay=group["weight_decay"] / initial_lr if initial_lr else 0.0,
                eps=group["eps"],
                maximize=group["maximize"],
            )
        return loss

    def report_per_parameter_metrics(
        self, param: Tensor, name: str, optimizer_metrics: dict[str, Any]
    ) -> dict[str, Any]:
        """Add a parameter's norms to `optimizer_metrics`, and return it.

        The names are `l2_norm/{moment,param,update,grad}/<name>`; the values are tensors on the device. For a
        sharded parameter they are the norms of the whole (collective). Before the first step there are none.
        """
        group = next(group for group in self.param_groups if any(one is param for one in group["params"]))
        initial_lr = group["initial_lr"]
        decay = group["weight_decay"] / initial_lr if initial_lr else 0.0
        optimizer_metrics.update(adam_norms(param, name, self.state.get(param, {}), group, decay=decay))
        return optimizer_metrics

    def allocate_state(self) -> None:
        """Create the state of every parameter that has a gradient; otherwise the first step creates it."""
        for group in self.param_groups:
            for param in _with_gradients(self, group):
                self._state_of(param, group)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            counts_on_device = group["capturable"] or group["fused"]
            # As torch's own: a count in a half-precision default dtype would stop at 256 or 2048.
            is_double = torch.get_default_dtype() == torch.float64 and not group["fused"]
            state["step"] = torch.zeros(
                (),
                dtype=torch.float64 if is_double else torch.float32,
                device=param.device if counts_on_device else "cpu",
            )
            slots = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
            for slot in slots:
                state[slot] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


class DecoupledSGDW(SGD):
    """SGD with the decay `w ← w · (1 - (lr / initial_lr) · weight_decay)` before each step.

    torch's `SGD` adds `weight_decay · w` to the gradient instead, so that the momentum contains the decay.
    A group whose initial learning rate is 0 is not decayed. The state has the layout of torch's `SGD`.

    Args:
        params: Parameters, named parameters or groups.
        lr: The learning rate; its first value is stored as `initial_lr` in each group.
        momentum: The momentum factor.
        dampening: The dampening of the momentum.
        weight_decay: The share of each weight that a step at the initial learning rate takes away.
        nesterov: Use Nesterov's momentum.
        foreach: Use torch's multi-tensor kernels.
        fused: Use torch's fused kernels; the default as for `DecoupledAdamW`.
        maximize: Ascend instead.

    Warns:
        UserWarning: If `weight_decay` is 1e-3 or more, which is a usual value for torch's `SGD` only.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 1, with the
    schedule multiplier `lr / initial_lr`.
    """

    steps_local_parts: ClassVar[bool] = True
    """Tells layouts that sharded and whole parameters may share a group: kernels get this rank's parts."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
    ) -> None:
        _warn_of_decay(self, weight_decay)
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            foreach=foreach,
            fused=fused,
            maximize=maximize,
        )
        _choose_kernel(self, lr)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and store its learning rate as `initial_lr`."""
        super().add_param_group(param_group)
        _check_numbers(self.param_groups[-1])
        _store_initial_rate(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return the result of `closure`, if there is one.

        Raises:
            TrainerConfigError: If a gradient is sparse, or the state of a sharded parameter is not sharded.
        """
        loss = _evaluate(closure)
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = _with_gradients(self, group)
            has_buffer = [self.state[param].get("momentum_buffer") is not None for param in params]
            self._update([param for param, has in zip(params, has_buffer, strict=True) if has], group)
            new = [param for param, has in zip(params, has_buffer, strict=True) if not has]
            # A fused kernel begins the momentum of all its parameters or of none, and in a step that it
            # skips on the device it would begin it with arbitrary values: such a step is skipped here.
            begins = bool(new) and group["momentum"] != 0
            if not (begins and found_inf is not None and found_inf.item()):
                self._update(new, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Decay and step parameters of a group, of which all or none have momentum from earlier steps."""
        if not params:
            return
        found_inf = getattr(self, "found_inf", None)
        parts = [local_part(param) for param in params]
        if group["weight_decay"] and group["initial_lr"]:
            factor = 1.0 - group["lr"] / group["initial_lr"] * group["weight_decay"]
            if found_inf is not None:
                # The kernel skips a step that overflowed, on the device; the decay is skipped likewise.
                factor = torch.where(found_inf.squeeze() > 0, 1.0, factor)
            torch._foreach_mul_(parts, factor)
        states = [self.state[param] for param in params]
        buffers = _local_slots(params, states, "momentum_buffer")
        # torch's fused SGD takes no `DTensor`; the update is the same on every rank's shards.
        sgd(
            parts,
            [local_part(param.grad) for param in params],
            buffers,
            has_sparse_grad=False,
            foreach=group["foreach"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        for param, state, buffer in zip(params, states, buffers, strict=True):
            if buffer is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = _laid_out_as(param, buffer)


def _local_slots(params: list[Tensor], states: list[Any], slot: str) -> list[Any]:
    """Return this rank's parts of a slot of the state of each parameter; None for a slot without a value.

    Raises:
        TrainerConfigError: A value is whole and its parameter sharded, of which kernels would take a wrong
            part without a word.
    """
    values = [state.get(slot) for state in states]
    for param, value in zip(params, values, strict=True):
        if value is not None and hasattr(value, "to_local") != hasattr(param, "to_local"):
            whole, sharded = ("state", "parameter") if hasattr(param, "to_local") else ("parameter", "state")
            raise TrainerConfigError(
                f"`{slot}` of a parameter of the shape {tuple(param.shape)}: the {sharded} is sharded and "
                f"the {whole} is whole. Load the optimizer's state by a checkpoint of the trainer, or by "
                "`set_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict`"
            )
    return [local_part(value) for value in values]


def _laid_out_as(param: Any, local: Tensor) -> Any:
    """Return `local` as a `DTensor` if `param` is one."""
    if not hasattr(param, "device_mesh"):
        return local
    kind = type(param.data)
    return kind.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _with_gradients(optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor]:
    params = [param for param in group["params"] if param.grad is not None]
    if any(param.grad.is_sparse for param in params):
        raise TrainerConfigError(
            f"`{type(optimizer).__name__}` got a sparse gradient; make the embedding with `sparse=False`, or "
            "give its parameters to `torch.optim.SparseAdam`"
        )
    return params


def _check_numbers(group: Mapping[str, Any]) -> None:
    """Refuse NaN, and what is no number, in a group's settings, which torch takes in part.

    Raises:
        TrainerConfigError: If there is one.
    """
    for name in ("lr", "momentum", "dampening", "eps", "weight_decay"):
        if not isinstance(group.get(name, 0), Tensor):
            check_number(name, group.get(name, 0))


def _store_initial_rate(optimizer: Optimizer) -> None:
    group = optimizer.param_groups[-1]
    group.setdefault("initial_lr", float(group["lr"]))


def _choose_kernel(optimizer: Optimizer, lr: float | Tensor) -> None:
    """Use fused kernels where the caller chose none and all parameters have them."""
    for group in optimizer.param_groups:
        if group["fused"] is None and group["foreach"] is None:
            params = group["params"]
            group["fused"] = all(
                torch.is_floating_point(param) and param.device.type in _FUSED_DEVICES for param in params
            ) and not (isinstance(lr, Tensor) and any(param.device.type == "mps" for param in params))
    # A flag for `GradScaler`: a step that overflowed is skipped on the device.
    optimizer._step_supports_amp_scaling = all(  # type: ignore[attr-defined]  # torch's own flag
        group["fused"] for group in optimizer.param_groups
    )


def _warn_of_decay(optimizer: Optimizer, weight_decay: float) -> None:
    if weight_decay >= _LARGE_DECAY:
        name = type(optimizer).__name__
        warnings.warn(
            f"`{name}` has a `weight_decay` of {weight_decay}, which is not multiplied by the learning rate: "
            f"every step at the initial learning rate takes {weight_decay:.2%} of each weight; use "
            f"torch's `weight_decay` times `lr`, such as 1e-5",
            stacklevel=3,
        )


@torch.no_grad()
def adam_norms(
    param: Tensor, name: str, state: Mapping[str, Tensor], group: Mapping[str, Any], *, decay: float
) -> dict[str, Tensor]:
    """Return the L2 norms of a parameter's gradient, value, first moment and latest update.

    Args:
        param: The parameter.
        name: Its name in the metrics `l2_norm/{moment,param,update,grad}/<name>`.
        state: Its optimizer state; nothing is returned while it is empty.
        group: Its parameter group.
        decay: The weight decay that the kernel multiplies by the learning rate.

    Returns:
        Scalar tensors on the device. Those of a sharded parameter are of the whole (collective).
    """
    if not state:
        return {}
    beta1, beta2 = group["betas"]
    step = state["step"].to(param.device)
    moment = state["exp_avg"]
    second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    denominator = (second / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
    update = (moment / (1.0 - beta1**step)).div_(denominator).add_(param, alpha=decay).mul_(group["lr"])
    tensors = {"moment": moment, "param": param, "update": update}
    if param.grad is not None:
        tensors["grad"] = param.grad
    # A sharded tensor's norm is a `DTensor`, too.
    return {
        f"l2_norm/{kind}/{name}": whole_tensor(torch.linalg.vector_norm(tensor))
        for kind, tensor in tensors.items()
    }
