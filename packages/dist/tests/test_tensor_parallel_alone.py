"""Where `tp` alone cuts a model, it is not sharded as well, and trains and saves as if it were."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hocket.algos import GyroDropout, IncompatibleError
from hocket.dist import ModelError, provide
from hocket.dist.layout.tensor_parallelism.packed import PackedOutput
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.trainer import Callback, Trainer
from hocket.trainer.optim import DecoupledAdamW, DecoupledSGDW
from support.standing_ranks import StandingRanks

SEQUENCES = {"degree": 2, "sequence_parallel": True}
SHARDED: dict[str, tuple[dict[str, Any], str | None]] = {
    "low precision": ({"tp": 2}, "amp_bf16"),
    "host memory": ({"tp": 2, "fsdp": {"cpu_offload": True}}, None),
    "sums in double precision": ({"tp": 2, "fsdp": {"mixed_precision": {"reduce_dtype": "fp64"}}}, None),
    "an output of its own": ({"tp": 2, "fsdp": {"mixed_precision": {"output_dtype": "bf16"}}}, None),
}


def _gpt(wrap: Any = None) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=4, width=8, num_layers=2, num_heads=2))
    if wrap is not None:
        model.fsdp_wrap_fn = lambda module: wrap if type(module).__name__ == "Block" else False
    return model


def _tokens() -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(256, (2, 5), generator=torch.Generator().manual_seed(1))}


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _kinds() -> None:
    for name, (config, precision) in SHARDED.items():
        with provide(config, device="cpu", timeout_s=30, precision=precision) as parallelism:
            assert _is_sharded(parallelism.lay_out(_gpt())), name
            assert parallelism.describe().startswith("FSDP2 (FULL_SHARD), 2 ranks: dp_shard 1 × tp 2"), name
    with provide({"tp": 2}, device="cpu", timeout_s=30) as parallelism:
        assert _is_sharded(parallelism.lay_out(_gpt({"mixed_precision": {"param_dtype": "bf16"}})))
    with provide({"tp": 2}, device="cpu", timeout_s=30) as parallelism:
        assert not _is_sharded(parallelism.lay_out(_gpt().double()))
    with provide({"tp": 2}, device="cpu", timeout_s=30) as parallelism:
        model = _gpt()
        names = [name for name, _ in model.named_parameters()]
        parallelism.lay_out(model)
        assert not _is_sharded(model)
        assert type(model) is GPT
        assert [name for name, _ in model.named_parameters()] == names
        told = "tensor parallelism, 2 ranks: dp_shard 1 × tp 2; nothing to shard beside `tp`; 10 modules cut"
        assert parallelism.describe().startswith(told)
        parallelism.sync_gradients(model, False)
        with pytest.raises(ModelError, match="GPT is not sharded"):
            parallelism.sync_gradients(_gpt(), False)


class OwnAdamW(torch.optim.AdamW):
    """An optimizer of a user."""


def _optimizers() -> None:
    for kind, is_sharded in ((torch.optim.AdamW, False), (OwnAdamW, True), (torch.optim.LBFGS, True)):
        with provide({"tp": 2}, device="cpu", timeout_s=30) as parallelism:
            model = _gpt()
            parallelism.lay_out(model, [kind(model.parameters(), lr=0.01)])
            assert _is_sharded(model) == is_sharded, kind
            assert all(isinstance(one, DTensor) for one in model.parameters()) == is_sharded, kind


def test_other_optimizers_get_parameters_of_one_kind(two_ranks: StandingRanks) -> None:
    two_ranks.run(_optimizers)


def _stages() -> None:
    for kind, is_sharded in ((torch.optim.AdamW, False), (OwnAdamW, True)):
        with provide({"pp": 2, "tp": 2}, device="cpu", timeout_s=30) as parallelism:
            model = _gpt()
            parallelism.lay_out(model, [kind(model.parameters(), lr=0.01)])
            assert all(isinstance(one, DTensor) for one in model.parameters()) == is_sharded, kind


def test_other_optimizers_get_parameters_of_one_kind_in_stages(four_ranks: StandingRanks) -> None:
    four_ranks.run(_stages)


def _lbfgs(config: dict[str, Any] | None) -> list[torch.Tensor]:
    with provide(config, device="cpu", timeout_s=30) as parallelism:
        model = _gpt()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        parallelism.lay_out(model, [optimizer])

        def close() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model.loss(model(_tokens()), _tokens())
            loss.backward()
            return loss

        optimizer.step(close)
        found = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
        return [one.detach().clone() for one in found]


def test_lbfgs_which_joins_all_gradients_trains_as_in_one_process(two_ranks: StandingRanks) -> None:
    alone = _lbfgs(None)
    for found in two_ranks.run(_lbfgs, {"tp": 2}):
        torch.testing.assert_close(found, alone, atol=1e-6, rtol=1e-5)


def test_a_model_that_is_cast_or_offloaded_is_still_sharded(two_ranks: StandingRanks) -> None:
    two_ranks.run(_kinds)


def _trained(config: dict[str, Any] | None, make: Callable[..., Any]) -> dict[str, Any]:
    """Train for two batches of two microbatches, of which a block is frozen in the first."""
    with provide(config, device="cpu", timeout_s=30) as parallelism:
        model = _gpt()
        model.blocks[0].requires_grad_(False)
        optimizer = make(model.parameters(), lr=0.01)
        parallelism.lay_out(model, [optimizer])
        for batch in range(2):
            for microbatch in range(2):
                parallelism.sync_gradients(model, microbatch == 1)
                model.loss(model(_tokens()), _tokens()).backward()
            for name, one in model.named_parameters():
                assert (one.grad is None) == (batch == 0 and name.startswith("blocks.0.")), name
                if isinstance(one, DTensor) and one.grad is not None:
                    assert one.grad.placements == one.placements, name
            parallelism.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            model.blocks[0].requires_grad_(True)
        state = {
            f"{name} {slot}": value
            for name, one in model.named_parameters()
            for slot, value in optimizer.state[one].items()
            if slot != "step"
        }
        for name, value in state.items():
            assert isinstance(value, DTensor) == isinstance(model.get_parameter(name.split()[0]), DTensor)
        found = {**dict(model.named_parameters()), **state}
        return {
            name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
            for name, one in found.items()
        }


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "DecoupledAdamW": DecoupledAdamW,
    "DecoupledSGDW": partial(DecoupledSGDW, momentum=0.9, foreach=True),
    "SGD": partial(torch.optim.SGD, momentum=0.9, foreach=True),
}
LEVERS = {"activation_checkpointing": True, "activation_cpu_offload": True}


def _train_all() -> dict[str, dict[str, Any]]:
    found = {kind: _trained({"tp": 2}, make) for kind, make in OPTIMIZERS.items()}
    for config in ({"tp": SEQUENCES}, {"tp": 2, "fsdp": LEVERS}):
        found[f"AdamW, {config}"] = _trained(config, torch.optim.AdamW)
    return found


def test_microbatches_and_blocks_that_thaw_train_as_in_one_process(two_ranks: StandingRanks) -> None:
    alone = {kind: _trained(None, make) for kind, make in OPTIMIZERS.items()}
    for found in two_ranks.run(_train_all):
        for kind, trained in found.items():
            expected = alone[kind.partition(",")[0]]
            assert list(trained) == list(expected)
            for name, value in trained.items():
                torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5, msg=f"{kind} {name}")


def _kernels() -> None:
    for make in (OPTIMIZERS["fused AdamW"], DecoupledAdamW):
        with provide({"tp": 2}, device="cpu", timeout_s=30) as parallelism:
            model = _gpt()
            optimizer = make(model.parameters(), lr=0.01)
            parallelism.lay_out(model, [optimizer])
            assert optimizer.param_groups[0]["fused"]


def test_fused_kernels_step_cut_and_whole_parameters_of_one_group(two_ranks: StandingRanks) -> None:
    two_ranks.run(_kernels)


def _packed(degree: int, num_parts: int) -> None:
    """Compare the exchange with the same rearrangement of the outputs of all ranks."""
    mesh = init_device_mesh("cpu", (4 // degree, degree), mesh_dim_names=("other", "tp"))["tp"]
    rank, width = mesh.get_local_rank(), 3
    whole = torch.arange(2.0 * num_parts * degree * width).view(2, num_parts, degree, width)
    computed = whole.flatten(1).chunk(degree, 1)[rank].clone().requires_grad_()
    own = PackedOutput(mesh, num_parts)(computed)
    assert torch.equal(own, whole[:, :, rank].flatten(1))
    (own * (2 + own.detach())).sum().backward()
    assert torch.equal(computed.grad, 2 + computed.detach())


def _pack_all() -> None:
    for degree in (2, 4):
        for num_parts in (2, 3, 5):
            _packed(degree, num_parts)


def test_packed_outputs_and_their_gradients_change_hands(four_ranks: StandingRanks) -> None:
    four_ranks.run(_pack_all)


class SwapsDropout(Callback):
    def batch_end(self, state: Any, logger: Any) -> None:
        (whole,) = (one for one in state.model.modules() if isinstance(one, nn.Sequential))
        whole[1] = nn.Dropout(0.25)


def _swap() -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25), nn.Linear(4, 4))
    trainer = Trainer(
        model=model,
        loss_fn=nn.functional.mse_loss,
        train_dataloader=[(torch.ones(2, 4), torch.ones(2, 4))] * 2,
        algorithms=[GyroDropout(reapply=True)],
        callbacks=[SwapsDropout()],
        optimizers=torch.optim.AdamW(model.parameters()),
        parallelism_config={"tp": {"degree": 2, "plan": {"0": "colwise", "2": "rowwise"}}},
        max_duration="2ba",
        device="cpu",
        progress_bar=False,
    )
    with pytest.raises(IncompatibleError) as caught:
        trainer.fit()
    trainer.close()
    return str(caught.value)


def test_modules_that_are_swapped_in_are_not_treated_in_a_cut_model(two_ranks: StandingRanks) -> None:
    for message in two_ranks.run(_swap):
        assert "cannot be treated now, as the model is laid out over ranks" in message
