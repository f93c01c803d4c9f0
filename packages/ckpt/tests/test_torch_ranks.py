"""M ranks load what N ranks saved, bit for bit: FSDP2 and AdamW over gloo.

One job of four processes, or eight under `-m slow`, runs all sizes: its first N processes form a world of N
ranks, with a mesh, a model and a coordinator of their own.
"""

import itertools
import zlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hocket.ckpt.document.tree import TreeLeaf
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.torch import CheckpointStore
from hocket.ckpt.torch.layout import describe
from hocket.ckpt.torch.ranks.coordinator import Coordinator, open_coordinator
from support.ranks import run_ranks
from support.sampling import cases

LARGEST = cases(full=8, sample=4)
PER_RANK = {"generator": b"\x00\x01", "draws": 3}


class Net(nn.Module):
    """A model with uneven dims, a tensor with fewer rows than ranks, a 0-d buffer and tied weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(101, 13)
        self.few = nn.Linear(13, 3)
        self.wide = nn.Linear(3, 257, bias=False)
        self.norm = nn.LayerNorm(257)
        self.last = nn.Linear(257, 13)
        self.head = nn.Linear(13, 101, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens):
        return self.head(self.last(self.norm(self.wide(self.few(self.embed(tokens)))))) * self.scale


def build(mesh):
    """Return a sharded model and its optimizer, which has not stepped."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(Net(), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model, optimizer):
    tokens = torch.arange(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
    model(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tree(model, optimizer, epoch):
    """Return the state as a trainer does, with the optimizer's state by parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    slots = {names[parameter]: dict(slots) for parameter, slots in optimizer.state.items()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    unstepped = SimpleNamespace(slots_like=dict(model.named_parameters()))
    return {
        "model": model.state_dict(),
        "optimizer": {"state": slots or unstepped, "param_groups": groups},
        "loop": {"epoch": epoch, "best": float("inf")},
    }


def tensors(node, path=()):
    if isinstance(node, torch.Tensor):
        yield ".".join(path), node
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from tensors(child, (*path, key))


def expected(name, tensor):
    """Return values that depend only on name and global position, so that any layout can be checked."""
    name = name.replace("head.weight", "embed.weight")
    return (
        torch.arange(tensor.numel())
        .add(zlib.crc32(name.encode()) % 1000)
        .reshape(tensor.shape)
        .to(tensor.dtype)
    )


def boxes(state, rank, world_size):
    """Yield the name, this rank's shard and its expected values of each tensor."""
    leaves = {name: TreeLeaf(name, (), tensor) for name, tensor in tensors(state)}
    for info in describe(leaves, rank=rank, world_size=world_size):
        wanted = expected(info.name, leaves[info.name].value)
        for dim, (start, size) in enumerate(zip(*info.box, strict=True)):
            wanted = wanted.narrow(dim, start, size)
        yield info.name, info.local, wanted


def save(store, mesh, world_size, mode):
    rank = dist.get_rank()
    model, optimizer = build(mesh)
    step(model, optimizer)
    state = tree(model, optimizer, epoch=world_size)
    with torch.no_grad():
        for _, local, wanted in boxes(state, rank, world_size):
            local.copy_(wanted)
    per_rank = {**PER_RANK, "rank": rank}
    handle = store.save(state, step=1, name=f"by-{world_size}", per_rank=per_rank, user={"n": 1}, mode=mode)
    if mode == "async":
        step(model, optimizer)  # the save has copied the state, so this step must not change the checkpoint
    handle.wait(30)
    store.save(state, step=2, name=f"by-{world_size}-again", mode=mode).wait(30)
    assert store.num_plans == 1
    for policy in ("drop", "require"):  # the third policy is the default, used above
        store.save({}, step=0, name=f"{policy}-{world_size}", per_rank=per_rank, per_rank_policy=policy)


def load(store, mesh, world_size, saved_by):
    rank = dist.get_rank()
    model, optimizer = build(mesh)
    loaded = store.load(f"by-{saved_by}", tree(model, optimizer, epoch=0))
    slots = loaded.state["optimizer"]["state"]
    assert set(slots) == {name for name, _ in model.named_parameters()}
    for key, parameter in model.named_parameters():
        assert slots[key]["exp_avg"].placements == parameter.placements
        assert slots[key]["exp_avg"].device_mesh == parameter.device_mesh
        assert type(slots[key]["step"]) is torch.Tensor
        optimizer.state[parameter] = slots[key]
    checked = 0
    for key, local, wanted in boxes(loaded.state, rank, world_size):
        assert torch.equal(local, wanted), key
        checked += local.numel()
    assert checked
    assert model.head.weight is model.embed.weight
    assert loaded.state["loop"] == {"epoch": saved_by, "best": float("inf")}
    assert loaded.state["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert loaded.user == {"n": 1}
    mine = {**PER_RANK, "rank": rank} if saved_by == world_size else None
    assert loaded.per_rank == mine
    step(model, optimizer)  # the optimizer must be able to step with the loaded state
    assert store.load(f"drop-{saved_by}", {}).per_rank == mine
    if mine is None:
        said = f"saved by {saved_by} ranks and requires as many.* here are {world_size}. Save with"
        with pytest.raises(CheckpointIncompatibleError, match=said):
            store.load(f"require-{saved_by}", {})
    else:
        assert store.load(f"require-{saved_by}", {}).per_rank == mine


def all_pairs(folder):
    from torch.distributed.device_mesh import DeviceMesh

    rank = dist.get_rank()
    sizes = range(1, LARGEST + 1)
    # All ranks must take part in making every group and coordinator, members or not.
    meshes = {size: DeviceMesh("cpu", list(range(size)), mesh_dim_names=("shard",)) for size in sizes}
    stores = {}
    for size in sizes:
        opened = open_coordinator()
        if rank < size:
            mine = Coordinator(opened.store, rank=rank, world_size=size, nonce=opened.nonce)
            stores[size] = CheckpointStore(folder, timeout_s=30, coordinator=mine)
    for size in stores:
        save(stores[size], meshes[size], size, "async" if size % 2 else "sync")
    dist.barrier()
    for saved_by, size in itertools.product(sizes, stores):
        load(stores[size], meshes[size], size, saved_by)
    return len(stores)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_m_ranks_load_what_n_ranks_saved(tmp_path):
    worlds = run_ranks(all_pairs, LARGEST, str(tmp_path), timeout_s=60 * LARGEST, init="gloo")
    assert worlds == list(range(LARGEST, 0, -1))
    listed = CheckpointStore(str(tmp_path)).list()
    assert {entry.status for entry in listed} == {"committed"}
    assert [entry.step for entry in listed] == [0] * 2 * LARGEST + [1] * LARGEST + [2] * LARGEST
