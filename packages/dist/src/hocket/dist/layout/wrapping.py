"""Choice of the modules that each become a group of parameters, gathered and freed together.

The user's settings come first: `module._fsdp_wrap = True` or `False`, then `fsdp_wrap_fn(module)` on the
model or on one of its children, as in Composer. Without either, repeated blocks are found by their class.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn

from hocket.dist.config.key_table import unknown_key
from hocket.dist.errors import WrapError
from hocket.dist.layout.checks.model_checks import group_of

WrapFn = Callable[[nn.Module], "bool | Mapping[str, Any]"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WRAP_OPTIONS = ("reshard_after_forward", "mixed_precision")


def choose_wraps(model: nn.Module, *, ignored: Collection[nn.Parameter] = ()) -> dict[str, dict[str, Any]]:
    """Choose the modules to wrap, except the root; children come before their parents.

    Args:
        model: Not sharded yet.
        ignored: Parameters that are not sharded.

    Returns:
        The options of each module by name (`reshard_after_forward`, `mixed_precision`), often none. Empty if
        no policy was given and the model has no repeated blocks: the root is then the only group.

    Raises:
        WrapError: A policy was given and matches nothing, matches a container without a forward of its own,
            or separates tied parameters.
    """
    left_out = {id(parameter) for parameter in ignored}
    marks: dict[str, Any] = {
        name: module._fsdp_wrap for name, module in _inner_modules(model) if hasattr(module, "_fsdp_wrap")
    }
    where, wrap_fn = _find_wrap_fn(model)
    wraps: dict[str, dict[str, Any]] = {}
    blocks = set() if wrap_fn or any(marks.values()) else repeated_blocks(model)
    for name, module in _inner_modules(model):
        answer = marks[name] if name in marks else wrap_fn(module) if wrap_fn else name in blocks
        if answer is False or answer is None or all(id(one) in left_out for one in module.parameters()):
            continue
        wraps[name] = _options(answer, name)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise WrapError(
                f"the wrap policy chose `{name}`, a {type(module).__name__}, which has no forward of its "
                "own. Choose the modules inside it"
            )
    if not wraps and (wrap_fn or any(marks.values())):
        given = f"`{where}.fsdp_wrap_fn`" if wrap_fn else "`_fsdp_wrap`"
        raise WrapError(
            f"{given} matches no module with parameters, so the whole model would be gathered at once. Let "
            "it match the repeated blocks, or take it away to have them found; `auto_wrap=False` makes one "
            "group"
        )
    _check_tied(model, set(wraps))
    # Deeper first: a group takes the parameters below it that no earlier group has.
    return dict(sorted(wraps.items(), key=lambda item: -item[0].count(".")))


def repeated_blocks(model: nn.Module) -> set[str]:
    """Return the names of the children of lists and sequences whose class occurs there at least twice.

    Only the outermost count: a block's own lists (experts, convolutions) stay inside it.
    """
    block_names: set[str] = set()

    def descend(module: nn.Module, prefix: str) -> None:
        inside: set[str] = set()
        if isinstance(module, _CONTAINERS):
            kinds = Counter(
                type(child) for child in module.children() if any(True for _ in child.parameters())
            )
            inside = {
                name
                for name, child in module.named_children()
                if kinds[type(child)] > 1 and not isinstance(child, nn.ModuleList | nn.ModuleDict)
            }
        for name, child in module.named_children():
            if name in inside:
                block_names.add(prefix + name)
            else:
                descend(child, f"{prefix}{name}.")

    descend(model, "")
    return block_names


def _inner_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if name)


def _find_wrap_fn(model: nn.Module) -> tuple[str, WrapFn | None]:
    """Return the name of the module that has a wrap function, and the function."""
    for name, owner in (
        ("model", model),
        *((f"model.{name}", child) for name, child in model.named_children()),
    ):
        wrap_fn = getattr(owner, "fsdp_wrap_fn", None)
        if wrap_fn is not None:
            return name, wrap_fn
    return "", None


def _options(answer: "bool | Mapping[str, Any]", name: str) -> dict[str, Any]:
    if not isinstance(answer, Mapping):
        if answer is not True:
            raise WrapError(
                f"the wrap policy answered {answer!r} for `{name}`, expected True, False or a dict of options"
            )
        return {}
    for key in answer:
        if key not in _WRAP_OPTIONS:
            raise WrapError(unknown_key(key, _WRAP_OPTIONS, f"the wrap policy's answer for {name}"))
    return dict(answer)


def _check_tied(model: nn.Module, wraps: set[str]) -> None:
    """Refuse to put one parameter into two groups: each would gather and reduce it by itself."""
    owners: dict[int, dict[str, str]] = defaultdict(dict)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)][group_of(name, wraps)] = name
    for groups in owners.values():
        if len(groups) > 1:
            (group, first), (other_group, second) = list(groups.items())[:2]
            raise WrapError(
                f"`{first}` and `{second}` are one tied parameter, but the wrap policy puts them into "
                f"different groups (`{group or 'the root'}` and `{other_group or 'the root'}`). Set "
                "`_fsdp_wrap = False` on the wrapped one"
            )
