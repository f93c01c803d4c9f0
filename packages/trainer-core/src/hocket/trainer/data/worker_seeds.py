"""Seeds of the random generators in the workers of a `DataLoader`, which a resumed run sets again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data as torch_data

from hocket.trainer.process.rng import derived_seed, seed_generators


class SeededMessage:
    """A value for a worker, which seeds its random generators when it receives the value.

    torch sends its workers indices and the signal of a new epoch, and nothing else. A seed travels inside one
    of them: the worker unpickles the plain value, and unpickling sets the generators.

    Args:
        seed: The seed.
        value: The value that the worker gets.
        is_per_worker: Whether the number of the worker is added to the seed, as torch does.
    """

    def __init__(self, seed: int, value: Any = None, *, is_per_worker: bool = False) -> None:
        self.seed = seed
        self.value = value
        self.is_per_worker = is_per_worker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function that the worker calls on arrival, and its arguments."""
        return _receive, (self.seed, self.value, self.is_per_worker)


def _receive(seed: int, value: Any, is_per_worker: bool) -> Any:
    info = torch_data.get_worker_info()
    if is_per_worker and info is not None:
        seed += info.id
        # `WorkerInfo` refuses to set its attributes.
        object.__setattr__(info, "seed", seed)
    seed_generators(seed)
    return value


def has_persistent_workers(loader: Any) -> bool:
    """Return whether torch keeps the workers of a loader from one epoch to the next."""
    return (
        isinstance(loader, torch_data.DataLoader)
        and loader.persistent_workers
        and loader.num_workers > 0
        and type(loader).__iter__ is torch_data.DataLoader.__iter__
    )


def iterate_persistent(loader: Any, epoch: int) -> Iterator[Any]:
    """Return an iterator over a loader with persistent workers that depends on the epoch, not on the past.

    torch draws a seed for the workers when it starts them, and none in later epochs. A run that is resumed in
    a later epoch starts its workers there. It must not draw the seed from the generator of the shuffle, and
    its workers must draw the numbers of the uninterrupted run. Each epoch after the first therefore seeds the
    workers anew, from a copy of the generator.

    Args:
        loader: The loader, for which `has_persistent_workers` is true.
        epoch: Number of the epoch.
    """
    if epoch == 0:
        loader._iterator = None
        return iter(loader)
    generator = torch.Generator()
    generator.set_state((loader.generator or torch.default_generator).get_state())
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())
    # Without a shuffle, the generator may be where it was in the epoch before.
    seed = derived_seed(drawn, epoch)
    if loader._iterator is None:
        _start_idle(loader, generator)
    loader._iterator._shared_seed = SeededMessage(seed, is_per_worker=True)
    return iter(loader)


def end_workers(loader: Any) -> None:
    """End the persistent workers of a loader, if it has any."""
    if has_persistent_workers(loader):
        loader._iterator = None


def _start_idle(loader: Any, generator: torch.Generator) -> None:
    """Start the workers of a loader without giving them an index or drawing from the loader's generator."""
    idle = {
        "generator": generator,
        "sampler": (),
        "batch_sampler": None if loader.batch_sampler is None else (),
    }
    own = {name: loader.__dict__[name] for name in idle}
    # `DataLoader` refuses to set these after its construction.
    loader.__dict__.update(idle)
    try:
        iter(loader)
    finally:
        loader.__dict__.update(own)
    loader._iterator._index_sampler = loader._index_sampler
