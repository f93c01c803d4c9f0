"""The table of dtypes, by safetensors name, and casts between floating-point ones as torch makes them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["DTYPES", "FLOATS", "ITEM_BYTES", "DtypeNames", "cast_floats", "float_dtype", "numpy_dtype"]


class DtypeNames(NamedTuple):
    """A dtype's item size, and what NumPy and torch call it."""

    item_bytes: int
    numpy: str
    """The name in NumPy, or in ml_dtypes if NumPy lacks the dtype."""
    torch: str
    storage: str | None
    """The name of torch's typed storage, if there is one."""


DTYPES: Mapping[str, DtypeNames] = {
    "BOOL": DtypeNames(1, "bool", "bool", "BoolStorage"),
    "U8": DtypeNames(1, "u1", "uint8", "ByteStorage"),
    "I8": DtypeNames(1, "i1", "int8", "CharStorage"),
    "F8_E4M3": DtypeNames(1, "float8_e4m3fn", "float8_e4m3fn", None),
    "F8_E5M2": DtypeNames(1, "float8_e5m2", "float8_e5m2", None),
    "F8_E4M3FNUZ": DtypeNames(1, "float8_e4m3fnuz", "float8_e4m3fnuz", None),
    "F8_E5M2FNUZ": DtypeNames(1, "float8_e5m2fnuz", "float8_e5m2fnuz", None),
    "F8_E8M0": DtypeNames(1, "float8_e8m0fnu", "float8_e8m0fnu", None),
    "I16": DtypeNames(2, "<i2", "int16", "ShortStorage"),
    "U16": DtypeNames(2, "<u2", "uint16", None),
    "F16": DtypeNames(2, "<f2", "float16", "HalfStorage"),
    "BF16": DtypeNames(2, "bfloat16", "bfloat16", "BFloat16Storage"),
    "I32": DtypeNames(4, "<i4", "int32", "IntStorage"),
    "U32": DtypeNames(4, "<u4", "uint32", None),
    "F32": DtypeNames(4, "<f4", "float32", "FloatStorage"),
    "I64": DtypeNames(8, "<i8", "int64", "LongStorage"),
    "U64": DtypeNames(8, "<u8", "uint64", None),
    "F64": DtypeNames(8, "<f8", "float64", "DoubleStorage"),
    "C64": DtypeNames(8, "<c8", "complex64", "ComplexFloatStorage"),
}
"""The dtypes that a checkpoint may hold."""

ITEM_BYTES: Mapping[str, int] = {name: names.item_bytes for name, names in DTYPES.items()}
"""Item size in bytes by safetensors dtype name."""

_IN_ML_DTYPES = frozenset(
    names.numpy for names in DTYPES.values() if names.numpy.startswith(("float8", "bf"))
)

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""The dtypes that floating-point tensors can be cast to."""

_FLOAT_NAMES = {DTYPES[name].torch.upper(): name for name in FLOATS} | {
    "DOUBLE": "F64", "FP64": "F64", "FLOAT": "F32", "FP32": "F32", "HALF": "F16", "FP16": "F16",
}  # fmt: skip

_BLOCK_ITEMS = 1 << 18
_SATURATING = "float8_e4m3fn"


def float_dtype(name: str) -> str:
    """Return the safetensors name of a floating-point dtype, given that or torch's name in any case.

    Raises:
        ValueError: There is no such dtype.
    """
    upper = name.upper().removeprefix("TORCH.")
    dtype = _FLOAT_NAMES.get(upper, upper)
    if dtype not in FLOATS:
        raise ValueError(
            f"`dtype` is {name!r}; expected one of {', '.join(FLOATS)}, or torch's name, such as `bfloat16`"
        )
    return dtype


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype for a safetensors name; bf16 and fp8 come from ml_dtypes."""
    numpy_name = DTYPES[name].numpy
    if numpy_name not in _IN_ML_DTYPES:
        return np.dtype(numpy_name)
    import ml_dtypes  # imported late: it accounts for a tenth of the command's start-up time

    dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, numpy_name))
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
    num_beyond, largest = 0, _largest(target.dtype)
    flat_source, flat_target = source.reshape(-1), target.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat_source.size, _BLOCK_ITEMS):
            items, result = (flat[start : start + _BLOCK_ITEMS] for flat in (flat_source, flat_target))
            if target.dtype.name == _SATURATING:
                wide = items.astype(np.promote_types(np.float32, items.dtype))
                num_beyond += int(np.count_nonzero(np.abs(wide) > largest))
                np.copyto(result, np.clip(wide, -largest, largest), casting="unsafe")
            else:
                np.copyto(result, items, casting="unsafe")
                # NumPy looks at ml_dtypes' items one by one, which takes four times as long as their cast.
                if -largest <= items.min() and items.max() <= largest:  # both are NaN if an item is
                    continue
                lost = np.isnan(result) | (np.isfinite(items) & ~np.isfinite(result))
                num_beyond += int(np.count_nonzero(lost & ~np.isnan(items)))
    return num_beyond


def _largest(dtype: np.dtype[Any]) -> float:
    import ml_dtypes  # imported late: it accounts for a tenth of the command's start-up time

    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
