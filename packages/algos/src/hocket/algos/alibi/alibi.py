"""ALiBi: attention biases that fall linearly with distance, in place of position embeddings."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hocket.algos.alibi import transformers_policies
from hocket.algos.alibi.attention import KERNELS, AlibiAttention
from hocket.algos.alibi.positions import check_position_embeddings, neutralize_position_embeddings
from hocket.algos.alibi.registry import policy_registry
from hocket.algos.checks import check_choice, check_count
from hocket.algos.errors import AlgorithmConfigError, IncompatibleError, SurgeryError
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, check_memory, replace_module_classes
from hocket.algos.surgery.optimizers import Optimizers, named_parameters, repair_optimizers
from hocket.algos.traits import Trait
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class Alibi(SurgeryAlgorithm):
    """Gives a transformer ALiBi at INIT, and trains on shorter sequences.

    With a scaling of 1/4, each sequence of a batch is cut into 4 shorter ones, so that a batch has as many
    tokens as before; the model extrapolates to `max_sequence_length` in evaluation.

    Args:
        max_sequence_length: The longest sequence that the model will see, in tokens.
        train_sequence_length_scaling: The share of the sequence length to train with, above 0 to 1.
        position_embeddings: Whether to look for position embeddings; pass False for a model without them.
        kernel: `"sdpa"` or `"flex"`, as for `AlibiAttention`.
        input_key: The entry of a batch that has the tokens, `(B, L)`.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: A setting is out of its range.

    Example:
        >>> Alibi(max_sequence_length=1024, train_sequence_length_scaling=0.25)
        Alibi(max_sequence_length=1024, train_sequence_length_scaling=0.25)
    """

    events: ClassVar[frozenset[Event] | None] = frozenset(
        {Event.INIT, Event.AFTER_LOAD, Event.EPOCH_START, Event.EVAL_BEFORE_ALL, Event.AFTER_DATALOADER}
    )

    def __init__(
        self,
        max_sequence_length: int,
        train_sequence_length_scaling: float = 0.25,
        *,
        position_embeddings: bool = True,
        kernel: str = "sdpa",
        input_key: str = "input_ids",
        reapply: bool = False,
    ) -> None:
        super().__init__(reapply=reapply)
        check_choice("kernel", kernel, KERNELS)
        check_count("max_sequence_length", max_sequence_length)
        if not 0 < train_sequence_length_scaling <= 1:
            raise AlgorithmConfigError(
                f"`train_sequence_length_scaling` is {train_sequence_length_scaling!r}, expected above 0 and "
                "at most 1"
            )
        self.max_sequence_length = max_sequence_length
        self.train_sequence_length_scaling = train_sequence_length_scaling
        if train_sequence_length_scaling < 1:
            self.traits = type(self).traits | {Trait.CUTS_SEQUENCES}  # type: ignore[misc]
        self.position_embeddings = position_embeddings
        self.kernel = kernel
        self.input_key = input_key
        self._classes: tuple[type[nn.Module], ...] = ()

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """The attention classes that were found in the model."""
        return self._classes

    def operate(self, state: "State") -> SurgeryReport:
        """Change the attention of `state.model`."""
        self._classes = tuple(_classes(state.model))
        return apply_alibi(
            state.model,
            self.max_sequence_length,
            state.optimizers,
            position_embeddings=self.position_embeddings,
            kernel=self.kernel,
        )

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Operate at INIT; cut the sequences of each training batch."""
        if event is not Event.AFTER_DATALOADER:
            super().apply(event, state, logger)
        elif self.train_sequence_length_scaling < 1:
            state.batch = shorten_sequences(
                state.batch,
                self.train_sequence_length_scaling,
                self.max_sequence_length,
                input_key=self.input_key,
            )

    def __repr__(self) -> str:
        return (
            f"Alibi(max_sequence_length={self.max_sequence_length}, "
            f"train_sequence_length_scaling={self.train_sequence_length_scaling})"
        )


def apply_alibi(
    model: nn.Module,
    max_sequence_length: int,
    optimizers: Optimizers | None = None,
    *,
    position_embeddings: bool = True,
    kernel: str = "sdpa",
) -> SurgeryReport:
    """Give a model ALiBi, in place; needs no trainer.

    Supports the attention of transformers' GPT-2, BERT and RoBERTa, and every class that is registered with
    `policy_registry`. Position embeddings are set to zero and frozen.

    Args:
        model: Changed in place.
        max_sequence_length: The longest sequence that the model will see, in tokens.
        optimizers: Built over the model's parameters; the position embeddings are removed from them.
        position_embeddings: Whether to look for position embeddings; pass False for a model without them.
        kernel: `"sdpa"` or `"flex"`, as for `AlibiAttention`, which a policy of your own must use.

    Returns:
        The report of the surgery.

    Raises:
        AlgorithmConfigError: A setting is out of its range.
        SurgeryError: The model has no attention of a registered class.
        IncompatibleError: A position embedding is absent, shared, or no `nn.Embedding`; an attention lacks
            the expected attributes or is not causal where its policy needs it; the model is an encoder-
            decoder; the bias would not fit in memory.

    Source: Press et al., Train Short, Test Long: Attention with Linear Biases, 2021.
    """
    check_count("max_sequence_length", max_sequence_length)
    check_choice("kernel", kernel, KERNELS)
    _refuse_encoder_decoder(model)
    classes = _classes(model)
    if not classes:
        raise SurgeryError(
            f"Alibi found no attention that it knows in {type(model).__name__}; it knows "
            f"{', '.join(policy_registry.names)}. Register a class of your own with "
            "`hocket.algos.alibi.policy_registry.register(MyAttention)`"
        )
    old_parameters = named_parameters(model)

    def give(module: nn.Module, index: int) -> nn.Module:
        policy = policy_registry.find(type(module))
        assert policy is not None
        return policy(module, index, max_sequence_length)

    if position_embeddings:
        check_position_embeddings(model)
    report = replace_module_classes(model, dict.fromkeys(classes, give), if_none="error", title="Alibi")
    _use_kernel(model, kernel, max_sequence_length)
    if position_embeddings:
        neutralize_position_embeddings(model, max_sequence_length)
    report.optimizer_changes = repair_optimizers(optimizers, old_parameters, named_parameters(model))
    return report


def shorten_sequences(
    batch: Any, scaling: float, max_sequence_length: int, *, input_key: str = "input_ids"
) -> Any:
    """Cut each sequence of a batch into `1 / scaling` shorter ones, as rows of their own.

    Args:
        batch: A mapping with tensors `(B, L)`, such as `input_ids`, or `(B, L, ...)`; others stay.
        scaling: The share of `L` that a shorter sequence has.
        max_sequence_length: The longest `L` that is allowed.
        input_key: The entry that has the tokens.

    Returns:
        A mapping with tensors `(B * n, L // n)`, `n` being `1 / scaling` rounded down; the rest of a sequence
        that does not fill a shorter one is dropped.

    Raises:
        IncompatibleError: The batch is no mapping with `input_key`, or a sequence is too long.
    """
    ids = batch.get(input_key) if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.ndim < 2:
        entries = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise IncompatibleError(
            f"`Alibi` shortens batches by their `{input_key}` of shape (B, L), and this batch has {entries}. "
            "Give batches as mappings, name the entry with `input_key`, or pass "
            "`train_sequence_length_scaling=1`"
        )
    rows, length = ids.shape[:2]
    if length > max_sequence_length:
        raise IncompatibleError(
            f"`Alibi`: a sequence has {length} tokens, and `max_sequence_length` is {max_sequence_length}. "
            "Raise it, or cut the sequences"
        )
    num_pieces = int(1 / scaling)
    piece_length = length // num_pieces
    if piece_length < 1:
        warnings.warn(f"`Alibi` cannot cut sequences of {length} into {num_pieces} pieces", stacklevel=2)
        return batch
    return {
        name: value[:, : piece_length * num_pieces].reshape(rows * num_pieces, piece_length, *value.shape[2:])
        if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[:2] == (rows, length)
        else value
        for name, value in batch.items()
    }


def _refuse_encoder_decoder(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            raise IncompatibleError(
                f"`Alibi`: {f'`{name}`' if name else 'the model'}, a {type(module).__name__}, is an encoder-"
                "decoder, whose cross-attention relates two sequences that share no positions. Use it with "
                "models of one sequence"
            )


def _use_kernel(model: nn.Module, kernel: str, max_sequence_length: int) -> None:
    """Set the kernel of all attention with ALiBi, after a check of the memory that it takes."""
    attentions = [module for module in model.modules() if isinstance(module, AlibiAttention)]
    if kernel == "flex" and not attentions:
        raise IncompatibleError(
            "`Alibi`: `kernel='flex'` needs a policy that gives the attention an `AlibiAttention`, and the "
            "one that is registered for this model does not"
        )
    for module in attentions:
        module.kernel = kernel
        if kernel == "sdpa":
            check_memory(
                module.num_heads * max_sequence_length**2 * torch.finfo(torch.float32).bits // 8,
                next((parameter.device for parameter in model.parameters()), torch.device("cpu")),
                f"the bias of `Alibi` for {module.num_heads} heads and {max_sequence_length} tokens (it "
                "takes none with `kernel='flex'`)",
            )
    transformers_policies.use_kernel(model, kernel)


def _classes(model: nn.Module) -> list[type[nn.Module]]:
    kinds = dict.fromkeys(type(module) for module in model.modules())
    return [kind for kind in kinds if policy_registry.find(kind) is not None]
