"""Checkpoints and folders of models with `peft` adapters: they hold what training changes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from hocket.trainer import Callback, Trainer  # noqa: E402
from hocket.trainer.checkpoint.state_guard import StateGuard  # noqa: E402
from hocket.trainer.errors import TrainerClosedError, TrainerConfigError  # noqa: E402
from hocket.trainer.loggers import InMemoryLogger  # noqa: E402
from hocket.trainer.models import HuggingFaceModel  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
]
VOCABULARY = 32
IDS = torch.randint(2, VOCABULARY, (16, 8), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
PROJECTIONS = ["q_proj", "v_proj"]
LM = "CAUSAL_LM"


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=16, max_position_embeddings=32, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def resnet():
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config)


def adapted(config, make=llama):
    return lambda: peft.get_peft_model(make(), config())


def with_trained_norms():
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=PROJECTIONS, task_type=LM))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "norm" in name)
    return model


def with_two_adapters():
    config = peft.LoraConfig(r=2, target_modules=PROJECTIONS, task_type=LM)
    model = peft.get_peft_model(llama(), config, adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(r=2, target_modules=["o_proj"], task_type=LM))
    model.base_model.set_adapter(["one", "two"])
    return model


KINDS = {
    "prompt": adapted(lambda: peft.PromptTuningConfig(task_type=LM, num_virtual_tokens=4)),
    "prefix": adapted(lambda: peft.PrefixTuningConfig(task_type=LM, num_virtual_tokens=4)),
    "projected prefix": adapted(lambda: peft.PrefixTuningConfig(
        task_type=LM, num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=8)),
    "p-tuning": adapted(lambda: peft.PromptEncoderConfig(
        task_type=LM, num_virtual_tokens=4, encoder_hidden_size=8)),
    # Its encoder replaces its tensor at each pass.
    "context": adapted(lambda: peft.CPTConfig(
        task_type=LM, cpt_token_ids=[3, 4, 5], cpt_mask=[1] * 3, cpt_tokens_type_mask=[1, 2, 4])),
    "IA3": adapted(lambda: peft.IA3Config(
        task_type=LM, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "LoHa": adapted(lambda: peft.LoHaConfig(r=2, target_modules=PROJECTIONS)),
    "LoKr": adapted(lambda: peft.LoKrConfig(r=2, target_modules=PROJECTIONS)),
    "AdaLoRA": adapted(lambda: peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=20, target_modules=PROJECTIONS, task_type=LM)),
    "OFT": adapted(lambda: peft.OFTConfig(oft_block_size=4, target_modules=PROJECTIONS, task_type=LM)),
    "VeRA": adapted(lambda: peft.VeraConfig(r=4, target_modules=PROJECTIONS, task_type=LM)),
    "tokens": adapted(lambda: peft.LoraConfig(
        r=2, target_modules=PROJECTIONS, trainable_token_indices=[3, 4], task_type=LM)),
    "head": adapted(lambda: peft.LoraConfig(
        r=2, target_modules=PROJECTIONS, modules_to_save=["lm_head"], task_type=LM)),
    "embedding": adapted(lambda: peft.LoraConfig(
        r=2, target_modules=["embed_tokens", "q_proj"], task_type=LM)),
    "norms": with_trained_norms,
    "two adapters": with_two_adapters,
    "running statistics": adapted(lambda: peft.LoraConfig(
        r=2, target_modules=r".*layer.*convolution", modules_to_save=["classifier"]), resnet),
}  # fmt: skip


def samples_of(kind):
    if kind == "running statistics":
        return [
            {"pixel_values": image, "labels": torch.tensor(index % 3)} for index, image in enumerate(IMAGES)
        ]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in IDS]


def tensors_of(model):
    named = [*model.model.named_parameters(), *model.model.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


def train(kind, folder, duration, *, seed):
    """Train, and return the tensors before and after, the losses and the model."""
    torch.manual_seed(seed)  # of the adapters: those of another seed must not be noticed after a resume
    model = HuggingFaceModel(KINDS[kind]())
    before, memory = tensors_of(model), InMemoryLogger()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(samples_of(kind), batch_size=4),
        optimizers=torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05),
        max_duration=duration,
        save_folder=str(folder),
        save_interval="2ba",
        autoresume=True,
        loggers=memory,
        device="cpu",
        progress_bar=False,
        seed=1,
    ) as trainer:
        trainer.fit()
    return before, tensors_of(model), [float(value) for _, value in memory.data["loss/train/total"]], model


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_adapter_trains_on_as_without_a_break(kind, tmp_path):
    before, whole, losses, model = train(kind, tmp_path / "whole", "4ba", seed=7)
    changed = {name for name, value in whole.items() if not torch.equal(value, before[name])}
    assert changed
    saved = {name.removeprefix("model.") for name in model.state_dict()}
    assert len(saved) < len(model.model.state_dict())
    train(kind, tmp_path / "cut", "2ba", seed=7)
    _, resumed, losses_after, _ = train(kind, tmp_path / "cut", "4ba", seed=9)
    assert losses_after == losses[2:]
    assert [name for name in changed if not torch.equal(resumed[name], whole[name])] == []


def test_a_checkpoint_without_the_buffers_of_the_base_loads_and_is_said(tmp_path, monkeypatch):
    kind = "running statistics"
    with monkeypatch.context() as patch:  # a checkpoint as older releases wrote it
        keep = HuggingFaceModel.state_dict
        patch.setattr(HuggingFaceModel, "state_dict", lambda *args, **options: {
            name: value for name, value in keep(*args, **options).items() if "running_" not in name
        })  # fmt: skip
        patch.setattr(StateGuard, "check", lambda *_: {})  # which would refuse it now
        train(kind, tmp_path, "2ba", seed=7)
    with pytest.warns(UserWarning, match=r"lacks the buffers `model.*running_mean`.*keep their values"):
        _, _, losses, _ = train(kind, tmp_path, "3ba", seed=9)
    assert len(losses) == 1


def test_a_parameter_of_the_base_that_a_callback_unfroze_resumes(tmp_path):
    class Unfreeze(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.counts.batch >= 1:
                norm_of(state.model).requires_grad_(True)

    def norm_of(model):
        return model.model.get_base_model().model.norm.weight

    def run(folder, duration):
        model = HuggingFaceModel(KINDS["IA3"]())
        parameters = [one for one in model.parameters() if one.requires_grad] + [norm_of(model)]
        with Trainer(
            model=model, train_dataloader=DataLoader(samples_of("IA3"), batch_size=4), callbacks=Unfreeze(),
            optimizers=torch.optim.SGD(parameters, lr=0.5), max_duration=duration, save_folder=str(folder),
            autoresume=True, device="cpu", progress_bar=False, seed=1,
        ) as trainer:  # fmt: skip
            trainer.fit()
        return norm_of(model).detach().clone()

    whole = run(tmp_path / "whole", "4ba")
    run(tmp_path / "cut", "2ba")
    assert torch.equal(run(tmp_path / "cut", "4ba"), whole)


def test_the_state_of_adapters_loads_without_the_buffers_of_the_base():
    one, other = (HuggingFaceModel(KINDS["running statistics"]()) for _ in range(2))
    state = one.state_dict()
    assert any("running_mean" in name for name in state)
    other.load_state_dict({name: value for name, value in state.items() if "running" not in name})
    classifier = next(name for name in state if "classifier" in name)
    with pytest.raises(RuntimeError, match="the adapters' state does not fit: missing"):
        other.load_state_dict({name: value for name, value in state.items() if name != classifier})


@pytest.mark.parametrize("kind", ["prompt", "p-tuning", "prefix"])
@pytest.mark.parametrize("use_logits", [False, True])
def test_a_trained_prompt_is_measured_as_its_loss(kind, use_logits):
    model = HuggingFaceModel(KINDS[kind](), use_logits=use_logits)
    samples = samples_of(kind)
    samples[0]["labels"] = torch.where(torch.arange(8) < 3, -100, IDS[0])
    with warnings.catch_warnings(), Trainer(
        model=model, eval_dataloader=DataLoader(samples, batch_size=5), device="cpu", progress_bar=False
    ) as trainer:  # fmt: skip
        trainer.eval()
        measured = float(trainer.state.eval_metrics["eval"]["LanguageCrossEntropy"].compute())
    with torch.no_grad():
        loss = model.model.eval()(**torch.utils.data.default_collate(samples)).loss
    assert measured == pytest.approx(float(loss), rel=1e-5)


@torch.no_grad()
def logits_of(model, kind):
    model.eval()
    batch = torch.utils.data.default_collate(samples_of(kind)[:4])
    outputs = model(**batch)
    return outputs.logits


OPENED = (
    "prompt",
    "projected prefix",
    "IA3",
    "tokens",
    "head",
    "norms",
    "two adapters",
    "running statistics",
)


@pytest.mark.parametrize("kind", OPENED)
def test_a_folder_of_adapters_opens_in_peft_as_it_was_trained(kind, tmp_path):
    *_, model = train(kind, tmp_path / "run", "2ba", seed=7)
    model.save_pretrained(tmp_path / "out")
    make = resnet if kind == "running statistics" else llama
    if kind == "two adapters":
        opened = peft.PeftModel.from_pretrained(make(), tmp_path / "out" / "one", adapter_name="one")
        opened.load_adapter(tmp_path / "out" / "two", "two")
        opened.base_model.set_adapter(["one", "two"])
    else:
        opened = peft.PeftModel.from_pretrained(make(), tmp_path / "out")
    torch.testing.assert_close(logits_of(opened, kind), logits_of(model.model, kind))


@pytest.mark.parametrize("kind", ["prompt", "norms"])
def test_the_base_model_is_saved_beside_a_prompt_and_beside_trained_norms(kind, tmp_path):
    model = HuggingFaceModel(KINDS[kind](), should_save_peft_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    opened = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(logits_of(opened, kind), logits_of(model.model, kind))


def test_a_folder_that_cannot_hold_what_was_trained_is_refused(tmp_path):
    model = HuggingFaceModel(KINDS["prompt"]())
    model.model.get_base_model().model.norm.weight.requires_grad_()
    with pytest.raises(
        TrainerConfigError, match=r"`model\.norm` is trained beside a prompt, .*`should_save_peft_"
    ):
        model.save_pretrained(tmp_path / "prompt")
    model = HuggingFaceModel(KINDS["LoHa"]())
    inner = model.model.get_base_model()
    inner.scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(
        TrainerConfigError, match=r"`scale` is trained beside the adapters, .*is the model itself"
    ):
        model.save_pretrained(tmp_path / "scale")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_refused_after_the_ranks_have_parted(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        TrainerClosedError, match=r"`save_pretrained` needs all 2 ranks, .*inside of `with trainer:`"
    ):
        HuggingFaceModel(llama()).save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())
