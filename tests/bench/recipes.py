"""The steps and the time to the same held-out quality, plain training beside each method and the whole stack.

`uv run python tests/bench/recipes.py` runs every recipe of `hocket.recipes` with five seeds; name some to run
these alone. Runs of a recipe alternate: every setting with the first seed, then with the second. Time is the
CPU time of one thread in training, evaluation left out, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import statistics
import time
from typing import Any

import torch

RECIPES = {"resnet": "images", "vit": "images", "gpt": "language", "bert": "language", "unet": "diffusion",
           "text": "embeddings"}  # fmt: skip
Curve = list[tuple[int, float, float]]


def measure(name: str, seeds: int, until: float) -> tuple[Any, dict[str, list[Curve]]]:
    """Return a recipe, and by setting the curve of each seed; start no seed after a time."""
    from hocket.recipes.recipe import run

    recipe = importlib.import_module(f"hocket.recipes.{RECIPES[name]}").RECIPES[name]
    settings: dict[str, Any] = {
        "plain": (),
        **{method: (method,) for method in recipe.methods},
        "stack": None,
    }
    curves: dict[str, list[Curve]] = {setting: [] for setting in settings}
    for seed in range(seeds):
        if time.monotonic() > until:
            break
        for setting, methods in settings.items():
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                curves[setting].append(run(recipe, methods, seed=seed, device="cpu", clock=time.process_time))
    return recipe, curves


def table(name: str, recipe: Any, curves: dict[str, list[Curve]]) -> str:
    """Return one recipe's results in Markdown."""
    num_seeds = len(curves["plain"])
    sign = "≥" if recipe.higher_is_better else "≤"
    lines = [
        f"### {name}: {recipe.metric} {sign} {recipe.target:g}, {recipe.steps} steps, {num_seeds} seeds",
        "",
        "| setting | reached | steps | CPU seconds | time against plain | quality at the end |",
        "|---|---|---|---|---|---|",
    ]
    plain = None
    for setting, runs in curves.items():
        first = [next((point for point in run if recipe.reaches(point[2])), None) for run in runs]
        reached = [point for point in first if point is not None]
        everywhere = len(reached) == num_seeds
        seconds = statistics.median(point[1] for point in reached) if everywhere else None
        plain = seconds if setting == "plain" else plain
        lines.append(
            f"| {setting} | {len(reached)} of {num_seeds} | {_spread([p[0] for p in reached], 0)} | "
            f"{_spread([p[1] for p in reached], 2)} | "
            f"{f'{seconds / plain:.2f}' if seconds and plain else '–'} | "
            f"{_spread([run[-1][2] for run in runs], 4)} |"
        )
    return "\n".join([*lines, ""])


def _spread(values: list[Any], digits: int) -> str:
    if not values:
        return "–"
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f}–{most:.{digits}f})"


def main() -> None:
    """Run the recipes and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="recipes; all of them if none is named")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=15.0, help="for each recipe; no seed starts later")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.names or RECIPES:
        if name not in RECIPES:
            parser.error(f"`{name}` is no recipe; there are {', '.join(RECIPES)}")
        recipe, curves = measure(name, given.seeds, time.monotonic() + 60 * given.minutes)
        print(table(name, recipe, curves), flush=True)


if __name__ == "__main__":
    main()
