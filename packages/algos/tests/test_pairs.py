"""Every allowed pair of methods trains together, with the same result in both orders of the list."""

from itertools import combinations, permutations
from typing import Any

import pytest
import torch

from hocket.algos import (
    EMA,
    QAT,
    SAM,
    SWA,
    ColOut,
    CutMix,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    LoRA,
    MixUp,
    ProgressiveResizing,
    ScheduleFree,
    SelectiveBackprop,
    ZLoss,
)
from hocket.algos.traits import Trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.engine.passes import make_passes, run_passes
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.event import Event
from support.methods import CASES, common_kind, make_model, train

pytest.importorskip("torchvision", reason="needs torchvision")
pytest.importorskip("schedulefree", reason="needs schedulefree")
pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("torchao", reason="needs torchao")
pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")

# Conflicting pairs, and a part of the trainer's error message.
REFUSED = {
    ("Alibi", "SequencePacking"): "no longer fit their attention masks",
    ("CutMix", "MixUp"): "each mixes every sample with another one",
    ("EMA", "SWA"): "each replaces the model's weights by its own average",
    ("EMA", "ScheduleFree"): "each replaces the model's weights by its own average",
    ("SWA", "ScheduleFree"): "each replaces the model's weights by its own average",
    ("Float8", "QAT"): "in its own way",
    ("Float8", "QLoRA"): "the linear layers are in 4 bits",
    ("QAT", "QLoRA"): "the linear layers are in 4 bits",
    ("LoRA", "QLoRA"): "each freezes the model and adds its own adapters",
    ("SeqLengthWarmup", "SequencePacking"): "no longer fit their attention masks",
}
# `NoOpModel` replaces the model that these methods change, or has no outputs that they need.
REFUSED |= {
    (min(name, "NoOpModel"), max(name, "NoOpModel")): f"`{name}` changes the model that `NoOpModel` replaces"
    for name in (
        "BlurPool", "ChannelsLast", "Factorize", "GhostBatchNorm", "GyroDropout", "LowPrecisionGroupNorm",
        "SqueezeExcite", "StochasticDepth", "WeightStandardization",
    )
}  # fmt: skip
REFUSED |= {
    (min(name, "NoOpModel"), max(name, "NoOpModel")): f"`{name}` needs the outputs or losses of samples"
    for name in ("CutMix", "LabelSmoothing", "MixUp", "SelectiveBackprop", "ZLoss")
}
PAIRS = [pair for pair in combinations(sorted(CASES), 2) if common_kind(pair) is not None]
RUNNING = [pair for pair in PAIRS if pair not in REFUSED]


def test_the_conflicting_pairs_are_pairs_of_methods() -> None:
    assert set(REFUSED) <= set(PAIRS)


@pytest.mark.parametrize("pair", sorted(REFUSED), ids="-".join)
def test_conflicting_pairs_raise_with_the_reason(pair: tuple[str, str]) -> None:
    for names in (pair, pair[::-1]):
        with pytest.raises(TrainerConfigError, match=f"cannot be used together: .*{REFUSED[pair]}"):
            train(names)


def test_a_method_of_another_package_is_refused_by_its_trait() -> None:
    class Lookahead(Algorithm):
        events = frozenset({Event.BATCH_END})
        traits = frozenset({Trait.AVERAGES_WEIGHTS})

        def apply(self, event: Event, state: Any, logger: Any) -> None: ...

    assert "by its own average" in str(SWA().conflict_with(Lookahead()))
    assert QAT().conflict_with(Lookahead()) is None


@pytest.mark.parametrize("method", [EMA, SWA, ScheduleFree, SAM, ZLoss, QAT, MixUp, LoRA])
def test_two_subclasses_of_a_method_conflict_as_two_of_the_method_do(method: type[Any]) -> None:
    first, second = type("First", (method,), {})(), type("Second", (method,), {})()
    reason = method().conflict_with(method())
    assert reason
    assert first.conflict_with(second) == second.conflict_with(first) == reason


def test_schedule_free_refuses_a_method_of_another_package_by_its_trait() -> None:
    foreign = type("Lookahead", (), {"traits": frozenset({Trait.AVERAGES_WEIGHTS})})()
    assert "by its own average" in str(ScheduleFree().conflict_with(foreign))


@pytest.mark.slow
@pytest.mark.parametrize("pair", RUNNING, ids="-".join)
def test_a_pair_trains_alike_in_both_orders(pair: tuple[str, str]) -> None:
    first, losses = train(pair, steps=2)
    second, other_losses = train(pair[::-1], steps=2)
    assert losses == other_losses
    if "NoOpModel" in pair:
        assert losses == [0.0, 0.0]
    else:
        assert all(0 < loss < 100 for loss in losses)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(second[name], value), name


def test_many_methods_train_together() -> None:
    names = [
        "ColOut", "CutOut", "EMA", "GradientClipping", "LabelSmoothing", "MixUp",
        "ProgressiveResizing", "RandAugment", "SAM", "SelectiveBackprop", "ZLoss",
    ]  # fmt: skip
    first, losses = train(names)
    second, _ = train(names[::-1])
    assert len(losses) == 4
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_many_surgeries_train_together() -> None:
    names = [
        "BlurPool", "ChannelsLast", "Factorize", "GhostBatchNorm", "GyroDropout", "SqueezeExcite",
        "StochasticDepth", "WeightStandardization",
    ]  # fmt: skip
    first, losses = train(names)
    second, other_losses = train(names[::-1])
    assert losses == other_losses
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_methods_that_change_the_batch_run_in_a_fixed_order() -> None:
    seen: list[str] = []

    def note(algorithm: Any) -> Any:
        apply = algorithm.apply

        def noting(event: Any, state: Any, logger: Any) -> None:
            seen.append(f"{type(algorithm).__name__}@{event.value}")
            apply(event, state, logger)

        algorithm.apply = noting
        return algorithm

    methods = [
        LabelSmoothing(), MixUp(), ColOut(), ProgressiveResizing(), SelectiveBackprop(0, 1, interrupt=0),
    ]  # fmt: skip
    train([], kind="images", steps=1, algorithms=[note(method) for method in methods])
    assert seen == [
        "SelectiveBackprop@init",
        "SelectiveBackprop@after_dataloader",
        "ProgressiveResizing@after_dataloader",
        "ColOut@after_dataloader",
        "MixUp@before_forward",
        "MixUp@before_loss",
        "LabelSmoothing@before_loss",
        "LabelSmoothing@after_loss",
        "MixUp@after_loss",
    ]


def test_gradients_of_frozen_layers_are_dropped_before_clipping() -> None:
    for methods in permutations([LayerFreezing(), GradientClipping(clipping_threshold=1.0)]):
        ordered = run_passes(methods, Event.AFTER_TRAIN_BATCH, make_passes())
        assert [type(method) for method in ordered] == [LayerFreezing, GradientClipping]


def test_targets_are_both_smoothed_and_mixed() -> None:
    targets: list[torch.Tensor] = []

    def keep(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        targets.append(batch[1])
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    for mixing in (MixUp(0.5), CutMix(0.5)):
        model: Any = make_model("images")
        model.loss = keep
        train([], kind="images", steps=1, model=model, algorithms=[LabelSmoothing(0.2), mixing])
    for target in targets:
        torch.testing.assert_close(target.sum(1), torch.ones(8))
        torch.testing.assert_close(target.min(), torch.tensor(0.05))
