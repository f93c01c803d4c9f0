"""The axes of the device mesh: their names, and the layout of all ranks that is nearest to a wrong one."""

import math
from collections.abc import Mapping, Sequence

PP, DP_REPLICATE, DP_SHARD, CP, TP = "pp", "dp_replicate", "dp_shard", "cp", "tp"
EP = "ep"
AXES = (PP, DP_REPLICATE, DP_SHARD, CP, TP, EP)
"""The names of the axes. On the mesh `pp` is the outermost and `tp` the innermost; `ep` divides the ranks of
`dp_shard` and `cp`."""


def describe_degrees(degrees: Mapping[str, int]) -> str:
    """Return the axes of several ranks with their degrees, such as "`dp_shard` 2 × `tp` 2"."""
    return " × ".join(f"`{axis}` {degree}" for axis, degree in degrees.items() if degree > 1)


def nearest_layout(degrees: Mapping[str, int], world_size: int) -> str:
    """Describe the layout of all ranks whose degrees differ least from the given ones, `tp` first."""
    sizes, left = dict[str, int](), world_size
    for axis in (TP, CP, PP, DP_REPLICATE):
        sizes[axis] = _nearest_of(_divisors(left), degrees.get(axis, 1))
        left //= sizes[axis]
    sizes[DP_SHARD] = left
    if degrees.get(PP, 1) > 1:
        return describe_degrees({axis: sizes[axis] for axis in AXES if axis in sizes})
    described = f"`{DP_REPLICATE}` {sizes[DP_REPLICATE]} × `{DP_SHARD}` {sizes[DP_SHARD]}"
    return f"{described}{f' × `{CP}` {sizes[CP]}' if degrees[CP] > 1 else ''} × `{TP}` {sizes[TP]}"


def nearest_layout_of_experts(degrees: Mapping[str, int], world_size: int, wanted: int) -> str:
    """Describe a layout of all ranks in which about `wanted` of them share the experts; "" if none can."""
    inner = {CP: degrees[CP], TP: degrees[TP]}
    if world_size % math.prod(inner.values()):
        inner = {CP: 1, TP: 1}
    left = world_size // math.prod(inner.values())
    numbers_of_stages = _divisors(left)
    if inner[CP] == 1 < left:
        numbers_of_stages.pop()  # so that a stage has several ranks to share its experts
    stages = _nearest_of(numbers_of_stages, degrees.get(PP, 1))
    places = left // stages
    nearest = _nearest_of(_divisors(places)[1:] or [1], wanted)
    sharing = nearest if nearest > 1 else inner[CP]
    shared = {DP_REPLICATE: places // nearest, DP_SHARD: nearest, **inner, EP: sharing}
    return describe_degrees({PP: stages, **shared})


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _nearest_of(numbers: Sequence[int], wanted: int) -> int:
    return min(numbers, key=lambda one: abs(one - wanted))
