"""The registry of attention classes that ALiBi can change."""

from collections.abc import Callable
from typing import Any

from torch import nn

from hocket.algos.errors import IncompatibleError

AlibiPolicy = Callable[[Any, int, int], nn.Module]
"""`policy(module, index, max_sequence_length)` changes an attention module in place and returns it, or
returns the module to put in its place."""


class PolicyRegistry:
    """Maps attention classes to the functions that give them ALiBi.

    Classes of transformers are found by name, so that transformers is not imported here.

    Example:
        >>> @policy_registry.register(MyAttention)
        ... def give_alibi(module, index, max_sequence_length):
        ...     module.alibi = AlibiAttention(module.num_heads, max_sequence_length)
        ...     return module
    """

    def __init__(self) -> None:
        self._by_class: dict[type[nn.Module], AlibiPolicy] = {}
        self._by_name: dict[str, AlibiPolicy] = {}

    def register(
        self, *classes: type[nn.Module] | str, causal: bool = False
    ) -> Callable[[AlibiPolicy], AlibiPolicy]:
        """Return a decorator that registers a policy for attention classes.

        Args:
            classes: The classes, or their names (`"GPT2Attention"`).
            causal: Whether the policy is for causal attention alone: a module whose `is_causal` is False is
                refused.

        Raises:
            TypeError: An argument is neither a class of modules nor a name.
        """
        for kind in classes:
            if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise TypeError(f"{kind!r} is no class of `torch.nn.Module` and no class name")

        def keep(policy: AlibiPolicy) -> AlibiPolicy:
            stored_policy = _for_causal(policy) if causal else policy
            for kind in classes:
                if isinstance(kind, str):
                    self._by_name[kind] = stored_policy
                else:
                    self._by_class[kind] = stored_policy
            return policy

        return keep

    def find(self, kind: type[nn.Module]) -> AlibiPolicy | None:
        """Return the policy for a class: that of the class itself or of the nearest base."""
        for base in kind.__mro__:
            if base in self._by_class:
                return self._by_class[base]
            if base.__name__ in self._by_name:
                return self._by_name[base.__name__]
        return None

    def __contains__(self, kind: type[nn.Module]) -> bool:
        """Return whether a class or a base of it was registered, not by its name alone."""
        return any(base in self._by_class for base in kind.__mro__)

    @property
    def names(self) -> list[str]:
        """The names of all registered classes, sorted."""
        return sorted({*self._by_name, *(kind.__name__ for kind in self._by_class)})


def _for_causal(policy: AlibiPolicy) -> AlibiPolicy:
    def checked(module: Any, index: int, max_sequence_length: int) -> nn.Module:
        if getattr(module, "is_causal", True) is False:
            raise IncompatibleError(
                f"`Alibi`: this {type(module).__name__} is not causal (`is_causal` is False), and its policy "
                "is for causal attention. Register a policy of your own for it with "
                "`policy_registry.register(MyAttention)`"
            )
        return policy(module, index, max_sequence_length)

    return checked


policy_registry = PolicyRegistry()
"""The registry that `apply_alibi` uses."""
