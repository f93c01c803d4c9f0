"""`hocket-launch plan`: the memory of a layout on each rank, before any rank is started."""

import argparse
import ast
import importlib
import importlib.util
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hocket.dist.config.dtypes import parse_precision
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.errors import ConfigError, DistError
from hocket.dist.memory.activations import measure_activations
from hocket.dist.memory.estimate import MemoryEstimate, estimate_memory, ladder
from hocket.dist.memory.layouts import LayoutEstimator, Machines
from hocket.dist.memory.proposal import describe_proposal, propose, propose_only
from hocket.dist.option_names import OptionParser
from hocket.dist.ranks.mesh import MeshShape, mesh_shape
from hocket.dist.ranks.world import World

Result = TypeVar("Result")

_DESCRIPTION = """\
Estimate the memory that each rank needs, without a GPU and without starting ranks.

BUILD names a function, as `file.py:function` or `package.module:function`. It is called with tensors created
on the meta device and returns a model, or a pair of a model and one microbatch; with a microbatch,
activations are counted too. `--layouts` estimates every layout over the axes `pp`, `dp_replicate`,
`dp_shard`, `cp`, `tp` and `ep`, and prints the best three; `--parallelism-config` estimates one. Experts are
assumed to get equal numbers of rows, so that no values are needed.
"""
_UNITS = {"": 2**30, "mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
"""Bytes of the units of memory."""


def plan(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = OptionParser(
        prog="hocket-launch plan",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("build", metavar="BUILD")
    parser.add_argument("--world_size", "--world-size", type=int, default=8, help="ranks (default 8)")
    parser.add_argument("-n", "--nproc", type=int, help="ranks on each machine (default: all)")
    parser.add_argument("--fsdp-config", default="{}", help="a dict, such as '{\"cpu_offload\": True}'")
    parser.add_argument("--precision", help="the trainer's precision, such as amp_bf16")
    parser.add_argument("--optimizer-slots", type=int, default=2, help="2 for Adam (default), 1 for momentum")
    parser.add_argument(
        "--memory",
        type=_bytes,
        help="memory per device, such as 80GB or 74.5GiB (GiB without a unit), to report what fits",
    )
    parser.add_argument("--layouts", action="store_true", help="print the three best layouts of all axes")
    parser.add_argument(
        "--parallelism-config",
        help="estimate this layout, such as '{\"tp\": 2}'; `pp` also takes a dict with `schedule`, "
        "`stages_per_rank` and `split`",
    )
    parser.add_argument("--microbatches", type=int, default=1, help="microbatches of a step (default 1)")
    for name, unit in (
        ("tflops", "TFLOP/s of a rank"),
        ("inside", "GB/s of a rank to its machine"),
        ("between", "GB/s of a rank to other machines"),
    ):
        default = getattr(Machines(ranks=1, ranks_each=1), name)
        parser.add_argument(f"--{name}", type=float, default=default, help=f"{unit} (default {default:g})")
    options = parser.parse_args(argv)
    if min(options.microbatches, options.tflops, options.inside, options.between, options.world_size) <= 0:
        parser.error("`--microbatches`, `--tflops`, `--inside`, `--between` and `--world_size` are above 0")
    if options.optimizer_slots < 0 or (options.memory is not None and not options.memory > 0):
        parser.error("`--optimizer-slots` is below 0, or `--memory` is not above 0")
    try:
        config = _config(options)
        per_node = options.nproc or options.world_size
        if options.layouts or options.parallelism_config is not None:
            return _propose(options, config, per_node)
        shape = mesh_shape(config, World(world_size=options.world_size, local_world_size=per_node))
        model, batch = _build(options.build)
        activations = 0 if batch is None else _on_meta(lambda: measure_activations(model, batch, config))
        estimate = estimate_memory(
            model,
            config,
            shape,
            activations=activations,
            optimizer_slots=options.optimizer_slots,
            microbatches=options.microbatches,
        )
    except DistError as error:
        print(f"hocket-launch plan: error: {error}", file=sys.stderr)
        return 1
    print(_table(model, estimate, shape, has_batch=batch is not None))
    if options.memory is not None:
        is_enough = estimate.total <= options.memory
        print(f"{'fits' if is_enough else 'does not fit'} in {options.memory / 2**30:g} GiB")
        if not is_enough:
            for name, saved in ladder(model, config, shape, activations=activations):
                print(f"  {name}: saves about {saved / 2**30:.2f} GiB")
            return 3
    return 0


def _propose(options: argparse.Namespace, config: FSDPConfig, per_node: int) -> int:
    """Print the best layouts, or the one that was asked for, and return the exit code."""
    if options.layouts and options.parallelism_config is not None:
        raise ConfigError(
            "`--layouts` tries every layout, and `--parallelism-config` names one. Give one of them"
        )
    unset = FSDPConfig()
    for name in ("data_parallel_shard_degree", "data_parallel_replicate_degree", "process_group"):
        if (value := getattr(config, name)) != getattr(unset, name):
            raise ConfigError(
                f"`{name}` in `--fsdp-config` is {value!r}, and the layouts have degrees of their own. "
                "Leave it out"
            )
    if options.world_size % per_node:
        raise ConfigError(
            f"`--world_size` is {options.world_size}, which {per_node} ranks on each machine do not divide"
        )
    model, batch = _build(options.build)
    if batch is None:
        raise ConfigError(
            f"`{options.build}` returned a model alone. Let it return a model and a microbatch: activations "
            "and traffic depend on its size"
        )
    machines = Machines(
        ranks=options.world_size,
        ranks_each=per_node,
        tflops=options.tflops,
        inside=options.inside,
        between=options.between,
    )
    estimator = _on_meta(
        lambda: LayoutEstimator(
            model,
            batch,
            machines,
            config=config,
            optimizer_slots=options.optimizer_slots,
            microbatches=options.microbatches,
        ),
        advice="Correct the batch. A model that reads values of tensors has no estimate of its layouts, but "
        "for the numbers of experts that a stack takes by `forward(rows, experts, weights)`",
    )
    if options.layouts:
        found = propose(estimator, options.memory)
    else:
        given = _dict("--parallelism-config", options.parallelism_config)
        found = propose_only(estimator, given, options.memory)
    print(describe_proposal(found, machines, options.memory))
    return 0 if found.fitting else 3


def _config(options: argparse.Namespace) -> FSDPConfig:
    keys = _dict("--fsdp-config", options.fsdp_config)
    return FSDPConfig.from_mapping(keys).with_precision(parse_precision(options.precision))


def _dict(option: str, text: str) -> dict[str, Any]:
    try:
        keys = _parse_dict(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"`{option}` is {text!r}, expected a dict: {error}") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"`{option}` is {text!r}, expected a dict")
    return keys


def _bytes(text: str) -> float:
    """Return the bytes of an amount of memory, such as `80GB`; a number alone counts GiB."""
    number, unit = re.fullmatch(r"(.*?)\s*([a-z]*)", text.strip().lower(), re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        return float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no amount of memory; give a number of GiB, or one with MB, GB, TB, MiB, GiB or TiB"
        ) from None


def _parse_dict(text: str) -> Any:
    """Parse a dict of JSON or of Python."""
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


def _build(name: str) -> tuple[nn.Module, Any]:
    """Call the function, and return its model and its microbatch or None."""
    source, _, function = name.rpartition(":")
    if not source:
        raise ConfigError(f"BUILD is {name!r}, expected `file.py:function` or `package.module:function`")
    sys.path.insert(0, str(Path.cwd()))
    try:
        build = getattr(_load(source), function)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(f"BUILD is {name!r}, which cannot be imported: {error}") from error
    except Exception as error:
        raise ConfigError(f"BUILD is {name!r}, which cannot be imported:\n{_trace(error)}") from error
    try:
        with torch.device("meta"):
            result = build()
    except Exception as error:
        raise ConfigError(f"`{name}`, called without arguments, failed:\n{_trace(error)}") from error
    model, *batch = result if isinstance(result, tuple) else (result,)
    if not isinstance(model, nn.Module) or len(batch) > 1:
        received = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise ConfigError(f"`{name}` returned {received}, expected a model, or a model and a batch")
    return model, batch[0] if batch else None


def _on_meta(
    measure: Callable[[], Result],
    *,
    advice: str = "Correct the batch, or let BUILD return the model alone, and none are counted",
) -> Result:
    """Call a function that runs the user's model on the meta device."""
    try:
        return measure()
    except DistError:
        raise
    except Exception as error:
        raise ConfigError(
            "the forward pass failed on the meta device, where tensors have shapes and no values. "
            f"{advice}:\n{_trace(error)}"
        ) from error


def _trace(error: Exception) -> str:
    """Return the innermost frames of an error of the user's code."""
    return "".join(traceback.format_exception(error, limit=-3)).rstrip()


def _load(source: str) -> Any:
    if not source.endswith(".py"):
        return importlib.import_module(source)
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _table(model: nn.Module, estimate: MemoryEstimate, shape: MeshShape, *, has_batch: bool) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    rows = [
        ("parameters (shard)", estimate.parameters),
        ("gradients (shard)", estimate.gradients),
        ("optimizer state (shard)", estimate.optimizer),
        ("gathered groups", estimate.gathered),
        ("activations", estimate.activations),
        ("buffers", estimate.buffers),
    ]
    lines = [
        f"{count:,} parameters, {shape.replicate} × {shape.shard} ranks (copies × shards), GiB on each rank:"
    ]
    lines += [
        f"  {name:28}{'not counted' if name == 'activations' and not has_batch else f'{size / 2**30:10.3f}'}"
        for name, size in rows
    ]
    if estimate.host:
        lines.append(f"  {'of these in host memory':28}{estimate.host / 2**30:10.3f}")
    lines.append(f"  {'total on the device':28}{estimate.total / 2**30:10.3f}")
    return "\n".join(lines)
