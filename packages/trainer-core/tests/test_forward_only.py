"""What an evaluation or prediction sets aside, for checkpoints and for one around it."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from hocket.trainer import Callback
from support.training import Net, data, loader, make, parameters


def test_a_checkpoint_saved_within_an_evaluation_has_the_generators_of_the_training(tmp_path):
    def run(**arguments):
        generator = torch.Generator().manual_seed(1)
        shuffled = [DataLoader(data(n), batch_size=4, shuffle=True, generator=generator) for n in (20, 9)]
        model = type("M", (Net,), {})(dropout=0.3)
        with make(
            model=model,
            train_dataloader=shuffled[0],
            eval_dataloader=shuffled[1],
            max_duration="3ep",
            **arguments,
        ) as trainer:
            for callback in trainer.state.callbacks:
                callback.trainer = trainer
            trainer.fit()
            return parameters(trainer)

    class Saves(Callback):
        def eval_batch_end(self, state, logger):
            if state.counts.epoch == 2 and state.eval_timestamp.counts.batch == 1:
                self.trainer.save_checkpoint(f"{tmp_path}/saved")

    whole = run(callbacks=Saves())
    resumed = run(load_path=f"{tmp_path}/saved")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_an_evaluation_within_a_prediction_leaves_its_time_and_batch():
    seen = []

    class Evaluates(Callback):
        def predict_batch_end(self, state, logger):
            self.trainer.eval(loader(8, 2))
            seen.append((state.evaluation_depth, state.predict_timestamp.batch.value, len(state.batch[1])))

    callback = Evaluates()
    with make(model=Net(), callbacks=callback) as trainer:
        callback.trainer = trainer
        trainer.predict(loader(12, 4))
        assert seen == [(1, 1, 4), (1, 2, 4), (1, 3, 4)]
        assert trainer.state.evaluation_depth == 0
