"""ALiBi: attention with linear biases in place of position embeddings."""

from hocket.algos.alibi.alibi import Alibi, apply_alibi
from hocket.algos.alibi.attention import AlibiAttention
from hocket.algos.alibi.bias import alibi_bias, alibi_slopes
from hocket.algos.alibi.registry import policy_registry

__all__ = ["Alibi", "AlibiAttention", "alibi_bias", "alibi_slopes", "apply_alibi", "policy_registry"]
