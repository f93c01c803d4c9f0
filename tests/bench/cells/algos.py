"""The cost of training methods in a step.

For methods that act at events, the time that a trainer spends in their `match` and `apply`. For methods that
replace modules or the step itself, the time of a whole step, that of a plain one, and the time that their
`match` and `apply` still take in a step, although they have nothing left to do.

Runs in Hocket's environment or in Composer's, whose classes have the same names: `cells/algos.py SYSTEM
[PART ...]`, the parts being `events` and `steps`. Prints microseconds a step, by method and setting, as
JSON: processor time of the thread that trains, so that other work on the machine counts little.
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

SYSTEM, PARTS = sys.argv[1], sys.argv[2:] or ["events", "steps"]
if SYSTEM == "hocket":
    import hocket.algos as methods
    from hocket.trainer import ComposerModel, Trainer
else:
    import composer.algorithms as methods
    from composer import Trainer
    from composer.models import ComposerModel

STEPS, WARMUP, BATCH = 30, 6, 32

# By method: settings with which the method does nothing in any step, and settings with which it acts in each.
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

# Methods whose work is in modules or in the step: the model that each trains, and its arguments.
WHOLE_STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "BlurPool": ("convolutions", {"min_channels": 16}),
    "ChannelsLast": ("convolutions", {}),
    "Factorize": (
        "convolutions",
        {"min_channels": 64, "latent_channels": 0.25, "min_features": 256, "latent_features": 128},
    ),
    "Float8": ("convolutions", {"emulate": True}),
    "GhostBatchNorm": ("convolutions", {"ghost_batch_size": 16}),
    "LayerFreezing": ("convolutions", {"freeze_start": 0.0, "freeze_level": 0.5}),
    "LoRA": ("convolutions", {"r": 8}),
    "QAT": ("convolutions", {"scheme": "int8-int4", "group_size": 32}),
    "QLoRA": ("convolutions", {"r": 8}),
    "SAM": ("convolutions", {"rho": 0.05}),
    "SqueezeExcite": ("convolutions", {"latent_channels": 64, "min_channels": 64}),
    "WeightStandardization": ("convolutions", {}),
    "GyroDropout": ("bottlenecks", {"p": 0.5, "sigma": 256, "tau": 16}),
    "StochasticDepth": ("bottlenecks", {"target_layer_name": "ResNetBottleneck", "drop_rate": 0.2}),
    "LowPrecisionGroupNorm": ("group norms in bf16", {}),
    "Alibi": ("BERT", {"max_sequence_length": 64, "train_sequence_length_scaling": 1.0}),
    "GatedLinearUnits": ("BERT", {}),
    "LowPrecisionLayerNorm": ("BERT in bf16", {}),
    "FusedLayerNorm": ("Llama", {}),
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


class Bottlenecks(Net):
    """A ResNet of five bottleneck blocks, with dropout before its head."""

    def __init__(self, norm_layer: Any = nn.BatchNorm2d) -> None:
        from torchvision.models.resnet import Bottleneck, ResNet

        super().__init__()
        self.layers = ResNet(
            Bottleneck, [1, 2, 1, 1], num_classes=10, width_per_group=16, norm_layer=norm_layer
        )
        self.layers.fc = nn.Sequential(nn.Dropout(0.5), self.layers.fc)


class Bert(ComposerModel):
    """A masked language model of transformers' with two layers, 128 wide."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=512, max_position_embeddings=64,
        )  # fmt: skip
        self.model = BertForMaskedLM(config)

    def forward(self, batch: Any) -> Any:
        """Compute logits and loss."""
        return self.model(**batch)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the loss that the model computed."""
        return outputs.loss


class Llama(Bert):
    """A language model of transformers' with norms written out in Python: two layers, 128 wide."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=512, max_position_embeddings=64,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)


MODELS: dict[str, Any] = {
    "convolutions": Net,
    "bottlenecks": Bottlenecks,
    "group norms in bf16": lambda: Bottlenecks(lambda width: nn.GroupNorm(4, width)),
    "BERT": Bert,
    "BERT in bf16": Bert,
    "Llama": Llama,
}


class Timed:
    """Adds up the time spent in an algorithm's `match` and `apply`, by batch."""

    def __init__(self, algorithm: Any) -> None:
        self.seconds: dict[int, float] = {}
        for name in ("match", "apply"):
            setattr(algorithm, name, self._wrap(getattr(algorithm, name)))

    def _wrap(self, call: Any) -> Any:
        def timed(event: Any, state: Any, *others: Any) -> Any:
            start = time.thread_time()
            result = call(event, state, *others)
            spent = time.thread_time() - start
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


def measure_steps(kind: str, name: str, arguments: dict[str, Any]) -> dict[str, float]:
    """Return the median microseconds of a step with one method, and of that in its `match` and `apply`."""
    chosen = [] if name == "plain" else [getattr(methods, name)(**arguments)]
    timed = [Timed(algorithm) for algorithm in chosen]
    starts = train(chosen, kind)
    figures = {f"{kind}: {name}, whole step": 1e6 * statistics.median(starts[WARMUP:-2])}
    for timer in timed:
        median_s = statistics.median(timer.seconds.get(batch, 0.0) for batch in range(WARMUP, STEPS - 2))
        figures[f"{kind}: {name}, events of a step"] = 1e6 * median_s
    return figures


def make_data(kind: str) -> DataLoader[Any]:
    """Make random images of 32 × 32, or random tokens that are their own labels."""
    if kind.startswith(("BERT", "Llama")):
        ids = torch.randint(0, 1000, (STEPS * BATCH, 64))
        return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=BATCH)  # type: ignore[arg-type]
    images, labels = torch.randn(STEPS * BATCH, 3, 32, 32), torch.randint(0, 10, (STEPS * BATCH,))
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH)


def train(algorithms: list[Any], kind: str = "convolutions") -> list[float]:
    """Train for some steps; return the seconds from the start of each step to that of the next."""
    data, model = make_data(kind), MODELS[kind]()
    step_starts: dict[Any, float] = {}
    trainer: Any = None

    def note(module: Any, args: Any) -> None:
        # Count the first forward pass of a step, because SAM makes two.
        step_starts.setdefault(int(trainer.state.timestamp.batch), time.thread_time())

    model.register_forward_pre_hook(note)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            model=model,
            train_dataloader=data,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            algorithms=algorithms,
            max_duration=f"{STEPS}ba",
            device="cpu",
            precision="amp_bf16" if "bf16" in kind else "fp32",
            progress_bar=False,
        )
        trainer.fit()
        trainer.close()
    return [after - before for before, after in itertools.pairwise(step_starts.values())]


def run_whole_steps() -> dict[str, float]:
    """Measure plain training of each model and then the methods; leave out what the peer cannot run."""
    figures: dict[str, float] = {}
    plain: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in MODELS}
    for name, (kind, arguments) in (plain | WHOLE_STEPS).items():
        is_plain = name in MODELS
        if not is_plain and not hasattr(methods, name):
            continue
        try:
            figures |= measure_steps(kind, "plain" if is_plain else name, arguments)
        except Exception as error:
            if SYSTEM == "hocket":
                raise
            print(f"{SYSTEM} cannot run {name} on {kind}: {error}", file=sys.stderr)
    return figures


def run_events() -> dict[str, float]:
    """Measure the methods that act at events; leave out what the peer does not have."""
    return {
        f"{name}, {setting}": measure(name, arguments)
        for name, settings in SETTINGS.items()
        for setting, arguments in settings.items()
        if hasattr(methods, name.split(" ")[0])
    }


torch.set_num_threads(1)
found: dict[str, float] = {}
for part in PARTS:
    found |= {"events": run_events, "steps": run_whole_steps}[part]()
print(json.dumps(found))
