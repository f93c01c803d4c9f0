"""The pages of the API reference: for each public module, the names of its `__all__`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "trainer-core": [
        *("hocket.trainer", "hocket.trainer.callbacks", "hocket.trainer.loggers", "hocket.trainer.optim"),
        *(
            "hocket.trainer.models",
            "hocket.trainer.metrics",
            "hocket.trainer.loss",
            "hocket.trainer.profiler",
        ),
        *("hocket.trainer.evaluation", "hocket.trainer.step", "hocket.trainer.engine", "hocket.trainer.loop"),
        *("hocket.trainer.testing", "hocket.trainer.protocols", "hocket.trainer.errors"),
        *("hocket.trainer.callback", "hocket.trainer.compiled_step", "hocket.trainer.step.memory_report"),
        *("hocket.trainer.replay",),
    ],
    "algos": [
        *("hocket.algos", "hocket.algos.surgery", "hocket.algos.order"),
        # The methods with more names than `hocket.algos` takes from them.
        *("hocket.algos.alibi", "hocket.algos.blurpool", "hocket.algos.factorize"),
        *("hocket.algos.gated_linear_units", "hocket.algos.ghost_batchnorm"),
        *("hocket.algos.gradient_clipping", "hocket.algos.gyro_dropout", "hocket.algos.no_op_model"),
        *("hocket.algos.squeeze_excite", "hocket.algos.stochastic_depth"),
    ],
    "dist": ["hocket.dist", "hocket.dist.ray", "hocket.dist.errors"],
    "ckpt": [
        *("hocket.ckpt", "hocket.ckpt.torch", "hocket.ckpt.dcp", "hocket.ckpt.plain", "hocket.ckpt.errors"),
    ],
    "stream": [
        *("hocket.stream", "hocket.stream.torch", "hocket.stream.convert", "hocket.stream.encodings"),
        *("hocket.stream.mosaic", "hocket.stream.huggingface", "hocket.stream.simulate"),
        *("hocket.stream.packing", "hocket.stream.ray", "hocket.stream.spark", "hocket.stream.errors"),
    ],
    "native": ["hocket.native", "hocket.native.errors"],
    "hocket": [
        *("hocket.recipes.config", "hocket.compat.streaming", "hocket.compat.streaming.base.converters"),
    ],
}


@cache
def _tree(module: str) -> ast.Module | None:
    path = "/".join(module.split("."))
    for package in MODULES:
        for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi"):
            if (found := ROOT / "packages" / package / "src" / file).exists():
                return ast.parse(found.read_text("utf-8"))
    return None


def public_names(module: str) -> list[str]:
    """Return the names of a module's `__all__`, or without one, those that it defines."""
    tree = _tree(module)
    assert tree is not None, module
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value) if not name.startswith("_")]
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def canonical(module: str, name: str) -> str:
    """Return the path of the module that defines a name, and the name."""
    tree = _tree(module)
    for node in tree.body if tree else ():
        if isinstance(node, ast.ImportFrom) and node.module and node.module != module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module.startswith("hocket"):
                    return canonical(node.module, alias.name)
    return f"{module}.{name}"


@cache
def owners() -> dict[str, str]:
    """Return the first public path of each object, by its canonical path."""
    found: dict[str, str] = {}
    for module in (module for modules in MODULES.values() for module in modules):
        for name in public_names(module):
            found.setdefault(canonical(module, name), f"{module}.{name}")
    return found


def render(module: str) -> str:
    """Return the page of a module."""
    tree = _tree(module)
    docstring = (ast.get_docstring(tree) if tree else None) or ""
    first, _, _ = docstring.partition("\n\n")
    parts = [f"# `{module}`", " ".join(first.split())]
    if module == "hocket.trainer":
        parts.append("The arguments of `Trainer` and of `fit` have [a page of their own](arguments.md).")
    for name in public_names(module):
        path = canonical(module, name)
        owner = owners()[path]
        if _tree(path) is not None:
            parts.append(f"## `{name}`\n\nThe module [`{path}`]({path}.md).")
        elif owner == f"{module}.{name}":
            parts.append(f"::: {module}.{name}")
        else:
            page = owner.rpartition(".")[0]
            parts.append(f"## `{name}`\n\nThe same as [`{owner}`]({page}.md#{owner}).")
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, Callable[[], str]]:
    """Return what draws each page of the reference, by its place on the site."""
    modules = [module for modules in MODULES.values() for module in modules]
    return {f"reference/{module}.md": partial(render, module) for module in modules}
