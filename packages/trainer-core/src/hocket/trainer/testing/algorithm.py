"""The suite of `Algorithm`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event
from hocket.trainer.ranks.rank_gather import gather_objects
from hocket.trainer.testing.trees import describe_difference, snapshot
from hocket.trainer.trainer import Trainer

NUM_BATCHES = 4


def check_algorithm(
    algorithm: Algorithm, make_arguments: Callable[[], Mapping[str, Any]] | None = None
) -> None:
    """Check that an algorithm runs, is repeatable, and continues after a checkpoint with the same bits.

    Trains four batches of a small image classifier on the CPU, several times, each with a copy of the
    algorithm. In a job of several ranks, call it on every rank: the parameters must then be equal on all.

    Args:
        algorithm: The algorithm as its constructor made it; it is copied and not changed.
        make_arguments: A function that returns the arguments of `Trainer` for a run that the algorithm
            matches, such as `model`, `train_dataloader` and `optimizers`: new objects with equal values at
            each call. By default, images of shape (8, 3, 8, 8) in 4 classes, a network of two convolutions
            with batch norm, and SGD.

    Raises:
        AssertionError: If `events` or a method's signature is wrong, the algorithm never runs, a second run
            differs, a run that continues from a checkpoint differs, or the ranks differ.

    Example:
        >>> from hocket.trainer import Algorithm, Event
        >>> class ScaleLoss(Algorithm):
        ...     events = frozenset({Event.AFTER_LOSS})
        ...     def match(self, event, state):
        ...         return True
        ...     def apply(self, event, state, logger):
        ...         state.loss = state.loss * 0.5
        >>> check_algorithm(ScaleLoss())
    """
    _check_declarations(algorithm)
    make = make_arguments or _image_classification
    store = _MemoryStore()
    probe = _AlgorithmProbe(copy.deepcopy(algorithm))
    uninterrupted = _train(probe, make(), checkpointing={"store": store}, save_interval="2ba")
    name = type(algorithm).__name__
    assert probe.num_applied, (
        f"`{name}` never ran in {NUM_BATCHES} batches: `match` was asked at {sorted(probe.asked)} and never "
        "returned True; give `make_arguments` for a run that it matches"
    )
    repeated = _train(_AlgorithmProbe(copy.deepcopy(algorithm)), make())
    difference = describe_difference(uninterrupted, repeated)
    assert difference is None, (
        f"a second run with a copy of `{name}` and the same seed differs: {difference}; draw random numbers "
        "from torch's, Python's or NumPy's global generator, which the trainer seeds"
    )
    store.delete(NUM_BATCHES)  # a folder with later checkpoints is refused
    resumed = _train(
        _AlgorithmProbe(copy.deepcopy(algorithm)),
        make(),
        checkpointing={"store": store},
        load_path=store.name_of(step=2),
    )
    difference = describe_difference(uninterrupted, resumed)
    assert difference is None, (
        f"a run that continues after batch 2 differs from one that never stopped: {difference}; "
        f"`{name}.state_dict` must return all that later steps depend on, and `load_state_dict` take it back"
    )
    _check_ranks(name, uninterrupted)


def _check_declarations(algorithm: Algorithm) -> None:
    kind = type(algorithm).__name__
    assert isinstance(algorithm, Algorithm), f"`{kind}` is no `Algorithm`; derive it from that class"
    events = algorithm.events
    is_declared = events is None or all(isinstance(event, Event) for event in events)
    assert is_declared, f"`{kind}.events` is {events!r}; expected a frozenset of `Event`, or None"
    for method, arguments in (("match", 2), ("apply", 3)):
        try:
            inspect.signature(getattr(algorithm, method)).bind(*range(arguments))
        except TypeError as error:
            signature = "(event, state)" if method == "match" else "(event, state, logger)"
            raise AssertionError(f"`{kind}.{method}` cannot be called with {signature}: {error}") from error


class _AlgorithmProbe(Algorithm):
    """Runs an algorithm and counts how often it was applied."""

    def __init__(self, inner: Algorithm) -> None:
        self.inner = inner
        self.order = inner.order
        self.num_applied = 0
        self.asked: set[str] = set()

    def match(self, event: Event, state: Any) -> bool:
        if self.inner.events is not None and event not in self.inner.events:
            return False
        self.asked.add(event.value)
        answer = self.inner.match(event, state)
        kind = type(self.inner).__name__
        assert isinstance(answer, bool), (
            f"`{kind}.match` returned {answer!r} at {event}; expected True or False"
        )
        return answer

    def apply(self, event: Event, state: Any, logger: Any) -> int | None:
        self.num_applied += 1
        return self.inner.apply(event, state, logger)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)


def _train(algorithm: Algorithm, arguments: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """Return the parameters and buffers at the end."""
    defaults = {"max_duration": f"{NUM_BATCHES}ba", "progress_bar": False, "device": "cpu", "seed": 1}
    with Trainer(**{**defaults, **arguments, **overrides, "algorithms": algorithm}) as trainer:
        trainer.fit()
        state: dict[str, Any] = snapshot(dict(trainer.state.model.state_dict()))
        return state


def _image_classification() -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = _TinyClassifier()
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(8, 3, 8, 8, generator=generator), torch.randint(4, (8,), generator=generator))
        for _ in range(NUM_BATCHES)
    ]
    return {
        "model": model,
        "train_dataloader": batches,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
    }


class _TinyClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )

    def forward(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(batch[0])
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class _MemoryStore:
    """Checkpoints of one process, in its memory."""

    def __init__(self) -> None:
        self.saved: dict[str, dict[str, Any]] = {}

    def name_of(self, *, step: int) -> str:
        return next(name for name, record in self.saved.items() if record["step"] == step)

    def save(
        self,
        state: Any,
        *,
        step: int,
        name: str | None = None,
        per_rank: Any = None,
        user: Any = None,
        mode: str = "sync",
    ) -> Any:
        name = name or f"step-{step}"
        record = {"name": name, "step": step, "per_rank": per_rank, "user": user}
        self.saved[name] = snapshot({**record, "state": _without_slots(state)})
        return SimpleNamespace(name=name, wait=lambda *_: None, done=lambda: True)

    def load(
        self, source: str, into: Any, *, strict: bool = True, include: Sequence[str] | None = None
    ) -> Any:
        record = snapshot(self.saved[source])
        record["state"] = _fill(into, record["state"])
        return SimpleNamespace(**record)

    def list(self) -> list[Any]:
        return [
            SimpleNamespace(**record, uri=name, status="committed") for name, record in self.saved.items()
        ]

    def delete(self, step: int) -> None:
        self.saved = {name: record for name, record in self.saved.items() if record["step"] != step}


def _without_slots(node: Any) -> Any:
    """Replace the rule by which an optimizer makes missing slots, which is for loading alone, by `{}`."""
    if isinstance(node, dict):
        return {name: _without_slots(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_without_slots(value) for value in node]
    return {} if hasattr(node, "slots_like") else node


def _fill(target: Any, saved: Any) -> Any:
    """Copy saved tensors into those of `target`; take everything else as it was saved."""
    if isinstance(target, torch.Tensor):
        with torch.no_grad():
            return target.copy_(saved)
    if isinstance(target, dict) and isinstance(saved, dict):
        return {
            name: _fill(target[name], value) if name in target else value for name, value in saved.items()
        }
    if isinstance(target, list) and isinstance(saved, list) and len(target) == len(saved):
        return [_fill(one, other) for one, other in zip(target, saved, strict=True)]
    return saved


def _check_ranks(name: str, state: dict[str, Any]) -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    states = gather_objects(state)
    for rank, other in enumerate(states):
        difference = describe_difference(states[0], other)
        assert difference is None, (
            f"with `{name}`, the parameters of rank {rank} differ from rank 0's: {difference}; change the "
            "model in the same way on every rank"
        )
