"""The features of the table in packages/dist/docs/layouts.md, and how each shows that it acted."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hocket.algos import EMA, Float8, LoRA
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.recipes.mixture import MixtureConfig, MixtureGPT
from hocket.trainer import Callback, Trainer
from hocket.trainer.callbacks import Generate
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from support import layouts
from support.features import MICROBATCH, STEPS, Feature, Outcome
from support.live_bytes import LiveBytes


class _Passes:
    """Counts the forward passes of the first layer of attention of each block that record gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[str, int] = {}
        self.dtypes: set[torch.dtype] = set()
        for name, module in model.named_modules():
            if name.endswith((".qkv", ".q_proj")):
                module.register_forward_hook(
                    lambda _module, _args, output, name=name: self._see(name, output)
                )

    def _see(self, name: str, output: Tensor) -> None:
        self.dtypes.add(output.dtype)
        if torch.is_grad_enabled():
            self.counts[name] = self.counts.get(name, 0) + 1


class _Watched(Feature):
    """A feature that changes how often, or in which dtype, blocks run."""

    def build(self, kind: str) -> nn.Module:
        model = super().build(kind)
        self.passes = _Passes(model)
        return model


class Compiled(Feature):
    changes_numbers = False

    def options(self) -> dict[str, Any]:
        torch._dynamo.utils.counters.clear()
        return {"compile_config": {"backend": "eager"}}

    def facts(self, trainer: Trainer, memory: InMemoryLogger) -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        assert all(one.facts > 0 for one in found), "nothing was compiled"


class Checkpointed(_Watched):
    beside: ClassVar[dict[str, Any]] = {"fsdp": {"activation_checkpointing": True}}
    changes_numbers = False

    def facts(self, trainer: Trainer, memory: InMemoryLogger) -> dict[str, int]:
        return self.passes.counts

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        microbatches = STEPS * layouts.GLOBAL_BATCH // num_ranks // MICROBATCH
        counts = [count for one in found for count in one.facts.values()]
        assert counts
        assert set(counts) == {2 * microbatches}, f"each block computes its activations twice, not {counts}"


class CheckpointedByTransformers(Checkpointed):
    dense = "llama, checkpointed"
    mixture = "mixtral, checkpointed"
    beside: ClassVar[dict[str, Any]] = {}


class Rounded(Feature):
    """Float8 that is emulated, with 16 dividing the sizes of all layers."""

    needs = "torchao"

    def build(self, kind: str) -> nn.Module:
        torch.manual_seed(3)
        size = GPTConfig(context=layouts.LENGTH - 1, width=32, num_layers=2, num_heads=4)
        return GPT(size) if kind == "gpt" else MixtureGPT(MixtureConfig(gpt=size, num_experts=4))

    def options(self) -> dict[str, Any]:
        return {"algorithms": [Float8("rowwise_with_gw_hp", emulate=True)]}

    def facts(self, trainer: Trainer, memory: InMemoryLogger) -> list[str]:
        modules = trainer.state.model.named_modules()
        return [name for name, one in modules if type(one).__name__ == "Float8Linear"]

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        assert alone.facts
        assert all(one.facts == alone.facts for one in found)


class Adapted(Feature):
    needs = "peft"

    def options(self) -> dict[str, Any]:
        return {"algorithms": [LoRA(r=4)]}

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        for one in (*found, alone):
            initial, trained = one.numbers.initial, one.numbers.trained
            moved = {name for name, value in trained.items() if not torch.equal(value, initial[name])}
            assert moved == {name for name in trained if ".lora_" in name}


class Averaged(Feature):
    def options(self) -> dict[str, Any]:
        self._ema = EMA(half_life="2ba")
        return {"algorithms": [self._ema]}

    def facts(self, trainer: Trainer, memory: InMemoryLogger) -> dict[str, Tensor]:
        averages = self._ema.averaged_weights()
        return {
            name: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone()
            for name, one in averages.items()
        }

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        initial = alone.numbers.initial
        change = _flat({name: alone.facts[name] - value for name, value in initial.items()})
        for one in found:
            assert one.facts.keys() == alone.facts.keys()
            # Buffers may be of one rank, as the positions are that its experts have got.
            gaps = _flat({name: one.facts[name] - alone.facts[name] for name in initial})
            assert gaps.norm() <= self.bounds["update"] * change.norm()
            trained = _flat({name: value - initial[name] for name, value in one.numbers.trained.items()})
            assert change.norm() < 0.9 * trained.norm(), "an average lags behind"


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([one.double().flatten() for one in tensors.values()])


class Clipped(Feature):
    def options(self) -> dict[str, Any]:
        self._norms: list[float] = []
        feature = self

        class Watcher(Callback):
            reads_outputs = False
            measures_update = True

            def after_train_batch(self, state: Any, logger: Any) -> None:
                feature._norms.append(_norm(state.model, state.parallelism))

        return {"gradient_clipping": 0.1, "callbacks": [Watcher()]}

    def facts(self, trainer: Trainer, memory: InMemoryLogger) -> list[float]:
        return self._norms

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        for one in (*found, alone):
            assert all(norm > 0.1 for norm in one.numbers.norms)
            assert one.facts == pytest.approx([0.1] * STEPS, rel=1e-4)


def _norm(model: nn.Module, parallelism: Any) -> float:
    """Return the norm of the gradients of all stages. Collective."""
    whole = [
        one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad for one in model.parameters()
    ]
    square = torch.stack([one.double().square().sum() for one in whole]).sum()
    if hasattr(parallelism, "run_pipeline"):
        dist.all_reduce(square)
    return float(square.sqrt())


class Generated(Feature):
    dense = "llama"
    mixture = "mixtral"
    generate: ClassVar[dict[str, Any]] = {}

    def build(self, kind: str) -> nn.Module:
        model: Any = super().build(kind)  # skips the test where transformers is not installed
        import tokenizers
        import transformers

        words = {"[pad]": 0, "[end]": 1, **{f"w{index}": index for index in range(2, layouts.VOCABULARY)}}
        inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[pad]"))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        model.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="[pad]", eos_token="[end]"
        )
        return model  # type: ignore[no-any-return]

    def options(self) -> dict[str, Any]:
        prompts = ["w2 w3 w4", "w9 w30"]
        return {"callbacks": [Generate(prompts, "1ba", max_new_tokens=4, do_sample=False, **self.generate)]}

    def facts(self, trainer: Trainer, memory: InMemoryLogger) -> list[Any]:
        if trainer.state.parallelism.global_rank:
            return []  # rank 0 logs
        return [rows for _, _, rows in memory.tables["generations"]]

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        assert len(alone.facts) == STEPS
        assert all(text for rows in alone.facts for _, text in rows)
        assert found[0].facts == alone.facts


class GeneratedWithoutCache(Generated):
    generate: ClassVar[dict[str, Any]] = {"use_cache": False}


class Evaluated(Feature):
    def options(self) -> dict[str, Any]:
        # A short last batch, which evaluation takes.
        data = DataLoader(layouts.samples("gpt", 1)[:7], batch_size=2)
        return {"eval_dataloader": data, "eval_interval": "1ba"}

    def facts(self, trainer: Trainer, memory: InMemoryLogger) -> dict[str, list[float]]:
        return {
            name: [float(value) for _, value in values]
            for name, values in memory.data.items()
            if name.startswith("metrics/eval/")
        }

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        assert alone.facts
        for one in found:
            assert one.facts.keys() == alone.facts.keys()
            for name, values in alone.facts.items():
                assert len(set(values)) == STEPS, "each evaluation is of other weights"
                assert one.facts[name] == pytest.approx(values, rel=1e-5)


class LiveMeter:
    """A meter of the bytes of live tensors on a CPU."""

    def __init__(self, limit: int) -> None:
        self.limit, self.peaks = limit, list[int]()
        self._live: LiveBytes | None = None

    def start(self) -> None:
        self._live = LiveBytes()
        self._live.__enter__()

    def peak_bytes(self) -> int:
        assert self._live is not None
        self._live.__exit__(None, None, None)
        self.peaks.append(self._live.peak)
        return self.peaks[-1]

    def limit_bytes(self) -> int:
        return self.limit


class Searched(Feature):
    """A search with room for all samples, and then with half of the room between one sample and all."""

    num_rounds = 2

    def __init__(self) -> None:
        self._meters: list[LiveMeter] = []
        self._found: list[int] = []

    def options(self) -> dict[str, Any]:
        peaks = self._meters[0].peaks if self._meters else [10**9]
        self._meters.append(LiveMeter(limit=(peaks[0] + peaks[-1]) // 2))
        return {"device_train_microbatch_size": MicrobatchSearch(meter=self._meters[-1], headroom=0.0)}

    def facts(self, trainer: Trainer, memory: InMemoryLogger) -> list[int]:
        (size,) = {int(value) for _, value in memory.data["trainer/device_train_microbatch_size"]}
        self._found.append(size)
        return self._found

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        for one, samples in [(alone, layouts.GLOBAL_BATCH)] + [
            (rank, layouts.GLOBAL_BATCH // num_ranks) for rank in found
        ]:
            first, second = one.facts
            assert first == samples
            assert 1 <= second < samples
        assert found[0].facts == found[1].facts


class InFloat32(_Watched):
    precision = "fp32"
    dtype = torch.float32

    def options(self) -> dict[str, Any]:
        return {"precision": self.precision}

    def facts(self, trainer: Trainer, memory: InMemoryLogger) -> set[torch.dtype]:
        return self.passes.dtypes

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        assert all(one.facts == {self.dtype} for one in (*found, alone)), "blocks compute in the precision"


class InBfloat16(InFloat32):
    precision = "amp_bf16"
    dtype = torch.bfloat16
    bounds: ClassVar[dict[str, float]] = {"loss": 2e-3, "norm": 0.05, "update": 0.05}
    # A rounding may give a position to another expert.
    bounds_of_mixture: ClassVar[dict[str, float]] = {"loss": 2e-3, "norm": 0.05, "update": 0.15}


class InFloat16(InFloat32):
    precision = "amp_fp16"
    dtype = torch.float16
    bounds: ClassVar[dict[str, float]] = {"loss": 1e-4, "norm": 1e-3, "update": 0.01}


class InFloat8(InFloat32):
    precision = "amp_fp8"


FEATURES: dict[str, type[Feature]] = {
    "`compile_config`": Compiled,
    "`activation_checkpointing` of `fsdp`": Checkpointed,
    "`gradient_checkpointing_enable()`": CheckpointedByTransformers,
    "`Float8`": Rounded,
    "`LoRA`": Adapted,
    "`EMA`": Averaged,
    "`gradient_clipping`": Clipped,
    "`Generate`": Generated,
    "`Generate(use_cache=False)`": GeneratedWithoutCache,
    "`eval_dataloader`": Evaluated,
    '`device_train_microbatch_size="auto"`': Searched,
    '`precision="fp32"`': InFloat32,
    '`precision="amp_bf16"`': InBfloat16,
    '`precision="amp_fp16"`': InFloat16,
    '`precision="amp_fp8"`': InFloat8,
}
"""Each row of the table in docs/layouts.md."""
