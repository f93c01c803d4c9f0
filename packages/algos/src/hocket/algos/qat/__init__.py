"""Quantization-aware training: the rounding of a quantized model while it trains."""

from hocket.algos.qat.qat import QAT, apply_qat, convert_qat

__all__ = ["QAT", "apply_qat", "convert_qat"]
