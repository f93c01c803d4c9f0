"""Short scripts for Composer 0.32.1 and for `hocket.compat.composer`; `python oracle.py OUT.pt [NAME …]`.

Each script trains a small model and returns values to compare: the final parameters, the counts, the learning
rates, the names of metrics and of logged values, and the order of events.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from composer import Algorithm, Callback, DataSpec, Evaluator, Event, Trainer
from composer.algorithms import (
    EMA,
    SAM,
    SWA,
    BlurPool,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
)
from composer.callbacks import EarlyStopper, LRMonitor, ThresholdStopper
from composer.core import Time
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, ComposerModel
from composer.optim import (
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    DecoupledSGDW,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    PolynomialScheduler,
    StepScheduler,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

warnings.simplefilter("ignore")
SCRIPTS = {}


def script(function):
    SCRIPTS[function.__name__] = function
    return function


def rows(count=24, seed=1, width=4):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, width, generator=generator), torch.arange(count) % 3)


def loader(count=24, batch_size=8, seed=1):
    return DataLoader(rows(count, seed), batch_size=batch_size)


def fill(module, seed=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module


def network():
    return fill(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))


def classifier(**options):
    return ComposerClassifier(network(), num_classes=3, **options)


class Recorder(Callback):
    def __init__(self):
        self.events = []

        self.rates = []

    def run_event(self, event, state, logger):
        self.events.append(event.value)
        if event == Event.AFTER_TRAIN_BATCH:
            self.rates.append(state.optimizers[0].param_groups[0]["lr"])


def counts(state):
    time = state.timestamp
    return {
        name: int(getattr(time, name)) for name in ("epoch", "batch", "sample", "token", "batch_in_epoch")
    }


def run(model=None, fit=None, **arguments):
    """Train, and return the values to compare."""
    model = classifier() if model is None else model
    if "optimizers" not in arguments:
        arguments["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder, logger = Recorder(), InMemoryLogger()
    settings = {"train_dataloader": loader(), "max_duration": "2ep", "device": "cpu", "seed": 7}
    settings |= arguments
    settings["callbacks"] = [*arguments.get("callbacks", []), recorder]
    trainer = Trainer(model=model, progress_bar=False, loggers=[logger], **settings)
    (fit or (lambda trainer: trainer.fit()))(trainer)
    state = trainer.state
    found = {
        "parameters": {name: value.detach().clone() for name, value in state.model.state_dict().items()},
        "counts": counts(state),
        "events": recorder.events,
        "logged": sorted(logger.data),
        "metrics": {label: sorted(metrics) for label, metrics in state.eval_metrics.items()},
        "rates": recorder.rates,
        "monitored": {
            name: [float(value) for _, value in points]
            for name, points in logger.data.items()
            if name.startswith("lr-")
        },
    }
    trainer.close()
    return found


def with_schedule(*schedulers, **arguments):
    model = classifier()
    optimizer = DecoupledSGDW(model.parameters(), lr=0.1, momentum=0.9)
    return run(model, optimizers=optimizer, schedulers=list(schedulers), **arguments)


@script
def sgd():
    return run()


@script
def decoupled_sgd():
    model = classifier()
    return run(
        model,
        optimizers=DecoupledSGDW(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True),
    )


@script
def decoupled_adam():
    model = classifier()
    return run(model, optimizers=DecoupledAdamW(model.parameters(), lr=0.01, weight_decay=1e-4))


@script
def no_optimizer():
    return run(optimizers=None)


@script
def linear_warmup():
    return with_schedule(LinearWithWarmupScheduler(t_warmup="2ba"))


@script
def linear():
    return with_schedule(LinearScheduler(alpha_i=1.0, alpha_f=0.2, t_max="0.5dur"))


@script
def cosine():
    return with_schedule(CosineAnnealingScheduler(alpha_f=0.1))


@script
def cosine_warmup():
    return with_schedule(CosineAnnealingWithWarmupScheduler(t_warmup="0.2dur"))


@script
def restarts():
    return with_schedule(CosineAnnealingWarmRestartsScheduler(t_0="2ba", t_mult=2.0), max_duration="4ep")


@script
def multi_step():
    return with_schedule(MultiStepScheduler(milestones=["0.3dur", "0.5dur"]), max_duration="4ep")


@script
def step():
    return with_schedule(StepScheduler(step_size="2ba", gamma=0.5))


@script
def exponential():
    return with_schedule(ExponentialScheduler(gamma=0.9, decay_period="1ep"))


@script
def polynomial():
    return with_schedule(PolynomialScheduler(power=2.0, alpha_f=0.1))


@script
def constant_warmup():
    return with_schedule(ConstantWithWarmupScheduler(t_warmup="3ba", alpha=0.5))


@script
def two_schedules():
    return with_schedule(StepScheduler(step_size="1ep", gamma=0.5), LinearScheduler())


@script
def stretched_schedule():
    return with_schedule(LinearScheduler(), scale_schedule_ratio=0.5, max_duration="4ep")


@script
def monitored_schedule():
    return with_schedule(CosineAnnealingWithWarmupScheduler(t_warmup="2ba"), callbacks=[LRMonitor()])


@script
def schedule_by_epochs():
    return with_schedule(LinearScheduler(), step_schedulers_every_batch=False, max_duration="4ep")


@script
def schedules_of_both_kinds():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedules = [
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2),
        MultiStepScheduler(milestones=["0.3dur", "0.5dur"]),
    ]
    return run(model, optimizers=optimizer, schedulers=schedules, max_duration="4ep", callbacks=[LRMonitor()])


@script
def schedules_of_both_kinds_by_batches():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedules = [LinearScheduler(), torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)]
    return run(model, optimizers=optimizer, schedulers=schedules, step_schedulers_every_batch=True)


@script
def schedule_of_two_fits():
    def fit(trainer):
        trainer.fit()
        trainer.fit(duration="1ep", schedulers=ExponentialScheduler(gamma=0.5, decay_period="1ep"))

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = StepScheduler(step_size="1ba", gamma=0.5)
    return run(model, fit=fit, optimizers=optimizer, schedulers=schedule, max_duration="1ep")


@script
def torch_schedule():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    return run(model, optimizers=optimizer, schedulers=schedule, max_duration="3ep")


@script
def microbatches():
    return run(device_train_microbatch_size=3)


@script
def last_batch_is_shorter():
    return run(train_dataloader=loader(21), device_train_microbatch_size=4)


@script
def samples():
    return run(max_duration="40sp")


@script
def batches():
    return run(max_duration="4ba")


@script
def four_epochs():
    return run(max_duration="4ep")


@script
def subset():
    return run(train_subset_num_batches=2)


@script
def evaluation():
    return run(eval_dataloader=loader(20, seed=2), eval_interval="2ba")


@script
def evaluators():
    both = [
        Evaluator(label="one", dataloader=loader(8, seed=2), metric_names=["CrossEntropy"]),
        Evaluator(label="two", dataloader=loader(24, seed=4), subset_num_batches=1),
    ]
    return run(eval_dataloader=both)


@script
def training_metrics():
    return run(
        classifier(train_metrics=MulticlassAccuracy(num_classes=3, average="micro")), callbacks=[LRMonitor()]
    )


@script
def clipping_by_norm():
    return run(algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=0.1)])


@script
def clipping_by_value():
    return run(algorithms=[GradientClipping(clipping_type="value", clipping_threshold=0.05)])


@script
def clipping_adaptively():
    return run(algorithms=[GradientClipping(clipping_type="adaptive", clipping_threshold=0.01)])


@script
def label_smoothing():
    return run(algorithms=[LabelSmoothing(smoothing=0.2)])


@script
def ema():
    return run(algorithms=[EMA(half_life="2ba", update_interval="1ba")], eval_dataloader=loader(8, seed=2))


@script
def swa():
    return run(
        algorithms=[SWA(swa_start="0.5dur", swa_end="1dur", update_interval="1ba")], max_duration="4ep"
    )


@script
def swa_in_batches():
    return run(
        algorithms=[SWA(swa_start="0.5dur", swa_end="1dur", update_interval="1ba")], max_duration="12ba"
    )


@script
def sam():
    return run(algorithms=[SAM(rho=0.05)])


@script
def layer_freezing():
    return run(algorithms=[LayerFreezing(freeze_start=0.25, freeze_level=0.5)], max_duration="4ep")


@script
def surgery():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, stride=2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)]
    model = ComposerClassifier(fill(nn.Sequential(*layers)), num_classes=3)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(12, 3, 10, 10, generator=generator), torch.arange(12) % 3)
    return run(model, train_dataloader=DataLoader(data, batch_size=4), algorithms=[BlurPool(min_channels=1)])


@script
def two_fits():
    def fit(trainer):
        trainer.fit(duration="1ep")
        trainer.fit(duration="2ba")

    return run(fit=fit, max_duration=None)


@script
def time_reset():
    def fit(trainer):
        trainer.fit()
        trainer.fit(reset_time=True)

    return run(fit=fit, max_duration="1ep")


@script
def stopping():
    class Stop(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == Time.from_timestring("4ba"):
                state.stop_training()

    return run(callbacks=[Stop()])


@script
def early_stopper():
    model = classifier()
    return run(
        model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        eval_dataloader=loader(8, seed=2),
        max_duration="9ep",
        callbacks=[EarlyStopper("CrossEntropy", "eval", patience="2ep")],
    )


@script
def threshold_stopper():
    stopper = ThresholdStopper("MulticlassAccuracy", "eval", threshold=0.0)
    return run(eval_dataloader=loader(8, seed=2), max_duration="9ep", callbacks=[stopper])


@script
def loss_in_parts():
    class Parts(ComposerModel):
        def __init__(self):
            super().__init__()
            self.module = network()

        def forward(self, batch):
            return self.module(batch[0])

        def loss(self, outputs, batch):
            loss = nn.functional.cross_entropy(outputs, batch[1])
            return {"class": loss, "size": 0.1 * outputs.square().mean()}

    return run(Parts())


@script
def order_of_algorithms():
    order = []

    def make(name):
        class Named(Algorithm):
            def match(self, event, state):
                return event in (Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BATCH_START, Event.BATCH_END)

            def apply(self, event, state, logger):
                order.append(f"{event.value}:{name}")

        return Named()

    found = run(algorithms=[make("a"), make("b")], max_duration="1ba")
    return found | {"order": order}


@script
def tokens():
    spec = DataSpec(loader(), get_num_tokens_in_batch=lambda batch: 5 * len(batch[0]))
    return run(train_dataloader=spec, max_duration="100tok")


@script
def predictions():
    outputs = []
    found = run(fit=lambda trainer: outputs.extend(trainer.predict(loader())))
    return found | {"outputs": torch.cat(outputs)}


@script
def resumed():
    with tempfile.TemporaryDirectory() as folder:
        first = classifier()
        run(
            first,
            optimizers=DecoupledAdamW(first.parameters(), lr=0.01),
            max_duration="1ep",
            save_folder=folder,
        )
        again = classifier()
        latest = str(Path(folder) / "latest-rank0.pt")
        return run(again, optimizers=DecoupledAdamW(again.parameters(), lr=0.01), load_path=latest)


def main():
    torch.set_num_threads(1)
    wanted = sys.argv[2:] or SCRIPTS
    found = {}
    for name in wanted:
        try:
            found[name] = SCRIPTS[name]()
        except Exception as error:  # noqa: BLE001 - the answer is the error
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
