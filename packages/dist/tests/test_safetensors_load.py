"""A model on the meta device loads from any checkpoint format, without a whole copy on any rank."""

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from platform import libc_ver
from typing import Self

import pytest
import torch
from torch import nn

from hocket.dist import provide
from hocket.trainer import Trainer
from hocket.trainer.models import HuggingFaceModel
from support.live_bytes import LiveBytes
from support.standing_ranks import StandingRanks

ROWS, WIDTH, LAYERS, FILES = 40_000, 512, 16, 3
WHOLE = ROWS * WIDTH * 4  # 82 MB in float32


class Wide(nn.Module):
    """A model without a forward pass, for loading only."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, rows // LAYERS, bias=False) for _ in range(LAYERS))


def _trainer(model: nn.Module, **arguments: object) -> Trainer:
    return Trainer(
        model=model, loss_fn=nn.functional.mse_loss, device="cpu", progress_bar=False, seed=0, **arguments
    )


def _save_files(model: nn.Module, folder: Path, stem: str, suffix: str, save: Callable[..., object]) -> Path:
    """Write the model as several files with an index, as in a Hugging Face folder."""
    folder.mkdir()
    state = dict(model.state_dict())
    weight_map = {}
    for index in range(FILES):
        part = dict(list(state.items())[index::FILES])
        name = f"{stem}-{index + 1:05}-of-{FILES:05}{suffix}"
        save(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _save(rows: int, folder: Path) -> dict[str, str]:
    """Save one model in each format; return the paths by format."""
    safetensors = pytest.importorskip("safetensors.torch")
    folder.mkdir()
    torch.manual_seed(rows)
    model = Wide(rows)
    with _trainer(model) as trainer:
        trainer.save_checkpoint(str(folder / "hocket"), weights_only=True)
    torch.save(model.state_dict(), folder / "whole.pt")
    _save_files(model, folder / "safetensors", "model", ".safetensors", safetensors.save_file)
    _save_files(model, folder / "bin", "pytorch_model", ".bin", torch.save)
    return {
        "initial_weights": str(folder / "safetensors"),
        "load_path, Hocket": str(folder / "hocket"),
        "load_path, safetensors": str(folder / "safetensors"),
        "load_path, bin": str(folder / "bin"),
        "load_path, one file": str(folder / "whole.pt"),
    }


def _load_folder_of_transformers(folder: str) -> list[bool]:
    """Load a folder in both ways; return whether all values equal those of `from_pretrained`."""
    transformers = pytest.importorskip("transformers")
    expected = dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    config = transformers.AutoConfig.from_pretrained(folder)
    same = []
    for arguments in (
        {"fsdp_config": {"initial_weights": folder}},
        {"fsdp_config": {}, "load_path": folder},
    ):
        with torch.device("meta"):
            model = HuggingFaceModel(transformers.AutoModelForCausalLM.from_config(config))
        with Trainer(model=model, device="cpu", progress_bar=False, **arguments) as trainer:
            whole = {name: value.full_tensor() for name, value in model.model.named_parameters()}
            tokens = torch.arange(6).reshape(2, 3)
            loss = trainer.state.module({"input_ids": tokens, "labels": tokens})["loss"]
            same.append(bool(loss.isfinite()) and all(map(torch.equal, whole.values(), expected.values())))
        assert whole.keys() == expected.keys()
    return same


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_transformers_folder_loads_into_its_model(one_rank: None, tmp_path: Path, kind: str) -> None:
    """The trainer's wrapper prefixes names with `model.`; GPT-2's head is tied and not stored."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11, n_positions=8)
    else:
        config = transformers.LlamaConfig(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=11,
            max_position_embeddings=8,
        )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert _load_folder_of_transformers(str(tmp_path)) == [True, True]


def _load(kind: str, path: str, rows: int) -> Wide:
    with torch.device("meta"):
        model = Wide(rows)
    if kind == "initial_weights":
        with provide({"initial_weights": path}, device="cpu", timeout_s=60) as parallelism:
            parallelism.lay_out(model)
    else:
        _trainer(model, fsdp_config={}, load_path=path, load_weights_only=True).close()
    return model


class _ResidentGrowth:
    """Measures the growth of resident memory to its peak within a block, in multiples of the model.

    Large blocks get mappings of their own, which return to the system as soon as they are freed, so that the
    peak is the memory in use and excludes memory that the allocator would keep.
    """

    def __enter__(self) -> Self:
        libc = ctypes.CDLL(None)
        m_mmap_threshold = -3
        assert libc.mallopt(m_mmap_threshold, 1 << 16) == 1
        gc.collect()
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.ratio = (_status("VmHWM") - self._before) / WHOLE


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _peaks(small: dict[str, str], large: dict[str, str]) -> dict[str, tuple[float, float]]:
    """Return the growth of resident memory in each load, and a sum of the loaded values."""
    found = {}
    for kind in large:
        _load(kind, small[kind], 10 * LAYERS)  # leaves imports and caches out of the measurement
        model = None
        with _ResidentGrowth() as grown:
            model = _load(kind, large[kind], ROWS)
        found[kind] = grown.ratio, sum(value.to_local().double().sum().item() for value in model.parameters())
    return found


needs_resident_peak = pytest.mark.skipif(
    sys.platform != "linux" or not os.access("/proc/self/clear_refs", os.W_OK) or libc_ver()[0] != "glibc",
    reason="needs /proc/self/clear_refs and the allocator of glibc",
)


@needs_resident_peak
def test_no_rank_holds_a_whole_copy_while_loading(four_ranks: StandingRanks, tmp_path: Path) -> None:
    small, large = _save(10 * LAYERS, tmp_path / "small"), _save(ROWS, tmp_path / "large")
    torch.manual_seed(ROWS)
    expected = sum(value.double().sum().item() for value in Wide(ROWS).parameters())
    results = four_ranks.run(_peaks, small, large, timeout_s=120)
    print(json.dumps({kind: [round(found[kind][0], 3) for found in results] for kind in large}, indent=1))
    for kind in large:
        assert sum(found[kind][1] for found in results) == pytest.approx(expected, rel=1e-6), kind
        for found in results:
            # A quarter in shards, at most one of three files mapped, and buffers of fixed size.
            # With a whole copy besides its shards, a rank would hold 1.25.
            assert found[kind][0] < 0.75, kind


def _send_values_of_rank_0() -> tuple[float, float, float]:
    """Return the peak bytes of live tensors, the growth during sharding, and a sum of the values."""
    for rows in (10 * LAYERS, ROWS):  # the first pass makes torch load what it needs
        model = None
        with LiveBytes() as meter:
            with torch.device("cpu" if os.environ["RANK"] == "0" else "meta"):
                torch.manual_seed(ROWS)
                model = Wide(rows)
            with (
                _ResidentGrowth() as grown,
                provide({}, device="cpu", timeout_s=60) as parallelism,
            ):
                parallelism.lay_out(model)
    total = sum(value.to_local().double().sum().item() for value in model.parameters())
    return meter.peak / WHOLE, grown.ratio, total


@needs_resident_peak
def test_values_of_rank_0_are_sent_one_tensor_at_a_time(four_ranks: StandingRanks) -> None:
    """Rank 0 starts with the whole model; each sent tensor is replaced by its shard."""
    torch.manual_seed(ROWS)
    expected = sum(value.double().sum().item() for value in Wide(ROWS).parameters())
    results = four_ranks.run(_send_values_of_rank_0, timeout_s=120)
    print([(round(alive, 4), round(grown, 3)) for alive, grown, _ in results])
    assert sum(total for *_, total in results) == pytest.approx(expected, rel=1e-6)
    one_tensor = 1 / LAYERS
    (of_rank_0, *others) = (alive for alive, _, _ in results)
    # Making all shards before freeing tensors would add a quarter, and a second copy a whole model.
    assert 1 <= of_rank_0 <= 1 + one_tensor
    assert max(others) <= 1 / 4 + 2 * one_tensor
    for _, grown, _ in results:
        assert grown < 0.5
