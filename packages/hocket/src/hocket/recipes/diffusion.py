"""Diffusion: a UNet that predicts the noise in scikit-learn's digits, with an average of its weights.

`python -m hocket.recipes.diffusion unet` trains plainly, `--stack` with the recipe's methods. `diffusers`
trains a model of Hugging Face by the same class, which takes any network that is called as `unet(x, t)`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket import algos
from hocket.recipes.images import make_data
from hocket.recipes.recipe import Recipe, main

NUM_TIMES = 200


class NoisePrediction(nn.Module):
    """A diffusion model that predicts the noise in an image (Ho et al. 2020, with a cosine schedule).

    A batch is the pair (images, labels), images `(B, C, H, W)` from 0 to 1; labels are not used. Training
    draws times and noise from torch's generator; evaluation draws them from a generator of its own with a
    fixed seed, so that its losses can be compared.

    Args:
        unet: A network called as `unet(x, t)` with `(B, C, H, W)` and `(B,) int64`; returns the noise, or an
            object with the noise in `sample`.
    """

    signal: Tensor

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet
        times = (torch.arange(NUM_TIMES) + 1) / (NUM_TIMES + 1)
        self.register_buffer("signal", torch.cos(times * math.pi / 2) ** 2, persistent=False)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the noise that is predicted and the noise that was added."""
        images = batch[0] * 2 - 1
        generator = None if self.training else torch.Generator(images.device).manual_seed(0)
        times = torch.randint(0, NUM_TIMES, (len(images),), generator=generator, device=images.device)
        noise = torch.randn(images.shape, generator=generator, device=images.device)
        signal = self.signal[times][:, None, None, None]
        return self.predict(signal.sqrt() * images + (1 - signal).sqrt() * noise, times), noise

    def predict(self, x: Tensor, times: Tensor) -> Tensor:
        """Predict the noise in `x`."""
        predicted = self.unet(x, times)
        noise: Tensor = predicted if isinstance(predicted, Tensor) else predicted.sample
        return noise

    def loss(self, outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
        """Return the mean squared error of the noise."""
        return F.mse_loss(*outputs)

    @torch.no_grad()
    def generate(self, shape: tuple[int, int, int, int], *, steps: int = 20) -> Tensor:
        """Return new images from 0 to 1, by deterministic steps (Song et al. 2021)."""
        self.eval()
        x = torch.randn(shape, device=self.signal.device)
        times = torch.linspace(NUM_TIMES - 1, 0, steps).long().tolist()
        for time, next_time in zip(times, [*times[1:], None], strict=True):
            signal = self.signal[time]
            noise = self.predict(x, torch.full((shape[0],), time, device=x.device))
            image = ((x - (1 - signal).sqrt() * noise) / signal.sqrt()).clamp(-1, 1)
            next_signal = torch.ones_like(signal) if next_time is None else self.signal[next_time]
            x = next_signal.sqrt() * image + (1 - next_signal).sqrt() * noise
        return (x + 1) / 2


class TimedBlock(nn.Module):
    """Two convolutions beside a shortcut; the time is added as a shift of the channels."""

    def __init__(self, width: int, out: int, time_width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, out, 3, padding=1)
        self.time = nn.Linear(time_width, out)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Identity() if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Apply the block."""
        branch = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        out: Tensor = self.shortcut(x) + self.conv2(F.silu(self.norm2(branch)))
        return out


class UNet(nn.Module):
    """A UNet of two resolutions for `(B, 1, 8, 8)` (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 4 * width), nn.SiLU())
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = TimedBlock(width, width, 4 * width)
        self.shrink = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = TimedBlock(2 * width, 2 * width, 4 * width)
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = TimedBlock(2 * width, width, 4 * width)
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Predict the noise."""
        rates = torch.exp(-math.log(1000) * torch.arange(8, device=x.device) / 8)
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        high = self.down(self.first(x), time)
        low = self.middle(self.shrink(high), time)
        out: Tensor = self.last(self.up(torch.cat([high, self.grow(low)], 1), time))
        return out


def diffusers_unet() -> nn.Module:
    """Return a small `UNet2DModel` of diffusers, for `(B, 1, 8, 8)`."""
    from diffusers import UNet2DModel

    unet: nn.Module = UNet2DModel(  # type: ignore[no-untyped-call, assignment]
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=8,
    )  # fmt: skip
    return unet


def _recipe(make_unet: Callable[[], nn.Module]) -> Recipe:
    return Recipe(
        make_model=lambda: NoisePrediction(make_unet()),
        make_data=make_data,
        methods={
            "ChannelsLast": lambda: algos.ChannelsLast(),
            "EMA": lambda: algos.EMA("10ba"),
            "GradientClipping": lambda: algos.GradientClipping("norm", 1.0),
        },
        stack=("EMA", "GradientClipping"),
        target=0.25,
        steps=300,
    )


RECIPES = {"unet": _recipe(UNet), "diffusers": _recipe(diffusers_unet)}


if __name__ == "__main__":
    main(RECIPES, __doc__)
