"""A script of two training steps, which `test_wheels.py` runs with different sets of installed packages.

`python two_step.py [--fsdp] [--save-folder DIR] [--stream DIR] [--clip]` prints the last loss.
"""

import argparse

import torch
from torch.utils.data import DataLoader

from hocket.trainer import Trainer


class Regression(torch.nn.Module):
    """A model in the form that the trainer needs: `forward(batch)` and `loss(outputs, batch)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch["x"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--save-folder")
    parser.add_argument("--stream")
    parser.add_argument("--clip", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    model = Regression()
    rows = [{"x": torch.randn(4)} for _ in range(8)]
    loader = DataLoader(rows, batch_size=4)
    options = {}
    if args.stream:
        import numpy as np

        from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset

        with MDSWriter(columns={"x": "ndarray:float32:4"}, out=args.stream) as writer:
            for row in rows:
                writer.write({"x": np.asarray(row["x"])})
        loader = StreamingDataLoader(StreamingDataset(local=args.stream, batch_size=4))
    if args.clip:
        from hocket.algos import GradientClipping

        options["algorithms"] = [GradientClipping(clipping_type="norm", clipping_threshold=1.0)]
    if args.fsdp:
        options["fsdp_config"] = {}
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="2ba",
        save_folder=args.save_folder,
        progress_bar=False,
        **options,
    )
    with trainer:
        trainer.fit()
        print(f"loss {float(trainer.state.loss):.6f} after {trainer.state.timestamp.batch}")


if __name__ == "__main__":
    main()
