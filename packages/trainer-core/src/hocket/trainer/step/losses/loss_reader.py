"""`LossReader`: finds the rule by which a model's loss is reduced, while the loss is computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn import _reduction
from torch.overrides import TorchFunctionMode

from hocket.trainer.data.batch_tree import leaves
from hocket.trainer.loss import binary_cross_entropy_with_logits, linear_cross_entropy, soft_cross_entropy
from hocket.trainer.loss.ignored_label import is_counted
from hocket.trainer.step.losses.loss_rule import LossRule, find_labels


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Losses that leave labels out and weigh classes.
_OF_LABELS = {functional.cross_entropy, functional.nll_loss, soft_cross_entropy, linear_cross_entropy}
# Losses whose mean is over all elements of input and target.
_OF_ELEMENTS = {
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.kl_div,
    functional.poisson_nll_loss,
    functional.soft_margin_loss,
    functional.hinge_embedding_loss,
    functional.gaussian_nll_loss,
}
# Losses whose mean is over the first dim.
_OF_ROWS = {
    binary_cross_entropy_with_logits,
    functional.ctc_loss,
    functional.cosine_embedding_loss,
    functional.margin_ranking_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.triplet_margin_loss,
    functional.triplet_margin_with_distance_loss,
}
_KNOWN = _OF_LABELS | _OF_ELEMENTS | _OF_ROWS
# Functions that compute each row of their result from the same row of their arguments, or return no tensor.
_LOCAL = _names(
    """
    abs absolute add and bfloat16 bool ceil clamp clip clone contiguous cos cosine_similarity cpu cuda
    detach dim div divide double dropout elu eq erf exp expand_as expm1 flatten float floor format
    full_like gather ge gelu get glu gt half hash iadd imul int invert is_complex is_contiguous
    is_floating_point isfinite isinf isnan isub itruediv layer_norm le leaky_relu len lerp linear log
    log10 log1p log2 logical_and logical_not logical_or logsigmoid long lt masked_fill maximum minimum
    mish mul multiply nan_to_num ndimension ne neg nelement normalize numel one_hot ones_like or
    pairwise_distance pos pow radd ravel reciprocal relu relu6 repr requires_grad reshape rmul round
    rpow rsqrt rsub rtruediv selu set sigmoid sign silu sin size softplus sqrt square squeeze stride sub
    subtract tan tanh to true_divide truediv type type_as unflatten view view_as where xlogy zeros_like
    """
)
# Functions of this kind that are given dims other than the first.
_ALONG_DIMS = _names(
    """
    all amax amin any argmax argmin cumsum log_softmax logsumexp max mean min norm prod select softmax
    softmin std sum unbind unsqueeze var vector_norm
    """
)
# Functions after which the samples may lie along another dim.
_TRANSPOSED = _names("T mT movedim permute swapaxes t transpose")
_LINEAR = _names("clone contiguous double float mean neg reshape squeeze stack sum to view")
_SUMS = _names("add iadd isub radd rsub sub subtract")
_PRODUCTS = _names("imul mul multiply rmul")
_QUOTIENTS = _names("div divide itruediv true_divide truediv")
_READS = _names("index int item tolist")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossReduction:
    """One call of a function that reduces losses to a scalar."""

    name: str
    num: int
    """The number of losses that were added up."""
    is_mean: bool
    target: Tensor | None = None
    ignore_index: int | None = None
    """The label that does not count, if labels are counted."""
    class_weights: Tensor | None = None
    is_dense: bool = False
    """Whether the targets are probabilities, of which rows of zeros stand for labels that do not count."""

    def denominator(self) -> Tensor | float:
        """Return the number that a mean divides by: on the device, where labels are counted."""
        if self.target is None or self.ignore_index is None:
            return float(self.num)
        if self.is_dense:
            return self.target.sum()
        counted = is_counted(self.target, self.ignore_index)
        if self.class_weights is None:
            return counted.sum()
        weights = self.class_weights.detach().double().to(self.target.device)
        return (weights[self.target.long().clamp(0, weights.shape[0] - 1)] * counted).sum()

    def divided_by(self, divisor: Any, *, is_read: bool) -> LossReduction | None:
        """Return the mean that a sum becomes by a division; None if it becomes none. Reads the device.

        Args:
            divisor: The number or scalar tensor.
            is_read: Whether a number may come from the values of a tensor.
        """
        number = float(divisor)
        if self.ignore_index is not None and abs(float(self.denominator()) - number) <= 1e-6 * number:
            return replace(self, is_mean=True)
        if isinstance(divisor, Tensor) or is_read or number != int(number) or number < 1:
            return None
        return replace(self, is_mean=True, num=int(number), ignore_index=None)


class LossReader(TorchFunctionMode):
    """A context that observes torch's functions while they compute a loss; their results do not change.

    The denominator of a loss is known if the loss is a linear function of means that torch's loss functions
    or `mean` return, and if nothing before them combines samples with each other.

    Attributes:
        is_in_loss: Whether the model's `loss` runs, and not its `forward`, which may combine anything.
        problem: The first reason for which the denominator is unknown, in words; None without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_in_loss = True
        self.problem: str | None = None
        self._has_read = False
        self._is_transposed = False
        # Scalars that are linear functions of reductions. They stay alive, so that no other gets their ids.
        self._linear: dict[int, tuple[Tensor, frozenset[LossReduction]]] = {}
        # Tensors that were computed from parameters alone, as a penalty is.
        self._constants: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {} if kwargs is None else kwargs
        result = func(*args, **given)
        if func in _KNOWN:
            if reduction := _reduction_of(func, _bound(func, args, given)):
                self._linear[id(result)] = (result, frozenset((reduction,)))
            return result
        name = str(getattr(func, "__name__", func)).strip("_")
        items = args[0] if args and isinstance(args[0], (tuple, list)) else args
        if any(id(item) in self._linear for item in items):
            self._combine(name, items, result)
        elif self._is_constant(items):
            if isinstance(result, Tensor):
                self._constants[id(result)] = result
        elif self.is_in_loss:
            self._compute(name, args, given, result)
        return result

    def _is_constant(self, args: Any) -> bool:
        """Return whether a function of `args` gives the same for every microbatch."""
        tensors = [one for one in args if isinstance(one, Tensor)]
        return bool(tensors) and all(
            (one.is_leaf and one.requires_grad) or id(one) in self._constants for one in tensors
        )

    def _combine(self, name: str, args: Any, result: Any) -> None:
        """Note a function of scalars of which some are linear functions of reductions."""
        known = [self._linear[id(one)][1] for one in args if id(one) in self._linear]
        others = [one for one in args if id(one) not in self._linear]
        merged = frozenset[LossReduction]().union(*known)
        are_means = all(one.is_mean for one in merged)
        if name in _QUOTIENTS and id(args[0]) in self._linear:
            if are_means and len(known) == 1:
                is_linear = True
            else:
                means = [one.divided_by(args[1], is_read=self._has_read) for one in known[0]]
                merged = frozenset(mean for mean in means if mean is not None)
                is_linear = len(merged) == len(means)
        elif name in _SUMS:
            # A mean plus a constant is the mean of terms with that constant; a sum is not the sum of such.
            is_linear = are_means or not any(isinstance(one, Tensor) or one for one in others)
        elif name in _PRODUCTS:
            is_linear = len(known) == 1
        else:
            is_linear = name in _LINEAR
        self._linear.pop(id(result), None)  # of a function in place
        if is_linear:
            self._linear[id(result)] = (result, merged)

    def _compute(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note a function within the loss that may reduce losses, or combine samples with each other."""
        first = args[0] if args else None
        if name in _READS:
            self._has_read = True
        if not isinstance(first, (Tensor, tuple, list)) or name in _READS:
            return
        if name in ("mean", "sum") and isinstance(first, Tensor) and "dim" not in kwargs and len(args) == 1:
            reduction = LossReduction(name=name, num=first.numel(), is_mean=name == "mean")
            self._linear[id(result)] = (result, frozenset((reduction,)))
            return
        if name in _TRANSPOSED:
            self._is_transposed = is_local = True
        elif name in _ALONG_DIMS and isinstance(first, Tensor):
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            dims = dims if isinstance(dims, (tuple, list)) else [dims]
            num_dims = first.dim() + (name == "unsqueeze")
            is_local = not self._is_transposed and all(
                isinstance(dim, int) and num_dims > 1 and dim % num_dims for dim in dims
            )
        elif name == "getitem":
            is_local = _keeps_rows(args[1])
        else:
            is_local = name in _LOCAL
        if not is_local or _is_outer(args, result):
            self.problem = self.problem or f"`{name}` may combine samples with each other"

    def reductions_of(self, loss: Any) -> frozenset[LossReduction] | str:
        """Return the reductions that a scalar loss is a linear function of; the reason if it is none."""
        if self.problem is not None:
            return self.problem
        if id(loss) not in self._linear:
            return "it is not computed by torch's loss functions or `mean`"
        reductions = self._linear[id(loss)][1]
        if len({one.is_mean for one in reductions}) > 1:
            return "it adds sums to means"
        return reductions

    def rule_of(self, loss: Any, batch: Any, num_samples: int) -> LossRule | str:
        """Return the rule of a loss that was computed in this context; the reason if it has none.

        Reads the device.

        Args:
            loss: The scalar loss.
            batch: The batch, in which the labels are searched.
            num_samples: The samples of the batch.
        """
        reductions = self.reductions_of(loss)
        if isinstance(reductions, str):
            return reductions
        if not next(iter(reductions)).is_mean:
            return LossRule(is_sum=True)
        rules: dict[Any, LossRule] = {}
        for reduction in reductions:
            rule = _rule_of(reduction, batch, num_samples)
            if isinstance(rule, str):
                return rule
            rules[rule.key] = rule
        if len(rules) > 1:
            names = ", ".join(f"`{name}`" for name in sorted({one.name for one in reductions}))
            return f"its parts are divided by different numbers ({names})"
        return next(iter(rules.values()))


def _reduction_of(func: Any, given: Mapping[str, Any]) -> LossReduction | None:
    """Return the reduction that a loss function makes; None if it reduces nothing, or in a way of its own."""
    reduction = given.get("reduction", "mean")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = _reduction.legacy_get_string(given["size_average"], given["reduce"], emit_warning=False)
    if reduction == "none":
        return None
    losses = next(iter(given.values()))
    target = given.get("target", given.get("targets"))
    name, is_mean = func.__name__, reduction != "sum"
    if func in _OF_LABELS:
        is_dense = target.is_floating_point()
        num = losses.numel() // losses.shape[1 if losses.dim() > 1 else 0] if is_dense else target.numel()
        has_ignored = not is_dense or (func is soft_cross_entropy and is_mean)
        return LossReduction(
            name=name,
            num=num,
            is_mean=is_mean,
            target=target,
            ignore_index=given["ignore_index"] if has_ignored else None,
            class_weights=None if is_dense else given.get("weight"),
            is_dense=is_dense,
        )
    if func is functional.ctc_loss:
        return LossReduction(name=name, num=torch.as_tensor(given["target_lengths"]).numel(), is_mean=is_mean)
    if func in _OF_ROWS or reduction == "batchmean":
        is_divided = not is_mean and given.get("scale_by_batch_size", False)
        return LossReduction(name=name, num=losses.shape[0], is_mean=is_mean or is_divided)
    if given.get("weight") is not None and not name.startswith("binary"):
        return None  # the mean is divided by the weights of the elements
    num = torch.broadcast_shapes(losses.shape, target.shape).numel()  # type: ignore[no-untyped-call]
    return LossReduction(name=name, num=num, is_mean=is_mean, target=target)


def _rule_of(reduction: LossReduction, batch: Any, num_samples: int) -> LossRule | str:
    """Return the rule of one reduction to a mean; the reason if the labels are not in the batch."""
    target, ignore_index = reduction.target, reduction.ignore_index
    if target is not None and ignore_index is not None and not reduction.is_dense:
        found = find_labels(batch, target, ignore_index, num_samples)
        if found is None:
            return f"the labels of `{reduction.name}` are no part of the batch"
        weights = reduction.class_weights
        return LossRule(
            path=found[0],
            is_shifted=found[1],
            ignore_index=ignore_index,
            class_weights=None if weights is None else weights.detach().double().cpu(),
        )
    if reduction.num % num_samples or not reduction.num:
        return f"`{reduction.name}` is over {reduction.num} losses of {num_samples} samples"
    for path, part in leaves(batch):
        if not isinstance(part, Tensor) or part.dim() < 1 or part.shape[0] != num_samples:
            continue
        is_integer = not part.is_floating_point() and part.numel() == reduction.num
        if reduction.is_dense and is_integer:
            # An algorithm made probabilities of these labels.
            return LossRule(path=path, ignore_index=ignore_index, per_element=1.0)
        if target is not None and part.data_ptr() == target.data_ptr() and part.dim() > 1:
            return LossRule(path=path, per_element=reduction.num / part.numel())
    return LossRule()


def _bound(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _keeps_rows(index: Any) -> bool:
    """Return whether an index selects nothing along the first dim."""
    first = index[0] if isinstance(index, tuple) and index else index
    return first is Ellipsis or (isinstance(first, slice) and first == slice(None))


def _is_outer(args: tuple[Any, ...], result: Any) -> bool:
    """Return whether a function of several tensors has more results than any of them has elements."""
    sizes = [one.numel() for one in args if isinstance(one, Tensor) and one.dim() > 0]
    return isinstance(result, Tensor) and len(sizes) > 1 and result.numel() > max(sizes)
