"""`TensorParallelConfig`: the degree of tensor parallelism, and the plan of the modules that it cuts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from hocket.dist.config.key_table import mapped, names_keys, refused, resolve_keys
from hocket.dist.errors import ConfigError

Style = str | ParallelStyle
Plan = Mapping[str, Style] | Callable[[str, nn.Module], "Style | None"]

STYLES = {
    "colwise": "cuts the output features; the input is whole",
    "rowwise": "cuts the input features, which arrive cut; the output is whole",
    "colwise_gather_output": "cuts the output features and gathers the output",
    "rowwise_split_input": "cuts the input features of a whole input; the output is whole",
    "packed_colwise": "cuts each of several matrices that are stored as one: `packed_colwise:3` for three, "
    "`packed_colwise` for two",
    "embedding_rowwise": "cuts the vocabulary of an embedding",
    "embedding_colwise": "cuts the features of an embedding, and gathers the output",
    "replicated_with_grad_allreduce": "keeps whole parameters that act on cut activations, such as a norm of "
    "each head, and adds up their gradients",
    "replicate": "keeps a module whole, as one that the plan does not name",
}
"""The styles of a plan, by the names that transformers gives them."""

_SYNONYMS = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_KEYS = {
    "tensor_parallel_degree": mapped("The same as `degree`."),
    "layer_plan": mapped("The same as `plan`."),
    "device_mesh": refused("the mesh is made of the degrees. Leave it out"),
}
_COMPOSER_NAMES = {"tensor_parallel_degree": "degree", "layer_plan": "plan"}


@names_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelConfig:
    """The settings of tensor parallelism.

    Raises:
        ConfigError: The degree is no number of ranks, or the plan has an unknown style.
    """

    degree: int = 1
    """Ranks that share each cut matrix; -1 uses all ranks that the other axes leave."""

    plan: Plan | None = None
    """The style of each module by its name, in which `*` stands for any part between dots; or a function of
    a module's name and the module that returns a style or None. None uses the model's own plan."""

    sequence_parallel: bool = False
    """Whether the ranks also share the activations between the cut layers of the blocks, by positions."""

    loss_parallel: bool = False
    """Whether the loss is computed of cut logits, of which each rank has its part of the vocabulary."""

    def __post_init__(self) -> None:
        for name in ("sequence_parallel", "loss_parallel"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"`parallelism_config['tp']['{name}']` is {getattr(self, name)!r}, expected True or False"
                )
        if isinstance(self.plan, Mapping):
            for name, style in self.plan.items():
                check_style(style, name)
        elif self.plan is not None and not callable(self.plan):
            raise ConfigError(
                f"`plan` is {self.plan!r}, expected a dict of styles by module names, or a function of a "
                "module's name and the module"
            )

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """Make a config from a dict; Composer's `tensor_parallel_degree` and `layer_plan` are synonyms.

        Raises:
            ConfigError: A key is unknown, given under both of its names, or cannot be honoured.
        """
        own_keys = {field.name for field in fields(cls)}
        keys = resolve_keys(config, _KEYS, own_keys | set(_COMPOSER_NAMES), "parallelism_config['tp']")
        for theirs, own in _COMPOSER_NAMES.items():
            if theirs in keys:
                if own in keys and keys[own] != keys[theirs]:
                    raise ConfigError(
                        f"`parallelism_config['tp']` has `{own}` {keys[own]!r} and `{theirs}` "
                        f"{keys[theirs]!r}, which are the same. Set one of them"
                    )
                keys[own] = keys.pop(theirs)
        return cls(**keys)


def check_style(style: object, name: str) -> None:
    """Refuse a value of a plan that is no style.

    Raises:
        ConfigError: It is none; the message lists the styles.
    """
    if isinstance(style, ParallelStyle):
        return
    known, _ = split_style(style) if isinstance(style, str) else ("", 1)
    if known not in STYLES:
        listed = ", ".join(f"'{one}'" for one in STYLES)
        raise ConfigError(
            f"the tensor-parallel plan has the style {style!r} for `{name}`, expected one of {listed}, or a "
            "`ParallelStyle` of torch. Give your own `plan` in `parallelism_config['tp']`"
        )


def split_style(style: str) -> tuple[str, int]:
    """Return the name of a style and the number of matrices that are stored as one.

    Example:
        >>> split_style("packed_colwise:3")
        ('packed_colwise', 3)
    """
    name, _, parts = style.partition(":")
    name = _SYNONYMS.get(name, name)
    if name == "packed_colwise":
        return (name, int(parts or 2)) if (parts or "2").isdecimal() and int(parts or 2) > 1 else ("", 1)
    return (name, 1) if not parts else ("", 1)
