"""Schedule-free optimizers switch to their averages for evaluation; other optimizers raise."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.algos import EMA, IncompatibleError, ScheduleFree
from hocket.trainer import Trainer
from hocket.trainer.callback import Callback
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim import LinearScheduler
from support.methods import make_loader, make_model, train

schedulefree = pytest.importorskip("schedulefree", reason="needs schedulefree")


class Modes(Callback):
    """Keeps the optimizer's mode at each event, and the head's weights."""

    def __init__(self) -> None:
        self.modes: list[tuple[str, bool]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.first: dict[str, torch.Tensor] = {}

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        if event.value in (
            "before_forward",
            "eval_start",
            "predict_batch_start",
            "batch_checkpoint",
            "fit_end",
        ):
            is_training = state.optimizers[0].param_groups[0]["train_mode"]
            self.modes.append((event.value, is_training))
            self.weights[event.value] = state.model.head.weight.detach().clone()
            self.first.setdefault(event.value, self.weights[event.value])


def test_evaluation_and_the_trained_model_have_the_average() -> None:
    model, modes = make_model("text"), Modes()
    with Trainer(
        model=model,
        train_dataloader=make_loader("text", 3),
        eval_dataloader=make_loader("text", 1),
        eval_interval="2ba",
        optimizers=schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05),
        algorithms=ScheduleFree(),
        callbacks=modes,
        max_duration="3ba",
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        trainer.predict(make_loader("text", 1))
        assert modes.modes[:6] == [
            ("before_forward", True),
            ("batch_checkpoint", True),
            ("before_forward", True),
            ("eval_start", False),
            ("batch_checkpoint", True),
            ("before_forward", True),
        ]
        seen = dict(modes.modes)
        assert not seen["fit_end"]
        assert not seen["predict_batch_start"]
        assert torch.equal(modes.weights["fit_end"], model.head.weight)  # type: ignore[arg-type, union-attr]
        assert not torch.equal(modes.weights["before_forward"], modes.weights["fit_end"])
        trainer.fit("1ba")
        assert ("before_forward", True) in modes.modes[-4:]


def test_the_training_equals_a_loop_with_the_schedulefree_package() -> None:
    model = make_model("text")
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)
    optimizer.train()
    loader = make_loader("text", 4, shuffle=False)
    for batch in loader:
        model.loss(model(batch), batch).backward()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    trained, _ = train(["ScheduleFree"], kind="text", train_dataloader=loader)
    for name, value in model.named_parameters():
        torch.testing.assert_close(trained[name], value.detach(), atol=1e-6, rtol=1e-5)


def test_checkpoints_of_weights_only_have_the_average_and_saving_changes_nothing(tmp_path: Path) -> None:
    def fit(**saving: Any) -> tuple[torch.nn.Module, Modes]:
        model, modes = make_model("text"), Modes()
        with Trainer(
            model=model,
            train_dataloader=make_loader("text", 4, shuffle=False),
            eval_dataloader=make_loader("text", 1),
            eval_interval="2ba",
            optimizers=schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05),
            algorithms=ScheduleFree(),
            callbacks=modes,
            max_duration="4ba",
            seed=1,
            device="cpu",
            progress_bar=False,
            **saving,
        ) as trainer:
            trainer.fit()
        return model, modes

    model, modes = fit(save_folder=str(tmp_path), save_interval="2ba", save_weights_only=True)
    unsaved, _ = fit()
    for name, value in model.state_dict().items():
        assert torch.equal(value, unsaved.state_dict()[name]), name
    for checkpoint, expected in (("ep0-ba2", "eval_start"), ("latest", "fit_end")):
        again = make_model("text", seed=6)
        path = str(tmp_path / checkpoint)
        with Trainer(model=again, load_path=path, load_weights_only=True, device="cpu", progress_bar=False):
            # Switching to the average and back for the evaluation rounds once more.
            torch.testing.assert_close(again.head.weight.detach(), modes.first[expected])  # type: ignore[operator]


def test_misuse_raises_when_the_trainer_is_built() -> None:
    with pytest.raises(
        IncompatibleError, match="needs an optimizer of the `schedulefree` package, but got `SGD`"
    ):
        train([], kind="text", algorithms=[ScheduleFree()])
    with pytest.raises(IncompatibleError, match="replaces learning rate schedules; remove `schedulers=`"):
        train(["ScheduleFree"], schedulers=LinearScheduler())
    for other in (ScheduleFree(), EMA()):
        with pytest.raises(TrainerConfigError, match="cannot be used together"):
            train(["ScheduleFree"], algorithms=[ScheduleFree(), other])
