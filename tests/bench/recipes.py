"""Steps and time to the same held-out quality: plain training, each method alone, and the whole stack.

`uv run python tests/bench/recipes.py` runs every recipe of `hocket.recipes` with five seeds: plain, with each
of its methods alone, and with its stack; and the recipes of `method_recipes.py`, which have no stack, for the
methods that the other recipes do not use. Each run is appended to `--out` as it ends, and a run that the file
has already is not repeated: a benchmark that was interrupted, or ended by `--minutes`, continues where it
stopped, and `--show` prints the tables of the runs so far. All recipes run with one seed before the next, so
that an interrupted benchmark has equally many runs of each; `--settings plain stack` leaves the single
methods out. The stacks were chosen with seeds below 100; the seeds of this benchmark start at 100.

Time is the CPU time of one thread in training, evaluation left out, so that other work on the machine counts
little.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import method_recipes
import torch

RECIPES = {"resnet": "images", "vit": "images", "gpt": "language", "bert": "language", "unet": "diffusion",
           "diffusers": "diffusion", "text": "embeddings"}  # fmt: skip
NAMES = [*RECIPES, *method_recipes.RECIPES]
FIRST_SEED = 100
EXTREMES = ("plain", "stack")
Run = dict[str, Any]
"""One run: `recipe`, `setting`, `seed`, and its `curve` of `(step, seconds, quality)`."""


def recipe_of(name: str) -> Any:
    """Return a recipe by name."""
    if name in method_recipes.RECIPES:
        return method_recipes.RECIPES[name]
    return importlib.import_module(f"hocket.recipes.{RECIPES[name]}").RECIPES[name]


def settings_of(name: str) -> dict[str, Any]:
    """Return the names of the methods of each of a recipe's settings; None for the stack."""
    settings = {"plain": (), **{method: (method,) for method in recipe_of(name).methods}}
    return settings if name in method_recipes.RECIPES else {**settings, "stack": None}


def planned(names: list[str], settings: list[str], num_seeds: int) -> Iterator[tuple[str, str, int]]:
    """Yield recipe, setting and seed of each run, in order."""
    for seed, name in itertools.product(range(FIRST_SEED, FIRST_SEED + num_seeds), names):
        for setting in settings_of(name):
            if (setting if setting in EXTREMES else "methods") in settings:
                yield name, setting, seed


def measure(name: str, setting: str, seed: int) -> Run:
    """Run a recipe with one setting and seed."""
    from hocket.recipes.recipe import run

    recipe, methods = recipe_of(name), settings_of(name)[setting]
    options: dict[str, Any] = {}
    if setting in method_recipes.OPTIMIZERS:
        recipe = dataclasses.replace(recipe, make_optimizer=method_recipes.OPTIMIZERS[setting])
        options["schedulers"] = None
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        curve = run(recipe, methods, seed=seed, device="cpu", clock=time.process_time, **options)
    return {"recipe": name, "setting": setting, "seed": seed, "curve": curve}


def read(path: Path) -> list[Run]:
    """Return the runs in a file, or none if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(name: str, runs: list[Run], num_seeds: int) -> str:
    """Return one recipe's results in Markdown, of the seeds that all settings with runs have."""
    recipe = recipe_of(name)
    ran = [run for run in runs if run["recipe"] == name]
    curves: dict[str, dict[int, Any]] = {
        setting: {run["seed"]: run["curve"] for run in ran if run["setting"] == setting}
        for setting in settings_of(name)
    }
    curves = {setting: by_seed for setting, by_seed in curves.items() if by_seed or setting in EXTREMES}
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in curves.values())))[:num_seeds]
    sign = "≥" if recipe.higher_is_better else "≤"
    lines = [
        f"### {name}: {recipe.metric} {sign} {recipe.target:g}, {recipe.steps} steps, {len(seeds)} seeds",
        "",
        *([f"The stack is {', '.join(recipe.stack or recipe.methods)}.", ""] if "stack" in curves else []),
        "| setting | reached | steps | of plain | CPU seconds | of plain | quality at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    firsts = {
        setting: [_first(recipe, by_seed[seed]) for seed in seeds] for setting, by_seed in curves.items()
    }
    for setting, first in firsts.items():
        reached = [point for point in first if point is not None]
        ends = [curves[setting][seed][-1][2] for seed in seeds]
        lines.append(
            f"| {setting} | {len(reached)} of {len(seeds)} | {_spread([p[0] for p in reached], 0)} | "
            f"{_ratio(first, firsts['plain'], 0)} | {_spread([p[1] for p in reached], 2)} | "
            f"{_ratio(first, firsts['plain'], 1)} | {_spread(ends, 4)} |"
        )
    return "\n".join([*lines, ""])


def _first(recipe: Any, curve: Any) -> Any:
    """Return the first point of a curve that has the quality, or None."""
    return next((point for point in curve if recipe.reaches(point[2])), None)


def _ratio(points: list[Any], plain: list[Any], column: int) -> str:
    """Return the median and range of the ratios seed by seed, where both runs reached the quality."""
    pairs = [(one, other) for one, other in zip(points, plain, strict=True) if one and other]
    note = "" if len(pairs) == len(points) else f" [{len(pairs)} seed{'s' * (len(pairs) != 1)}]"
    return _spread([one[column] / other[column] for one, other in pairs], 2) + note * bool(pairs)


def _spread(values: list[Any], digits: int) -> str:
    if not values:
        return "–"
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f}–{most:.{digits}f})"


def main() -> None:
    """Run the missing settings, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=NAMES, choices=NAMES)
    kinds = [*EXTREMES, "methods"]
    parser.add_argument("--settings", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all of it; no run starts later")
    parser.add_argument("--out", type=Path, default=Path("recipes.jsonl"), help="the file of the runs")
    parser.add_argument(
        "--show", action="store_true", help="print the tables of the runs so far, run nothing"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    deadline = time.monotonic() + 60 * options.minutes
    done = {(run["recipe"], run["setting"], run["seed"]) for run in read(options.out)}
    for name, setting, seed in planned(options.recipes, options.settings, options.seeds):
        if options.show or time.monotonic() > deadline:
            break
        if (name, setting, seed) not in done:
            with options.out.open("a") as file:
                print(json.dumps(measure(name, setting, seed)), file=file)
    runs = read(options.out)
    for name in options.recipes:
        print(table(name, runs, options.seeds), flush=True)


if __name__ == "__main__":
    main()
