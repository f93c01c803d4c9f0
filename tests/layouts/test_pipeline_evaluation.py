"""A model in stages evaluates, predicts and generates as one process does, or refuses by name."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hocket.dist import ModelError
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.trainer import Trainer
from hocket.trainer.loggers import InMemoryLogger
from support import layouts
from support.stages import Five
from support.standing_ranks import StandingRanks

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="gloo ends the process in a pipeline of torch 2.9"
)

STAGES = {"pp": {"degree": 4, "schedule": "GPipe"}}
SHARDS = {"pp": {"degree": 2, "schedule": "GPipe"}, "dp_shard": 2}
LOOPED = {"pp": {"degree": 2, "schedule": "Interleaved1F1B"}, "dp_shard": 2}
TURNED = {"pp": {"degree": 2, "schedule": "ZBVZeroBubble"}, "dp_replicate": 2}
"""The first rank of a pipeline has the first and the last of four stages."""
MATRICES = {"pp": {"degree": 2, "schedule": "GPipe"}, "tp": {"degree": 2, "sequence_parallel": True}}
LOGITS = {"pp": {"degree": 2, "schedule": "Interleaved1F1B"}, "tp": {"degree": 2, "loss_parallel": True}}
SEQUENCES = {"pp": {"degree": 2, "schedule": "Interleaved1F1B"}, "cp": 2}
LAYOUTS = {
    "stages": STAGES,
    "shards": SHARDS,
    "looped": LOOPED,
    "turned": TURNED,
    "matrices": MATRICES,
    "logits": LOGITS,
    "sequences": SEQUENCES,
}
OF_ONE = (None, STAGES, MATRICES, LOGITS, SEQUENCES)
"""The layouts in which all ranks have the same samples."""


class Results(NamedTuple):
    """What a trained model gives."""

    metrics: dict[str, list[float]]
    predicted: list[Any]
    called: Any
    trained: dict[str, Tensor]


class LastHead(GPT):
    """A model whose loss applies the head, so that no logits leave the last stage."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(context=layouts.LENGTH - 1, width=24, num_layers=5, num_heads=4))

    def forward(self, batch: Any) -> Tensor:
        return self.encode(batch["tokens"][:, :-1].long())

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().loss(self.head(outputs), batch)


def _model(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return LastHead() if kind == "last head" else layouts.build(kind, 5)


def _samples(kind: str, steps: int) -> Any:
    return layouts.samples("gpt" if kind == "last head" else kind, steps)


def _loader(kind: str, steps: int, num_ranks: int = 1) -> Any:
    return DataLoader(_samples(kind, steps), batch_size=layouts.GLOBAL_BATCH // num_ranks)


def _trainer(kind: str, config: Any, **options: Any) -> Trainer:
    model = _model(kind)
    num_ranks = 1 if config in OF_ONE else 2
    return Trainer(
        model=model,
        train_dataloader=_loader(kind, 2, num_ranks),
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4),
        max_duration="2ba",
        device_train_microbatch_size=2,
        parallelism_config=config,
        progress_bar=False,
        device="cpu",
        seed=7,
        **options,
    )


def _use(kind: str, config: Any) -> Results:
    """Train with an evaluation after each batch, and use the model. Collective with several ranks."""
    memory = InMemoryLogger()
    # A short last batch, which evaluation takes.
    data = DataLoader(_samples(kind, 1)[:7], batch_size=4)
    trainer = _trainer(kind, config, eval_dataloader=data, eval_interval="1ba", loggers=[memory])
    with contextlib.closing(trainer):
        trainer.fit()
        trained = layouts.whole(trainer.state.model)
        metrics = {
            name: [float(value) for _, value in values]
            for name, values in memory.data.items()
            if name.startswith("metrics/eval/")
        }
        outputs = trainer.predict(data) if config in OF_ONE else []  # of this rank's samples
        predicted = [_numbers(one) for one in outputs]
        batch = next(iter(data))
        modules = trainer.state.model
        with torch.inference_mode():
            called = _numbers(modules(batch))
        return Results(metrics, predicted, called, trained)


def _numbers(outputs: Any) -> Any:
    """Return outputs without the cache of transformers, which is empty in stages."""
    return outputs if isinstance(outputs, Tensor) else [outputs.loss, outputs.logits]


def _train_alone(kind: str, config: Any) -> dict[str, Tensor]:
    with contextlib.closing(trainer := _trainer(kind, config)):
        trainer.fit()
        return layouts.whole(trainer.state.model)


def _use_stages(kind: str, layout: str) -> tuple[Results, dict[str, Tensor]]:
    config = LAYOUTS[layout]
    return _use(kind, config), _train_alone(kind, config)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("llama", "stages", marks=pytest.mark.slow(one_run_in=4)),
        pytest.param("gpt", "stages", marks=pytest.mark.slow(one_run_in=4)),
        pytest.param("last head", "stages", marks=pytest.mark.slow(one_run_in=4)),
        pytest.param("llama", "shards", marks=pytest.mark.slow(one_run_in=4)),
        pytest.param("llama", "looped", marks=pytest.mark.slow(one_run_in=4)),
        pytest.param("gpt", "turned", marks=pytest.mark.slow(one_run_in=4)),
        ("gpt", "sequences"),
        pytest.param("llama", "matrices", marks=pytest.mark.slow(one_run_in=4)),
        pytest.param("gpt", "logits", marks=pytest.mark.slow(one_run_in=4)),
        pytest.param("llama", "sequences", marks=pytest.mark.slow(one_run_in=4)),
    ],
)
def test_stages_evaluate_as_one_process(four_ranks: StandingRanks, kind: str, layout: str) -> None:
    alone = _use(kind, None)
    assert alone.metrics
    assert all(len(values) == 2 for values in alone.metrics.values())
    for found, without_evaluation in four_ranks.run(_use_stages, kind, layout):
        assert found.metrics.keys() == alone.metrics.keys()
        for name, values in alone.metrics.items():
            assert found.metrics[name] == pytest.approx(values, rel=1e-5)
        torch.testing.assert_close(found.called, alone.called, rtol=1e-4, atol=1e-5)
        if LAYOUTS[layout] in OF_ONE:
            torch.testing.assert_close(found.predicted, alone.predicted, rtol=1e-4, atol=1e-5)
        assert found.trained.keys() == without_evaluation.keys()
        for name, value in without_evaluation.items():
            assert torch.equal(found.trained[name], value), name


def _generate(config: Any) -> tuple[list[list[int]], list[str]]:
    """Return the tokens that a new model generates, and the messages of uses that stages refuse."""
    with contextlib.closing(_trainer("llama", config)) as trainer:
        model: Any = trainer.state.model
        prompt = torch.arange(6).reshape(2, 3)
        options = {"max_new_tokens": 4, "do_sample": False, "use_cache": False}
        tokens = model.generate(prompt, **options).tolist()
        messages = [] if config is None else [_refused(model, use) for use in REFUSED]
        return tokens, messages


def _refused(model: Any, use: str) -> str:
    grad = torch.set_grad_enabled(use == "gradients")
    with grad, pytest.raises(ModelError) as caught:
        _misuse(model, use)
    return str(caught.value)


def _misuse(model: Any, use: str) -> None:
    prompt = torch.arange(6).reshape(2, 3)
    if use == "cache":
        model.generate(prompt, max_new_tokens=2, do_sample=False)
    elif use == "block":
        model.model.model.layers[0](torch.zeros(2, 3, 24))
    elif use == "attentions":
        model.model.set_attn_implementation("eager")
        model.model(prompt, output_attentions=True)
    elif use == "hidden states":
        model.model(prompt, output_hidden_states=True)
    else:
        model({"input_ids": prompt})


REFUSED = {
    "cache": "is called with a cache of keys (`past_key_values`), which `pp` does not keep",
    "block": "`model.model.layers.0` runs outside of a training step, without a call of HuggingFaceModel",
    "gradients": "`model.model.layers.0` runs outside of a training step, with gradients, and `pp` has put",
    "hidden states": "uses activations from between the blocks of `model.model.layers` after them",
    "attentions": "have more than the last stage of `pp` computes, such as attention weights",
}


def test_stages_generate_without_a_cache_and_refuse_what_they_cannot(four_ranks: StandingRanks) -> None:
    expected, _ = _generate(None)
    for tokens, messages in four_ranks.run(_generate, STAGES):
        assert tokens == expected
        for message, words in zip(messages, REFUSED.values(), strict=True):
            assert words in message


class Widening(nn.Module):
    """A block that leaves the dtype of its input in evaluation."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return self.block(x) if self.training else self.block(x).double()


class CountedOutputs(GPT):
    """A model whose outputs depend in shape on their values."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(context=layouts.LENGTH - 1, width=24, num_layers=5, num_heads=4))

    def forward(self, batch: Any) -> Any:
        logits = super().forward(batch)
        return logits if self.training else logits[logits > 0]


def _evaluate_odd_models() -> list[str]:
    widening: Any = layouts.build("gpt", 5)
    widening.blocks = nn.ModuleList(map(Widening, widening.blocks))
    messages = []
    for model in (widening, CountedOutputs()):
        trainer = Trainer(model=model, parallelism_config=STAGES, progress_bar=False, device="cpu", seed=7)
        with contextlib.closing(trainer), pytest.raises(ModelError) as caught:
            trainer.predict(_loader("gpt", 1))
        messages.append(str(caught.value))
    return messages


def _predict_uneven() -> str:
    """Predict from sequences that two ranks share, and from shorter ones, which they cannot share evenly."""
    tokens = torch.stack([one["tokens"] for one in layouts.samples("gpt", 1)])
    even = tokens.shape[1] - (tokens.shape[1] - 1) % 2
    batches = [{"tokens": tokens[:, :even]}, {"tokens": tokens[:, : even - 1]}]
    model = layouts.build("gpt", 5)
    trainer = Trainer(model=model, parallelism_config=SEQUENCES, progress_bar=False, device="cpu", seed=7)
    with contextlib.closing(trainer):
        assert len(trainer.predict(batches[:1])) == 1
        with pytest.raises(ModelError) as caught:
            trainer.predict(batches)
        return str(caught.value)


def test_sequences_that_a_later_pass_cannot_share_are_refused_on_all(four_ranks: StandingRanks) -> None:
    for message in four_ranks.run(_predict_uneven):
        assert (
            "expected (batch, sequence, features) with a sequence that 2 ranks of `cp` can share" in message
        )


class Failing(Five):
    """A model that fails on the second rank before anything is sent."""

    def encode(self, seen: Tensor) -> Tensor:
        features = super().encode(seen)
        if dist.get_rank() == 1:
            raise ValueError("odd features")
        return features


def _fail_on_one() -> list[tuple[str, str]]:
    """Train and predict; return the type and message of each error."""
    found = []
    for is_training in (True, False):
        trainer = Trainer(
            model=Failing(),
            train_dataloader=_loader("gpt", 1),
            max_duration="1ba",
            device_train_microbatch_size=2,
            parallelism_config={"pp": 2},
            progress_bar=False,
            device="cpu",
            seed=7,
        )
        with contextlib.closing(trainer), pytest.raises((ModelError, ValueError)) as caught:
            trainer.fit() if is_training else trainer.predict(_loader("gpt", 1))
        found.append((type(caught.value).__name__, str(caught.value)))
    return found


def test_an_error_of_one_rank_in_the_first_pass_is_told_to_the_others(two_ranks: StandingRanks) -> None:
    first, second = two_ranks.run(_fail_on_one, timeout_s=60)
    assert first == [("ModelError", "rank 1 of `pp`: ValueError: odd features")] * 2
    assert second == [("ValueError", "odd features")] * 2


def test_an_odd_pass_of_one_stage_is_refused_on_all(four_ranks: StandingRanks) -> None:
    for widening, counted in four_ranks.run(_evaluate_odd_models):
        assert "rank 0 of `pp`: `blocks.0` returns a tensor of (8, 8, 24) and torch.float64" in widening
        assert "their shapes depend on their values" in counted
