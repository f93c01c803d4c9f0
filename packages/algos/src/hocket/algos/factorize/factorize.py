"""Factorize: two thin layers in place of each wide one."""

import math
from typing import TYPE_CHECKING, get_args

from torch import nn

from hocket.algos.checks import check_number
from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.factorize.layers import (
    FactorizedConv2d,
    FactorizedLinear,
    Initialize,
    max_rank_with_speedup,
)
from hocket.algos.factorize.low_rank import latent_size_of
from hocket.algos.order import Order
from hocket.algos.surgery import (
    SurgeryAlgorithm,
    SurgeryReport,
    is_plain,
    is_plain_linear,
    parts_of,
    replace_module_classes,
)
from hocket.algos.surgery.fast_path import leave_fast_path
from hocket.algos.surgery.optimizers import Optimizers
from hocket.algos.surgery.replace import Policy

if TYPE_CHECKING:
    from hocket.trainer.state import State


class Factorize(SurgeryAlgorithm):
    """Replaces wide linear layers and convolutions by two of low rank, at INIT.

    Args:
        factorize_convs: Whether convolutions are factorised.
        factorize_linears: Whether linear layers are factorised.
        min_channels: Convolutions with fewer input or output channels are left.
        latent_channels: Channels between the two convolutions; below 1, a share of the smaller side.
        min_features: Linear layers with fewer features are left.
        latent_features: Width between the two linear layers; below 1, a share of the smaller side.
        initialize: `"random"` draws the weights of the new layers; `"svd"` computes those whose product is
            nearest to the old weights, for pretrained models.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: Nothing is to be factorised, or a size is out of range.

    Example:
        >>> Factorize(factorize_convs=False).latent_features
        128
    """

    order = Order.FACTORIZE

    def __init__(
        self,
        factorize_convs: bool = True,
        factorize_linears: bool = True,
        min_channels: int = 256,
        latent_channels: float = 0.25,
        min_features: int = 256,
        latent_features: float = 128,
        *,
        initialize: Initialize = "random",
        reapply: bool = False,
    ) -> None:
        super().__init__(reapply=reapply)
        _check(factorize_convs, factorize_linears, latent_channels, latent_features, initialize)
        for name, least in (("min_channels", min_channels), ("min_features", min_features)):
            check_number(name, least, least=0)
        self.factorize_convs = factorize_convs
        self.factorize_linears = factorize_linears
        self.min_channels = min_channels
        self.latent_channels = latent_channels
        self.min_features = min_features
        self.latent_features = latent_features
        self.initialize: Initialize = initialize

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """The kinds of layers to factorise: convolutions, linear layers, or both."""
        kinds: list[type[nn.Module]] = []
        if self.factorize_convs:
            kinds.append(nn.Conv2d)
        if self.factorize_linears:
            kinds.append(nn.Linear)
        return tuple(kinds)

    def operate(self, state: "State") -> SurgeryReport:
        """Factorise the layers of `state.model`."""
        return apply_factorization(
            state.model,
            self.factorize_convs,
            self.factorize_linears,
            self.min_channels,
            self.latent_channels,
            self.min_features,
            self.latent_features,
            state.optimizers,
            initialize=self.initialize,
        )

    def __repr__(self) -> str:
        return (
            f"Factorize(factorize_convs={self.factorize_convs}, factorize_linears={self.factorize_linears}, "
            f"min_channels={self.min_channels}, latent_channels={self.latent_channels}, "
            f"min_features={self.min_features}, latent_features={self.latent_features}, "
            f"initialize={self.initialize!r})"
        )


def apply_factorization(
    model: nn.Module,
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 512,
    latent_channels: float = 0.25,
    min_features: int = 512,
    latent_features: float = 0.25,
    optimizers: Optimizers | None = None,
    *,
    initialize: Initialize = "random",
) -> SurgeryReport:
    """Factorise the wide linear layers and convolutions of a model, in place; needs no trainer.

    Layers whose factors would not be smaller, with groups, or of a subclass are left and listed in the
    report. The defaults are those of Composer's function, which differ from its class's.

    Args:
        model: Changed in place.
        factorize_convs: Same as for `Factorize`.
        factorize_linears: Same as for `Factorize`.
        min_channels: Same as for `Factorize`.
        latent_channels: Same as for `Factorize`.
        min_features: Same as for `Factorize`.
        latent_features: Same as for `Factorize`.
        optimizers: Receive the new parameters, in the groups of the old ones.
        initialize: Same as for `Factorize`.

    Returns:
        The report of the surgery.

    Raises:
        AlgorithmConfigError: Nothing is to be factorised, or a size is out of range.

    Source: Zhang et al., Accelerating Very Deep Convolutional Networks for Classification and Detection,
        2015.
    """
    _check(factorize_convs, factorize_linears, latent_channels, latent_features, initialize)
    for name, least in (("min_channels", min_channels), ("min_features", min_features)):
        check_number(name, least, least=0)
    inside = parts_of(model, FactorizedConv2d, FactorizedLinear)

    def conv(module: nn.Conv2d, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        sizes = (module.in_channels, module.out_channels)
        rank = latent_size_of(latent_channels, *sizes)
        most = max_rank_with_speedup(*sizes, math.prod(module.kernel_size))
        if min(sizes) < min_channels or rank > most or module.groups > 1 or id(module) in inside:
            return None
        if not is_plain(module, nn.Conv2d):
            return None
        return FactorizedConv2d.from_conv2d(module, latent_channels, initialize=initialize)

    def linear(module: nn.Linear, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        sizes = (module.in_features, module.out_features)
        rank = latent_size_of(latent_features, *sizes)
        if min(sizes) < min_features or rank > max_rank_with_speedup(*sizes) or id(module) in inside:
            return None
        if not is_plain_linear(module):
            return None
        return FactorizedLinear.from_linear(module, latent_features, initialize=initialize)

    policies: dict[type[nn.Module], Policy] = {}
    if factorize_convs:
        policies[nn.Conv2d] = conv
    if factorize_linears:
        policies[nn.Linear] = linear
    report = replace_module_classes(model, policies, optimizers, title="Factorize")
    leave_fast_path(model)
    return report


def _check(
    convs: bool, linears: bool, latent_channels: float, latent_features: float, initialize: str
) -> None:
    if not (convs or linears):
        raise AlgorithmConfigError(
            "`factorize_convs` and `factorize_linears` are both False, so nothing would change; set one"
        )
    for name, size in (("latent_channels", latent_channels), ("latent_features", latent_features)):
        if not size > 0:
            raise AlgorithmConfigError(f"`{name}` is {size!r}, expected a number or a share above 0")
    if initialize not in get_args(Initialize):
        raise AlgorithmConfigError(f"`initialize` is {initialize!r}, expected 'random' or 'svd'")
