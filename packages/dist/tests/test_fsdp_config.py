"""Every key of Composer's FSDP config is honoured, mapped, ignored with a log, or refused, by name."""

import dataclasses
import logging
import os

import pytest
import torch
from torch import nn

from hocket.dist import ConfigError, FSDPConfig, ParallelismConfig, World, WorldError, provide
from hocket.dist.config import key_table
from hocket.dist.config.fsdp_keys import FSDP_KEYS
from hocket.dist.config.key_table import Outcome
from hocket.dist.ranks.mesh import mesh_shape
from support.ranks import run_ranks

# Composer's own defaults for its FSDP1 config.
COMPOSERS_DEFAULTS = {
    "activation_checkpointing": False,
    "activation_checkpointing_reentrant": True,
    "activation_cpu_offload": False,
    "auto_wrap": True,
    "te_checkpoint_wrapper": False,
    "te_shard_fp8_weight": False,
    "backward_prefetch": "BACKWARD_POST",
    "backward_prefetch_limit": 1,
    "forward_prefetch_limit": 1,
    "cpu_offload": False,
    "data_parallel_shard_degree": -1,
    "data_parallel_replicate_degree": None,
    "forward_prefetch": False,
    "ignored_modules": None,
    "keep_low_precision_grads": False,
    "limit_all_gathers": True,
    "load_monolith_rank0_only": False,
    "load_planner": None,
    "save_planner": None,
    "mixed_precision": "DEFAULT",
    "process_group": None,
    "sharded_ckpt_prefix_dir": "ep{epoch}-ba{batch}",
    "sharding_strategy": "FULL_SHARD",
    "state_dict_type": "full",
    "sync_module_states": False,
    "use_orig_params": True,
    "verbose": False,
}


def _rows(outcome: Outcome) -> list[str]:
    return sorted(key for key, row in FSDP_KEYS.items() if row.outcome is outcome)


def test_a_config_copied_from_composer_is_accepted() -> None:
    assert FSDPConfig.from_mapping(COMPOSERS_DEFAULTS) == FSDPConfig(sync_module_states=False)
    upper = {key.upper(): value for key, value in COMPOSERS_DEFAULTS.items()}
    assert FSDPConfig.from_mapping(upper) == FSDPConfig(sync_module_states=False)


def test_the_table_has_exactly_the_keys_of_the_config() -> None:
    taken = set(_rows(Outcome.HONOURED)) | set(_rows(Outcome.MAPPED))
    assert taken == {field.name for field in dataclasses.fields(FSDPConfig)}


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("reshard_after_foward", "reshard_after_forward"),
        ("mixed_precison", "mixed_precision"),
        ("shard_degree", "data_parallel_shard_degree"),
        ("sharding_stategy", "sharding_strategy"),
    ],
)
def test_an_unknown_key_raises_with_the_nearest_one(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"no key `{key}`. Did you mean `{nearest}`"):
        FSDPConfig.from_mapping({key: 1})


@pytest.mark.parametrize("key", _rows(Outcome.NO_EFFECT))
def test_a_key_without_effect_is_logged_once_by_name(
    key: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_table, "_logged", set())
    monkeypatch.delenv("RANK", raising=False)
    row = FSDP_KEYS[key]
    with caplog.at_level(logging.WARNING, "hocket.dist"):
        for value in row.silent:
            FSDPConfig.from_mapping({key: value})
        assert not caplog.records
        loud = [value for value in row.accepted or ("anything",) if value not in row.silent]
        for value in loud * 2:
            FSDPConfig.from_mapping({key: value})
    assert [key in record.getMessage() for record in caplog.records] == [True] * min(len(loud), 1)
    if row.accepted is not None:
        with pytest.raises(ConfigError, match=f"'{key}'.*expected"):
            FSDPConfig.from_mapping({key: "something else"})


@pytest.mark.parametrize("key", _rows(Outcome.REFUSED))
def test_a_key_that_cannot_be_honoured_is_refused_by_name(key: str) -> None:
    for silent in FSDP_KEYS[key].silent:
        FSDPConfig.from_mapping({key: silent})
    with pytest.raises(ConfigError) as caught:
        FSDPConfig.from_mapping({key: "on"})
    assert f"'{key}'" in str(caught.value)
    assert FSDP_KEYS[key].reason in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sharding_strategy": "full"}, "expected 'FULL_SHARD', 'SHARD_GRAD_OP'"),
        ({"cpu_offload": "yes"}, "`cpu_offload` is 'yes'"),
        ({"forward_prefetch_limit": 0}, "`forward_prefetch_limit` is 0"),
        ({"backward_prefetch_limit": True}, "`backward_prefetch_limit` is True"),
        ({"activation_checkpointing_every": -1}, "`activation_checkpointing_every` is -1"),
        ({"activation_checkpointing": "full"}, "`activation_checkpointing` is 'full'"),
        ({"ignored_modules": "head"}, "`ignored_modules` is 'head', expected a list"),
        ({"gradient_sync": "first"}, "`gradient_sync` is 'first'"),
        ({"param_init_fn": "normal"}, "`param_init_fn` is 'normal'"),
        ({"verbose": 1, "VERBOSE": 0}, "the key `verbose` twice"),
        ({"reshard_after_forward": 1}, "`reshard_after_forward` is 1"),
        ({"reshard_after_forward": "yes"}, "`reshard_after_forward` is 'yes'"),
        ({"reshard_after_forward": 2, "sharding_strategy": "SHARD_GRAD_OP"}, "Set only one of them"),
        ({"data_parallel_shard_degree": 0}, "`data_parallel_shard_degree` is 0"),
        ({"data_parallel_replicate_degree": 0}, "`data_parallel_replicate_degree` is 0"),
        ({"sync_module_states": "no"}, "`sync_module_states` is 'no'"),
        ({"mixed_precision": "HALF"}, "expected 'DEFAULT', 'PURE', 'FULL'"),
        ({"mixed_precision": {"param_dype": "bf16"}}, "Did you mean `param_dtype`"),
        ({"mixed_precision": {"param_dtype": "bf17"}}, "`param_dtype` is 'bf17'"),
        ({"mixed_precision": {"reduce_dtype": torch.int8}}, "floating-point"),
        ({"mixed_precision": {"buffer_dtype": "bf16"}}, "buffer_dtype"),
        ({"mixed_precision": {"param_dtype": "fp16"}, "amp_dtype": "bf16"}, "`param_dtype` float16"),
        ({"initial_weights": 5}, "`initial_weights` is 5, expected the path of a folder"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_save_ops": [torch.ops.aten.mm]},
            "expected names such as 'matmul'",
        ),
        ({"activation_checkpointing_save_ops": ["mm"]}, "without `activation_checkpointing`"),
        ({"activation_checkpointing_every": 2}, "is 2 without `activation_checkpointing`"),
    ],
)
def test_an_invalid_value_raises_with_its_key(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FSDPConfig.from_mapping(values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (None, torch.float32, None)),
        ({"amp_dtype": "bf16"}, (torch.bfloat16, torch.float32, None)),
        ({"amp_dtype": "amp_bf16"}, (torch.bfloat16, torch.float32, None)),
        ({"mixed_precision": "PURE", "amp_dtype": torch.bfloat16}, (torch.bfloat16, torch.bfloat16, None)),
        ({"mixed_precision": "FULL", "amp_dtype": "bf16"}, (None, torch.float32, None)),
        ({"mixed_precision": {"param_dtype": "bf16"}}, (torch.bfloat16, torch.float32, None)),
        (
            {"mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "fp32", "output_dtype": "float32"}},
            (torch.float16, torch.float32, torch.float32),
        ),
    ],
)
def test_mixed_precision_always_sets_the_dtype_of_gradient_sums(values: dict, expected: tuple) -> None:
    policy = FSDPConfig.from_mapping(values).policy_for([torch.zeros(1)])
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == expected


def test_gradients_in_double_precision_are_summed_in_double() -> None:
    assert FSDPConfig().policy_for([torch.zeros(1, dtype=torch.float64)]).reduce_dtype == torch.float64


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"data_parallel_replicate_degree": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (
            {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 4},
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        ({"sharding_strategy": "HYBRID_SHARD"}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (
            {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2},
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        ({"sharding_strategy": "NO_SHARD"}, [[rank] for rank in range(8)]),
        ({"process_group": "self"}, [[rank] for rank in range(8)]),
        ({"process_group": "node"}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"process_group": "local_rank_across_nodes"}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ({"process_group": "SET2"}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ({"process_group": "mod2"}, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_the_mesh_uses_all_ranks(values: dict, expected: list[list[int]]) -> None:
    world = World(rank=0, world_size=8, local_rank=0, local_world_size=4)
    shape = mesh_shape(FSDPConfig(**values), world)
    assert shape.ranks().view(shape.replicate, shape.shard).tolist() == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data_parallel_shard_degree": 2}, "is 1 × 2, but the job has 4 ranks"),
        ({"data_parallel_replicate_degree": 3}, "does not divide 4 ranks"),
        ({"reshard_after_forward": 4}, "must divide the shard degree"),
        ({"reshard_after_forward": 3}, "must divide the shard degree"),
        ({"sharding_strategy": "NO_SHARD", "data_parallel_shard_degree": 2}, "Leave the degree out"),
        ({"process_group": "set3"}, "does not divide 4 ranks"),
        ({"process_group": "set0"}, "expected 'self', 'node'"),
        ({"process_group": [0, 1]}, "instead of lists of ranks"),
        ({"process_group": "node", "data_parallel_shard_degree": 2}, "Set only one of them"),
    ],
)
def test_a_mesh_that_does_not_match_the_ranks_raises(values: dict, message: str) -> None:
    world = World(rank=0, world_size=4, local_rank=0, local_world_size=4)
    with pytest.raises(ConfigError) as caught:
        mesh_shape(FSDPConfig(**values), world)
    assert message in str(caught.value)


def test_unsupported_axes_raise_with_their_name() -> None:
    config = ParallelismConfig.from_mapping({"FSDP": {"verbose": True}, "tp": {"tensor_parallel_degree": 1}})
    assert config.fsdp == FSDPConfig(verbose=True)
    assert ParallelismConfig.from_mapping({"fsdp2": {}}).fsdp == FSDPConfig()
    for value in ({"degree": 2}, 2):
        config = ParallelismConfig.from_mapping({"fsdp": {}, "ep": value})
        assert config.degrees(4) == {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 1}
    for value in (0, True, "2", 1.5):
        with pytest.raises(ConfigError, match=r"\['ep'\].*expected a number of ranks"):
            ParallelismConfig.from_mapping({"fsdp": {}, "ep": value})
    assert ParallelismConfig.from_mapping({"ep": -1, "dp_replicate": 2}).degrees(8)["dp_shard"] == 4
    with pytest.raises(
        ConfigError, match="nearest layout of 8 ranks is `dp_replicate` 4 × `dp_shard` 2 × `ep` 2"
    ):
        ParallelismConfig.from_mapping({"ep": 3, "dp_shard": 8}).degrees(8)
    assert ParallelismConfig.from_mapping({"ep": -1}).degrees(1)["dp_shard"] == 1, "as for `tp`"
    with pytest.raises(
        ConfigError, match=r"is `dp_shard` 3 × `ep` 3, which does not multiply to the 4 ranks"
    ):
        ParallelismConfig.from_mapping({"ep": 3}).degrees(4)
    for axis in ("pp", "ep"):
        assert ParallelismConfig.from_mapping({axis: 1}).is_replicated
    with pytest.raises(ConfigError, match="has the axis `fsdp` twice"):
        ParallelismConfig.from_mapping({"fsdp": {}, "FSDP": {"verbose": True}})
    with pytest.raises(ConfigError, match="both `fsdp` and `fsdp2`"):
        ParallelismConfig.from_mapping({"fsdp": {}, "fsdp2": {}})
    with pytest.raises(ConfigError, match="Did you mean `fsdp`"):
        ParallelismConfig.from_mapping({"fsdpp": {}})


def test_a_config_of_another_type_raises() -> None:
    """A dict is converted to a config wherever one is expected; any other type raises with its name."""
    assert ParallelismConfig(fsdp={"verbose": True}).fsdp == FSDPConfig(verbose=True)
    with pytest.raises(ConfigError, match="`fsdp_config` is a bool"):
        ParallelismConfig(fsdp=True)  # type: ignore[arg-type]
    for make, name in ((FSDPConfig.from_mapping, "fsdp"), (ParallelismConfig.from_mapping, "parallelism")):
        with pytest.raises(ConfigError, match=f"`{name}_config` is a str, expected a dict"):
            make("FULL_SHARD")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`parallelism_config` has no key `sharding_strategy`"):
        provide({"fsdp": {}, "sharding_strategy": "FULL_SHARD"}, device="cpu")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"forward_prefetch_limit": 4}, "`forward_prefetch_limit` is 4 and has no effect"),
        ({"param_init_fn": print}, "no parameter of Sequential is on the meta device"),
        ({"forward_prefetch_limit": 4, "forward_prefetch": True}, None),
        ({}, None),
    ],
)
def test_a_value_without_effect_is_logged(
    one_rank: None,
    config: dict,
    words: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    with caplog.at_level(logging.WARNING, "hocket.dist"), provide(config, device="cpu") as parallelism:
        parallelism.lay_out(model)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (words is not None), messages
    assert words is None or words in messages[0]


def test_the_trainers_precision_sets_the_low_precision_dtype(one_rank: None) -> None:
    for precision, config, expected in (
        ("amp_bf16", {}, torch.bfloat16),
        ("amp_fp16", {"mixed_precision": "pure"}, torch.float16),
        ("fp32", {"mixed_precision": "PURE"}, None),
        ("amp_bf16", {"amp_dtype": "fp16"}, torch.float16),
        ("amp_bf16", {"mixed_precision": "FULL"}, None),
    ):
        with provide(config, device="cpu", timeout_s=10, precision=precision) as parallelism:
            assert parallelism.config.policy_for([]).param_dtype == expected
    with pytest.raises(ConfigError, match="set `amp_dtype='bf16'`"):
        provide({"mixed_precision": "PURE"}, device="cpu")
    with pytest.raises(ConfigError, match="`precision` is 'bf17'"):
        provide({}, device="cpu", precision="bf17")


def test_the_config_is_checked_before_waiting_for_other_ranks() -> None:
    # In a process of its own: this one may have a process group, which would be the truth about the ranks.
    run_ranks(check_config_of_absent_ranks, 1)


def check_config_of_absent_ranks() -> None:
    # Ranks 1 to 3 do not exist, so an error about the config must have been raised before the roll call.
    os.environ.update({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    with pytest.raises(ConfigError, match="no key `shard`"):
        provide({"shard": 2}, device="cpu", timeout_s=30)
    with pytest.raises(ConfigError, match="4 ranks"):
        provide({"data_parallel_shard_degree": 3}, device="cpu", timeout_s=30)
    with pytest.raises(ConfigError, match="is a list"):
        provide(["fsdp"], device="cpu", timeout_s=30)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout_s"):
        provide(None, device="cpu", timeout_s=0)
    del os.environ["RANK"]
    with pytest.raises(WorldError, match="`RANK` is not"):
        provide({}, device="cpu", timeout_s=30)
