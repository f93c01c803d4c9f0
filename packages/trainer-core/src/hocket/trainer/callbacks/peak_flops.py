"""Peak rates of accelerators, to compute how much of them a run uses.

Dense rates (no structured sparsity) in 10¹² operations a second, from the vendors' data sheets.
"""

from __future__ import annotations

import torch

_HALF = ("amp_bf16", "amp_fp16", "bf16", "fp16")

# Matched in this order against the device's name in lower case: all words of the key must be in it.
_TERAFLOPS: dict[str, dict[str, float]] = {
    "gb200": {"half": 2500, "fp8": 5000, "tf32": 1250, "fp32": 80},
    "gb300": {"half": 2500, "fp8": 5000, "tf32": 1250, "fp32": 80},
    "b300": {"half": 2250, "fp8": 4500, "tf32": 1125, "fp32": 75},
    "b200": {"half": 2250, "fp8": 4500, "tf32": 1125, "fp32": 75},
    "gh200": {"half": 989, "fp8": 1979, "tf32": 495, "fp32": 67},
    "h200": {"half": 989, "fp8": 1979, "tf32": 495, "fp32": 67},
    "h100 nvl": {"half": 835, "fp8": 1671, "tf32": 418, "fp32": 60},
    "h100 pcie": {"half": 756, "fp8": 1513, "tf32": 378, "fp32": 51},
    "h100": {"half": 989, "fp8": 1979, "tf32": 495, "fp32": 67},
    "a100": {"half": 312, "tf32": 156, "fp32": 19.5},
    "a10g": {"half": 70, "tf32": 35, "fp32": 31.2},
    "a10": {"half": 125, "tf32": 62.5, "fp32": 31.2},
    "a40": {"half": 150, "tf32": 75, "fp32": 37.4},
    "l40s": {"half": 362, "fp8": 733, "tf32": 183, "fp32": 91.6},
    "l40": {"half": 181, "fp8": 362, "tf32": 90.5, "fp32": 90.5},
    "l4": {"half": 121, "fp8": 242, "tf32": 60, "fp32": 30.3},
    "v100s": {"half": 130, "fp32": 16.4},
    "v100": {"half": 125, "fp32": 15.7},
    "t4": {"half": 65, "fp32": 8.1},
    "rtx 5090": {"half": 210, "fp8": 419, "tf32": 105, "fp32": 105},
    "rtx 4090": {"half": 165, "fp8": 330, "tf32": 82.6, "fp32": 82.6},
    "rtx 3090": {"half": 71, "tf32": 35.6, "fp32": 35.6},
    "mi355x": {"half": 2500, "fp8": 5000, "fp32": 157},
    "mi350x": {"half": 2300, "fp8": 4600, "fp32": 144},
    "mi325x": {"half": 1307, "fp8": 2615, "tf32": 654, "fp32": 163},
    "mi300x": {"half": 1307, "fp8": 2615, "tf32": 654, "fp32": 163},
    "mi250x": {"half": 383, "fp32": 47.9},
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak operations a second of one device, or None where it is not known.

    Args:
        device: The device of this rank.
        precision: `"fp32"`, `"amp_bf16"`, `"amp_fp16"` or `"amp_fp8"`. With `fp32` the tensor cores count if
            torch is allowed to use TF32.
    """
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device), _column(precision))


def peak_flops_of(device_name: str, column: str) -> float | None:
    """Return the peak of a named device for `half`, `fp8`, `tf32` or `fp32`; None where it is not known."""
    name = device_name.lower().replace("-", " ")
    words = name.split()
    for key, rates in _TERAFLOPS.items():
        if all(any(word == part or word.startswith(f"{part}_") for word in words) for part in key.split()):
            rate = rates.get(column)
            return None if rate is None else rate * 1e12
    return None


def _column(precision: str) -> str:
    if precision in _HALF:
        return "half"
    if precision == "amp_fp8":
        return "fp8"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
