"""Composer's `Evaluator`, whose fields may be assigned."""

from __future__ import annotations

from typing import Any

from hocket import trainer


class Evaluator(trainer.Evaluator):
    """A data loader to evaluate on, as `hocket.trainer.Evaluator`, with fields that may be assigned.

    A trainer takes the fields as they are when it gets the evaluator.

    Raises:
        TrainerConfigError: If a field is invalid, when it is given or assigned.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a field, and check all of them."""
        before = getattr(self, name)
        object.__setattr__(self, name, value)
        try:
            self.__post_init__()
        except BaseException:
            object.__setattr__(self, name, before)
            raise


__all__ = ["Evaluator"]
