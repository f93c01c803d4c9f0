"""The cost of training methods in a step.

For methods that act at events, the time that a trainer spends in their `match` and `apply`. For methods that
replace modules or the step itself, the time of a whole step, beside that of a plain one; and what their
`match` and `apply` still take in a step, where they have nothing to do any more.

Runs in Hocket's environment or in Composer's, whose classes have the same names: `cells/algos.py SYSTEM`.
Prints microseconds a step, by method and setting, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SYSTEM = sys.argv[1]
if SYSTEM == "hocket":
    import hocket.algos as methods
    from hocket.trainer import ComposerModel, Trainer
else:
    import composer.algorithms as methods
    from composer import Trainer
    from composer.models import ComposerModel

STEPS, WARMUP, BATCH = 30, 6, 32

# By method: settings with which nothing is due in any step, and settings that work in each.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "ColOut": {"working": {}},
    "CutMix": {"working": {}},
    "CutOut": {"working": {}},
    "EMA": {"idle": {"half_life": "99999ba", "update_interval": "9999ba"}, "working": {"half_life": "100ba"}},
    "GradientClipping": {"working": {"clipping_type": "norm", "clipping_threshold": 1.0}},
    "GradientClipping (value)": {"working": {"clipping_type": "value", "clipping_threshold": 0.1}},
    "GradientClipping (adaptive)": {"working": {"clipping_type": "adaptive", "clipping_threshold": 0.01}},
    "LabelSmoothing": {"working": {}},
    "MixUp": {"working": {}},
    "ProgressiveResizing": {
        "idle": {"delay_fraction": 0.0, "finetune_fraction": 0.99},
        "working": {"delay_fraction": 0.99, "finetune_fraction": 0.0},
    },
    "SWA": {
        "idle": {"swa_start": "0.98dur", "swa_end": "0.99dur", "update_interval": "1ba"},
        "working": {"swa_start": "0.0dur", "swa_end": "0.99dur", "update_interval": "1ba"},
    },
    "SelectiveBackprop": {
        "idle": {"start": 1.0, "end": 1.0},
        "working": {"start": 0.0, "end": 1.0, "interrupt": 0},
    },
    "ZLoss": {"working": {}},
}

# Methods whose work is in the modules, or in the step: their arguments.
WHOLE_STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "BlurPool": {"min_channels": 16},
    "ChannelsLast": {},
    "Factorize": {"min_channels": 64, "latent_channels": 0.25, "min_features": 256, "latent_features": 128},
    "Float8": {"emulate": True},
    "GhostBatchNorm": {"ghost_batch_size": 16},
    "LayerFreezing": {"freeze_start": 0.0, "freeze_level": 0.5},
    "LoRA": {"r": 8},
    "QAT": {"scheme": "int8-int4", "group_size": 32},
    "QLoRA": {"r": 8},
    "SAM": {"rho": 0.05},
    "SqueezeExcite": {"latent_channels": 64, "min_channels": 64},
    "WeightStandardization": {},
}


class Net(ComposerModel):
    """A convolutional classifier of 1.2 million parameters in 20 tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [3, 32, 64, 64, 128]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)]
        self.layers = nn.Sequential(*layers, *head)

    def forward(self, batch: Any) -> torch.Tensor:
        """Compute logits."""
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any, reduction: str = "mean") -> torch.Tensor:
        """Compute the cross entropy."""
        return nn.functional.cross_entropy(outputs, batch[1], reduction=reduction)


class Timed:
    """Adds up the time spent in an algorithm's `match` and `apply`, by batch."""

    def __init__(self, algorithm: Any) -> None:
        self.seconds: dict[int, float] = {}
        for name in ("match", "apply"):
            setattr(algorithm, name, self._wrap(getattr(algorithm, name)))

    def _wrap(self, call: Any) -> Any:
        def timed(event: Any, state: Any, *others: Any) -> Any:
            start = time.perf_counter()
            result = call(event, state, *others)
            spent = time.perf_counter() - start
            batch = int(state.timestamp.batch)
            self.seconds[batch] = self.seconds.get(batch, 0.0) + spent
            return result

        return timed


def measure(name: str, arguments: dict[str, Any]) -> float:
    """Return the median microseconds a step in `match` and `apply` of one method."""
    algorithm = getattr(methods, name.split(" ")[0])(**arguments)
    timed = Timed(algorithm)
    train([algorithm])
    return 1e6 * statistics.median(timed.seconds.get(batch, 0.0) for batch in range(WARMUP, STEPS - 2))


def measure_steps(name: str, arguments: dict[str, Any]) -> dict[str, float]:
    """Return the median microseconds of a step with one method, and of that in its `match` and `apply`."""
    chosen = [] if name == "plain" else [getattr(methods, name)(**arguments)]
    timed = [Timed(algorithm) for algorithm in chosen]
    starts = train(chosen)
    found = {f"{name}, whole step": 1e6 * statistics.median(starts[WARMUP:-2])}
    for one in timed:
        own = statistics.median(one.seconds.get(batch, 0.0) for batch in range(WARMUP, STEPS - 2))
        found[f"{name}, events of a step"] = 1e6 * own
    return found


def train(algorithms: list[Any]) -> list[float]:
    """Train for some steps; return the seconds from the start of each step to that of the next."""
    images, labels = torch.randn(STEPS * BATCH, 3, 32, 32), torch.randint(0, 10, (STEPS * BATCH,))
    data = DataLoader(TensorDataset(images, labels), batch_size=BATCH)
    model = Net()
    seen: dict[Any, float] = {}
    trainer: Any = None

    def note(module: Any, args: Any) -> None:
        # The first forward pass of a step; SAM makes two.
        seen.setdefault(int(trainer.state.timestamp.batch), time.perf_counter())

    model.register_forward_pre_hook(note)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            model=model,
            train_dataloader=data,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            algorithms=algorithms,
            max_duration=f"{STEPS}ba",
            device="cpu",
            progress_bar=False,
        )
        trainer.fit()
        trainer.close()
    return [after - before for before, after in itertools.pairwise(seen.values())]


torch.set_num_threads(1)
figures = {
    f"{name}, {setting}": measure(name, arguments)
    for name, settings in SETTINGS.items()
    for setting, arguments in settings.items()
    if hasattr(methods, name.split(" ")[0])
}
for name, arguments in WHOLE_STEPS.items():
    if name == "plain" or hasattr(methods, name):
        figures |= measure_steps(name, arguments)
print(json.dumps(figures))
