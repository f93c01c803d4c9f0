"""A plain FSDP2 training script that saves and resumes through `torch.distributed.checkpoint`.

    torchrun --nproc-per-node 2 fsdp2.py runs/net --steps 4
    torchrun --nproc-per-node 3 fsdp2.py runs/net --steps 8     # resumes from step 4, on three ranks

Only the storage reader and writer are Hocket's.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hocket.ckpt import errors, list_checkpoints
from hocket.ckpt.dcp import HocketReader, HocketWriter


def build(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, sharded over the mesh, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 101), nn.ReLU(), nn.Linear(101, 7))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def newest(folder: str) -> str | None:
    """Return the newest committed checkpoint; unfinished saves are ignored."""
    try:
        found = [listing for listing in list_checkpoints(folder) if listing.status == "committed"]
    except errors.CheckpointNotFoundError:
        return None
    return found[-1].uri if found else None


def save(
    folder: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh
) -> None:
    """Save the model, the optimizer and the step."""
    weights, slots = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": slots, "step": step}
    uri = f"{folder}/step-{step}"
    dcp.save(state, checkpoint_id=uri, storage_writer=HocketWriter(), process_group=mesh.get_group())


def resume(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> int:
    """Load the newest checkpoint, written by any number of ranks, and return the step to resume from."""
    uri = newest(folder)
    if uri is None:
        return 0
    weights, slots = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": slots, "step": 0}
    dcp.load(state, checkpoint_id=uri, storage_reader=HocketReader(), process_group=mesh.get_group())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step: int = state["step"]
    return step


def train(folder: str, mesh: DeviceMesh, *, steps: int, every: int = 2) -> nn.Module:
    """Train up to a step, starting from the newest checkpoint."""
    model, optimizer = build(mesh)
    for step in range(resume(folder, model, optimizer, mesh), steps):
        generator = torch.Generator().manual_seed(step * mesh.size() + mesh.get_local_rank())
        inputs = torch.randn(8, 13, generator=generator)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0:
            save(folder, step + 1, model, optimizer, mesh)
    return model


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="where the checkpoints go: a folder or a URI")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(arguments.folder, init_device_mesh("cpu", (dist.get_world_size(),)), steps=arguments.steps)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
