"""A causal language model with ALiBi in Composer's style, on any number of ranks."""

import warnings

import torch
from composer import Trainer
from composer.algorithms import Alibi, SeqLengthWarmup
from composer.models import HuggingFaceModel
from composer.optim import DecoupledAdamW, LinearWithWarmupScheduler
from composer.utils import dist
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

warnings.simplefilter("ignore")
torch.manual_seed(17)
config = GPT2Config(
    vocab_size=32,
    n_positions=16,
    n_embd=16,
    n_layer=2,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
model = HuggingFaceModel(GPT2LMHeadModel(config), use_logits=True)
texts = [torch.arange(start, start + 16) % 32 for start in range(32)]
rows = [
    {"input_ids": text, "attention_mask": torch.ones(16, dtype=torch.long), "labels": text} for text in texts
]
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(rows, batch_size=8, shuffle=True),
    eval_dataloader=DataLoader(rows, batch_size=8),
    max_duration="4ep",
    optimizers=DecoupledAdamW(model.parameters(), lr=1e-2),
    schedulers=LinearWithWarmupScheduler(t_warmup="2ba"),
    algorithms=[
        Alibi(max_sequence_length=16),
        SeqLengthWarmup(duration=0.5, min_seq_length=8, max_seq_length=16),
    ],
    device="cpu",
    progress_bar=False,
    seed=17,
)
trainer.eval()
before = trainer.state.eval_metrics["eval"]["LanguagePerplexity"].compute().item()
trainer.fit()
after = trainer.state.eval_metrics["eval"]["LanguagePerplexity"].compute().item()
trainer.close()
if dist.get_global_rank() == 0:
    is_gone = not model.model.transformer.wpe.weight.any()
    print(f"ranks={dist.get_world_size()} batches={trainer.state.timestamp.batch.value}", flush=True)
    print(f"better={after < before} no_positions={is_gone}", flush=True)
