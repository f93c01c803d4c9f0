"""A model in stages trains as one process does, and what stages cannot do is refused by name."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from hocket.dist import ConfigError, ModelError
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.trainer import Algorithm, Callback, Trainer
from hocket.trainer.callbacks import GradNormMonitor
from hocket.trainer.errors import TrainerError
from support import layouts
from support.standing_ranks import StandingRanks

TOLERANCE = 1e-5
KINDS = ("gpt", "llama", "qwen3", "mistral", "untied gpt2")
SCHEDULES: dict[str, Any] = {
    "1F1B": 4,
    "GPipe": {"degree": 4, "schedule": "gpipe"},
    "split": {"degree": 4, "split": ["2", "3", "4"]},
}


@functools.cache
def _alone(kind: str, steps: int, size: int = 2) -> layouts.Numbers:
    return layouts.train(
        kind, None, 1, steps=steps, layers=5, callbacks=[], device_train_microbatch_size=size
    )


def _train(kind: str, pipeline: Any, steps: int, size: int = 2) -> layouts.Numbers:
    return layouts.train(
        kind,
        {"pp": pipeline},
        1,
        steps=steps,
        layers=5,
        callbacks=[],
        device_train_microbatch_size=size,
    )


def _check(found: list[layouts.Numbers], alone: layouts.Numbers, name: str) -> None:
    """Compare each rank's losses and norms, and the parameters of all stages together."""
    names = [key for one in found for key in one.trained]
    assert sorted(names) == sorted(alone.trained), "each parameter is on one stage, under its own name"
    trained = {key: value for one in found for key, value in one.trained.items()}
    trained = {key: trained[key] for key in alone.trained}
    for one in found:
        differences = one._replace(trained=trained).largest_differences(alone)
        assert max(differences.values()) <= TOLERANCE, (one.description, differences)
        assert one.losses == found[0].losses
        assert one.norms == found[0].norms
    print(f"{name} | {' | '.join(f'{value:.1e}' for value in differences.values())}")


@pytest.mark.parametrize(("kind", "name"), [("gpt", "1F1B"), ("llama", "GPipe")])
def test_stages_train_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks.run(_train, kind, SCHEDULES[name], 3), _alone(kind, 3), f"{kind} | {name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_trains_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks.run(_train, kind, SCHEDULES[name], 20), _alone(kind, 20), f"{kind} | {name}")


class LateNorm(GPT):
    """A model that registers its last norm before the blocks."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(context=layouts.LENGTH - 1, width=24, num_layers=5, num_heads=4))
        blocks, norm = self.blocks, self.norm
        del self.blocks, self.norm
        self.norm, self.blocks = norm, blocks
        self.head = self._modules.pop("head")


class Skip(GPT):
    """A model that adds the output of the first block to that of the last."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(context=layouts.LENGTH - 1, width=24, num_layers=5, num_heads=4))

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen)
        x = first = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        features: Tensor = self.norm(x + first)
        return features


class ScaledBetween(GPT):
    """A model that computes between its blocks."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(context=layouts.LENGTH - 1, width=24, num_layers=5, num_heads=4))

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen)
        for block in self.blocks:
            x = block(x) * 0.5
        features: Tensor = self.norm(x)
        return features


def routed() -> Any:
    """Return a mixture of experts whose loss has a term of all routers."""
    model = layouts.build("mixtral", 5)
    model.config.output_router_logits = True
    return model


class Listening(Callback):
    """A callback that is called with each microbatch."""

    def after_forward(self, state: Any, logger: Any) -> None:
        """Do nothing."""


class Averaging(Algorithm):
    """An algorithm that does nothing."""

    def match(self, event: Any, state: Any) -> bool:
        return False

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        """Do nothing."""


LOADER = DataLoader(layouts.samples("gpt", 1), batch_size=layouts.GLOBAL_BATCH)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "degrees": ({"config": {"pp": 3}}, "The nearest layout that does is `pp` 4"),
    "beside": ({"config": {"pp": 2, "tp": 2}}, "`pp` 2 and `tp`, which is not implemented beside `pp`"),
    "sharded": ({"config": {"pp": 4, "fsdp": {}}}, "`pp` 4 and `fsdp`, which is not implemented"),
    "schedule": (
        {"config": {"pp": {"degree": 4, "schedule": "2F2B"}}},
        "'2F2B', which is unknown. Use '1F1B'",
    ),
    "stages": ({"config": {"pp": {"degree": 4, "schedule": "ZBVZeroBubble"}}}, "gives a rank several stages"),
    "split": ({"config": {"pp": {"degree": 4, "split": ["2"]}}}, "names 1 blocks, which make 2 stages"),
    "no block": (
        {"config": {"pp": {"degree": 4, "split": ["2", "1", "3"]}}},
        "`1` is no block after the first one of the stage before. Name blocks from `blocks.1` to `blocks.4`",
    ),
    "few blocks": ({"kind": "gpt", "layers": 3}, "has 3 blocks in `blocks`, which 4 stages of `pp` cannot"),
    "tied": (
        {"kind": "gpt2", "layers": 5},
        "are one tied weight, and `pp` puts them into the stages 0 and 3",
    ),
    "tied llama": ({"kind": "tied llama", "layers": 5}, "Untie them (`tie_word_embeddings=False`"),
    "routers": ({"model": routed}, "`output_router_logits` of HuggingFaceModel is True"),
    "late norm": ({"model": LateNorm}, "after the blocks of `blocks`, and it is part of stage 0, expected 3"),
    "skip": ({"model": Skip}, "uses activations from between the blocks of `blocks` after them"),
    "between": ({"model": ScaledBetween}, "`blocks.1` does not get the output of the block before it"),
    "size": ({"device_train_microbatch_size": 3}, "`device_train_microbatch_size` 3 does not divide: all"),
    "few": ({"device_train_microbatch_size": 4}, "'1F1B' needs at least 4 microbatches. Set a smaller"),
    "auto": ({"device_train_microbatch_size": "auto"}, "`device_train_microbatch_size='auto'` does not work"),
    "evaluation": ({"eval_dataloader": LOADER}, "`eval_dataloader` does not work with `pp`"),
    "checkpoints": ({"save_folder": "never_made"}, "`save_folder` does not work with `pp`"),
    "algorithm": ({"algorithms": [Averaging()]}, "the algorithm `Averaging` does not work with `pp`"),
    "microbatches": ({"callbacks": [Listening()]}, "is called at `after_forward` with each microbatch, does"),
    "norms": ({"callbacks": [GradNormMonitor()]}, "`GradNormMonitor`, which reads the whole model, does not"),
    "fp16": ({"precision": "amp_fp16"}, "`pp` is 4 and `precision` is 'amp_fp16'"),
}


def _fit(given: dict[str, Any]) -> None:
    options = dict(given)
    kind, layers = options.pop("kind", "gpt"), options.pop("layers", 5)
    model = options.pop("model")() if "model" in options else layouts.build(kind, layers)
    defaults = {"device_train_microbatch_size": 2, "progress_bar": False, "device": "cpu", "seed": 7}
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples(kind, 1), batch_size=layouts.GLOBAL_BATCH),
        max_duration="1ba",
        parallelism_config=options.pop("config", {"pp": 4}),
        **{**defaults, **options},
    )
    with contextlib.closing(trainer):
        trainer.fit()


def _refuse() -> dict[str, str]:
    messages = {}
    for name, (given, _) in REFUSED.items():
        with pytest.raises((ConfigError, ModelError, TrainerError)) as caught:
            _fit(given)
        messages[name] = str(caught.value)
    return messages


def test_what_stages_cannot_do_is_refused_on_every_rank(four_ranks: StandingRanks) -> None:
    for messages in four_ranks.run(_refuse):
        for name, (_, words) in REFUSED.items():
            assert words in messages[name], name


def _use_whole_model(folder: str) -> list[str]:
    """Try what needs all stages, after a training."""
    messages = []
    trainer = Trainer(
        model=layouts.build("gpt", 5),
        train_dataloader=LOADER,
        max_duration="1ba",
        parallelism_config={"pp": {"degree": 4, "schedule": "GPipe"}},
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        trainer.fit()  # in one microbatch
        for use in (
            lambda: trainer.eval(eval_dataloader=LOADER),
            lambda: trainer.predict(LOADER),
            lambda: trainer.save_checkpoint(folder),
        ):
            with pytest.raises((ModelError, TrainerError)) as caught:
                use()
            messages.append(str(caught.value))
    return messages


def test_uses_of_the_whole_model_are_refused(four_ranks: StandingRanks, tmp_path: Path) -> None:
    for evaluation, prediction, saving in four_ranks.run(_use_whole_model, str(tmp_path / "saved")):
        assert "`blocks.0` runs outside of a training step, and `pp` has put the blocks" in evaluation
        assert "`blocks.0` runs outside of a training step" in prediction
        assert "checkpoints of a run with `pp` are not implemented" in saving
