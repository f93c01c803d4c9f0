"""A model built on the meta device gets values of the distribution that a build on a real device gives."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hocket.dist import ModelError, provide
from hocket.dist.layout.deferred_init import DeferredModel
from hocket.dist.layout.initializers import Twins, find_calls, needed, trace, units
from hocket.recipes.gpt import GPT
from support.standing_ranks import StandingRanks

IS_2_9 = torch.__version__ < "2.10"
Build = Callable[[], nn.Module]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().double()
        for name, value in named
    }


def _deferred(build: Build, config: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a model that is built on the meta device and laid out."""
    with torch.device("meta"):
        model = build()
    with provide({"auto_wrap": False, **(config or {})}, device="cpu", timeout_s=60) as parallelism:
        parallelism.lay_out(model)
        return _tensors(model)


def _differences(plain: dict[str, torch.Tensor], deferred: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yield the tensors whose mean or standard deviation differs by more than chance explains."""
    assert plain.keys() == deferred.keys()
    for name, expected in plain.items():
        found, num = deferred[name], expected.numel()
        if torch.equal(expected, found):
            continue
        if num < 2 or expected.std() == 0:
            yield f"{name}: {found.flatten()[:3].tolist()}, not {expected.flatten()[:3].tolist()}"
            continue
        # Both are samples of `num` values; 2% is the tolerance for large ones.
        ratio = float(found.std() / expected.std())
        error = abs(float(found.mean() - expected.mean())) / float(expected.std() * math.sqrt(2 / num))
        if abs(ratio - 1) > 0.02 + 4 / math.sqrt(num) or error > 4.5:
            yield f"{name}: standard deviation {ratio:.3f} times as large, mean off by {error:.1f} errors"


def _check(build: Build) -> None:
    torch.manual_seed(1)
    plain = _tensors(build())
    torch.manual_seed(2)
    assert list(_differences(plain, _deferred(build))) == []


class Scaled(nn.Module):
    """A block that sets and scales the layers below it, as residual branches are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)
        self.down = nn.Linear(64, 64)
        self.gate = nn.Parameter(torch.empty(64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.zeros_(self.up.bias)
        with torch.no_grad():
            self.down.weight.div_(8.0)  # keeps the layer's own draw
            self.down.bias.copy_(self.up.bias + 1)
            self.gate.fill_(0.5)


class Visited(nn.Module):
    """A model that visits its modules in the end, and whose first layer is set without in-place writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64, padding_idx=3)
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))
        self.mixed = nn.Linear(64, 64)
        self.head = nn.Linear(64, 50)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.3)
        elif module is self.head:
            nn.init.orthogonal_(module.weight)
        elif isinstance(module, Scaled):
            nn.init.uniform_(module.down.weight, -0.1, 0.3)
        elif isinstance(module, Visited):
            module.mixed.weight = nn.Parameter(torch.full((64, 64), 0.25))
            # transformers keeps `torch.linspace` from the meta device, for good where it is the first to ask.
            module.mixed.bias.data = torch.arange(64.0) / 63


class FromNumpy(nn.Module):
    """A module whose initialiser needs values of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.empty(64))
        if self.weight.is_meta:
            return
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight.detach().numpy()[:] = np.arange(64)
        self.layer.weight.detach().numpy()[:] *= 3


def _transformer() -> nn.Module:
    return nn.Transformer(64, 4, 1, 1, dim_feedforward=64, batch_first=True)


@pytest.mark.parametrize(
    "build",
    [Scaled, Visited, FromNumpy, _transformer, lambda: nn.MultiheadAttention(64, 4), lambda: nn.LSTM(64, 64)],
    ids=["scaled", "visited", "numpy", "transformer", "attention", "lstm"],
)
def test_parents_initialise_the_modules_below_them(one_rank: None, build: Build) -> None:
    _check(build)


def test_the_gpt_of_the_recipes_can_be_built_on_the_meta_device(one_rank: None) -> None:
    _check(GPT)


def _in_constructor(write: Callable[[nn.Linear], object]) -> Build:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)
            write(self.proj)

    return Net


class DataWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.shrink()

    def shrink(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(0, 0.01)


class SkippedOnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        nn.init.trunc_normal_(self.proj.weight, std=0.02)


class NanoGpt(nn.Module):
    """A model that sets its last layers after it visited all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(4, 4)
        self.c_proj = nn.Linear(4, 4)
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / 4)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_in_constructor(lambda layer: nn.init.normal_(layer.weight)), r"`proj\.weight` .* by 2 writes"),
        (DataWrites, r"`DataWrites` .* in `DataWrites\.shrink`"),
        # With torch 2.9 the constructor is not found for `trunc_normal_`.
        (SkippedOnMeta, r"`proj\.weight` .* by 6 writes" if IS_2_9 else r"in `SkippedOnMeta\.__init__`"),
        (NanoGpt, r"`c_proj\.weight` .* by 3 writes, .* repeat 2"),
    ],
    ids=["init", "data", "trunc_normal_", "after a visit"],
)
def test_values_that_a_constructor_sets_are_refused(one_rank: None, build: Build, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _deferred(build)

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 2.0)

    found = _deferred(build, {"param_init_fn": init})
    assert all(bool((value == 2).all()) for value in found.values())


def _both() -> tuple[list[str], bool]:
    torch.manual_seed(1)
    plain = _tensors(Visited())
    sharded = _deferred(Visited, {"auto_wrap": True})
    alone = _deferred(Visited, {"sharding_strategy": "NO_SHARD"})
    return [*_differences(plain, sharded)], all(
        torch.equal(alone[name], one) for name, one in sharded.items()
    )


def test_shards_have_the_values_of_the_whole_model(two_ranks: StandingRanks) -> None:
    for differences, is_equal in two_ranks.run(_both):
        assert differences == []
        assert is_equal


def test_only_tensors_that_are_set_together_are_in_memory_together() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Scaled() for _ in range(5)), nn.Linear(64, 64))
    twins = Twins(model)
    calls = find_calls(twins.modules, list(twins.slots), init_fn=None)
    assert all(trace(call, twins) for call in calls)
    groups = units(needed(calls, twins.slots))
    tensors = [{name for call in group for name in call.tensors} for group in groups]
    assert sorted(map(len, tensors)) == [2, 5, 5, 5, 5, 5]
    # The draws of `up` are overwritten by the block, so the layer's own initialiser does not run.
    assert "0.up" not in {call.module for group in groups for call in group}


SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
SIZES |= {"hidden_size": 128, "intermediate_size": 256}
IMAGES: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "vocab_size"}
IMAGES |= {"image_size": 32, "patch_size": 8}
SEQ2SEQ: dict[str, Any] = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 300}
SEQ2SEQ |= {"encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
SEQ2SEQ |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
WHISPER: dict[str, Any] = {"max_source_positions": 64, "max_target_positions": 64, "pad_token_id": 0}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("LMHeadModel", {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 300}),
    "T5": ("ForConditionalGeneration", {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, **SIZES}),
    "Bert": ("ForMaskedLM", SIZES),
    "Roberta": ("ForMaskedLM", SIZES),
    "Electra": ("ForMaskedLM", {**SIZES, "embedding_size": 128}),
    "DebertaV2": ("ForMaskedLM", SIZES),
    "DistilBert": ("ForMaskedLM", {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256}),
    "Llama": ("ForCausalLM", SIZES),
    "Mistral": ("ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "Mixtral": ("ForCausalLM", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}),
    "Qwen2": ("ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "Gemma2": ("ForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 32}),
    "Phi3": ("ForCausalLM", {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}),
    "OPT": ("ForCausalLM", {**SIZES, "ffn_dim": 256, "word_embed_proj_dim": 128}),
    "Bloom": ("ForCausalLM", {"hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 300}),
    "GPTNeoX": ("ForCausalLM", SIZES),
    "Falcon": ("ForCausalLM", SIZES),
    "Bart": ("ForConditionalGeneration", SEQ2SEQ),
    "Whisper": ("ForConditionalGeneration", {**SEQ2SEQ, **WHISPER}),
    "Mamba": ("ForCausalLM", {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 300}),
    "ViT": ("ForImageClassification", IMAGES),
    "Beit": ("ForImageClassification", {**IMAGES, "use_relative_position_bias": True}),
    "Swin": (
        "ForImageClassification",
        {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32},
    ),
    "CLIPVision": ("ModelWithProjection", {**IMAGES, "projection_dim": 128}),
    "ResNet": ("ForImageClassification", {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1]}),
}


def _family(name: str) -> Build:
    transformers = pytest.importorskip("transformers")
    head, sizes = FAMILIES[name]
    return lambda: getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**sizes))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_transformers(one_rank: None, name: str) -> None:
    _check(_family(name))


def test_a_value_that_only_the_constructor_of_clip_sets_is_named(one_rank: None) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"text_config": SIZES, "vision_config": IMAGES, "projection_dim": 128}

    def build() -> nn.Module:
        model: nn.Module = transformers.CLIPModel(transformers.CLIPConfig(**sizes))
        return model

    with torch.device("meta"):
        deferred = DeferredModel(build())
    deferred.allocate(torch.device("cpu"))
    with pytest.raises(ModelError, match=r"`logit_scale` .* left it without values"):
        deferred.initialize(1)
