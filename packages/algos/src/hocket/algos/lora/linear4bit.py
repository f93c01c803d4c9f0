"""A linear layer whose frozen weight is kept in 4 bits."""

from typing import Any, Self

import torch
from torch import nn

from hocket.algos.libraries import import_library

_BLOCK = 64


class Linear4Bit(nn.Linear):
    """A linear layer with a frozen weight in 4 bits, in blocks of 64, by the kernels of `bitsandbytes`.

    The weight and its scales are buffers, so that checkpoints, ranks and devices treat them like any other
    buffer: under FSDP each rank holds all of them.

    Args:
        linear: The layer whose weight is quantized.
        quant_type: `"nf4"` or `"fp4"`.
        double_quant: Whether the scales are quantized too, to 8 bits.
    """

    def __init__(self, linear: nn.Linear, *, quant_type: str = "nf4", double_quant: bool = True) -> None:
        nn.Module.__init__(self)
        kernels: Any = import_library("bitsandbytes.functional", needed_by="QLoRA")
        self._matmul = import_library("bitsandbytes", needed_by="QLoRA").matmul_4bit
        self._dequantize, self._quant_state = kernels.dequantize_4bit, kernels.QuantState
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.quant_type, self.dtype = quant_type, linear.weight.dtype
        self.bias = linear.bias
        weight, state = kernels.quantize_4bit(
            linear.weight.detach(), blocksize=_BLOCK, quant_type=quant_type, compress_statistics=double_quant
        )
        self.register_buffer("weight", weight)
        self.register_buffer("scales", state.absmax)
        self.register_buffer("levels", state.code)
        nested = state.state2
        self.nested_block = None if nested is None else int(nested.blocksize)
        self.register_buffer("nested_scales", None if nested is None else nested.absmax)
        self.register_buffer("nested_levels", None if nested is None else nested.code)
        self.register_buffer("offset", None if nested is None else state.offset)

    def _state(self) -> Any:
        nested = None
        if self.nested_block is not None:
            nested = self._quant_state(
                absmax=self.nested_scales,
                code=self.nested_levels,
                blocksize=self.nested_block,
                dtype=torch.float32,
            )
        return self._quant_state(
            absmax=self.scales,
            shape=torch.Size((self.out_features, self.in_features)),
            code=self.levels,
            blocksize=_BLOCK,
            quant_type=self.quant_type,
            dtype=self.dtype,
            offset=self.offset,
            state2=nested,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's
        """Multiply `(..., in_features)` by the weight; gradients reach the input, not the weight."""
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))  # noqa: A001
        bias = None if self.bias is None else self.bias.to(input.dtype)
        out: torch.Tensor = self._matmul(input, self.weight, bias=bias, quant_state=self._state())
        return out

    @torch.no_grad()
    def dequantized(self) -> nn.Linear:
        """Return a plain linear layer with the dequantized weight of this one."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(self._dequantize(self.weight, self._state()).to(self.dtype))
        plain.bias = self.bias
        return plain

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # A cast of the whole model, such as `model.bfloat16()`, must not round the scales.
        scales = {name: value for name, value in self._buffers.items() if value is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in scales.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != value.dtype:
                self._buffers[name] = value.to(moved.device)
        return self
