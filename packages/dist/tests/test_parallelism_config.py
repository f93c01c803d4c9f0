"""The degrees of the axes: filled, multiplied to the number of ranks, and refused where they contradict."""

from typing import Any

import pytest
import torch

from hocket.dist import ConfigError, ParallelismConfig, provide
from hocket.dist.config.parallelism import CONFIG_KEYS
from hocket.dist.config.tensor_parallel import TensorParallelConfig
from hocket.dist.ranks.mesh import mesh_shape
from hocket.dist.ranks.world import World
from hocket.trainer.setup import arguments


@pytest.mark.parametrize(
    ("config", "degrees"),
    [
        ({"dp_replicate": 1, "dp_shard": -1, "tp": 2, "cp": 1, "pp": 1, "ep": 1}, (1, 4, 2)),
        ({"tp": 2}, (1, 4, 2)),
        ({"dp_shard": 2, "tp": -1}, (1, 2, 4)),
        ({"dp_replicate": -1, "dp_shard": 2, "tp": 2}, (2, 2, 2)),
        ({"DP_SHARD": 8}, (1, 8, 1)),
        ({"dp_replicate": 2}, (2, 4, 1)),
        ({"fsdp": {"data_parallel_shard_degree": 2}, "dp_shard": 2, "dp_replicate": 2, "tp": 2}, (2, 2, 2)),
        ({"tp": {"tensor_parallel_degree": 2, "layer_plan": {"up": "colwise"}}}, (1, 4, 2)),
        ({"tp": 2, "fsdp": {"data_parallel_replicate_degree": 2}}, (2, 2, 2)),
        ({"tp": 2, "fsdp2": {"sharding_strategy": "HYBRID_SHARD"}}, (2, 2, 2)),
        ({"tp": 2, "fsdp": {"sharding_strategy": "NO_SHARD"}}, (4, 1, 2)),
    ],
)
def test_degrees_fill_the_ranks(config: dict[str, Any], degrees: tuple[int, int, int]) -> None:
    made = ParallelismConfig.from_mapping(config)
    world = World(rank=3, world_size=8, local_rank=3, local_world_size=4)
    shape = mesh_shape(made.sharding(8), world, tensor=made.inner_degrees(8)[1])
    assert (shape.replicate, shape.shard, shape.tensor) == degrees
    assert shape.ranks().flatten().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"dp_shard": 3, "tp": 2},
            "`dp_replicate` 1 × `dp_shard` 3 × `tp` 2, which does not multiply to the 8",
        ),
        ({"dp_shard": 3, "tp": 2}, "nearest layout that does is `dp_replicate` 1 × `dp_shard` 4 × `tp` 2"),
        ({"tp": 3}, "`dp_shard` -1 × `tp` 3, which does not multiply to the 8 ranks"),
        ({"tp": 3}, "nearest layout that does is `dp_replicate` 1 × `dp_shard` 4 × `tp` 2"),
        ({"dp_shard": -1, "tp": -1}, "-1 for `dp_shard` and `tp`. Only one axis"),
        ({"dp_shard": 0}, "`parallelism_config['dp_shard']` is 0, expected a number of ranks from 1, or -1"),
        ({"tp": "two"}, "`parallelism_config['tp']` is 'two'"),
        ({"tp": True}, "`parallelism_config['tp']` is True"),
        ({"dp_shard": 4, "DP_Shard": 4}, "has the axis `dp_shard` twice"),
        (
            {"dp_shard": 4, "fsdp": {"data_parallel_shard_degree": 2}},
            "`data_parallel_shard_degree` in `fsdp` is 2",
        ),
        ({"dp_shard": 4, "fsdp": {"process_group": "node"}}, "`process_group` in `fsdp` is 'node'"),
        ({"tp": {"degree": 2, "tensor_parallel_degree": 4}}, "`degree` 2 and `tensor_parallel_degree` 4"),
        ({"tp": {"degre": 2}}, "Did you mean `degree`?"),
        ({"tp": {"plan": {"up": "colwise:2"}}}, "the style 'colwise:2' for `up`, expected one of 'colwise'"),
        ({"tp": {"plan": 3}}, "`plan` is 3, expected a dict of styles"),
        ({"tensor": 2}, "`parallelism_config` has no key `tensor`"),
        (
            {"pp": 3},
            "to the 8 ranks of the job. The nearest layout that does is `pp` 2 × `dp_shard` 4",
        ),
        ({"pp": True}, "`parallelism_config['pp']` is True"),
        ({"cp": 0}, "`parallelism_config['cp']` is 0, expected a number of ranks from 1"),
        ({"cp": {"degre": 2}}, "Did you mean `degree`?"),
        (
            {"cp": {"degree": 2, "method": "p2p"}},
            "`parallelism_config['cp']['method']` is 'p2p', expected 'ulysses' or 'ring'",
        ),
        (
            {"cp": {"degree": 2, "method": "ring", "rotate_method": "ring"}},
            "`parallelism_config['cp']['rotate_method']` is 'ring', expected 'allgather' or 'alltoall'",
        ),
        (
            {"cp": {"degree": 2, "rotate_method": "alltoall"}},
            "belongs to the method 'ring', and the method is 'ulysses'",
        ),
        ({"pp": {"stages": 2}}, "`parallelism_config['pp']` has no key `stages`"),
        (
            {"ep": 3, "dp_shard": 4, "tp": 2},
            "nearest layout of 8 ranks is `dp_replicate` 2 × `dp_shard` 2 × `tp` 2 × `ep` 2",
        ),
        (
            {"ep": 3, "pp": 2, "dp_shard": 4},
            "nearest layout of 8 ranks is `pp` 2 × `dp_replicate` 2 × `dp_shard` 2 × `ep` 2",
        ),
        ({"ep": 2, "pp": 8}, "nearest layout of 8 ranks is `pp` 4 × `dp_shard` 2 × `ep` 2"),
        ({"ep": 4, "pp": 3, "cp": 2}, "nearest layout of 8 ranks is `pp` 2 × `dp_shard` 2 × `cp` 2 × `ep` 2"),
        (
            {"ep": 8, "cp": 8, "dp_shard": 3},
            "`dp_shard` 3 × `cp` 8 × `ep` 8, which does not multiply to the 8 ranks",
        ),
    ],
)
def test_degrees_that_do_not_fit_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelismConfig.from_mapping(config).degrees(8)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("config", "degrees"),
    [
        ({"ep": 4}, (4, 2, 4, 1, 1)),
        ({"ep": 2, "dp_shard": 8}, (2, 1, 8, 1, 1)),
        ({"ep": 4, "dp_shard": -1}, (4, 1, 8, 1, 1)),
        ({"ep": -1, "dp_replicate": 2}, (4, 2, 4, 1, 1)),
        ({"ep": 2, "cp": 2}, (2, 4, 1, 2, 1)),
        ({"ep": 4, "cp": 2, "tp": 2}, (4, 1, 2, 2, 2)),
        ({"ep": -1, "cp": 2}, (8, 1, 4, 2, 1)),
        ({"ep": 2, "tp": -1}, (2, 1, 2, 1, 4)),
        ({"ep": 2, "fsdp": {"data_parallel_shard_degree": 4}, "dp_replicate": 2}, (2, 2, 4, 1, 1)),
    ],
)
def test_ranks_that_share_experts_are_some_of_those_that_share_parameters(
    config: dict[str, Any], degrees: tuple[int, ...]
) -> None:
    made = ParallelismConfig.from_mapping(config)
    assert (made.expert_degree(8), *made.degrees(8).values()) == degrees


@pytest.mark.parametrize(
    ("config", "degrees"),
    [
        ({"pp": 2, "ep": 2}, (2, 2, 2, 2, 1, 1)),
        ({"pp": 2, "ep": -1}, (4, 2, 1, 4, 1, 1)),
        ({"pp": 2, "ep": 2, "dp_shard": -1}, (2, 2, 1, 4, 1, 1)),
        ({"pp": -1, "ep": 2}, (2, 4, 1, 2, 1, 1)),
        ({"pp": 2, "ep": 2, "cp": 2}, (2, 2, 2, 1, 2, 1)),
        ({"pp": 2, "ep": 4, "cp": 2}, (4, 2, 1, 2, 2, 1)),
        ({"pp": 2, "ep": 2, "tp": 2}, (2, 2, 1, 2, 1, 2)),
    ],
)
def test_ranks_of_a_stage_share_its_experts(config: dict[str, Any], degrees: tuple[int, ...]) -> None:
    made = ParallelismConfig.from_mapping(config)
    assert (made.expert_degree(8), *made.degrees(8).values()) == degrees


def test_stages_are_sharded_over_the_ranks_that_are_left() -> None:
    for whole in ({"pp": 8}, {"pp": 2, "dp_replicate": 4}):
        assert ParallelismConfig.from_mapping(whole).sharding_of_stages(8) is None
    for config, expected in (
        ({"pp": 2}, ("SHARD_GRAD_OP", -1, None)),
        ({"pp": 2, "dp_replicate": 2}, ("SHARD_GRAD_OP", 2, 2)),
        ({"pp": 2, "fsdp": {"sharding_strategy": "HYBRID_SHARD"}}, ("_HYBRID_SHARD_ZERO2", -1, None)),
    ):
        found = ParallelismConfig.from_mapping(config).sharding_of_stages(8)
        assert found is not None
        degrees = (found.data_parallel_shard_degree, found.data_parallel_replicate_degree)
        assert (found.sharding_strategy, *degrees) == expected
        assert found.gradient_sync == "last"


def test_tensor_parallel_ranks_are_on_one_machine() -> None:
    made = ParallelismConfig.from_mapping({"tp": 4})
    with pytest.raises(ConfigError, match="`tp` is 4, which does not divide the 2 ranks of this machine"):
        mesh_shape(made.sharding(8), World(world_size=8, local_world_size=2), tensor=4)


def test_the_ranks_are_drawn_by_axis() -> None:
    made = ParallelismConfig.from_mapping({"dp_replicate": 2, "tp": 2})
    shape = mesh_shape(made.sharding(8), World(world_size=8, local_world_size=8), tensor=2)
    assert shape.draw() == "dp_replicate × dp_shard ↓, tp →\n0 1\n2 3\n4 5\n6 7"
    large = mesh_shape(
        ParallelismConfig(tp=16).sharding(256), World(world_size=256, local_world_size=256), tensor=16
    )
    assert large.draw().splitlines()[1] == "  0   1   2   3   4   5   6 …  15"
    assert len(large.draw().splitlines()) == 10


def test_the_trainer_knows_the_same_axes() -> None:
    assert arguments._AXES == CONFIG_KEYS


def test_a_degree_becomes_a_config() -> None:
    assert ParallelismConfig(tp=2).tp == TensorParallelConfig(degree=2)


def test_stages_are_refused_before_torch_2_10(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.1"))
    with pytest.raises(ConfigError, match=r"`pp` is 2, and this is torch 2\.9\.1"):
        provide({"pp": 2}, device="cpu", timeout_s=1)
