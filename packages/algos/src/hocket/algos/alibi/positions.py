"""Position embeddings of a model: found by name, zeroed and frozen, since ALiBi takes their place."""

from torch import nn

from hocket.algos.errors import IncompatibleError
from hocket.algos.surgery import check_memory

_NAMES = ("wpe", "position_embeddings", "position_embedding")


def neutralize_position_embeddings(model: nn.Module, max_sequence_length: int) -> list[str]:
    """Set a model's position embeddings to zero, freeze them, and widen them to a length.

    Args:
        model: Changed in place.
        max_sequence_length: The least number of rows; padding rows that RoBERTa keeps in front are added.

    Returns:
        The names of the embeddings.

    Raises:
        IncompatibleError: There is no position embedding; or one is no `nn.Embedding`, shares its weight with
            another module, or would not fit in memory.
    """
    embeddings = check_position_embeddings(model)
    for module in embeddings.values():
        _neutralize(module, max_sequence_length)
    _widen_buffers(model, max_sequence_length)
    return list(embeddings)


def find_position_embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are position embeddings by their names, which may be of any class."""
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in _NAMES}


def check_position_embeddings(model: nn.Module) -> dict[str, nn.Embedding]:
    """Return the position embeddings by name; raise as `neutralize_position_embeddings` does."""
    candidates = find_position_embeddings(model)
    if not candidates:
        raise IncompatibleError(
            f"`Alibi` found no position embeddings in {type(model).__name__}: expected a module named "
            f"{', '.join(f'`{name}`' for name in _NAMES)}. A model without them needs no surgery there; pass "
            "`position_embeddings=False`"
        )
    embeddings: dict[str, nn.Embedding] = {}
    for name, module in candidates.items():
        if not isinstance(module, nn.Embedding):
            raise IncompatibleError(
                f"`Alibi`: the position embedding `{name}` is a {type(module).__name__}, expected a "
                "`torch.nn.Embedding`, which can be set to zero"
            )
        sharing = [
            other
            for other, parameter in model.named_parameters(remove_duplicate=False)
            if parameter is module.weight and other != f"{name}.weight"
        ]
        if sharing:
            raise IncompatibleError(
                f"`Alibi`: the position embedding `{name}` shares its weight with `{sharing[0]}`, which "
                "would become zero as well. Untie them first"
            )
        embeddings[name] = module
    return embeddings


def _neutralize(module: nn.Embedding, length: int) -> None:
    extra = 0 if module.padding_idx is None else module.padding_idx + 1
    rows = max(module.num_embeddings, length + extra)
    num_bytes = rows * module.embedding_dim * module.weight.element_size()
    check_memory(num_bytes, module.weight.device, f"a position embedding of {rows} rows for `Alibi`")
    weight = module.weight.new_zeros(rows, module.embedding_dim)
    module.num_embeddings = rows
    module.weight = nn.Parameter(weight, requires_grad=False)


def _widen_buffers(model: nn.Module, length: int) -> None:
    """Widen the buffers of positions and token types that transformers' embeddings slice by length."""
    for module in model.modules():
        for name in ("position_ids", "token_type_ids"):
            buffer = getattr(module, name, None)
            if name in module._buffers and buffer is not None and buffer.shape[-1] < length:
                widened = buffer.new_zeros(1, length)
                if name == "position_ids":
                    start = int(buffer[0, 0])
                    widened = buffer.new_ones(1, length).cumsum(-1) - 1 + start
                module._buffers[name] = widened
