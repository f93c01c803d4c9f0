"""The table of training methods in `packages/algos/README.md`, made from the code.

`uv run python tools/algos_table.py` writes it, and `--check` fails if it is out of date. The columns come
from the classes of `hocket.algos` and from the cases of `tests/support/methods.py`, which the tests run.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "packages/algos/README.md"
START, END = "<!-- made by tools/algos_table.py -->", "<!-- end of the table -->"
SETTINGS = ("DDP", "FSDP2", "compile", "microbatches", "resume")
# Methods that the parity tests compare with Composer's, and the cases there.
COMPARED = {
    "Alibi": {"slopes", "bias"},
    "AugMix": {"augmix", "augmentation"},
    "BlurPool": {"apply_blurpool"},
    "ChannelsLast": {"channels_last"},
    "ColOut": {"colout"},
    "CutMix": {"cutmix"},
    "CutOut": {"cutout"},
    "EMA": {"ema", "half_life"},
    "Factorize": {"apply_factorization"},
    "GatedLinearUnits": {"gated"},
    "GhostBatchNorm": {"apply_ghost_batchnorm"},
    "GradientClipping": {"clip"},
    "GyroDropout": {"periods"},
    "LabelSmoothing": {"smooth"},
    "LayerFreezing": {"freeze"},
    "LowPrecisionGroupNorm": {"apply_low_precision_groupnorm"},
    "LowPrecisionLayerNorm": {"apply_low_precision_layernorm"},
    "MixUp": {"mixup"},
    "ProgressiveResizing": {"resize"},
    "RandAugment": {"randaugment", "augmentation"},
    "SAM": {"sam"},
    "SelectiveBackprop": {"select", "should_select"},
    "SeqLengthWarmup": {"length"},
    "SqueezeExcite": {"apply_squeeze_excite"},
    "StochasticDepth": {"stochastic_depth"},
    "WeightStandardization": {"apply_weight_standardization"},
}
WITHOUT_COUNTERPART = {"Float8", "LoRA", "QAT", "QLoRA", "ScheduleFree", "SequencePacking", "ZLoss"}


def table() -> str:
    """Return the table in Markdown."""
    sys.path.insert(0, str(ROOT / "tests"))
    from hocket import algos
    from hocket.trainer.algorithm import Algorithm
    from support.methods import CASES

    classes = {
        name: kind
        for name in algos.__all__
        if inspect.isclass(kind := getattr(algos, name)) and issubclass(kind, Algorithm)
    }
    refused = _refused({name: case.make() for name, case in CASES.items()})
    lines = [
        "| method | class | function | events | composes with | not with | runs under | parity | effect |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(classes, key=str.lower):
        folder = classes[name].__module__.split(".")[2]
        cells = [
            f"[{_title(folder)}](src/hocket/algos/{folder}/README.md)",
            f"`{name}`",
            ", ".join(f"`{one}`" for one in _functions(folder)) or "–",
            ", ".join(_events(classes[name])),
            _composes(name, refused) if name in CASES else "–",
            ", ".join(f"`{other}`" for other in sorted(refused.get(name, ()))) or "–",
            ", ".join(SETTINGS) if name in CASES else "see its page",
            _parity(name),
            _effect(folder),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _title(folder: str) -> str:
    page = ROOT / "packages/algos/src/hocket/algos" / folder / "README.md"
    return page.read_text().splitlines()[0].removeprefix("# ")


def _functions(folder: str) -> list[str]:
    module = importlib.import_module(f"hocket.algos.{folder}")
    return [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]


def _events(kind: Any) -> list[str]:
    from hocket.trainer.event import Event

    return [event.name for event in Event if kind.events is None or event in kind.events]


def _refused(made: dict[str, Any]) -> dict[str, set[str]]:
    refused: dict[str, set[str]] = {}
    for (name, first), (other_name, second) in permutations(made.items(), 2):
        if first.conflict_with(second):
            refused.setdefault(name, set()).add(other_name)
            refused.setdefault(other_name, set()).add(name)
    return refused


def _composes(name: str, refused: dict[str, set[str]]) -> str:
    """Count the methods that `test_pairs.py` combines with a method, of those for the same kind of model."""
    from support.methods import CASES, common_kind

    others = [one for one in CASES if common_kind([name, one])]
    return f"{len(set(others) - {name} - refused.get(name, set()))} of {len(others) - 1}"


def _effect(folder: str) -> str:
    """Return a link to the measured effect of a method if its page has one, and else a dash."""
    page = ROOT / "packages/algos/src/hocket/algos" / folder / "README.md"
    link = f"[measured](src/hocket/algos/{folder}/README.md)"
    return link if "**Measured.**" in page.read_text() else "–"


def _parity(name: str) -> str:
    if name in COMPARED:
        return "compared"
    return "no counterpart" if name in WITHOUT_COUNTERPART else "see its page"


def updated(text: str) -> str:
    """Return the README's text with the table replaced by the current one."""
    before, rest = text.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n{table()}\n{END}{after}"


def main() -> int:
    """Write or check the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = README.read_text()
    new = updated(text)
    if parser.parse_args().check:
        if new != text:
            print(f"{README} is out of date; run `python tools/algos_table.py`")
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
