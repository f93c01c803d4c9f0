"""Merging of checkpoints into one: means, interpolations and task arithmetic, in bounded memory."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, cast, get_args

from hocket.ckpt.document.dtypes import float_dtype
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.companions import check_whole
from hocket.ckpt.formats.table import FORMATS
from hocket.ckpt.globs import check_globs, taken
from hocket.ckpt.read.merged import MergedCheckpoint, SlerpWeights, sum_dtype
from hocket.ckpt.read.opener import open as open_checkpoint
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.uris import local_path
from hocket.ckpt.verbs.convert import (
    MEMORY_BYTES,
    SHARD_BYTES,
    ConvertReport,
    ConvertRequest,
    Format,
    check_request,
    content_of,
    idle_globs,
    refuse_idle_globs,
    write_content,
)
from hocket.ckpt.verbs.destination import check_destination
from hocket.native import _native

__all__ = ["BUFFERS", "METHODS", "MergeMethod", "merge"]

MergeMethod = Literal["mean", "ema", "1-sqrt", "slerp", "task"]
"""How checkpoints are merged."""

METHODS: tuple[MergeMethod, ...] = get_args(MergeMethod)

BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Globs of the buffers of torch's normalization layers, whose mean fits no weights."""

_PIECE_BYTES = 16 << 20
_NAMES_SHOWN = 3


def merge(
    sources: Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    *,
    method: MergeMethod = "mean",
    weights: Sequence[float] | None = None,
    decay: float | None = None,
    t: float | None = None,
    base: str | os.PathLike[str] | None = None,
    to: Format | None = None,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    copied: Sequence[str] = BUFFERS,
    max_shard_bytes: int = SHARD_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    compression: str | None = None,
    unfenced: bool = False,
    step: int | None = None,
    user: object = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Merge checkpoints of any formats into one.

    Floating-point and complex tensors are combined; tensors of 16 bits and less are summed in 32 bits, others
    in 64 bits, and rounded once. Integers, buffers, values and the step come from the last source. Tied
    tensors are merged once. The sources may be sharded differently and be of different formats, but have the
    same names, shapes and dtypes. As `convert` does, a merge streams its tensors, verifies what it reads,
    writes the file that marks the destination as complete last, and resumes when it is run again.

    The methods, for sources x_1 to x_n in the order of their steps:

    - `mean`: their mean, with `weights` Σ w_i x_i / Σ w_i;
    - `ema`: an exponential average, a_i = decay · a_(i-1) + (1 - decay) · x_i, from a_1 = x_1;
    - `1-sqrt`: x_1 + Σ (1 - sqrt((i-1)/n)) (x_i - x_(i-1)), as if the learning rate had decayed so between
      them (Tian et al., "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging", 2025); the mean is
      the same for a linear decay;
    - `slerp`: the spherical interpolation of two sources, tensor by tensor, at `t`;
    - `task`: base + Σ w_i (x_i - base), with weights of 1 by default (Ilharco et al., "Editing Models with
      Task Arithmetic", 2023).

    Args:
        sources: The checkpoints, in the order of their steps.
        destination: As for `convert`.
        method: How they are merged.
        weights: A weight for each source, for `mean` and `task`.
        decay: The share of the average so far, for `ema`; between 0 and 1.
        t: The share of the second source, for `slerp`; from 0 to 1, 0.5 by default.
        base: The checkpoint that the sources were trained from, for `task`.
        to: The destination format; that of the last source by default.
        dtype: The dtype of floating-point tensors, as for `convert`; required if the sources' differ.
        include: Globs of names to merge; if empty, all names. Others are left out.
        exclude: Globs of names to leave out.
        copied: Globs of tensors that come from the last source.
        max_shard_bytes: As for `convert`.
        memory_bytes: Memory limit for tensor data.
        compression: As for `convert`.
        unfenced: As for `convert`.
        step: The step to record; the last source's by default.
        user: The `user` value to record; the last source's by default.
        on_progress: Called with the bytes written so far and the bytes of all files.

    Raises:
        CheckpointIncompatibleError: The sources differ in names, shapes, dtypes or ties.
        ValueError: An argument is invalid.
        CheckpointError: As for `convert`.
    """
    if isinstance(sources, str | os.PathLike):
        raise ValueError(f"`sources` is {sources!r}; expected a list of checkpoints")
    uris = [local_path(source) for source in sources]
    destination = local_path(destination)
    factors = _factors(method, len(uris), weights=weights, decay=decay, t=t, base=base)
    if base is not None:
        uris.insert(0, local_path(base))
    check_globs(copied=copied)
    wanted_dtype = None if dtype is None else float_dtype(dtype)
    if to is not None:
        check_destination(destination, _known(to), unfenced=unfenced)
    opened = [open_checkpoint(uri, follow=False) for uri in uris]
    last = opened[-1]
    request = ConvertRequest(
        to=to or _known(last.format),
        dtype=wanted_dtype,
        include=include,
        exclude=exclude,
        rename={},
        max_shard_bytes=max_shard_bytes,
        compression=compression,
        unfenced=unfenced,
        step=step,
        user=user,
    )
    check_request(request, memory_bytes)
    check_destination(destination, request.to, unfenced=unfenced)
    for source in opened:
        if FORMATS[source.format].has_companions:
            check_whole(source.uri, source.contents)
        refuse_idle_globs(source.uri, source.contents, include)
    names = request.taken(last.contents.tensors)
    for source in opened[:-1]:
        _check_alike(source, last, names, request)
    merged = MergedCheckpoint(
        opened,
        SlerpWeights(opened, factors[1], _PIECE_BYTES) if method == "slerp" else lambda _: factors,
        copied=frozenset(taken(names, include=copied) if copied else ()),
    )
    arguments = [method, factors, list(copied), *request.identity]
    report = write_content(
        merged,
        content_of(last.contents, request),
        request,
        source=", ".join(uris),
        destination=destination,
        identity=lambda: ["merge", 1, _native.__version__, *merged.identity(), *arguments],
        # Beside the pieces of a conversion, each of four threads holds one of every source.
        memory_bytes=max(memory_bytes * 16 // (16 + 4 * len(opened)), 4 << 20),
        on_progress=on_progress,
    )
    # A glob may be for a name that only some of the sources have.
    known = [name for source in opened for name in (*source.contents.tensors, *source.contents.values)]
    return replace(report, idle_exclude=idle_globs(exclude, dict.fromkeys(known)))


def _known(to: str) -> Format:
    if to not in FORMATS:
        raise ValueError(f"`to` is {to!r}; expected one of {', '.join(FORMATS)}")
    return cast("Format", to)


def _factors(
    method: str,
    number: int,
    *,
    weights: Sequence[float] | None,
    decay: float | None,
    t: float | None,
    base: str | os.PathLike[str] | None,
) -> list[float]:
    """Return the weight of each source, the base before them; for `slerp` 1 - t and t.

    Raises:
        ValueError: An argument is invalid, missing, or of another method.
    """
    if method not in METHODS:
        raise ValueError(f"`method` is {method!r}; expected one of {', '.join(METHODS)}")
    users = {"weights": ("mean", "task"), "decay": ("ema",), "t": ("slerp",), "base": ("task",)}
    for name, value in (("weights", weights), ("decay", decay), ("t", t), ("base", base)):
        if value is not None and method not in users[name]:
            owners = " and ".join(f"`{one}`" for one in users[name])
            raise ValueError(f"`{name}` is given, and `method` is {method!r}; it is for {owners}")
    least = 1 if method == "task" else 2
    if number < least or (method == "slerp" and number != 2):
        raise ValueError(
            f"{number} sources for {method!r}; expected {'2' if method == 'slerp' else f'{least} or more'}"
        )
    given = [1.0] * number if weights is None else [float(weight) for weight in weights]
    if len(given) != number or not all(map(math.isfinite, given)):
        raise ValueError(f"`weights` is {given}; expected {number} finite numbers, one for each source")
    if method == "task":
        if base is None:
            raise ValueError("`base` is None; expected the checkpoint that the sources were trained from")
        return [1 - math.fsum(given), *given]
    if method == "ema":
        if decay is None or not 0 < decay < 1:
            raise ValueError(f"`decay` is {decay}; expected a number between 0 and 1")
        return [(1 if index == 0 else 1 - decay) * decay ** (number - 1 - index) for index in range(number)]
    if method == "1-sqrt":
        decays = [1.0, *(1 - math.sqrt(index / number) for index in range(1, number)), 0.0]
        return [decays[index] - decays[index + 1] for index in range(number)]
    if method == "slerp":
        share = 0.5 if t is None else t
        if not 0 <= share <= 1:
            raise ValueError(f"`t` is {t}; expected a number from 0 to 1")
        return [1 - share, share]
    total = math.fsum(given)
    if total == 0:
        raise ValueError(f"`weights` is {given}, whose sum is 0; expected another sum")
    return [weight / total for weight in given]


def _check_alike(source: Checkpoint, last: Checkpoint, names: Sequence[str], request: ConvertRequest) -> None:
    """Check that two sources have the same tensors, as far as these are merged.

    Raises:
        CheckpointIncompatibleError: Names, shapes, dtypes or ties differ.
    """
    own, others = source.contents.tensors, last.contents.tensors
    for one, another, missing in (
        (source, last, [name for name in names if name not in own]),
        (last, source, [name for name in request.taken(own) if name not in others]),
    ):
        if missing:
            listed = ", ".join(f"`{name}`" for name in missing[:_NAMES_SHOWN])
            more = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
            raise CheckpointIncompatibleError(
                f"`{one.uri}` lacks {listed}{more}, which `{another.uri}` has. Leave them out with `exclude`"
            )
    for name in names:
        a, b = own[name], others[name]
        if a.shape != b.shape:
            problem = f"the shape {list(a.shape)}, and in `{last.uri}` {list(b.shape)}"
        elif a.same_as != b.same_as:
            ties = [f"shares `{tie}`" if tie else "is on its own" for tie in (a.same_as, b.same_as)]
            raise CheckpointIncompatibleError(
                f"`{name}` {ties[0]} in `{source.uri}`, and {ties[1]} in `{last.uri}`"
            )
        elif a.dtype != b.dtype and (
            request.dtype is None or None in (sum_dtype(a.dtype), sum_dtype(b.dtype))
        ):
            problem = f"the dtype {a.dtype}, and in `{last.uri}` {b.dtype}"
            problem += ". Pass `dtype`, such as `F32`" if sum_dtype(a.dtype) and sum_dtype(b.dtype) else ""
        else:
            continue
        raise CheckpointIncompatibleError(f"`{name}` has in `{source.uri}` {problem}")
