"""The names of parameters and buffers in the unwrapped model."""

from __future__ import annotations

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return a parameter or buffer name without the parts added by compiling and activation checkpointing."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
