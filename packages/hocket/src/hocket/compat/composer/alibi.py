"""ALiBi for models of a script's own, whose policies take care of position embeddings, as in Composer."""

from __future__ import annotations

from typing import Any

from torch import nn

import hocket.algos as _algos
from hocket.algos.alibi import policy_registry
from hocket.algos.alibi.positions import find_position_embeddings
from hocket.algos.surgery import SurgeryReport
from hocket.trainer import State


class Alibi(_algos.Alibi):
    """`hocket.algos.Alibi`, which leaves position embeddings to the policies that a script registers.

    Position embeddings with a usual name become zero nevertheless. A model that has none of them and no
    module of a class that the script registered is refused, as by `hocket.algos.Alibi`.
    """

    def operate(self, state: State) -> SurgeryReport:
        """Change the attention of `state.model`."""
        self.position_embeddings = _must_have_position_embeddings(state.model)
        return super().operate(state)


def apply_alibi(model: nn.Module, max_sequence_length: int, optimizers: Any = None) -> SurgeryReport:
    """Give a model ALiBi, in place, as `Alibi` does."""
    must_have = _must_have_position_embeddings(model)
    return _algos.apply_alibi(model, max_sequence_length, optimizers, position_embeddings=must_have)


def _must_have_position_embeddings(model: nn.Module) -> bool:
    if find_position_embeddings(model):
        return True
    return not any(type(module) in policy_registry for module in model.modules())


__all__ = ["Alibi", "apply_alibi"]
