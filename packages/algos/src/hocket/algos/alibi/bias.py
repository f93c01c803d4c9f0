"""The numbers of ALiBi: slopes per head, and the bias computed from them."""

import math

import torch


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the slope of each head, `(H,) float32`.

    For a power of two, `H`, the slopes are `2^(-8/H), 2^(-16/H), ...`. For other numbers, those of the power
    of two below come first, then every second slope of the power of two above, as in the authors' code.

    Args:
        num_heads: `H`, 1 or more.
        device: The device of the slopes.

    Raises:
        ValueError: `num_heads` is not above 0.

    Source: Press et al., Train Short, Test Long, 2021, section 3.
    """
    if num_heads < 1:
        raise ValueError(f"`num_heads` is {num_heads}, expected 1 or more")

    def of_power(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]

    power_of_two = 2 ** math.floor(math.log2(num_heads))
    slopes = of_power(power_of_two)
    slopes += of_power(2 * power_of_two)[0::2][: num_heads - power_of_two]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi_bias(slopes: torch.Tensor, query_length: int, key_length: int) -> torch.Tensor:
    """Return the bias on attention scores, `(H, Q, K) float32`: minus slope times distance.

    The queries are the last `Q` of `K` positions, as when keys of earlier tokens are cached. For a causal
    model the bias of later keys does not matter, as they are masked.

    Args:
        slopes: `(H,)`.
        query_length: `Q`.
        key_length: `K`, at least `Q`.
    """
    keys = torch.arange(key_length, device=slopes.device)
    queries = keys[key_length - query_length :]
    distance = (queries[:, None] - keys[None, :]).abs()
    return -slopes[:, None, None] * distance
