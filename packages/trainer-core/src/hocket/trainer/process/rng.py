"""The random generators of this process: seeding, and saving and restoring their states."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch


def seed_rng(seed: int) -> None:
    """Seed Python's generator, torch's on every device, and NumPy's where it is loaded."""
    # The import of rich draws from Python's generator. Without it here, the first run of a process would have
    # other random numbers than the second.
    import rich.style  # noqa: F401

    seed_generators(seed)


def seed_generators(seed: int) -> None:
    """Seed the generators, as `seed_rng` does, in a process that does not import rich."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def reseed(seed: int, *, step: int, rank: int) -> None:
    """Seed the generators again, for a rank whose generator states are in no checkpoint.

    The seed is a hash of the three arguments, so that ranks and restarts do not repeat each other's numbers.
    """
    seed_rng(derived_seed(seed, step, rank))


def derived_seed(*numbers: int) -> int:
    """Return a seed below 2**63 that is a hash of some numbers."""
    digest = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def loader_generators(loader: Any) -> list[torch.Generator]:
    """Return a loader's own random generators, from which its order is drawn."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = {id(one): one for one in (getattr(owner, "generator", None) for owner in owners)}
    return [one for one in generators.values() if isinstance(one, torch.Generator)]


def capture_rng(device: torch.device, loader: Any = None) -> dict[str, Any]:
    """Return the states of the generators as numbers and bytes, about 10 kB.

    On a CUDA device, the state of its generator is included. The state is in host memory, so the read does
    not wait for the device. With a loader, the states of its own generators are included, 5 kB each.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "words": struct.pack(f"<{len(words)}I", *words), "gauss": gauss},
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = {
            "kind": kind,
            "keys": keys.astype("<u4").tobytes(),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states | loader_rng(loader)


def loader_rng(
    loader: Any, known: Mapping[torch.Generator, torch.Tensor] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the entry of `capture_rng` for a loader's own generators; empty if it has none.

    Args:
        loader: The loader.
        known: States of generators that replace their present ones.
    """
    own = loader_generators(loader)
    states = [known[one] if one in known else one.get_state() for one in own]
    return {"loader": [state.numpy().tobytes() for state in states]} if own else {}


def restore_rng(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to captured states; a generator without a captured state is not changed."""
    if python := states.get("python"):
        words = python["words"]
        numbers = struct.unpack(f"<{len(words) // 4}I", words)
        random.setstate((python["version"], numbers, python["gauss"]))
    if given := states.get("torch"):
        torch.set_rng_state(_byte_tensor(given))
    if (given := states.get("numpy")) and (numpy := sys.modules.get("numpy")) is not None:
        keys = numpy.frombuffer(given["keys"], dtype="<u4")
        numpy.random.set_state((given["kind"], keys, given["position"], given["has_gauss"], given["cached"]))
    if (given := states.get("cuda")) and device.type == "cuda":
        torch.cuda.set_rng_state(_byte_tensor(given), device)


def restore_loader_rng(states: Mapping[str, Any], loader: Any) -> None:
    """Set a loader's own generators to captured states, if these are of as many generators."""
    given, generators = states.get("loader", ()), loader_generators(loader)
    if len(given) == len(generators):
        for generator, state in zip(generators, given, strict=True):
            generator.set_state(_byte_tensor(state))


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
