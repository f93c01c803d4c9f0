"""Sequence classification with a Hugging Face BERT; `python bert.py FOLDER MAX_DURATION [LOAD_PATH]`."""

import sys
import warnings
from pathlib import Path

import torch
import transformers
from composer import Trainer
from composer.algorithms import FusedLayerNorm, GradientClipping
from composer.callbacks import LRMonitor, MemoryMonitor, OptimizerMonitor, RuntimeEstimator, SpeedMonitor
from composer.loggers import FileLogger, InMemoryLogger
from composer.metrics import CrossEntropy
from composer.models import HuggingFaceModel
from composer.optim import DecoupledAdamW, LinearWithWarmupScheduler
from composer.utils import dist, reproducibility
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "plot", "cast", "the", "was"]


class Reviews(Dataset):
    """Generated reviews; those with the word `good` have label 1."""

    def __init__(self, tokenizer, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (size,), generator=generator).tolist()
        texts = []
        for label in self.labels:
            words = [WORDS[index] for index in torch.randint(7, 12, (6,), generator=generator)]
            words[int(torch.randint(6, (1,), generator=generator))] = "good" if label else "bad"
            texts.append(" ".join(words))
        self.encodings = tokenizer(texts, padding="max_length", truncation=True, max_length=12)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        item = {name: torch.tensor(values[index]) for name, values in self.encodings.items()}
        item["labels"] = torch.tensor(self.labels[index])
        return item


warnings.simplefilter("ignore")
folder, max_duration, load_path = Path(sys.argv[1]), sys.argv[2], (sys.argv[3:] or [None])[0]
reproducibility.seed_all(17)
vocabulary = folder / f"vocabulary-{dist.get_global_rank()}.txt"
vocabulary.write_text("\n".join(WORDS))
tokenizer = transformers.BertTokenizer(vocab=str(vocabulary))
config = transformers.BertConfig(
    vocab_size=len(WORDS),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
    num_labels=2,
)
model = HuggingFaceModel(
    transformers.BertForSequenceClassification(config),
    tokenizer=tokenizer,
    use_logits=True,
    metrics=[CrossEntropy(), MulticlassAccuracy(num_classes=2, average="micro")],
)
train_dataset, eval_dataset = Reviews(tokenizer, 512, seed=1), Reviews(tokenizer, 100, seed=2)
train_dataloader = DataLoader(train_dataset, batch_size=32, shuffle=True, num_workers=4)
eval_dataloader = DataLoader(eval_dataset, batch_size=32)
optimizer = DecoupledAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=1e-5)
memory_logger = InMemoryLogger()
trainer = Trainer(
    run_name="bert",
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration=max_duration,
    optimizers=optimizer,
    schedulers=LinearWithWarmupScheduler(t_warmup="4ba", alpha_f=0.02, t_max="8ep"),
    algorithms=[
        FusedLayerNorm(),
        GradientClipping(clipping_type="norm", clipping_threshold=1.0),
    ],
    callbacks=[
        SpeedMonitor(window_size=4),
        LRMonitor(),
        MemoryMonitor(),
        OptimizerMonitor(batch_log_interval=4),
        RuntimeEstimator(),
    ],
    loggers=[FileLogger(filename=str(folder / "training_log.txt"), flush_interval=50), memory_logger],
    fsdp_config={
        "sharding_strategy": "FULL_SHARD",
        "activation_checkpointing": True,
        "mixed_precision": "PURE",
        "backward_prefetch": "BACKWARD_PRE",
        "verbose": False,
    },
    precision="amp_bf16",
    device="cpu",
    device_train_microbatch_size=8,
    eval_interval="1ep",
    save_folder=str(folder / "checkpoints"),
    save_filename="ep{epoch}-ba{batch}-rank{rank}.pt",
    save_interval="1ep",
    save_num_checkpoints_to_keep=2,
    load_path=load_path,
    progress_bar=False,
    seed=17,
)
started_at = trainer.state.timestamp.batch.value
trainer.fit()
accuracy = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute().item()
batches = trainer.state.timestamp.batch.value
names = sorted({name.split("/")[0] for name in memory_logger.data})
trainer.close()
if dist.get_global_rank() == 0:
    norms = sum("Norm" in type(module).__name__ for module in model.modules())
    samples = trainer.state.timestamp.sample
    print(f"ranks={dist.get_world_size()} from={started_at} to={batches} samples={samples}")
    print(f"accuracy={accuracy:.3f} norms={norms} logged={names}", flush=True)
