"""FSDP layouts: the modules that form groups, unchanged properties, and errors; mostly on one rank."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hocket.dist import ConfigError, FSDPParallelism, ModelError, OptimizerError, WrapError, provide
from hocket.dist.layout.wrapping import choose_wraps
from support.ranks import run_ranks
from support.standing_ranks import StandingRanks


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(x) for expert in self.experts)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), nn.LayerNorm(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), Encoder(), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def eval_forward(self, batch: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        return self.forward(batch) if outputs is None else outputs


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = {"body.1.layers.0", "body.1.layers.1"}


@pytest.fixture
def fsdp(one_rank: None) -> Iterator[FSDPParallelism]:
    with provide({}, device="cpu", timeout_s=10) as parallelism:
        yield parallelism


def test_repeated_blocks_become_groups_and_their_submodules_do_not() -> None:
    assert set(choose_wraps(Model())) == BLOCKS
    assert set(choose_wraps(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == {"0", "2"}
    assert choose_wraps(nn.Linear(2, 2)) == {}


def test_fsdp_wrap_on_a_module_takes_precedence() -> None:
    model = Model()
    model.head._fsdp_wrap = True
    assert set(choose_wraps(model)) == {"head"}
    model = Model()
    model.get_submodule("body.1.layers.0")._fsdp_wrap = False
    assert set(choose_wraps(model)) == {"body.1.layers.1"}


@pytest.mark.parametrize("owner", ["", "body"])
def test_a_wrap_function_chooses_the_groups(owner: str) -> None:
    model = Model()

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return {"reshard_after_forward": False} if isinstance(module, Block) else isinstance(module, Encoder)

    model.get_submodule(owner).fsdp_wrap_fn = choose
    wraps = choose_wraps(model)
    assert wraps.pop("body.1") == {}
    assert wraps == {name: {"reshard_after_forward": False} for name in BLOCKS}


def test_inner_groups_come_before_outer_ones() -> None:
    model = Model()
    model.fsdp_wrap_fn = lambda module: isinstance(module, Block | Encoder)
    assert list(choose_wraps(model))[-1] == "body.1"


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda module: False, "matches no module with parameters"),
        (lambda module: isinstance(module, nn.ReLU), "matches no module with parameters"),
        (lambda module: isinstance(module, nn.ModuleList), "which has no forward of its own"),
        (lambda module: {"reshard_after_foward": True}, "Did you mean `reshard_after_forward`"),
        (lambda module: "yes", "expected True, False or a dict"),
    ],
)
def test_an_unsuitable_wrap_function_raises(choose: Any, message: str) -> None:
    model = Model()
    model.fsdp_wrap_fn = choose
    with pytest.raises(WrapError, match=message):
        choose_wraps(model)


def test_fsdp_wrap_on_a_module_without_parameters_raises() -> None:
    model = Model()
    model.get_submodule("body.2")._fsdp_wrap = True  # a ReLU
    with pytest.raises(WrapError, match="`_fsdp_wrap` matches no module"):
        choose_wraps(model)


def test_groups_that_separate_tied_parameters_raise() -> None:
    model = Tied()
    model.head._fsdp_wrap = True
    with pytest.raises(WrapError, match=r"`embed.weight` and `head.weight` are one tied parameter"):
        choose_wraps(model)


def test_tied_parameters_stay_tied_and_are_optimized_once(fsdp: FSDPParallelism) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp.lay_out(model, [optimizer])
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, DTensor)
    ids = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
    assert ids.count(id(model.embed.weight)) == 1
    tokens = torch.tensor([[1, 2, 3]])
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    assert model.head.weight is model.embed.weight


def test_layout_makes_the_policys_groups_and_keeps_names(fsdp: FSDPParallelism) -> None:
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    assert fsdp.lay_out(model) is model
    assert {name for name, module in model.named_modules() if isinstance(module, FSDPModule)} == BLOCKS | {""}
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys


def test_parameters_are_gathered_only_during_a_pass(fsdp: FSDPParallelism) -> None:
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(2, 4)
    expected = model(x).detach()
    fsdp.lay_out(model)
    for method in (model, model.eval_forward):
        with torch.no_grad():
            outputs = method(x)
        torch.testing.assert_close(outputs, expected)
        kinds = {type(parameter) for parameter in model.parameters()}
        assert all(issubclass(kind, DTensor) for kind in kinds), "parameters were left gathered"
    model.eval_forward(x).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_optimizers_keep_groups_options_and_state(fsdp: FSDPParallelism, momentum: float) -> None:
    torch.manual_seed(0)
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizers = []
    for each in (model, twin):
        weights = [p for n, p in each.named_parameters() if n.endswith("weight")]
        biases = [p for n, p in each.named_parameters() if n.endswith("bias")]
        optimizer = torch.optim.SGD(
            [{"params": biases, "lr": 0.5}, {"params": weights}], lr=0.1, momentum=momentum
        )
        each(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizers.append(optimizer)
    groups = optimizers[0].param_groups
    fsdp.lay_out(model, optimizers[:1])
    assert optimizers[0].param_groups is groups
    assert [group["lr"] for group in groups] == [0.5, 0.1]
    known = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for group in groups for parameter in group["params"]} == known
    assert {id(parameter) for parameter in optimizers[0].state} <= known
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        each(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, msg=name)


def test_an_optimizer_of_another_model_raises_before_anything_changes(fsdp: FSDPParallelism) -> None:
    model = Model()
    with pytest.raises(
        OptimizerError, match=r"SGD's group 0 holds .* parameters that the model does not have"
    ):
        fsdp.lay_out(model, [torch.optim.SGD(Model().parameters(), lr=0.1)])
    assert not isinstance(model, FSDPModule)


def test_modules_that_cannot_be_sharded_raise(fsdp: FSDPParallelism) -> None:
    with pytest.raises(ModelError, match="ReLU has no parameters"):
        fsdp.lay_out(nn.ReLU())
    with pytest.raises(ModelError, match="is not sharded"):
        fsdp.sync_gradients(Model(), True)
    model = fsdp.lay_out(Model())
    with pytest.raises(ModelError, match="sharded already"):
        fsdp.lay_out(model)


def test_low_precision_is_used_inside_the_model_only(one_rank: None) -> None:
    config = {"mixed_precision": {"param_dtype": "bf16", "output_dtype": "fp32"}}
    seen = []
    with provide(config, device="cpu", timeout_s=10) as parallelism:
        model = parallelism.lay_out(Model())
        model.head.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
        output = model(torch.randn(2, 4))
        output.sum().backward()
        assert seen == [torch.bfloat16]
        assert output.dtype == torch.float32
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        assert "gathered bfloat16, gradients summed in float32" in parallelism.describe()


def test_the_norm_of_no_gradients_is_zero(fsdp: FSDPParallelism) -> None:
    model = fsdp.lay_out(Model())
    assert fsdp.clip_grad_norm_(model.parameters(), 1.0).item() == 0.0


def test_replication_refuses_a_model_that_it_did_not_lay_out() -> None:
    with provide(None, device="cpu", timeout_s=10) as parallelism:
        model = parallelism.lay_out(Model())
        parallelism.sync_gradients(model, False)
        with pytest.raises(ModelError, match="was not laid out here"):
            parallelism.sync_gradients(Model(), True)


def test_config_errors_are_value_errors() -> None:
    assert issubclass(WrapError, ConfigError)
    assert issubclass(ConfigError, ValueError)


def _timeouts_of_axes() -> list[float]:
    config = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}
    parallelism = provide(config, device="cpu", timeout_s=77)
    assert isinstance(parallelism, FSDPParallelism)
    groups = [parallelism.mesh.get_group(axis) for axis in ("dp_replicate", "dp_shard")]
    found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    parallelism.close()
    return found


def test_replica_and_shard_groups_have_the_given_timeout() -> None:
    assert run_ranks(_timeouts_of_axes, 2) == [[77.0, 77.0]] * 2


def test_contradictory_gradient_sync_values_raise() -> None:
    with pytest.raises(ConfigError, match="`gradient_sync` is 'last', and 'every' in `fsdp_config`"):
        provide({"gradient_sync": "every"}, device="cpu", gradient_sync="last")


def _refused_on_a_rank() -> list[str]:
    """Return the error of each invalid layout, and check that the ranks can still communicate."""
    plain, marked = _sequential(), _sequential()
    marked.fsdp_wrap_fn = lambda module: isinstance(module, nn.Embedding)
    wrong: list[tuple[Any, nn.Module]] = [
        ({"data_parallel_shard_degree": 3}, plain),
        ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}, plain),
        ({}, marked),
        ({"fsdp": {}, "fsdp2": {}}, plain),
        ({"sharding_strategy": "FULL_SHARD", "SHARDING_STRATEGY": "NO_SHARD"}, plain),
        ({"fsdp": {}, "tp": {"tensor_parallel_degree": 2}}, plain),
        ({"dp_shard": 3, "tp": 2}, plain),
        ({"tp": {"degree": 2, "plan": {"layrs": "colwise"}}}, plain),
        ({"tp": {"degree": 2, "plan": {"1": "colwize"}}}, plain),
        ({"fsdp": {"cpu_offload": True}, "pp": {"degree": 2}}, plain),
        ({"ignored_modules": ["haed"]}, plain),
    ]
    messages = []
    for config, model in wrong:
        with (
            pytest.raises(ConfigError) as caught,
            provide(config, device="cpu", timeout_s=30) as parallelism,
        ):
            parallelism.lay_out(model)
        messages.append(str(caught.value))
    with provide({}, device="cpu", timeout_s=30) as parallelism:
        parallelism.lay_out(_sequential())(torch.ones(2, 4)).sum().backward()
    return messages


def _sequential() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def test_an_invalid_layout_raises_the_same_error_on_all_ranks(two_ranks: StandingRanks) -> None:
    first, second = two_ranks.run(_refused_on_a_rank)
    assert first == second
    for message, words in zip(
        first,
        (
            "is 1 × 3, but the job has 2 ranks",
            "is 2 × 2, but the job has 2 ranks",
            "`model.fsdp_wrap_fn` matches no module",
            "both `fsdp` and `fsdp2`",
            "the key `sharding_strategy` twice",
            "Sequential has no tensor-parallel plan",
            "The nearest layout that does is `dp_replicate` 1 × `dp_shard` 1 × `tp` 2",
            "names `layrs`, which is no module of Sequential",
            "the style 'colwize' for `1`, expected one of 'colwise', 'rowwise'",
            "has `pp`, and `cpu_offload` in `fsdp` is True, which does not work beside it",
            "haed",
        ),
        strict=True,
    ):
        assert words in message


class _Switched(nn.Module):
    """A model that leaves one of two layers unused in each forward pass, as routed layers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers[self.calls % 2](x)


def _train_with_unused(config: Any, **options: Any) -> tuple[bool, str]:
    """Return whether all ranks have the same parameters after three steps, or the error's message."""
    with provide(config, device="cpu", timeout_s=30, **options) as parallelism:
        model = _Switched()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        module = parallelism.lay_out(model, [optimizer])
        try:
            for _ in range(3):
                module(torch.full((2, 4), 1.0 + parallelism.data_parallel[0])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            return False, "\n".join([str(error), *getattr(error, "__notes__", ())])
        values = [getattr(one, "full_tensor", lambda one=one: one)().sum() for one in module.parameters()]
        mine = torch.stack(values).detach().double()
        return torch.allclose(parallelism.reduce_async(mine).wait() / 2, mine), ""


def _train_with_unused_each_way() -> list[tuple[bool, str]]:
    return [
        _train_with_unused(None, find_unused_parameters=True),
        _train_with_unused({"sharding_strategy": "NO_SHARD", "find_unused_parameters": True}),
        _train_with_unused({"find_unused_parameters": True}),
        _train_with_unused(None),
    ]


def test_find_unused_parameters_handles_unused_layers(two_ranks: StandingRanks) -> None:
    for *searched, (_, message) in two_ranks.run(_train_with_unused_each_way):
        assert searched == [(True, "")] * 3
        assert "`fsdp_config={'sharding_strategy': 'NO_SHARD', 'find_unused_parameters': True}`" in message
