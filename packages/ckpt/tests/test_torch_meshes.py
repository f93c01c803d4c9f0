"""Real jobs on real meshes: FSDP over tensor parallelism saved, HSDP and one process loaded, and back."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hocket.ckpt.torch import CheckpointStore
from support.ranks import run_ranks


def model(seed):
    torch.manual_seed(seed)
    # Extents that no mesh of these divides evenly.
    return torch.nn.Sequential(torch.nn.Linear(7, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))


def fsdp_over_tp(seed):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = model(seed)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net


def hsdp(seed):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = model(seed)
    fully_shard(net, mesh=mesh)
    return net


def step(net):
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = {parameter: name for name, parameter in net.named_parameters()}
    return {names[parameter]: dict(slots) for parameter, slots in optimizer.state.items()}


def whole(tree):
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tree.items()
    }


def job(folder):
    store = CheckpointStore(folder, timeout_s=60)
    nets = {"fsdp-tp": fsdp_over_tp(1), "hsdp": hsdp(2)}
    expected, wrong = {}, []
    placed = {type(placement).__name__ for p in nets["fsdp-tp"].parameters() for placement in p.placements}
    for name, net in nets.items():
        slots = step(net)
        store.save({"model": net.state_dict(), "slots": slots}, step=1, name=name)
        expected[name] = {
            "model": whole(net.state_dict()),
            "slots": {key: whole(each) for key, each in slots.items()},
        }
    for name, into in (("fsdp-tp", hsdp(3)), ("hsdp", fsdp_over_tp(4)), ("fsdp-tp", fsdp_over_tp(5))):
        slots = step(into)
        loaded = store.load(name, {"model": into.state_dict(), "slots": slots}).state
        found = {
            "model": whole(loaded["model"]),
            "slots": {k: whole(each) for k, each in loaded["slots"].items()},
        }
        pairs = [(found["model"], expected[name]["model"])]
        pairs += [(found["slots"][key], expected[name]["slots"][key]) for key in found["slots"]]
        wrong += [key for mine, theirs in pairs for key in theirs if not torch.equal(mine[key], theirs[key])]
    store.close()
    model_bytes = {key: tensor.tolist() for key, tensor in expected["fsdp-tp"]["model"].items()}
    return wrong, sorted(placed), model_bytes if dist.get_rank() == 0 else None


def test_what_one_mesh_saved_another_loads(tmp_path):
    found = run_ranks(job, 4, str(tmp_path), init="gloo", timeout_s=200)
    assert [wrong for wrong, _, _ in found] == [[]] * 4
    assert "_StridedShard" in found[0][1]
    alone = model(9)
    CheckpointStore(str(tmp_path)).load("fsdp-tp", {"model": alone.state_dict()}, include=["model"])
    for key, tensor in alone.state_dict().items():
        assert tensor.tolist() == found[0][2][key]
