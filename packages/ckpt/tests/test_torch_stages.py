"""Jobs of four ranks whose states differ: pipeline stages, and experts on a mesh of their own."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hocket.ckpt
from hocket.ckpt.torch import CheckpointStore
from hocket.ckpt.verbs.convert import convert
from support.states import stepped, whole, wrong

LARGE = 300_000  # items; too many for a tensor that several stages hold


class Mixture(torch.nn.Module):
    """A model of dense layers and seven experts, which no mesh of these tests divides evenly."""

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(7, 10)
        self.router = torch.nn.Linear(10, 7)
        self.experts = torch.nn.Module()
        self.experts.up = torch.nn.Parameter(torch.randn(7, 12, 10))
        self.experts.down = torch.nn.Parameter(torch.randn(7, 4, 12))


def expert_parallel(seed, num_parts):
    """Shard experts over `num_parts` ranks, each by FSDP over the others; the rest by FSDP over all."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (4 // num_parts, num_parts), mesh_dim_names=("data", "expert"))
    net = Mixture()
    for name, parameter in list(net.experts.named_parameters()):
        cut = distribute_tensor(parameter.detach(), mesh["expert"], [Shard(0)])
        net.experts.register_parameter(name, torch.nn.Parameter(cut))
    fully_shard(net.experts, mesh=mesh["data"], shard_placement_fn=lambda _: Shard(1))
    return fully_shard(net, mesh=init_device_mesh("cpu", (4,)))


def sharded(net, mesh):
    fully_shard(net, mesh=mesh)
    return net


FEW = torch.arange(5.0 * 12 * 10).reshape(5, 12, 10)


def too_few():
    """Shard five experts over four ranks; the last one has none, with the empty shape that torch gives it."""
    mesh = init_device_mesh("cpu", (1, 4))
    rank = dist.get_rank()
    local = FEW[2 * rank : 2 * rank + 2] if rank < 3 else torch.empty(0, 0, 10)
    placements = [Shard(1), Shard(0)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=FEW.shape, stride=FEW.stride())


def experts_job(folder):
    store = CheckpointStore(folder, timeout_s=60)
    all_ranks = init_device_mesh("cpu", (4,))
    made = {
        "two": lambda seed: expert_parallel(seed, 2),
        "four": lambda seed: expert_parallel(seed, 4),
        "dense": lambda seed: (torch.manual_seed(seed), sharded(Mixture(), all_ranks))[1],
    }
    expected = {}
    for seed, (name, make) in enumerate(made.items()):
        state = stepped(make(seed))
        store.save(state, step=1, name=name)
        expected[name] = whole(state)
    bad = []
    for saved, into in (("two", "four"), ("two", "dense"), ("four", "two"), ("dense", "two")):
        state = store.load(saved, stepped(made[into](9))).state
        bad += [f"{saved} into {into}: {name}" for name in wrong(state, expected[saved])]
    store.save({"few": too_few()}, step=1, name="few")
    found = store.load("few", {"few": zeroed(too_few())}).state["few"]
    bad += [] if torch.equal(found.to_local(), too_few().to_local()) else ["few"]
    store.close()
    return bad, expected


def layers():
    torch.manual_seed(3)
    return {str(number): torch.nn.Linear(7, 9) for number in range(4)}


class Layers(torch.nn.Module):  # torch before 2.10 shards no container, even with a `forward`
    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, tokens):
        for layer in self.children():
            tokens = layer(tokens)
        return tokens


class Stages:
    """Two pipeline stages of two ranks each, of a model of four layers."""

    def __init__(self, seed=0):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
        self.number = dist.get_rank() // 2
        self.peers = self.mesh["data"]
        mine = {name: each for name, each in layers().items() if int(name) // 2 == self.number}
        self.net = sharded(Layers(mine), self.peers)
        for parameter in self.net.parameters():
            parameter.data.add_(seed)

    def state(self):
        """Return the stage's layers, its own tensors, those of both stages, and some empty on one."""
        shared = torch.arange(7.0 * 300).reshape(7, 300)
        return {
            **stepped(self.net),
            "buffers": {f"of-{self.number}": torch.arange(LARGE) + self.number},
            "shared": distribute_tensor(shared, self.mesh, [Replicate(), Shard(0)]),
            "seen": torch.tensor(17),
            "loop": {"epoch": 3, f"stage-{self.number}": [1, 2]},
            "extra": {} if self.number else {"x": 1.5},
        }


def keyed(number):
    """Return a stage's state with integer keys in a dict of both stages and in one of its own, and a list."""
    mine = torch.tensor(number)
    return {"slots": {number: mine}, f"of-{number}": {0: mine}, "list": [torch.tensor(5), torch.tensor(6)]}


def tensors(state):
    return {key: state[key] for key in ("model", "slots", "buffers", "shared", "seen")}


def zeroed(node):
    if isinstance(node, dict):
        return {key: zeroed(each) for key, each in node.items()}
    return torch.zeros_like(node) if isinstance(node, torch.Tensor) else node


def said(act):
    try:
        act()
    except Exception as error:  # noqa: BLE001 - compared by the test
        return f"{type(error).__name__}: {error}"
    return None


def stages_job(folder):
    """Save and load stages; return wrong tensors, the union of all tensors, and errors of invalid saves."""
    store = CheckpointStore(folder, timeout_s=60)
    rank, stages = dist.get_rank(), Stages()
    state, parts = stages.state(), [None] * 4
    dist.all_gather_object(parts, whole(tensors(state)))
    union = parts[0] | parts[2]
    for number, mode in enumerate(("sync", "async")):
        store.save(state, step=number, name=mode, mode=mode, peers=stages.peers).wait(60)
    bad = [] if store.num_plans == 1 else ["planned again"]
    for name in ("sync", "async"):
        loaded = store.load(name, zeroed(state), peers=stages.peers).state
        bad += wrong(tensors(loaded), union)
        both = {"epoch": 3, "stage-0": [1, 2], "stage-1": [1, 2]}
        bad += [] if loaded["loop"] == both else [f"{loaded['loop']}"]
    store.save(keyed(stages.number), step=2, name="keyed", peers=stages.peers)
    mesh = init_device_mesh("cpu", (4,))
    everywhere = sharded(Layers(layers()), mesh)
    into = {**zeroed(stepped(everywhere)), "shared": torch.zeros(7, 300)}
    loaded = store.load("sync", into, include=["model", "slots", "shared"]).state
    bad += wrong(loaded, union)
    save = {"store": store.save, "peers": stages.peers, "state": {"w": torch.ones(3)}}

    def refused(**changes):
        given = {**save, **changes}
        return said(lambda: given["store"](given["state"], step=9, name="bad", peers=given["peers"]))

    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    found = {
        "no peers": refused(state=state, peers=None),
        "some peers": refused(peers=[rank] if rank == 3 else stages.peers),
        "not me": refused(peers=[(rank + 1) % 4]),
        "a tensor": refused(state={"w": torch.full((3,), stages.number)}),
        "a large tensor": refused(state={"w": torch.ones(LARGE)}),
        "a value": refused(state={"loop": {"lr": 0.1 * (1 + stages.number)}}),
        "a node": refused(state={"loop": {"lr": 0.1} if stages.number else 3}),
        "in a stage": refused(state={"w": torch.ones(3), f"x{rank}": 1}),
        "partial": refused(state={"w": partial}, peers=None),
        "left": said(lambda: store.load("sync", {"shared": state["shared"]}, peers=stages.peers)),
        "missing": said(
            lambda: store.load("sync", {**state, f"more{rank // 3}": torch.ones(1)}, peers=[rank])
        ),
        "loose": said(lambda: store.load("sync", {"seen": state["seen"]}, peers=[rank], strict=False)),
    }
    store.close()
    return bad, union, found


def job(folder):
    """Run this file's jobs; `four_ranks` calls it on each rank."""
    return experts_job(f"{folder}/experts"), stages_job(f"{folder}/stages")


@pytest.fixture(scope="module")
def ran(four_ranks):
    return four_ranks.folder / "stages", *zip(*four_ranks.found["stages"], strict=True)


def test_experts_load_on_any_other_mesh_and_in_one_process(ran):
    folder, found, _ = ran
    assert [bad for bad, _ in found] == [[]] * 4
    for name in ("two", "four", "dense"):
        checkpoint = hocket.ckpt.open(str(folder / "experts" / name))
        assert set(checkpoint) == set(found[0][1][name])
        state = stepped(Mixture())
        CheckpointStore(str(folder / "experts")).load(name, state)
        assert wrong(state, found[0][1][name]) == []
    assert hocket.ckpt.open(str(folder / "experts" / "few"))["few"].tolist() == FEW.tolist()


def test_stages_save_one_checkpoint_that_loads_on_any_number_of_ranks(ran):
    folder, _, found = ran
    assert [bad for bad, _, _ in found] == [[]] * 4
    for name in ("sync", "async"):
        uri = str(folder / "stages" / name)
        checkpoint = hocket.ckpt.open(uri)
        assert set(checkpoint) == set(found[0][1])
        assert {key: record.value for key, record in checkpoint.contents.values.items()} == {
            "loop.epoch": 3, "loop.stage-0": [1, 2], "loop.stage-1": [1, 2], "extra.x": 1.5,
        }  # fmt: skip
        assert hocket.ckpt.verify(uri).is_sound
        state = stepped(Layers(layers()))
        state |= {"buffers": {f"of-{number}": torch.zeros(LARGE, dtype=torch.int64) for number in (0, 1)}}
        state |= {"shared": torch.zeros(7, 300), "seen": torch.tensor(0), "loop": {}, "extra": {}}
        loaded = CheckpointStore(str(folder / "stages")).load(name, state).state
        assert wrong(tensors(loaded), found[0][1]) == []


def test_dicts_with_integer_keys_of_any_stage_do_not_become_lists(ran, tmp_path):
    folder, _, _ = ran
    target = tmp_path / "keyed.pt"
    convert(str(folder / "stages/keyed"), str(target), to="torch")
    zero, one = torch.tensor(0), torch.tensor(1)
    assert torch.load(target) == {
        "slots": {0: zero, 1: one}, "of-0": {0: zero}, "of-1": {0: one},
        "list": [torch.tensor(5), torch.tensor(6)],
    }  # fmt: skip


def test_incompatible_stages_raise_on_every_rank(ran):
    folder, _, found = ran
    told = [refusals for _, _, refusals in found]
    expected = {
        "no peers": ("CheckpointStateError", "all that `peers` names"),
        "some peers": ("CheckpointStateError", "on the ranks [2]"),
        "not me": ("", "this one among them"),
        "a tensor": ("CheckpointStateError", "tensor `w` differs between the stages of rank 0 and of rank 2"),
        "a large tensor": ("CheckpointStateError", "is larger than 1048576 bytes"),
        "a value": ("CheckpointStateError", "value `loop.lr` differs"),
        "a node": ("CheckpointStateError", "leaf `loop` differs"),
        "in a stage": ("CheckpointStateError", "value `x0` is 1 on rank 0 and not there on rank 1"),
        "partial": ("CheckpointStateError", "is placed as `Partial(sum)`"),
        "left": ("CheckpointIncompatibleError", "no stage takes `buffers.of-0`"),
        "missing": ("CheckpointIncompatibleError", "`more0`"),
    }
    for name, (kind, message) in expected.items():
        for rank in range(4):
            text = told[rank][name] or ""
            assert text.startswith(kind), (name, rank, text)
            if name != "missing" or rank < 3:
                assert message in text, (name, rank, text)
    assert [each["loose"] for each in told] == [None] * 4
    assert not (folder / "stages" / "bad").exists()
