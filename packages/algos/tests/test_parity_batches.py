"""The functional forms give the results of Composer's on the same inputs, seeds and draws.

Run with `uv run pytest -m parity`: Composer lives in an environment of its own, which `uv` makes. Where a
method differs on purpose, its README says why.
"""

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hocket import algos
from hocket.algos import augmentations
from hocket.algos.cutout.cutout import cut_holes
from hocket.trainer.ranks.single_process import SingleProcess
from support.composer_peer import ask

pytestmark = [pytest.mark.parity, pytest.mark.timeout(1800)]

SEEDS = range(5)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _images(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, 3, 12, 16)), generator=_generator(seed))


def _cases() -> list[dict[str, Any]]:
    cases = [
        case for seed in SEEDS for make in (_of_batches, _of_training, _of_pictures) for case in make(seed)
    ]
    arguments = [
        {"current_duration": at, "batch_idx": batch, "start": 0.3, "end": 0.8, "interrupt": interrupt}
        for at, batch, interrupt in itertools.product((0.0, 0.3, 0.5, 0.8, 1.0), range(4), range(4))
    ]
    cases.append(_case("should_select", arguments=arguments))
    cases.append(_case("half_life", arguments=[("100ba", None), ("50ba", "5ba"), ("3ep", "1ep")]))
    return cases


def _case(call: str, **inputs: Any) -> dict[str, Any]:
    return {"call": call, **inputs}


def _of_batches(seed: int) -> Iterator[dict[str, Any]]:
    generator, share = _generator(seed), 0.2 * seed
    x, y = _images(seed), torch.randint(0, 5, (4,), generator=generator)
    indices = torch.randperm(4, generator=generator)
    yield _case("mixup", x=x, y=y, mixing=share / 2, indices=indices)
    yield _case("cutmix", x=x, y=y, bbox=[1, 2, 5 + seed, 9], indices=indices)
    yield _case("cutout", x=x, places=[3, 5 + seed, 11, 0], length=0.1 + share)
    yield _case("colout", x=x, y=x[:, :1], seed=seed, p_row=share / 2, p_col=0.3)
    yield _case("smooth", logits=x[:, :, 0], y=torch.randint(0, 3, (4, 16)), smoothing=share)
    # Keep at least one of 4 samples, because Composer may keep none.
    yield _case("select", x=x.flatten(1), y=x.flatten(1) ** 3, keep=0.25 + 0.15 * seed)
    for mode, scale, target, has_targets in (
        ("resize", 0.5, x[:, 0], False),
        ("crop", 0.5, x[:, 0], False),
        ("crop", 0.5, x[:, :1], True),
        ("resize", 0.75, x[:, 0].long(), True),
    ):
        yield _case("resize", x=x, y=target, seed=seed, scale=scale, mode=mode, targets=has_targets)
    for options in ({}, {"preserve_end_of_sequence": True}, {"truncate": False}):
        yield _case("length", length=3 + seed, batch=_texts(seed), options=options)


def _of_training(seed: int) -> Iterator[dict[str, Any]]:
    batches = list(_images(seed, 3, 5, 3))
    yield _case("sam", rho=0.2 * seed, interval=1 + seed % 2, model=_linear(seed), batches=batches)
    yield _case("ema", model=_linear(seed), averages=_linear(seed + 9), smoothing=0.2 * seed)
    for kind, threshold in (("norm", 0.5), ("value", 0.1), ("adaptive", 0.05)):
        yield _case("clip", type=kind, threshold=threshold, **_gradients(seed))


def _of_pictures(seed: int) -> Iterator[dict[str, Any]]:
    picture = torch.randint(0, 256, (20, 24, 3), generator=_generator(seed), dtype=torch.uint8)
    sets = augmentations.augmentation_sets
    for one, share in itertools.product({*sets["all"], *sets["original"]}, (0.2, 0.8)):
        severity = 1 + 2 * seed
        yield _case("augmentation", image=picture, name=one.__name__, severity=severity, share=share)
    yield _case("randaugment", image=picture, severity=2 * seed, depth=3, share=0.7, start=seed)
    mix = {"weights": [0.5, 0.2, 0.3], "mixing": 0.2 * seed}
    yield _case("augmix", image=picture, severity=3, depth=2, share=0.3, start=seed, **mix)


def _linear(seed: int) -> dict[str, torch.Tensor]:
    return {"weight": _images(seed, 2, 3), "bias": _images(seed + 1, 2)}


def _gradients(seed: int) -> dict[str, Any]:
    shapes = [(5, 3, 2, 2), (5,), (7, 4)]
    return {
        "weights": [_images(seed, *shape) for shape in shapes],
        "gradients": [_images(seed + 7, *shape) for shape in shapes],
    }


def _texts(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 50, (4, 12), generator=_generator(seed))
    lengths = torch.randint(2, 13, (4, 1), generator=_generator(seed + 1))
    return {"input_ids": ids, "attention_mask": (torch.arange(12) < lengths).long(), "labels": ids + 1}


def _fixed_draws(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    share = case["share"]
    monkeypatch.setattr(random, "uniform", lambda low, high: low + (high - low) * share)
    monkeypatch.setattr(random, "random", lambda: share)
    if "start" in case:
        turns = itertools.count(case["start"])
        monkeypatch.setattr(random, "choice", lambda some: some[next(turns) % len(some)])


def _picture(case: dict[str, Any]) -> Any:
    from PIL import Image

    return Image.fromarray(case["image"].numpy())


def _pixels(image: Any) -> torch.Tensor:
    from torchvision.transforms.v2.functional import pil_to_tensor

    pixels: torch.Tensor = pil_to_tensor(image).permute(1, 2, 0)
    return pixels


def mixup(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    return algos.mixup_batch(case["x"], case["y"], case["mixing"], indices=case["indices"])


def cutmix(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    return algos.cutmix_batch(case["x"], case["y"], bbox=tuple(case["bbox"]), indices=case["indices"])[:3]


def cutout(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    rows, columns = torch.tensor(case["places"]).view(1, -1, 2).expand(4, -1, -1).unbind(2)
    return cut_holes(case["x"], rows, columns, int(12 * case["length"]) // 2)


def colout(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(case["seed"])
    return algos.colout_batch((case["x"], case["y"]), case["p_row"], case["p_col"])


def resize(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(case["seed"])
    return algos.resize_batch(case["x"], case["y"], case["scale"], case["mode"], case["targets"])


def select(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    seen: dict[str, Any] = {}

    def multinomial(weights: torch.Tensor, num: int) -> torch.Tensor:
        seen.update(num=num, p=weights / weights.sum())
        return torch.arange(len(weights) - num, len(weights))

    monkeypatch.setattr(torch, "multinomial", multinomial)
    kept, _ = algos.select_using_loss(
        case["x"],
        case["y"],
        lambda x: x,
        lambda outputs, target, reduction: (outputs - target).square().flatten(1).mean(1),
        keep=case["keep"],
    )
    return kept, seen["num"], seen["p"]


def should_select(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    return [algos.should_selective_backprop(**arguments) for arguments in case["arguments"]]


def length(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    return algos.set_batch_sequence_length(case["batch"], case["length"], **case["options"])


def ema(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    model, averages = nn.Linear(3, 2), nn.Linear(3, 2)
    model.load_state_dict(case["model"])
    averages.load_state_dict(case["averages"])
    algos.compute_ema(model, averages, smoothing=case["smoothing"])
    return dict(averages.state_dict())


def half_life(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    return [algos.EMA(half_life=one, update_interval=every).smoothing for one, every in case["arguments"]]


def clip(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    parameters = [nn.Parameter(weight.clone()) for weight in case["weights"]]
    for parameter, gradient in zip(parameters, case["gradients"], strict=True):
        parameter.grad = gradient.clone()
    algos.apply_gradient_clipping(parameters, case["type"], clipping_threshold=case["threshold"])
    return [parameter.grad for parameter in parameters]


def smooth(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    return algos.smooth_labels(case["logits"], case["y"], smoothing=case["smoothing"])


def augmentation(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    _fixed_draws(case, monkeypatch)
    return _pixels(getattr(augmentations, case["name"])(_picture(case), case["severity"]))


def randaugment(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    _fixed_draws(case, monkeypatch)
    return _pixels(algos.randaugment_image(_picture(case), case["severity"], case["depth"]))


def augmix(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    _fixed_draws(case, monkeypatch)
    module = sys.modules["hocket.algos.aug_mix.aug_mix"]
    monkeypatch.setattr(module, "draw_dirichlet", lambda alpha, size: case["weights"])
    monkeypatch.setattr(module, "draw_beta", lambda alpha: case["mixing"])
    return _pixels(algos.augmix_image(_picture(case), case["severity"], case["depth"]))


class _Step:
    """A training step of a linear model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def compute_gradients(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()


def sam(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    model = nn.Linear(3, 2)
    model.load_state_dict(case["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: Any = SimpleNamespace(
        device=torch.device("cpu"),
        model=model,
        optimizers=[optimizer],
        outputs=None,
        parallelism=SingleProcess(torch.device("cpu")),
    )
    step = algos.SAMStep(
        _Step(model, optimizer), state, rho=case["rho"], epsilon=1e-12, interval=case["interval"]
    )
    for number, batch in enumerate(case["batches"]):
        state.timestamp = SimpleNamespace(counts=SimpleNamespace(batch=number))
        step.compute_gradients(batch)
        step.update()
    return dict(model.state_dict())


CALLS: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        mixup,
        cutmix,
        cutout,
        colout,
        resize,
        select,
        should_select,
        length,
        ema,
        half_life,
        clip,
        smooth,
        augmentation,
        randaugment,
        augmix,
        sam,
    )
}
TOLERANCE: dict[str, dict[str, float]] = {
    # Allow pixels whose mixture rounds to the neighbouring integer.
    "augmix": {"atol": 1, "rtol": 0},
}


def test_functions_give_the_results_of_composers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    cases = _cases()
    assert {case["call"] for case in cases} == set(CALLS)
    answers = ask(Path(__file__).with_name("composer_peer_batches.py"), cases, tmp_path)
    failures = []
    for case, answer in zip(cases, answers, strict=True):
        with monkeypatch.context() as patched:
            found = CALLS[case["call"]](case, patched)
        try:
            torch.testing.assert_close(found, answer, check_dtype=False, **TOLERANCE.get(case["call"], {}))
        except (AssertionError, TypeError) as error:
            what = {name: value for name, value in case.items() if not isinstance(value, torch.Tensor)}
            failures.append(f"{what}: {error}")
    assert not failures, "\n".join(failures[:20])
