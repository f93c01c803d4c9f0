"""Completion of `hocket-launch` in a shell: a script with the names of all options.

The script is complete by itself, because starting the command to ask it would import torch at each Tab.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hocket.dist.launch.options import make_parser

FLAGS = ("--show-completion", "--install-completion")

_VALUES = {"--on": "slurm kubernetes ray", "--compat": "composer", "--nproc": "gpu cpu auto"}
"""Words that may follow an option; other values, and the script, are completed as files."""

_BASH = """\
_hocket_launch() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    COMPREPLY=()
    case "$previous" in
{cases}
    esac
    if [[ "$current" == -* ]]; then
        COMPREPLY=($(compgen -W {options} -- "$current"))
    fi
}}
complete -o default -F _hocket_launch hocket-launch
"""
_ZSH = "autoload -Uz compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"
_FILES = {
    "bash": (".bash_completions/hocket-launch.sh", ".bashrc"),
    "zsh": (".zfunc/hocket-launch.zsh", ".zshrc"),
    "fish": (".config/fish/completions/hocket-launch.fish", None),
}
"""By shell: the script's file, and the file that reads it at each start, both in the home folder."""


def completion(arguments: Sequence[str]) -> int:
    """Print or install the script for a shell, by default that of `SHELL`; return the exit code.

    Args:
        arguments: `--show-completion` or `--install-completion`, then perhaps a shell, or `=` and the shell.
    """
    flag, *shells = [*arguments[0].split("=", 1), *arguments[1:]]
    shell = shells[0] if shells else Path(os.environ.get("SHELL", "")).name
    if shell not in _FILES or len(shells) > 1:
        known = ", ".join(f"`{flag} {name}`" for name in _FILES)
        print(f"hocket-launch: error: the shell is {shell!r}; expected {known}", file=sys.stderr)
        return 2
    script = completion_script(shell)
    if flag == "--show-completion":
        print(script, end="")
        return 0
    file, startup = _FILES[shell]
    path = Path.home() / file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
        if startup is not None:
            _add_line(Path.home() / startup, f"source {shlex.quote(str(path))}")
    except OSError as error:
        print(
            f"hocket-launch: error: {error}; `{flag.replace('install', 'show')} {shell}`",
            end=" ",
            file=sys.stderr,
        )
        print("prints the script, to be kept elsewhere", file=sys.stderr)
        return 1
    print(f"{path} was written; completion begins with the next {shell} that is started")
    return 0


def _add_line(path: Path, line: str) -> None:
    text = path.read_text(errors="surrogateescape") if path.exists() else ""
    if line not in text.splitlines():
        with path.open("a") as file:
            file.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{line}{chr(10)}")


def completion_script(shell: str) -> str:
    """Return the script that completes options in `bash`, `zsh` or `fish`."""
    parser = make_parser()
    names = sorted({name for action in parser._actions for name in action.option_strings} | {*FLAGS})
    if shell == "fish":
        return "".join(_fish_line(name) for name in names)
    cases = "\n".join(
        f'        {option}) COMPREPLY=($(compgen -W {shlex.quote(words)} -- "$current")); return;;'
        for option, words in _values(parser).items()
    )
    return (_ZSH if shell == "zsh" else "") + _BASH.format(cases=cases, options=shlex.quote(" ".join(names)))


def _values(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the words that may follow an option, for each of the option's spellings joined by `|`."""
    spellings = {name: action.option_strings for action in parser._actions for name in action.option_strings}
    return {"|".join(spellings[name]): words for name, words in _VALUES.items()}


def _fish_line(name: str) -> str:
    kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
    words = f" -x -a {shlex.quote(_VALUES[name])}" if name in _VALUES else ""
    return f"complete -c hocket-launch {kind} {name.lstrip('-')}{words}\n"
