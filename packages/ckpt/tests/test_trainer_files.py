"""Checkpoint files that Lightning's and Composer's trainers save are read, and converted for `torch.load`."""

import argparse
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hocket.ckpt  # noqa: E402
from hocket.ckpt.verbs.convert import convert  # noqa: E402
from support.composer_peer import run_peer  # noqa: E402


def check_model(path, prefix, expected):
    """Check the model of a file, before and after a conversion to a Hocket checkpoint and back."""
    convert(path, path.parent / "hocket", to="hocket")
    convert(path.parent / "hocket", path.parent / "back.pt", to="torch")
    for place in (path, path.parent / "hocket", path.parent / "back.pt"):
        checkpoint = hocket.ckpt.open(place)
        for name, tensor in expected.items():
            np.testing.assert_array_equal(checkpoint[prefix + name], tensor.numpy())
    return hocket.ckpt.open(path)


@pytest.mark.slow
# Lightning uses deprecated parts of torch and of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_lightnings_file_is_read(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="needs `uv sync --group lightning`")

    class Module(lightning.LightningModule):
        def __init__(self, width, settings):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(4, width)

        def training_step(self, batch, number):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]

    module = Module(8, argparse.Namespace(data=pathlib.PurePosixPath("/data")))
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), 8)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(tmp_path),
    )
    trainer.fit(module, batches)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = check_model(tmp_path / "last.ckpt", "state_dict.", module.state_dict())
    assert checkpoint.contents.values["global_step"].value == 4
    assert checkpoint.contents.values["hyper_parameters.width"].value == 8
    assert checkpoint["optimizer_states.0.state.0.exp_avg"].shape == (8, 4)
    assert "argparse.Namespace" in checkpoint.contents.opaque["hyper_parameters.settings"]


@pytest.mark.parity
def test_composers_file_is_read(tmp_path):
    run_peer(pathlib.Path(__file__).with_name("composer_peer_files.py"), tmp_path)
    expected = torch.load(tmp_path / "expected.pt")
    checkpoint = check_model(tmp_path / "ep1-ba4-rank0.pt", "state.model.", expected)
    assert checkpoint.contents.values["state.timestamp.Timestamp.batch"].value == 4
    assert checkpoint["state.optimizers.AdamW.state.module.0.weight.exp_avg"].shape == (8, 4)
    assert "state.timestamp.Timestamp.total_wct" in checkpoint.contents.opaque
