"""Floating-point dtypes, and casts to them as torch makes them."""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FLOATS", "cast_floats", "float_dtype"]

_DTYPE_NAMES = {
    "FLOAT64": "F64", "DOUBLE": "F64", "FP64": "F64", "FLOAT32": "F32", "FLOAT": "F32", "FP32": "F32",
    "FLOAT16": "F16", "HALF": "F16", "FP16": "F16", "BFLOAT16": "BF16", "FLOAT8_E4M3FN": "F8_E4M3",
    "FLOAT8_E5M2": "F8_E5M2", "FLOAT8_E4M3FNUZ": "F8_E4M3FNUZ", "FLOAT8_E5M2FNUZ": "F8_E5M2FNUZ",
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""The dtypes that floating-point tensors can be cast to."""

_BLOCK_ITEMS = 1 << 18
_SATURATING = "float8_e4m3fn"


def float_dtype(name: str) -> str:
    """Return the safetensors name of a floating-point dtype, given that or torch's name in any case.

    Raises:
        ValueError: There is no such dtype.
    """
    upper = name.upper().removeprefix("TORCH.")
    dtype = _DTYPE_NAMES.get(upper, upper)
    if dtype not in FLOATS:
        raise ValueError(
            f"`dtype` is {name!r}; expected one of {', '.join(FLOATS)}, or torch's name, such as `bfloat16`"
        )
    return dtype


def cast_floats(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> int:
    """Cast `source` into `target`; both are contiguous and have one shape.

    As in torch, an item beyond the range of `float8_e4m3fn`, which has no infinity, becomes its largest
    number. In other dtypes it becomes infinity, or NaN where there is none.

    Returns:
        The number of items beyond the target's range.
    """
    if source.dtype == target.dtype or _largest(source.dtype) <= _largest(target.dtype):
        np.copyto(target, source, casting="unsafe")
        return 0
    num_beyond = 0
    flat_source, flat_target = source.reshape(-1), target.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat_source.size, _BLOCK_ITEMS):
            items, result = (flat[start : start + _BLOCK_ITEMS] for flat in (flat_source, flat_target))
            if target.dtype.name == _SATURATING:
                wide = items.astype(np.promote_types(np.float32, items.dtype))
                limit = _largest(target.dtype)
                num_beyond += int(np.count_nonzero(np.abs(wide) > limit))
                np.copyto(result, np.clip(wide, -limit, limit), casting="unsafe")
            else:
                np.copyto(result, items, casting="unsafe")
                lost = np.isnan(result) | (np.isfinite(items) & ~np.isfinite(result))
                num_beyond += int(np.count_nonzero(lost & ~np.isnan(items)))
    return num_beyond


def _largest(dtype: np.dtype[Any]) -> float:
    import ml_dtypes  # imported late: it accounts for a tenth of the command's start-up time

    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
