"""Hosts on one machine, each in a network namespace of its own, whose links can be cut."""

import contextlib
import os
import shutil
import subprocess


class Networks:
    """Hosts on one bridge, as network namespaces of this machine; needs the rights of an administrator."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tag = f"hk{os.getpid() % 10**5}"

    def name(self, host: int) -> str:
        """Return the name of a host's namespace."""
        return f"{self._tag}n{host}"

    def interface(self, host: int) -> str:
        """Return the name of a host's interface within its namespace."""
        return f"{self._tag}e{host}"

    def address(self, host: int) -> str:
        """Return a host's address."""
        return f"10.213.7.{host + 1}"

    def open(self) -> str | None:
        """Make the namespaces; return the reason if this machine does not allow it."""
        if shutil.which("ip") is None:
            return "there is no command `ip`"
        try:
            _ip("link", "add", self._tag, "type", "bridge")
            _ip("link", "set", self._tag, "up")
            for host in range(self._count):
                name, inner, outer = self.name(host), self.interface(host), self._outer(host)
                _ip("netns", "add", name)
                _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
                _ip("link", "set", outer, "master", self._tag, "up")
                _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", inner)
                for interface in (inner, "lo"):
                    _ip("-n", name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            self.close()
            return f"network namespaces are not allowed: {error.stderr.strip()}"
        return None

    def cut(self, host: int) -> None:
        """Let no packet pass to or from a host any more; its connections stay open."""
        _ip("link", "set", self._outer(host), "nomaster")

    def restore(self, host: int) -> None:
        """Let the packets of a host pass again after `cut`."""
        _ip("link", "set", self._outer(host), "master", self._tag)

    def close(self) -> None:
        """Remove the namespaces."""
        for host in range(self._count):
            for words in (("link", "del", self._outer(host)), ("netns", "del", self.name(host))):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*words)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._tag)

    def _outer(self, host: int) -> str:
        return f"{self._tag}o{host}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)
