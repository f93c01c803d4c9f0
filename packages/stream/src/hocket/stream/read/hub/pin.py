"""The commit of a hub's repository that a run reads, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.native import Store
from hocket.stream.errors import ConfigError
from hocket.stream.read.hub.layout import HubLayout

SCHEME = "hf://"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSource:
    """A data set on a hub, at one commit."""

    uri: str
    """URI with the commit in place of a branch or tag."""

    layout: HubLayout

    notice: str | None
    """What to tell the user: the commit, if the given URI names none."""

    def refuse_config(self, place: str) -> None:
        """Refuse a configuration for data with an index, which has none.

        Args:
            place: URI of the index.

        Raises:
            ConfigError: One is given.
        """
        if (config := self.layout.config) is not None:
            raise ConfigError(f"`config` is `{config}`, and `{place}` has no configurations: leave it out")


def pin_source(
    place: str | None, *, config: str | None, split: str | None, deadline_s: float
) -> HubSource | None:
    """Return the data set at a hub's URI, at the commit that its revision is now; None for one elsewhere.

    All ranks get the same commit; see `hocket.native.hub.pin`.

    Args:
        place: Location of the data set.
        config: Name of the configuration.
        split: Name of the split.
        deadline_s: Seconds for all attempts of one request together.

    Raises:
        ConfigError: A configuration is given for data elsewhere.
        StoreError: There is no such repository or revision, or no access to it.
    """
    if place is None or not place.startswith(SCHEME):
        if config is not None:
            raise ConfigError(
                f"`config` is {config!r}, and `{place or 'the data'}` is not on a hub: expected it with "
                "`hf://datasets/owner/name` only; leave it out, or give `split`"
            )
        return None
    from hocket.native.hub import pin

    asked, pinned = Store(place).uri, pin(place, deadline_s=deadline_s)
    commit = pinned.partition("@")[2].partition("/")[0]
    parts = pinned.removeprefix(SCHEME).split("/")
    layout = HubLayout(
        config=config,
        split=split,
        is_root=len(parts) == (3 if parts[0] in ("datasets", "spaces") else 2),
        is_converted=None if pinned == asked else "@refs/convert/" in asked,
    )
    notice = None
    if pinned != asked:
        notice = (
            f"`{asked}` is read at the commit {commit}: write `@{commit}` into the URI to read the same "
            "when the run is resumed"
        )
    return HubSource(uri=pinned, layout=layout, notice=notice)
