"""A parser of options that names the nearest option to one that it does not know."""

import argparse
import difflib
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

_SYNONYMS = {
    "machine-rank": "node-rank",
    "main-process-ip": "master-addr",
    "main-process-port": "master-port",
    "np": "nproc",
    "num-gpus": "nproc",
    "num-machines": "nnodes",
    "num-nodes": "nnodes",
    "num-processes": "nproc",
}
"""Options of `accelerate launch`, `deepspeed` and `mpirun`, and those of torchrun that replace them."""

_MISSING = "the following arguments are required: "


class OptionParser(argparse.ArgumentParser):
    """A parser whose message on an unknown option has the nearest one. It requires no option.

    Attributes:
        note: A sentence after the message on an unknown option.
    """

    note = ""
    _given: Sequence[str] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as the base class does; exit with code 2 and a message on an unknown option."""
        self._given = list(sys.argv[1:] if args is None else args)
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._describe(unknown))
        return options

    def error(self, message: str) -> NoReturn:
        """Exit with code 2; the message is about an unknown option rather than a missing script."""
        if message.startswith(_MISSING):
            # Without a script, every word is an option or the value of one.
            known = tuple(name for name in self._option_string_actions if len(name) == 2)
            given = [word for word in self._given if word.startswith("--") or not word.startswith(known)]
            names = self._option_string_actions
            if unknown := [word for word in given if word[:1] == "-" and word.partition("=")[0] not in names]:
                message = self._describe(unknown)
        super().error(message)

    def _describe(self, unknown: Sequence[str]) -> str:
        word = next((word for word in unknown if word.startswith("-")), None)
        if word is None:
            return f"unexpected arguments: {' '.join(unknown)}"
        name, equals, value = word.partition("=")
        near = nearest_option(name, self._option_string_actions)
        hint = f"did you mean `{near}{equals}{value}`?" if near else "`--help` lists the options."
        return f"there is no option `{name}`; {hint} {self.note}".rstrip(" .")


def nearest_option(name: str, known: Collection[str]) -> str | None:
    """Return the known option that another one is meant to be: a misspelling, a beginning, or a synonym.

    Of an option with two spellings, the one with the dashes or underscores of `name` is returned.

    Args:
        name: The unknown option, such as `--nproc_per_nod`.
        known: The options with their dashes.
    """
    word = name.lstrip("-").lower()
    if len(word) < 2:
        return next((option for option in known if option == f"-{word}"), None)
    by_word = {option.lstrip("-"): option for option in known if len(option) > 2}
    synonym = _SYNONYMS.get(word.replace("_", "-"), word)
    word = synonym.replace("-", "_") if "_" in word else synonym
    if close := difflib.get_close_matches(word, by_word, n=1, cutoff=0.6):
        return by_word[close[0]]
    begun = [option for other, option in by_word.items() if other.startswith(word)]
    return begun[0] if len({option.replace("_", "-") for option in begun}) == 1 else None
