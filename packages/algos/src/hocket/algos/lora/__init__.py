"""LoRA and QLoRA: low-rank adapters beside frozen, or 4-bit, linear layers."""

from hocket.algos.lora.lora import LoRA, apply_lora, merge_lora
from hocket.algos.lora.qlora import QLoRA, apply_qlora

__all__ = ["LoRA", "QLoRA", "apply_lora", "apply_qlora", "merge_lora"]
