"""The faults of a drill, in the order in which they are injected."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault.

    Attributes:
        name: The word by which `--faults` selects it.
        title: Its description in the table.
        place: Where it is made: by a `rank`, at the `launch` of one of two hosts, or in their `network`.
        verdict: A regular expression for the verdict on it.
    """

    name: str
    title: str
    place: Literal["rank", "launch", "network"]
    verdict: str


_RANK = r"rank 1 \(pid \d+\)"
_AT = r"on host \S+ at \S+:\d+"

FAULTS = (
    Fault(
        name="killed",
        title="rank killed (SIGKILL)",
        place="rank",
        verdict=rf"{_RANK} failed first, by SIGKILL",
    ),
    Fault(
        name="stopped", title="rank stopped (SIGSTOP)", place="rank", verdict=rf"{_RANK} was stopped.*{_AT}"
    ),
    Fault(
        name="memory",
        title="out of memory",
        place="rank",
        verdict=rf"{_RANK} failed first.*{_AT}.*Memory was short",
    ),
    Fault(
        name="raised",
        title="rank raised an exception",
        place="rank",
        verdict=rf"{_RANK} failed first, with exit code 1: `ValueError: .*`; {_AT}",
    ),
    Fault(
        name="branch",
        title="another branch: a collective of one rank alone",
        place="rank",
        verdict=rf"in different collectives: rank 0 .*{_AT}.*rank 1 .*{_AT}|{_RANK} did not take part",
    ),
    Fault(
        name="length",
        title="another length of data",
        place="rank",
        verdict=rf"{_RANK} ended with exit code 0 while other ranks trained on.*waited for it at \S+:\d+",
    ),
    Fault(
        name="order",
        title="another order of collectives",
        place="rank",
        verdict=rf"(different collectives: rank 0|by SIGABRT).*{_AT}.* same collectives in the same order",
    ),
    Fault(name="slow", title="slow host", place="rank", verdict=rf"{_RANK} did not take part.*{_AT}"),
    Fault(
        name="link",
        title="link of a host cut",
        place="network",
        verdict=r"rank \d on host \S+ did not answer, nor did the launcher there",
    ),
    Fault(name="port", title="wrong port on a host", place="launch", verdict=r"--master_port|came to"),
    Fault(
        name="nnodes",
        title="wrong `--nnodes` on a host",
        place="launch",
        verdict=r"machine 0 .* was started with `--nnodes [2:3]+`, and machine 1 .*`--nnodes [2-4:]+`",
    ),
    Fault(
        name="code",
        title="another script on a host",
        place="launch",
        verdict=r"ranks were started differently: rank 1 on \S+ runs the script",
    ),
)
"""All faults."""


def select(names: str | None) -> list[Fault]:
    """Return the faults that a list of names, divided by commas, selects; all by default.

    Raises:
        ValueError: A name is unknown.
    """
    if names is None:
        return list(FAULTS)
    known = {fault.name: fault for fault in FAULTS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"there is no fault `{unknown[0]}`; known are {', '.join(known)}")
    return [known[name] for name in wanted]
