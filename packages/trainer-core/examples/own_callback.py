"""A custom callback: it records the loss of each epoch's last batch without waiting in the step."""

from data import make_loader, make_model

from hocket.trainer import Callback, Trainer


class EpochLosses(Callback):
    """Keeps the loss at each epoch's end. Reading the number waits for the device, here once an epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def epoch_end(self, state, logger):
        """Read the loss of the epoch's last batch."""
        self.losses.append(float(state.loss))


if __name__ == "__main__":
    watch = EpochLosses()
    with Trainer(
        model=make_model(), train_dataloader=make_loader(), max_duration="3ep", callbacks=watch, seed=1
    ) as trainer:
        trainer.fit()
    print("losses:", ", ".join(f"{loss:.3f}" for loss in watch.losses))
