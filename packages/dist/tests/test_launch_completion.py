"""Completion of `hocket-launch` in bash, and the files that it is installed into."""

import subprocess
from pathlib import Path

import pytest

from hocket.dist.launch import completion
from hocket.dist.launch.command import main
from hocket.dist.launch.options import make_parser


def _completed(script: str, *words: str) -> list[str]:
    """Return what bash offers after words, the last of which is being typed."""
    line = " ".join(f"'{word}'" for word in ("hocket-launch", *words))
    asked = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _hocket_launch\n"
    asked += "printf '%s\\n' \"${COMPREPLY[@]}\""
    run = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    assert not run.stderr
    return run.stdout.split()


def test_bash_completes_options_and_their_words() -> None:
    script = completion.completion_script("bash")
    assert _completed(script, "--nn") == ["--nnodes"]
    assert _completed(script, "-n", "2", "--max-r") == ["--max-restarts"]
    assert _completed(script, "--on", "s") == ["slurm"]
    assert _completed(script, "-n", "") == ["gpu", "cpu", "auto"]
    assert _completed(script, "--compat", "") == ["composer"]
    assert _completed(script, "train") == []  # bash's own completion of files follows
    offered = set(_completed(script, "-"))
    taken = {name for action in make_parser()._actions for name in action.option_strings}
    assert taken <= offered
    assert {"--save-signals", "--help-torchrun", "--install-completion"} <= offered


@pytest.mark.parametrize(("shell", "startup"), [("bash", ".bashrc"), ("zsh", ".zshrc"), ("fish", None)])
def test_it_is_installed_once(
    shell: str,
    startup: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    if startup is not None:
        (tmp_path / startup).write_text("alias ll='ls -l'")
    assert main(["--install-completion"]) == 0
    assert main(["--install-completion", shell]) == 0
    assert main([f"--install-completion={shell}"]) == 0
    path = Path(capsys.readouterr().out.split(" was written")[0])
    assert path.read_text() == completion.completion_script(shell)
    assert main(["--show-completion"]) == 0
    assert capsys.readouterr().out == path.read_text()
    if startup is not None:
        assert (tmp_path / startup).read_text() == f"alias ll='ls -l'\nsource {path}\n"


def test_an_unknown_shell_and_a_file_that_cannot_be_written_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/tcsh")
    assert main(["--show-completion"]) == 2
    assert "the shell is 'tcsh'; expected `--show-completion bash`" in capsys.readouterr().err
    assert main(["--show-completion=bash", "zsh"]) == 2
    assert "expected `--show-completion bash`" in capsys.readouterr().err
    home = tmp_path / "home"
    home.write_text("no folder")
    monkeypatch.setenv("HOME", str(home))
    assert main(["--install-completion", "bash"]) == 1
    assert "`--show-completion bash` prints the script" in capsys.readouterr().err
