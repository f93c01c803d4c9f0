"""The lines that `hocket.compat.composer` prints to a console, in Composer's form."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hocket.compat.composer import Trainer
from hocket.compat.composer.loggers import ConsoleLogger, format_log_data_value
from hocket.compat.composer.models import ComposerClassifier


def make_loader(rows: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(rows, 2), torch.arange(rows) % 3), batch_size=2)


def printed(*, evaluate: int | None = None, **arguments: Any) -> list[str]:
    """Train for two epochs of three batches, evaluate if `evaluate` is given; return the lines."""
    torch.manual_seed(2)
    model = ComposerClassifier(nn.Linear(2, 3), num_classes=3)
    stream = io.StringIO()
    settings: dict[str, Any] = {"log_to_console": True, "console_stream": stream, "max_duration": "2ep"}
    with Trainer(
        model=model,
        train_dataloader=make_loader(6),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        progress_bar=False,
        device="cpu",
        **settings | arguments,
    ) as trainer:
        if evaluate is None:
            trainer.fit()
        else:
            trainer.eval(make_loader(evaluate))
        # `fit` and `eval` write all logged values before they return.
        return stream.getvalue().splitlines()


def progress(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("[")]


def test_each_value_has_a_line_below_the_progress() -> None:
    lines = printed()
    starts = [index for index, line in enumerate(lines) if line.startswith("[")]
    assert progress(lines) == [
        f"[epoch={epoch}][batch={batch}/3]:" for epoch in (1, 2) for batch in (1, 2, 3)
    ]
    second = lines[starts[1] + 1 : starts[2]]
    names = [line.partition(": ")[0] for line in second]
    assert {"\t Train loss/train/total", "\t Train metrics/train/MulticlassAccuracy"} <= {*names}
    (loss,) = [line for line in second if "loss/train/total" in line]
    assert len(loss.rpartition(".")[2]) == 4


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        # Lines are also printed at the first batch or epoch, and at the end of the training.
        ("4ba", ["[epoch=1][batch=1/3]:", "[epoch=2][batch=1/3]:", "[epoch=2][batch=3/3]:"]),
        ("1ep", ["[epoch=1][batch=3/3]:", "[epoch=2][batch=3/3]:"]),
    ],
)
def test_the_console_prints_at_the_interval(interval: str, expected: list[str]) -> None:
    assert progress(printed(console_log_interval=interval)) == expected


def test_the_progress_is_in_the_unit_of_the_duration() -> None:
    assert progress(printed(max_duration="2ba")) == ["[batch=1/2]:", "[batch=2/2]:"]


@pytest.mark.parametrize(
    ("rows", "batches"), [(8, [1, 2, 3, 4]), (40, [1, 3, 5, 7, 9, 10, 12, 14, 16, 18, 20])]
)
def test_an_evaluation_prints_its_progress_and_then_its_metrics(rows: int, batches: list[int]) -> None:
    lines = printed(evaluate=rows)
    total = rows // 2
    assert [line.rstrip(":") for line in progress(lines)] == [
        f"[Eval batch={batch}/{total}] Eval on eval data" for batch in batches
    ]
    last = lines.index(f"[Eval batch={total}/{total}] Eval on eval data:")
    assert any("\t Eval metrics/eval/MulticlassAccuracy: " in line for line in lines[last:])


def test_an_evaluation_does_not_replace_the_values_of_the_training() -> None:
    lines = printed(console_log_interval="100ba", eval_dataloader=make_loader(4), eval_interval="1ep")
    assert not [line for line in lines if "Eval loss/train" in line]
    assert progress(lines)[-1] == "[epoch=2][batch=3/3]:"
    assert any("Train loss/train/total" in line for line in lines[lines.index("[epoch=2][batch=3/3]:") :])


def test_settings_are_printed_before_the_first_line() -> None:
    lines = printed(auto_log_hparams=True)
    assert lines[1] == "Config:"
    assert lines[0] == "*" * 30
    assert any(line.startswith("max_duration") for line in lines[: lines.index("[epoch=1][batch=1/3]:")])


def test_values_are_printed_as_composer_prints_them() -> None:
    value = {"a": [1, 0.5], "b": None, "c": torch.tensor(2.0), "d": torch.zeros(2, 3), "e": "x"}
    assert format_log_data_value(value) == (
        '{ "a": [1, 0.5000], "b": None, "c": 2.0000, "d": Tensor of shape torch.Size([2, 3]), "e": "x", }'
    )


def test_unsupported_units_raise() -> None:
    with pytest.raises(ValueError, match="`log_interval` is `10sp`; expected batches or epochs"):
        ConsoleLogger("10sp")
