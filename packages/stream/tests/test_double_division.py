"""Libraries that divide data over ranks themselves, on two ranks, as docs/trainers.md shows."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset
from hocket.stream.errors import ConfigError
from support.ranks import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "trainers.md"
COUNT = 203
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}


def read_page() -> dict[str, str]:
    """Return the page's snippets by the name in their first line."""
    found = re.findall(r"^```python\n# (.*?)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == 5
    return dict(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("data") / "train"
    with MDSWriter(columns={"id": "int"}, out=out, size_limit=400) as writer:
        for number in range(COUNT):
            writer.write({"id": number})
    return str(out)


def skip_without(library: str) -> None:
    """Skip a test whose ranks need a library. Importing it here would change the environment."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs `uv sync --group {library}`")


class Net(torch.nn.Module):
    """A model that records the samples of its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, id: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: A002 - the column's name
        self.seen += id.tolist()
        return {"loss": self.layer(id[:, None].float() / COUNT).square().mean()}


def run_snippets(code: list[str], folder: str) -> list[list[int]]:
    """Run snippets on a rank; return the samples that each one saw."""
    found = []
    for snippet in code:
        names: dict[str, Any] = {"folder": folder, "seen": [], "model": Net(), "__name__": "snippet"}
        exec(snippet, names)
        found.append(names["seen"])
    return found


def use_accelerate(code: list[str], folder: str) -> tuple[list[str], list[list[int]]]:
    """Pass the divided data set to Accelerate in each way on a rank, then run snippets.

    Returns:
        The messages that were raised, and the samples that each snippet saw.
    """
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    messages = []
    for dispatch, workers in [(True, 0), (False, 0), (False, 1)]:
        options = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        dataset = StreamingDataset(local=folder, batch_size=4)
        loader = accelerator.prepare(DataLoader(dataset, batch_size=4, num_workers=workers))
        with pytest.raises(ConfigError) as caught:
            next(iter(loader))
        messages.append(str(caught.value))
    # Reading the data set without Accelerate raises nothing.
    assert len(list(StreamingDataset(local=folder, batch_size=4))) in (101, 102)
    assert len(list(DataLoader(StreamingDataset(local=folder, batch_size=4), num_workers=1))) in (101, 102)
    return messages, run_snippets(code, folder)


def test_a_shard_of_a_divided_data_set_is_refused(folder: str) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader", reason="needs `uv sync --group accelerate`")
    for world_size, num_processes in [(2, 2), (2, 1), (1, 2)]:
        dataset = StreamingDataset(local=folder, batch_size=4, rank=0, world_size=world_size)
        shard = data_loader.IterableDatasetShard(dataset, batch_size=4, num_processes=num_processes)
        if world_size == num_processes:
            with pytest.raises(ConfigError, match="divided over 2 ranks"):
                next(iter(shard))
        else:
            assert next(iter(shard))["id"] == 0


@pytest.mark.slow
def test_accelerate(folder: str) -> None:
    skip_without("accelerate")
    page = read_page()
    code = [page["accelerate"], page["accelerate, library divides"]]
    ranks = run_ranks(use_accelerate, 2, code, folder, timeout_s=180, env=QUIET)
    for messages, _ in ranks:
        assert "accelerate.data_loader.DataLoaderDispatcher` divides" in messages[0]
        for message in messages:
            assert "divided over 2 ranks" in message
            assert "`hocket.stream.StreamingDataLoader`" in message
            assert "`rank=0, world_size=1`" in message
    ours, theirs = zip(*(seen for _, seen in ranks), strict=True)
    assert sorted(ours[0] + ours[1]) == list(range(COUNT))
    assert set(theirs[0] + theirs[1]) == set(range(COUNT))
    assert len(theirs[0]) == len(theirs[1])


def use_transformers(code: list[str], folder: str) -> list[list[int]]:
    """Train on the divided data set with transformers' Trainer on a rank, then run snippets."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=f"{folder}/out", use_cpu=True, max_steps=3, report_to="none", remove_unused_columns=False
    )
    dataset = StreamingDataset(local=folder, batch_size=4)
    with pytest.raises(ConfigError, match="divided over 2 ranks"):
        Trainer(model=Net(), args=arguments, train_dataset=dataset).train()
    return run_snippets(code, folder)


@pytest.mark.slow
def test_transformers(folder: str) -> None:
    skip_without("accelerate")
    skip_without("transformers")
    page = read_page()
    code = [page["transformers"], page["transformers, library divides"]]
    ours, theirs = zip(*run_ranks(use_transformers, 2, code, folder, timeout_s=240, env=QUIET), strict=True)
    for ranks in (ours, theirs):
        assert set(ranks[0] + ranks[1]) == set(range(COUNT))
        assert len(ranks[0] + ranks[1]) <= COUNT + 8


def fit(code: str, folder: str) -> list[int]:
    """Run the page's snippet for Lightning on a rank; return the samples that it saw."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.seen = self.net.seen

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            return self.net(batch["id"])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-6)

    names: dict[str, Any] = {"folder": folder, "seen": [], "module": Module(), "__name__": "snippet"}
    exec(code, names)
    seen: list[int] = names["seen"]
    return seen


@pytest.mark.slow
def test_lightning(folder: str) -> None:
    skip_without("lightning")
    ranks = run_ranks(fit, 2, read_page()["lightning"], folder, timeout_s=180, env=QUIET)
    # A rank without a share of the last batch makes its step with one sample.
    assert set(ranks[0] + ranks[1]) == set(range(COUNT))
    assert len(ranks[0] + ranks[1]) <= COUNT + 1


def test_streamingdataloader_reads_a_divided_data_set(folder: str) -> None:
    dataset = StreamingDataset(local=folder, batch_size=4, rank=0, world_size=2)
    assert len(list(StreamingDataLoader(dataset))) == 26


def resume_transformers(folder: str) -> dict[str, Any]:
    """Train with transformers' Trainer on a rank, whole and in parts; return the samples and the weights."""
    from transformers import Trainer, TrainingArguments

    from hocket.stream.huggingface import StreamingCallback

    class StreamingTrainer(Trainer):  # type: ignore[misc]  # mypy does not see transformers here
        def get_train_dataloader(self) -> Any:
            return StreamingDataLoader(self.train_dataset)

    def train(
        name: str, *, resumes: bool = False, stop: int = -1, with_callback: bool = True, **options: Any
    ) -> Any:
        torch.manual_seed(1)
        model = Net()
        arguments = TrainingArguments(
            output_dir=f"{folder}-{name}",
            use_cpu=True,
            num_train_epochs=3,
            report_to="none",
            save_steps=2,
            disable_tqdm=True,
            remove_unused_columns=False,
            learning_rate=0.1,
            **options,
        )

        class Stop(StreamingCallback):
            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_training_stop = state.global_step == stop

        Stop.__name__ = "StreamingCallback"
        dataset = StreamingDataset(local=folder, batch_size=25, shuffle=True, tail="pad")
        trainer = StreamingTrainer(
            model=model,
            args=arguments,
            train_dataset=dataset,
            callbacks=[Stop()] if with_callback else [],
        )
        trainer.train(resume_from_checkpoint=resumes)
        return model.seen, [value.detach().clone() for value in model.parameters()]

    found: dict[str, Any] = {}
    # An epoch has 5 batches: within the first, at the end of the second, and within the third.
    for name, stops, options in [
        ("plain", (2, 10, 12), {}),
        ("constant", (4,), {"lr_scheduler_type": "constant"}),
    ]:
        whole = train(f"{name}-whole", **options)
        parts = [
            train(name, resumes=number > 0, stop=stop, **options) for number, stop in enumerate([*stops, -1])
        ]
        found[name] = whole, parts
    messages = []
    train("without", stop=-1, with_callback=False, max_steps=2)
    for name, options in [("without", {}), ("accumulated", {"gradient_accumulation_steps": 2})]:
        if options:
            train(name, stop=2, **options)
        with pytest.raises(ConfigError) as caught:
            train(name, resumes=True, **options)
        messages.append(str(caught.value))
    found["messages"] = messages
    return found


@pytest.mark.slow
def test_transformers_resumes_within_an_epoch(folder: str) -> None:
    skip_without("accelerate")
    skip_without("transformers")
    for rank in run_ranks(resume_transformers, 2, folder, timeout_s=240, env=QUIET):
        for name in ("plain", "constant"):
            (seen, weights), parts = rank[name]
            assert [number for part, _ in parts for number in part] == seen
            assert len(seen) == 3 * 125
            assert all(map(torch.equal, parts[-1][1], weights))
        without, accumulated = rank["messages"]
        assert "checkpoint of step 2 was saved without `StreamingCallback`" in without
        assert "within an epoch of 5 batches, and `gradient_accumulation_steps` is 2" in accumulated
