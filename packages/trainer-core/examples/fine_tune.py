"""Fine-tuning a Hugging Face model: a classifier, evaluated, stopped early, and saved as a folder.

The weights are random here, so that nothing is downloaded; with a name, use
`AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)`, and pass its tokenizer along.
"""

import sys
import tempfile

import torch
import transformers
from torch.utils.data import DataLoader

from hocket.trainer import Trainer
from hocket.trainer.callbacks import EarlyStopper
from hocket.trainer.models import HuggingFaceModel
from hocket.trainer.optim import LinearWithWarmupScheduler, norms_and_biases, param_groups


def make_samples(num_samples: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of 12 tokens; the label is 1 if token 5 is among them, else 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(6, 64, (num_samples, 12), generator=generator)
    places = torch.randint(0, 12, (num_samples // 2,), generator=generator)
    tokens[torch.arange(0, num_samples, 2), places] = 5
    return [{"input_ids": row, "labels": (row == 5).any().long()} for row in tokens]


def make_model() -> HuggingFaceModel:
    """Return a small classifier of random weights."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=2,
    )
    return HuggingFaceModel(transformers.BertForSequenceClassification(config))


def main(folder: str) -> None:
    """Train, evaluate and save the model, and load it from the folder."""
    model = make_model()
    groups = param_groups(model, {norms_and_biases: {"weight_decay": 0.0}})
    with Trainer(
        model=model,
        train_dataloader=DataLoader(make_samples(256, seed=1), batch_size=16, shuffle=True),
        eval_dataloader=DataLoader(make_samples(64, seed=2), batch_size=16),
        optimizers=torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.01),
        schedulers=LinearWithWarmupScheduler(t_warmup="0.1dur"),
        gradient_clipping=1.0,
        max_duration="10ep",
        callbacks=EarlyStopper("metrics/eval/MulticlassAccuracy", patience="4ep"),
        seed=1,
    ) as trainer:
        trainer.fit()
        accuracy = float(trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute())
        model.save_pretrained(folder)  # on every rank; one of them writes
        is_first = trainer.state.parallelism.data_parallel[0] == 0

    if is_first:
        again = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        label = again(torch.tensor([[7, 8, 5, 9, 10, 11, 12, 13, 14, 15, 16, 17]])).logits.argmax().item()
        print(f"accuracy: {accuracy:.2f}; a sequence with token 5 gets the label {label}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
