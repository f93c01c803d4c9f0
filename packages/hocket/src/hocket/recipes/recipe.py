"""The `Recipe` class, and a function that trains a recipe plainly or with some of its methods."""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hocket.trainer import Algorithm, Callback, Evaluator, Logger, State, Trainer
from hocket.trainer.optim import CosineAnnealingWithWarmupScheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A small training job: a model, its data, and the methods that make up its tuned stack.

    Attributes:
        make_model: Makes the model; the caller has seeded torch.
        make_data: Takes a batch size; returns the loaders for training and evaluation. The training loader
            shuffles with torch's generator.
        methods: For each method that the benchmark tries, the function that makes it.
        stack: Names of the methods that are used together; all of them if empty.
        metric: Name of the held-out quality: a metric of the model, or `"Loss"`.
        target: The quality to which the benchmark measures the training time.
        higher_is_better: Whether a higher quality is better.
        batch_size: Samples of a step.
        make_optimizer: Takes the parameters and the learning rate.
        learning_rate: Peak learning rate, with warmup and a cosine decay to 10%.
        steps: Number of training steps.
        eval_every: Steps between evaluations.
    """

    make_model: Callable[[], nn.Module]
    make_data: Callable[[int], tuple[DataLoader[Any], DataLoader[Any]]]
    methods: Mapping[str, Callable[[], Algorithm]]
    stack: tuple[str, ...] = ()
    metric: str = "Loss"
    target: float
    higher_is_better: bool = False
    batch_size: int = 32
    make_optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer] = torch.optim.AdamW
    learning_rate: float = 3e-3
    steps: int = 200
    eval_every: int = 10

    def reaches(self, quality: float) -> bool:
        """Return whether a quality is as good as the target."""
        return quality >= self.target if self.higher_is_better else quality <= self.target


@dataclass(slots=True)
class Curve(Callback):
    """A callback that records the held-out quality over steps and training seconds, without evaluation time.

    Attributes:
        metric: The metric's name.
        clock: Returns seconds.
        points: `(step, seconds, quality)` of each evaluation.
    """

    metric: str
    clock: Callable[[], float] = time.perf_counter
    points: list[tuple[int, float, float]] = field(default_factory=list)
    _since: float = 0.0
    _seconds: float = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the clock."""
        self._since = self.clock()

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Stop the clock."""
        self._seconds += self.clock() - self._since

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Record the quality, and start the clock again."""
        quality = float(state.eval_metric_values[self.metric])
        self.points.append((state.timestamp.counts.batch, self._seconds, quality))
        self._since = self.clock()


def run(
    recipe: Recipe,
    methods: Sequence[str] | None = (),
    *,
    seed: int = 0,
    steps: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> list[tuple[int, float, float]]:
    """Train a recipe and return its curve: `(step, training seconds, held-out quality)`.

    Args:
        recipe: The recipe to train.
        methods: Names in `recipe.methods`; none for the plain training, None for the whole stack.
        seed: Seed of the weights, the data's order and the methods' draws.
        steps: Number of steps, instead of the recipe's; the interval of evaluations scales with it.
        clock: Returns the seconds that the curve records; the benchmark passes a clock of CPU time.
        options: Further arguments of `Trainer`.

    Raises:
        ValueError: A method is not one of the recipe's.
    """
    names = list(recipe.stack or recipe.methods) if methods is None else list(methods)
    if unknown := sorted(set(names) - set(recipe.methods)):
        raise ValueError(
            f"`methods` has {unknown}, which the recipe does not have; it has {', '.join(recipe.methods)}"
        )
    length = recipe.steps if steps is None else steps
    torch.manual_seed(seed)
    model = recipe.make_model()
    train, evaluation = recipe.make_data(recipe.batch_size)
    curve = Curve(recipe.metric, clock)
    interval = max(1, recipe.eval_every * length // recipe.steps)
    arguments: dict[str, Any] = {
        "train_dataloader": train,
        "eval_dataloader": Evaluator(label="eval", dataloader=evaluation, eval_interval=f"{interval}ba"),
        "optimizers": recipe.make_optimizer(model.parameters(), recipe.learning_rate),
        "schedulers": CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur", alpha_f=0.1),
        "max_duration": f"{length}ba",
        "seed": seed,
        "progress_bar": False,
        **options,
    }
    callbacks = [curve, *arguments.pop("callbacks", ())]
    algorithms = [recipe.methods[name]() for name in names]
    with Trainer(model=model, algorithms=algorithms, callbacks=callbacks, **arguments) as trainer:
        trainer.fit()
    return curve.points


def main(recipes: Mapping[str, Recipe], description: str | None) -> None:
    """Run one of a file's recipes from the command line, and print its curve."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("name", choices=sorted(recipes))
    parser.add_argument("--stack", action="store_true", help="train with the recipe's methods")
    parser.add_argument("--methods", nargs="*", default=[], help="train with these of the recipe's methods")
    parser.add_argument("--steps", type=int, help="number of steps, in place of the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    recipe = recipes[options.name]
    points = run(recipe, None if options.stack else options.methods, seed=options.seed, steps=options.steps)
    for step, seconds, quality in points:
        reached = "  reaches the target" * recipe.reaches(quality)
        print(f"step {step:5d}  {seconds:7.2f} s  {recipe.metric} {quality:.4f}{reached}")
