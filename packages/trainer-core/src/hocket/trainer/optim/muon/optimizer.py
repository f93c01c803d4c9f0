"""Muon on whole and on sharded matrices."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim.muon.exchange import MatrixExchange, cut_axes
from hocket.trainer.ranks.sharded_tensors import local_part

NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RATE_ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")


class Muon(torch.optim.Muon):
    """Torch's `Muon` that gives sharded matrices the same updates as whole ones, and takes experts.

    Torch's own gathers a sharded matrix for each product of its iteration, in an order that rounds
    otherwise. Here one rank, the owner of a matrix, gets its update whole and sends the orthogonal one back
    as shards; in float32 a rank sends and receives at most twice the bytes of its momentum, in bfloat16 half
    of that. Every step is collective over the ranks that share the matrices.

    A parameter of three dims is a batch of matrices, such as the experts of a layer: (experts, rows,
    columns). Where ranks divide whole experts, nothing is exchanged. States are torch's.

    Args:
        params: Parameters of two or three dims, or groups of them.
        lr: The learning rate.
        weight_decay: The decay, multiplied by the learning rate.
        momentum: The decay rate of the momentum.
        nesterov: Use Nesterov's momentum.
        ns_coefficients: The three coefficients of a Newton-Schulz iteration.
        eps: The least norm by which a matrix is divided.
        ns_steps: The number of iterations.
        adjust_lr_fn: The scaling of the rate by a matrix's shape (rows, columns): `"original"` (or None)
            `sqrt(max(1, rows / columns))`, `"match_rms_adamw"` `0.2 * sqrt(max(rows, columns))`,
            `"spectral_unclamped"` `sqrt(rows / columns)`.
        ns_dtype: The dtype of the iteration. `"bfloat16"`, as torch's, rounds to three digits, so that two
            layouts whose gradients differ in the last bit of float32 get updates that differ by up to 1%;
            with `"float32"` they agree to 1e-5.

    Raises:
        TrainerConfigError: A parameter is complex or has other dims, or a setting is out of range.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None,
        ns_dtype: Literal["bfloat16", "float32"] = "bfloat16",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
        }
        # Not torch's own constructor, which refuses three dims.
        Optimizer.__init__(self, params, defaults)
        self._exchanges: dict[tuple[Tensor, ...], MatrixExchange] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices.

        Raises:
            TrainerConfigError: A parameter is complex or has another number of dims, or a setting is out of
                range.
        """
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("ns_dtype", self.defaults.get("ns_dtype", "bfloat16"))  # torch's own has none
        self._exchanges = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return the result of `closure`, if there is one.

        Raises:
            TrainerConfigError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            momenta = {
                index: self._momentum(param, group)
                for index, param in enumerate(group["params"])
                if param.grad is not None
            }
            for index, update in self._orthogonal(group, momenta).items():
                param = group["params"][index]
                values = local_part(param)
                rate = float(group["lr"])
                values.mul_(1 - rate * group["weight_decay"])
                ratio = _rate_ratio(group["adjust_lr_fn"], *param.shape[-2:])
                values.add_(update.to(values.device), alpha=-rate * ratio)
        return loss

    def _momentum(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Advance the momentum of a parameter; return this rank's part of what is to be orthogonalised."""
        assert param.grad is not None
        if param.grad.is_sparse:
            raise TrainerConfigError(
                "`Muon` got a sparse gradient; make the embedding with `sparse=False`, or give its "
                "parameters to `torch.optim.SparseAdam`"
            )
        given: Any = param.grad
        placements = getattr(param, "placements", ())
        if hasattr(given, "placements") and given.placements != placements:
            # Such as the sum over ranks that is still due of a matrix that all of them have.
            given = given.redistribute(placements=placements)
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(given, memory_format=torch.preserve_format)
        gradient, buffer = local_part(given), local_part(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        part: Tensor = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return part

    def _orthogonal(self, group: dict[str, Any], momenta: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return this rank's part of each orthogonal update by the parameter's index in its group."""
        dtype = NS_DTYPES[group["ns_dtype"]]

        def orthogonalize(whole: Tensor) -> Tensor:
            return newton_schulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"], dtype)

        shared: dict[Any, list[int]] = defaultdict(list)
        for index, param in enumerate(group["params"]):
            axes = cut_axes(param)
            shared[(param.device_mesh, axes) if axes else None].append(index)
        updates = {index: orthogonalize(momenta[index]) for index in shared.pop(None, ()) if index in momenta}
        for indexes in shared.values():
            exchange = self._exchange(tuple(group["params"][index] for index in indexes))
            parts = [momenta.get(index) for index in indexes]
            taken = [index for index in indexes if index in momenta]
            updates.update(zip(taken, exchange.apply(parts, orthogonalize, dtype), strict=True))
        return updates

    def _exchange(self, params: tuple[Tensor, ...]) -> MatrixExchange:
        if params not in self._exchanges:
            self._exchanges[params] = MatrixExchange(params)
        return self._exchanges[params]


def warn_of_shards(optimizers: Iterable[Optimizer]) -> None:
    """Say once if torch's own `Muon` has matrices that are cut over ranks."""
    for optimizer in optimizers:
        if type(optimizer) is torch.optim.Muon and any(
            cut_axes(param) for group in optimizer.param_groups for param in group["params"]
        ):
            warnings.warn(
                "`torch.optim.Muon` gathers a sharded matrix for each product of its iteration, and its "
                "updates differ from those of one process; use `hocket.trainer.optim.Muon`, which takes the "
                "same arguments",
                stacklevel=2,
            )
            return


def newton_schulz(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return matrices near the orthogonal factors of `matrices`, by a quintic Newton-Schulz iteration.

    Products and order are those of `torch.optim.Muon`, whose bits a matrix of two dims gets in bfloat16.

    Args:
        matrices: Of shape (rows, columns) or (batch, rows, columns).
        coefficients: Of the first, third and fifth power.
        steps: The number of iterations.
        eps: The least norm by which a matrix is divided.
        dtype: The dtype of the iteration.

    Returns:
        A tensor of `dtype` and the same shape, with singular values of about 0.5 to 1.5.
    """
    first, third, fifth = coefficients
    found = matrices.to(dtype, copy=True)
    is_tall = found.size(-2) > found.size(-1)
    if is_tall:
        found = found.mT
    if found.ndim == 2:
        found.div_(found.norm().clamp(min=eps))
        add_product: Callable[..., Tensor] = torch.addmm
    else:
        found.div_(torch.linalg.matrix_norm(found, keepdim=True).clamp(min=eps))
        add_product = torch.baddbmm
    for _ in range(steps):
        gram = found @ found.mT
        change = add_product(gram, gram, gram, beta=third, alpha=fifth)
        found = add_product(found, change, found, beta=first)
    return found.mT if is_tall else found


def _rate_ratio(adjustment: str | None, rows: int, columns: int) -> float:
    if adjustment in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns)


def _check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "momentum", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise TrainerConfigError(f"`{name}` of `Muon` is {group[name]}; expected a number of at least 0")
    for name, known in (("adjust_lr_fn", RATE_ADJUSTMENTS), ("ns_dtype", tuple(NS_DTYPES))):
        if group[name] not in known:
            shown = ", ".join(map(repr, known))
            raise TrainerConfigError(f"`{name}` of `Muon` is {group[name]!r}; expected one of {shown}")
    for param in group["params"]:
        if param.ndim not in (2, 3) or param.is_complex():
            raise TrainerConfigError(
                f"`Muon` got a parameter of shape {tuple(param.shape)} and dtype {param.dtype}; expected "
                "real matrices, or batches of them. Give the others to AdamW, as `muon_with_adamw` does"
            )
