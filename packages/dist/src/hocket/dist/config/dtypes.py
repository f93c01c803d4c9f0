"""Parsing of dtype names such as "bf16", "torch.float32" and "amp_fp16"."""

import torch

from hocket.dist.errors import ConfigError

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}


def parse_dtype(name: str, value: object) -> torch.dtype | None:
    """Return the floating-point dtype that a setting names, or None for None.

    Args:
        name: The setting's name, for the error message.
        value: A `torch.dtype`, None, or a name in any letter case, with or without `torch.` or `amp_`.

    Raises:
        ConfigError: The value names no dtype, or one that is not floating-point.
    """
    if value is None or isinstance(value, torch.dtype):
        dtype = value
    else:
        text = str(value).lower().removeprefix("torch.").removeprefix("amp_")
        if not isinstance(value, str) or text not in _DTYPES:
            raise ConfigError(
                f"`{name}` is {value!r}, expected a torch.dtype, None, or one of "
                f"{', '.join(map(repr, _DTYPES))}"
            )
        dtype = _DTYPES[text]
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"`{name}` is {dtype}, expected a floating-point dtype")
    return dtype


def parse_precision(precision: object) -> torch.dtype | None:
    """Return the low-precision dtype of a trainer's precision, None for full precision.

    Args:
        precision: A name such as "amp_bf16", "amp_fp16", "fp32", "amp_fp8", an enum member with such a value,
            or None.

    Raises:
        ConfigError: The name is not a precision.
    """
    name = getattr(precision, "value", precision)
    if name == "amp_fp8":
        name = "bf16"  # float8 layers compute the rest in bfloat16
    dtype = parse_dtype("precision", name)
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")
