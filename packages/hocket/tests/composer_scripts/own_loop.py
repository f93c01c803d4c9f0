"""A user's own training loop with Composer's functional methods, without a trainer."""

import warnings

import composer.functional as cf
import torch
from composer.loss import soft_cross_entropy
from composer.utils import dist, get_device, reproducibility
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
device = get_device("cpu")
dist.initialize_dist(device, timeout=60)
reproducibility.seed_all(17)
generator = torch.Generator().manual_seed(1)
labels = torch.arange(128) % 4
images = torch.rand(128, 3, 8, 8, generator=generator) * 0.3
images[torch.arange(128), labels % 3] += labels[:, None, None] * 0.2
dataset = TensorDataset(images, labels)
sampler = dist.get_sampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 4),
)
cf.apply_channels_last(model)
cf.apply_blurpool(model, min_channels=3)
cf.apply_squeeze_excite(model, min_channels=16, latent_channels=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
replica = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
losses = []
for epoch in range(6):
    sampler.set_epoch(epoch)
    total = 0.0
    for inputs, targets in loader:
        inputs = cf.cutout_batch(inputs, num_holes=1, length=0.25)
        inputs = cf.colout_batch(inputs, p_row=0.1, p_col=0.1)
        inputs = nn.functional.interpolate(inputs, (8, 8))
        mixed, permuted, share = cf.mixup_batch(inputs, targets, alpha=0.2)
        logits = replica(mixed)
        smoothed = cf.smooth_labels(logits, targets, smoothing=0.1)
        smoothed_permuted = cf.smooth_labels(logits, permuted, smoothing=0.1)
        loss = (1 - share) * soft_cross_entropy(logits, smoothed)
        loss = loss + share * soft_cross_entropy(logits, smoothed_permuted)
        optimizer.zero_grad()
        loss.backward()
        cf.apply_gradient_clipping(model, clipping_type="norm", clipping_threshold=1.0, fsdp_enabled=False)
        optimizer.step()
        total += loss.item()
    cf.freeze_layers(model, optimizers=optimizer, current_duration=epoch / 6, freeze_start=0.9)
    losses.append(total / len(loader))
weights = dist.all_gather_object([parameter.sum().item() for parameter in model.parameters()])
if dist.get_global_rank() == 0:
    is_same = all(one == weights[0] for one in weights)
    print(f"ranks={len(weights)} better={losses[-1] < losses[0]} same={is_same}", flush=True)
