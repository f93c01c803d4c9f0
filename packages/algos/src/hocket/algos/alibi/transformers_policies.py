"""ALiBi for the attention of transformers' GPT-2, BERT and RoBERTa."""

from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from hocket.algos.alibi.attention import AlibiAttention
from hocket.algos.alibi.registry import policy_registry
from hocket.algos.errors import IncompatibleError, MissingLibraryError

_NAMES = {"sdpa": "hocket_alibi", "flex": "hocket_alibi_flex"}


@policy_registry.register("GPT2Attention", causal=True)
@policy_registry.register("BertSelfAttention", "RobertaSelfAttention")
def give_alibi(module: Any, index: int, max_sequence_length: int) -> nn.Module:  # noqa: ARG001
    """Give an attention module its slopes, and have its model call the attention with the bias.

    Raises:
        IncompatibleError: The module is cross-attention, lacks the attributes of transformers' attention, or
            has heads that do not divide its width.
    """
    where = type(module).__name__
    if getattr(module, "is_cross_attention", False):
        raise IncompatibleError(
            f"`Alibi`: {where} is cross-attention, where the distance of positions means nothing; encoder-"
            "decoder models are not supported"
        )
    num_heads = getattr(module, "num_attention_heads", getattr(module, "num_heads", None))
    config = getattr(module, "config", None)
    if num_heads is None or config is None:
        raise IncompatibleError(
            f"`Alibi` needs `config` and `num_heads` or `num_attention_heads` on {where}, as transformers 5 "
            "has them. Register a policy for the class: `policy_registry.register(MyAttention)`"
        )
    width = getattr(module, "all_head_size", getattr(module, "embed_dim", config.hidden_size))
    if num_heads < 1 or width % num_heads:
        raise IncompatibleError(
            f"`Alibi`: {where} has {num_heads} heads and a width of {width}, expected a width that the heads "
            "divide"
        )
    _register_attention()
    module.alibi = AlibiAttention(num_heads, max_sequence_length)
    config._attn_implementation = _NAMES["sdpa"]
    return module  # type: ignore[no-any-return]


def use_kernel(model: nn.Module, kernel: str) -> None:
    """Make transformers build the masks that a kernel takes, for every model that has ALiBi."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) in _NAMES.values():
            config._attn_implementation = _NAMES[kernel]  # type: ignore[union-attr]


def _register_attention() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask
    except ImportError as error:
        raise MissingLibraryError(
            "`Alibi` needs transformers 5 or newer for this model: `pip install 'transformers>=5'`"
        ) from error
    for name in _NAMES.values():
        AttentionInterface.register(name, _attend)
    # Masks as additive floats, to which the bias is added, and as block masks.
    AttentionMaskInterface.register(_NAMES["sdpa"], eager_mask)
    AttentionMaskInterface.register(_NAMES["flex"], _block_mask)


def _block_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    device: Any = "cpu",
    **_: Any,
) -> BlockMask:
    """Return the mask for flex attention; transformers' own is compiled anew for each batch of padding."""
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask

    mask_of = mask_function or causal_mask_function
    real = None if attention_mask is None else prepare_padding_mask(attention_mask, kv_length, kv_offset)

    def see(batch: Any, head: Any, row: Any, column: Any) -> Any:
        is_visible = mask_of(batch, head, row + q_offset, column + kv_offset)
        return is_visible if real is None else is_visible & real[batch, column + kv_offset].bool()

    return create_block_mask(see, batch_size, None, q_length, kv_length, device=str(device))


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with ALiBi, `(B, H, L, D)` to `(B, L, H, D)`."""
    if isinstance(attention_mask, torch.Tensor):
        attention_mask = attention_mask[..., : key.shape[2]]
    is_causal = attention_mask is None and getattr(module, "is_causal", False)
    out = module.alibi(query, key, value, attention_mask, dropout, is_causal, scaling)
    return out.transpose(1, 2), None
