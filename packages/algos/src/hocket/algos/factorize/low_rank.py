"""Replacement of a linear map by two thin ones that give nearly the same outputs on sample inputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hocket.algos.errors import AlgorithmConfigError


def latent_size_of(latent_size: float, in_size: int, out_size: int) -> int:
    """Return the number of latent channels: `latent_size`, below 1 as a share of the smaller side."""
    return max(1, int(latent_size * min(in_size, out_size))) if latent_size < 1 else int(latent_size)


@dataclass
class LowRankSolution:
    """Two maps in place of one, and their error; the names are Composer's.

    Attributes:
        Wa: The first map: `(in, rank)`, or `(rank, in_channels, h, w)` of a convolution.
        Wb: The second: `(rank, out)`, or `(out_channels, rank, 1, 1)`; None where `Wa` alone is the map.
        bias: Added to the outputs; None if the given map had none.
        rank: The width between the two.
        nmse: The mean squared error of the outputs, divided by their variance.
    """

    Wa: torch.Tensor | None = None
    Wb: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    rank: int = -1
    nmse: float = 0.0


def factorize_matrix(
    X: torch.Tensor,  # noqa: N803 - Composer's names
    Y: torch.Tensor,  # noqa: N803
    Wa: torch.Tensor,  # noqa: N803
    Wb: torch.Tensor | None = None,  # noqa: N803
    bias: torch.Tensor | None = None,
    rank: float = 0.25,
    n_iters: int = 3,
) -> LowRankSolution:
    """Find the two thin matrices and the bias whose outputs for `X` are nearest to `Y`.

    The nearest matrices are computed directly, by reduced-rank regression from the given map: the smallest
    correction first fits the map to the samples, and its outputs are then projected on their first `rank`
    principal directions. In directions that no sample has, the given map is unchanged.

    Args:
        X: Sample inputs, `(N, in)`.
        Y: The outputs that the map should give for `X`, `(N, out)`.
        Wa: The map, `(in, out)`, or its first factor, `(in, rank now)`.
        Wb: Its second factor, `(rank now, out)`; None if it is not factorized.
        bias: Bias of the outputs; a new one is computed. None for a map without a bias, which gets none.
        rank: Width between the two matrices; below 1, a share of the smaller side.
        n_iters: 0 for the factors of the map alone, regardless of the samples; any other number for the
            nearest ones.

    Returns:
        The solution. `Wb` is None if `rank` is not below both sides; given factors are returned unchanged if
        `rank` is not below theirs.

    Source: Izenman, Reduced-rank regression for the multivariate linear model, 1975, equation 2.8 with the
    unit matrix for weights.
    """
    if X.ndim != 2 or Y.ndim != 2 or len(X) != len(Y):
        raise AlgorithmConfigError(
            f"`X` has the shape {tuple(X.shape)} and `Y` {tuple(Y.shape)}; expected `(N, in)` and `(N, out)` "
            "with one N"
        )
    latent_size = latent_size_of(rank, X.shape[1], Y.shape[1])
    x, y = X.detach().double(), Y.detach().double()
    full_weight = (Wa if Wb is None else Wa @ Wb).detach().double()
    is_thin = Wb is not None and latent_size >= Wa.shape[1]
    if is_thin and latent_size < min(full_weight.shape):
        old_bias = 0 if bias is None else bias.detach().double()
        return LowRankSolution(Wa, Wb, bias, Wa.shape[1], _error(x @ full_weight + old_bias, y))
    x_mean, y_mean = (
        (torch.zeros_like(x[0]), torch.zeros_like(y[0])) if bias is None else (x.mean(0), y.mean(0))
    )
    if n_iters:
        residual = (y - y_mean) - (x - x_mean) @ full_weight
        full_weight = full_weight + torch.linalg.pinv(x - x_mean) @ residual
        outputs = (x - x_mean) @ full_weight
    else:
        outputs = full_weight
    first, second = full_weight, None
    if latent_size < min(full_weight.shape):
        # Directions are in ascending order, one for each output, however few samples there are.
        directions = torch.linalg.eigh(outputs.T @ outputs).eigenvectors[:, -latent_size:]
        first, second = full_weight @ directions, directions.T
        full_weight = first @ second
    new_bias = y_mean - x_mean @ full_weight
    return LowRankSolution(
        Wa=first.to(Wa),
        Wb=None if second is None else second.to(Wa),
        bias=None if bias is None else new_bias.to(Wa),
        rank=latent_size if second is not None else min(full_weight.shape),
        nmse=_error(x @ full_weight + new_bias, y),
    )


def factorize_conv2d(
    X: torch.Tensor,  # noqa: N803
    Wa: torch.Tensor,  # noqa: N803
    Wb: torch.Tensor | None = None,  # noqa: N803
    biasA: torch.Tensor | None = None,  # noqa: N803
    biasB: torch.Tensor | None = None,  # noqa: N803
    rank: float = 0.25,
    n_iters: int = 3,
) -> LowRankSolution:
    """Find a convolution into few channels and one of 1 by 1 with the nearest outputs for `X`.

    Args:
        X: Sample inputs, `(N, in_channels, H, W)`.
        Wa: The weights, `(out_channels, in_channels, h, w)`, or those of the first convolution.
        Wb: The weights of the second convolution, `(out_channels, rank now, 1, 1)`.
        biasA: Bias of the first convolution.
        biasB: Bias of the second convolution.
        rank: Same as for `factorize_matrix`.
        n_iters: Same as for `factorize_matrix`.

    Returns:
        The solution, with weights of convolutions and one bias, that of the outputs.
    """
    height, width = Wa.shape[2:]
    patches = F.unfold(X, (height, width)).transpose(1, 2).flatten(0, 1)
    first = Wa.flatten(1).T
    second = None if Wb is None else Wb.flatten(1).T
    outputs = patches @ first
    bias = biasA
    if second is not None:
        outputs = outputs @ second
        bias = biasB if biasA is None else biasA @ second + (0 if biasB is None else biasB)
    outputs = outputs if bias is None else outputs + bias
    solution = factorize_matrix(patches, outputs, first, second, bias, rank, n_iters)
    if solution.Wa is not None:
        solution.Wa = solution.Wa.T.reshape(-1, Wa.shape[1], height, width)
    if solution.Wb is not None:
        solution.Wb = solution.Wb.T[:, :, None, None]
    return solution


def _error(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    return float((outputs - expected).square().mean() / expected.var())
