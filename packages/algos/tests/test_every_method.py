"""Every method alone: its effect, microbatches, compiled models, and save and resume."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from hocket import algos
from hocket.trainer import Trainer
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.compiled_step import CompiledStep
from hocket.trainer.errors import TrainerConfigError
from support.methods import CASES, common_kind, make_loader, make_model, train
from support.sampling import plan

pytest.importorskip("torchvision", reason="needs torchvision")
pytest.importorskip("schedulefree", reason="needs schedulefree")
pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("torchao", reason="needs torchao")
pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
NAMES = sorted(CASES)
STEPS = 4


def _check_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def _differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() != other.keys() or any(not torch.equal(one[name], other[name]) for name in one)


def test_every_case_is_an_algorithm() -> None:
    assert all(issubclass(getattr(algos, name), Algorithm) for name in CASES)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_trains_and_changes_the_training(name: str) -> None:
    kind = common_kind([name])
    parameters, losses = train([name], steps=STEPS)
    if name == "NoOpModel":  # the model is replaced by one that trains nothing
        assert losses == [0.0] * STEPS
        return
    assert all(0 < loss < 100 for loss in losses)
    assert _differ(parameters, make_model(kind).state_dict())  # type: ignore[arg-type]
    if CASES[name].pil or CASES[name].optimizer or name == "EMA":
        return  # other data or another optimizer, or only evaluation is affected
    assert _differ(parameters, train([], kind=kind, steps=STEPS, **dict(CASES[name].arguments))[0])


# Methods that make modules, parameters or random numbers of their own.
MAKING = (
    "BlurPool",
    "Factorize",
    "FusedLayerNorm",
    "GatedLinearUnits",
    "GyroDropout",
    "LoRA",
    "NoOpModel",
    "SqueezeExcite",
    "StochasticDepth",
)


@pytest.mark.parametrize("name", MAKING)
def test_a_method_trains_while_the_default_device_is_meta(name: str) -> None:
    kind = common_kind([name])
    assert kind is not None
    batches = list(make_loader(kind, 2))  # torch's `DataLoader` draws its seed on the default device
    losses = []
    for device in (None, "meta"):
        model = make_model(kind)
        torch.set_default_device(device)
        try:
            losses.append(train([name], steps=2, model=model, train_dataloader=batches)[1])
        finally:
            torch.set_default_device(None)
    assert losses[1] == losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_runs_with_microbatches(name: str) -> None:
    _, whole = train([name], steps=STEPS)
    _, split = train([name], steps=STEPS, device_train_microbatch_size=3)
    assert len(split) == len(whole) == STEPS
    if name in ("GradientClipping", "ScheduleFree", "SeqLengthWarmup", "SequencePacking"):
        # Without batch norm, dropout or mixing within a microbatch, the training is the same.
        _, whole = train([name], kind="text", steps=STEPS)
        _, split = train([name], kind="text", steps=STEPS, device_train_microbatch_size=3)
        assert split == pytest.approx(whole, rel=1e-4)


def test_samples_and_tokens_are_counted_after_methods_have_changed_the_batch() -> None:
    counts: list[tuple[int, int]] = []

    def keep(trainer: Any) -> None:
        counts.append((trainer.state.timestamp.sample.value, trainer.state.timestamp.token.value))

    train(["SelectiveBackprop"], look=keep)
    train(["SeqLengthWarmup"], look=keep)
    reshaping = [algos.SeqLengthWarmup(1.0, 8, 16, 8, truncate=False)]
    train([], kind="text", steps=2, algorithms=reshaping, look=keep)
    # Half of 8 samples in three of four batches; lengths 8, 12, 16 and 16; 16 rows of 8 and 16 rows of 8.
    assert counts == [(3 * 4 + 8, 0), (4 * 8, 8 * (8 + 12 + 16 + 16)), (32, 256)]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    whole, losses = train([name], steps=STEPS, save_folder=tmp_path, save_interval="2ba")
    resumed, rest = train([name], steps=STEPS, save_folder=tmp_path / "again", load_path=tmp_path / "ep0-ba2")
    assert rest == losses[2:]
    _check_equal(resumed, whole)


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_of_a_method_are_equal(name: str) -> None:
    _check_equal(train([name], steps=STEPS)[0], train([name], steps=STEPS)[0])


# Methods that run between the forward pass and the loss, where a step compiled as a whole has no events.
BETWEEN = ["CutMix", "LabelSmoothing", "MixUp"]
COMPILED = [(name, what) for name in NAMES for what in ("model", "step")[: 1 if name in BETWEEN else 2]]


def _compiled(kind: Any) -> torch.nn.Module:
    model = make_model(kind)
    model.compile(backend="aot_eager", fullgraph=True)  # `fullgraph`: a graph break is an error
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), COMPILED)
def test_it_trains_compiled(name: str, what: str) -> None:
    torch._dynamo.reset()
    _, plain = train([name], steps=STEPS)
    step, kind = partial(CompiledStep, backend="aot_eager"), common_kind([name])
    options: dict[str, Any] = {"train_step": step} if what == "step" else {"model": _compiled(kind)}
    _, compiled = train([name], steps=STEPS, **options)
    # In bf16 a compiled model rounds at other operations.
    assert compiled == pytest.approx(plain, rel=2e-2 if CASES[name].arguments else 1e-3)


@pytest.mark.parametrize("name", BETWEEN)
def test_methods_between_forward_and_loss_raise_with_a_compiled_step(
    name: str,
) -> None:
    with pytest.raises(TrainerConfigError, match=f"`{name}` listens between forward pass and loss"):
        Trainer(
            model=make_model("images"),
            algorithms=[CASES[name].make()],
            train_step=partial(CompiledStep, backend="eager"),
            device="cpu",
        )


# One method of each kind, which changes attention, convolutions, norms, linear layers, parametrizations,
# branches, inputs and targets, lengths, gradients, the step, or weights.
BY_DEFAULT = [
    "Alibi", "BlurPool", "GhostBatchNorm", "LoRA", "WeightStandardization", "StochasticDepth", "MixUp",
    "SeqLengthWarmup", "GradientClipping", "SAM", "EMA", "LowPrecisionLayerNorm",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not plan().asks_for("slow"), reason="one alone takes ten seconds and more")
@pytest.mark.parametrize("name", BY_DEFAULT)
def test_it_runs_with_torchs_default_compiler(name: str) -> None:
    torch._dynamo.reset()
    _, plain = train([name], steps=STEPS)
    # More threads would be torch's pool of compilers, which stays for the life of the process; and its own
    # generator would draw other dropouts.
    with inductor_config.patch(compile_threads=1, fallback_random=True):
        _, compiled = train([name], steps=STEPS, compile_config={})
    assert compiled == pytest.approx(plain, rel=2e-2 if CASES[name].arguments else 1e-3)
