"""Callbacks that load checkpoints, export models and generate text."""

from __future__ import annotations

import sys

import pytest
import torch

from hocket.trainer import Callback
from hocket.trainer.callbacks import ExportForInferenceCallback, Generate, LoadCheckpoint
from hocket.trainer.errors import MissingExtraError, ResumeError, TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.models.export import export_for_inference
from support.training import Net, data, loader, make, parameters


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.9's own load
def test_an_exported_model_runs_without_its_source(tmp_path):
    export = ExportForInferenceCallback(save_path=tmp_path / "{run_name}.pt2")
    with make(model=Net(dropout=0.5), callbacks=export, max_duration="1ep", run_name="one") as trainer:
        trainer.fit()
        assert trainer.state.model.training
        again = trainer.export_for_inference(tmp_path / "again.pt2")
        assert torch.export.load(again).module()([torch.zeros(3, 5), torch.zeros(3)]).shape == (3, 3)
        program = torch.export.load(tmp_path / "one.pt2").module()
        model = trainer.state.model.eval()
        batch = list(data(7)[:])
        torch.testing.assert_close(program(batch), model(batch))


def test_invalid_exports_raise_before_the_training(monkeypatch, tmp_path):
    for save_format, message in (
        ("torchscript", "superseded"),
        ("pickle", "expected `torch_export` or `onnx`"),
    ):
        with pytest.raises(TrainerConfigError, match=message):
            ExportForInferenceCallback(save_format, tmp_path / "x")
        with pytest.raises(TrainerConfigError, match=message):
            export_for_inference(Net(), tmp_path / "x", sample_input=data(2)[:], save_format=save_format)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match="onnx"):
        ExportForInferenceCallback("onnx", tmp_path / "x")


def test_a_checkpoint_is_loaded_at_an_event(tmp_path):
    pytest.importorskip("hocket.ckpt.torch")
    with make(max_duration="1ep", save_folder=tmp_path / "c") as trainer:
        trainer.fit()
    trained = parameters(trainer)
    path = f"{tmp_path}/c/ep1-ba5"

    def load(**options):
        model = Net(seed=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        callback = LoadCheckpoint(path, **options)
        with make(model=model, optimizers=optimizer, callbacks=callback) as fresh:
            return parameters(fresh), before, optimizer, fresh.state.timestamp.counts.batch

    loaded, _, optimizer, batch = load()
    assert all(torch.equal(loaded[name], trained[name]) for name in trained)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == 4
    assert batch == 0
    loaded, before, optimizer, _ = load(
        load_weights_only=True, ignore_keys=["model/layers.3.*"], event="after_load"
    )
    assert torch.equal(loaded["layers.0.weight"], trained["layers.0.weight"])
    assert torch.equal(loaded["layers.3.weight"], before["layers.3.weight"])
    assert len(optimizer.state) == 0
    with pytest.raises(TrainerConfigError, match="expected one of `BEFORE_LOAD`"):
        LoadCheckpoint(path, event="batch_end")

    path = f"{tmp_path}/c/latest"
    loaded, _, optimizer, _ = load()
    assert all(torch.equal(loaded[name], trained[name]) for name in trained)
    assert len(optimizer.state) == 4
    # A checkpoint of another program has only the model.
    path = str(tmp_path / "weights.pt")
    torch.save({"model_state_dict": trained}, path)
    loaded, _, optimizer, _ = load()
    assert all(torch.equal(loaded[name], trained[name]) for name in trained)
    assert len(optimizer.state) == 0
    path = str(tmp_path / "latest")
    with pytest.raises(ResumeError, match="has no committed checkpoint"):
        load()


def test_a_language_model_generates_at_intervals():
    transformers = pytest.importorskip("transformers", reason="needs `uv sync --group transformers`")
    tokenizers = pytest.importorskip("tokenizers")
    from hocket.trainer.models import HuggingFaceModel

    words = {"[pad]": 0, "[end]": 1, **{f"w{index}": index for index in range(2, 32)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[pad]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[pad]", eos_token="[end]"
    )
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )

    class Frozen(Callback):
        def epoch_start(self, state, logger):
            frozen = state.model.model.transformer.h[0].attn.attn_dropout
            assert frozen.training == (state.counts.epoch == 0)
            frozen.eval()

    def run(*callbacks):
        torch.manual_seed(0)
        model = HuggingFaceModel(transformers.GPT2LMHeadModel(config), tokenizer)
        ids = (torch.arange(8) + torch.arange(2, 14)[:, None]) % 32
        batches = [{"input_ids": rows, "labels": rows} for rows in ids.split(4)]
        memory = InMemoryLogger()
        trainer = make(
            model=model,
            train_dataloader=batches,
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            callbacks=list(callbacks),
            loggers=memory,
            max_duration="2ep",
        )
        with trainer:
            trainer.fit()
        return trainer, memory

    sampled = Generate(["w2 w3", "w4"], "1ep", batch_size=1, max_new_tokens=3, do_sample=True)
    trainer, memory = run(sampled, Frozen())
    first, second = memory.tables["generations"]
    assert (first[0], second[0]) == (3, 6)
    assert second[1] == ["prompt", "generation"]
    assert [row[0] for row in second[2]] == ["w2 w3", "w4"]
    assert all(len(row[1].split()) <= 3 for row in second[2])
    plain, _ = run(Frozen())
    same = zip(parameters(trainer).values(), parameters(plain).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in same)
    assert trainer.state.model.training


def test_a_model_that_cannot_generate_raises():
    with (
        pytest.raises(TrainerConfigError, match="`Net` lacks them"),
        make(callbacks=Generate(["x"]), max_duration="1ba", train_dataloader=loader()) as trainer,
    ):
        trainer.fit()
    with pytest.raises(TrainerConfigError, match="expected a list"):
        Generate("one text")
    with pytest.raises(TrainerConfigError, match="`batch_size` is 0; expected a whole number from 1 on"):
        Generate(["x"], batch_size=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_is_exported_to_onnx(tmp_path):
    pytest.importorskip("onnxscript", reason="needs `uv sync --group onnx`")
    reference = pytest.importorskip("onnx.reference", reason="needs `uv sync --group onnx`")
    export = ExportForInferenceCallback("onnx", tmp_path / "model.onnx")
    with make(callbacks=export, max_duration="1ep") as trainer:
        trainer.fit()
        session = reference.ReferenceEvaluator(str(tmp_path / "model.onnx"))
        inputs, targets = data(7)[:]
        given = dict(zip(session.input_names, [inputs.numpy()], strict=True))
        (found,) = session.run(None, given)
        model = trainer.state.model.eval()
        torch.testing.assert_close(torch.from_numpy(found), model([inputs, targets]), rtol=1e-4, atol=1e-5)
