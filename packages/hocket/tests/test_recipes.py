"""Recipes run plainly and with their stacks; the contrastive loss is exact on microbatches and ranks."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hocket.recipes import diffusion, embeddings, images, language, recipe
from hocket.trainer import Callback, Trainer
from support.methods import LoaderOf
from support.ranks import run_ranks

RECIPES = {
    name: one for module in (images, language, diffusion, embeddings) for name, one in module.RECIPES.items()
}


@pytest.fixture(autouse=True)
def _digits_or_text(request: pytest.FixtureRequest) -> None:
    if request.node.name.startswith("test_images"):
        pytest.importorskip("sklearn", reason="needs scikit-learn")


def _run(name: str) -> None:
    for methods in ((), None):
        points = recipe.run(RECIPES[name], methods, steps=2, device="cpu")
        assert [step for step, _, _ in points] == [1, 2]
        assert all(seconds > 0 and quality == quality for _, seconds, quality in points)


@pytest.mark.parametrize("name", ["resnet", "unet", "vit"])
def test_images_run_plainly_and_with_the_stack(name: str) -> None:
    _run(name)


def test_images_and_a_model_of_diffusers_by_the_same_class() -> None:
    pytest.importorskip("diffusers", reason="needs diffusers (group models)")
    _run("diffusers")
    model = RECIPES["diffusers"].make_model()
    assert type(model) is diffusion.NoisePrediction
    assert type(model.unet).__module__.startswith("diffusers.")
    made = model.generate((2, 1, 8, 8), steps=2)
    assert made.shape == (2, 1, 8, 8)


@pytest.mark.parametrize("name", ["bert", "gpt", "text"])
def test_texts_run_plainly_and_with_the_stack(name: str) -> None:
    _run(name)


def test_images_are_learned_in_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["images", "resnet", "--methods", "LabelSmoothing", "--steps", "40"])
    recipe.main(images.RECIPES, "Images.")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == 20
    assert float(lines[-1].split()[-1 - 3 * ("reaches" in lines[-1])]) > 0.3


def test_a_method_that_a_recipe_lacks_raises_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"\['SAM'\], which the recipe does not have; it has EMA"):
        recipe.run(embeddings.RECIPES["text"], ["SAM"])


def test_masked_bytes_have_the_documented_shares() -> None:
    text = torch.full((64, 512), 65, dtype=torch.uint8)
    batch = language.mask_bytes(text, torch.Generator().manual_seed(1))
    chosen = batch["labels"] != language.IGNORED
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (batch["labels"][chosen] == 65).all()
    assert (batch["tokens"][~chosen] == 65).all()
    assert (batch["tokens"][chosen] == language.MASK).float().mean().item() == pytest.approx(0.8, abs=0.03)


def test_the_unet_generates_images_and_evaluates_reproducibly() -> None:
    model = diffusion.NoisePrediction(diffusion.UNet(8))
    made = model.generate((2, 1, 8, 8), steps=3)
    assert made.shape == (2, 1, 8, 8)
    assert 0 <= made.min() <= made.max() <= 1
    batch = (torch.rand(4, 1, 8, 8), None)
    model.eval()
    assert torch.equal(model.loss(model(batch), batch), model.loss(model(batch), batch))
    model.train()
    assert not torch.equal(model.loss(model(batch), batch), model.loss(model(batch), batch))


def test_a_model_of_diffusers_trains_by_the_same_class() -> None:
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8),
        norm_num_groups=4, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    model = diffusion.NoisePrediction(unet)
    batch = (torch.rand(4, 1, 8, 8), None)
    model.loss(model(batch), batch).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_train_batch(self, state: Any, logger: Any) -> None:
        self.losses.append(float(state.loss))


def _contrast(microbatch: int | None = None) -> tuple[dict[str, torch.Tensor], list[float]]:
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = embeddings.TextEncoder(language.GPTConfig(context=8, width=16, num_layers=1, num_heads=2))
    texts = torch.randint(0, 256, (2, 8, 2, 8), dtype=torch.uint8)
    rows = slice(rank * 8 // num_ranks, (rank + 1) * 8 // num_ranks)
    batches = [{"first": text[rows, 0], "second": text[rows, 1]} for text in texts]
    watch = Losses()
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    with Trainer(
        model=model,
        train_dataloader=LoaderOf(loader, (rank, num_ranks)),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
        algorithms=[embeddings.GatheredNegatives()],
        callbacks=[watch],
        device_train_microbatch_size=microbatch,
        max_duration="2ba",
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        return {name: value.detach().clone() for name, value in model.named_parameters()}, watch.losses


def test_the_contrastive_loss_is_exact_under_accumulation_and_ranks() -> None:
    whole, losses = _contrast()
    start = nn.functional.normalize(torch.randn(8, 2, 4), dim=-1)
    scores = start[:, 0] @ start[:, 1].T / embeddings.TEMPERATURE
    expected = sum(-scores.log_softmax(dim).diagonal().mean() for dim in (0, 1)) / 2
    torch.testing.assert_close(embeddings.contrastive_loss(start), expected)
    for parameters, seen in (_contrast(3), *run_ranks(_contrast, 2, 3, init="gloo", timeout_s=120)):
        assert seen == pytest.approx(losses, abs=1e-5)
        for name, value in whole.items():
            torch.testing.assert_close(parameters[name], value, atol=1e-5, rtol=1e-4)
