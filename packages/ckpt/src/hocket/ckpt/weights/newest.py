"""The record of the newest version under a prefix, which names the one publisher that may replace it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
from dataclasses import dataclass

from hocket.ckpt.errors import CheckpointCorruptError, CheckpointExistsError, CheckpointNotFoundError
from hocket.ckpt.uris import child_uri
from hocket.native import Store, _native
from hocket.native.errors import StoreChangedError, StoreExistsError, StoreNotFoundError, StoreTransientError
from hocket.native.paths import is_uri

__all__ = ["NewestRecord", "PublisherFence"]

_NAME = "newest.json"
_ATTEMPTS = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestRecord:
    """The newest version that was published, and the publisher that follows on it."""

    publisher: str
    """The id of the publisher that began last."""
    host: str
    """Its host."""
    version: str | None = None
    """The name of the newest version; None before the first one, as are its step and save id."""
    step: int | None = None
    save_id: str | None = None

    @classmethod
    def read(cls, uri: str) -> NewestRecord | None:
        """Read the record of a prefix; return None if there is none.

        Raises:
            CheckpointCorruptError: It is damaged.
        """
        try:
            text = Store(uri).get(_NAME)
        except StoreNotFoundError:
            return None
        try:
            fields = json.loads(text)
            record = cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})
            if record.step is not None and not isinstance(record.step, int):
                raise TypeError(record.step)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"`{child_uri(uri, _NAME)}` is {text[:80]!r}; expected the record of the newest version. "
                "Remove it if no publisher runs: the versions do not need it"
            ) from error
        return record

    def to_json(self) -> bytes:
        """Return the record as it is stored."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()


class PublisherFence:
    """The right of one publisher to name the newest version under a prefix.

    The publisher that begins last takes it from the one before, by a conditional write of the record. A
    publisher that was taken for dead and continues is then refused, whatever it was doing: its version is not
    named, so that no follower reads it.

    Args:
        uri: The prefix.
        unfenced: Write without conditions, to a store that knows none.
    """

    def __init__(self, uri: str, *, unfenced: bool = False) -> None:
        self._uri = uri
        self._unfenced = unfenced
        self._own = NewestRecord(publisher=os.urandom(8).hex(), host=socket.gethostname())
        self._etag: str | None = None

    def take(self) -> None:
        """Take the right from the publisher before.

        Raises:
            CheckpointUnfencedError: The store ignores conditional writes.
        """
        if is_uri(self._uri) and not self._unfenced:
            _native.ckpt_check_fence(child_uri(self._uri, ".hocket-probe"), os.urandom(16).hex())
        there = None
        for _ in range(_ATTEMPTS):
            self._etag, before = self._look()
            record = before or self._own
            record = dataclasses.replace(record, publisher=self._own.publisher, host=self._own.host)
            there = self._put(record)
            if there == record:
                return
        raise self._refusal(there)

    def check(self) -> None:
        """Raise an error if another publisher has taken the right.

        Raises:
            CheckpointExistsError: It has.
        """
        self._etag, record = self._look()
        if record is None or record.publisher != self._own.publisher:
            raise self._refusal(record)

    def name(self, version: str, step: int, save_id: str) -> None:
        """Name the newest version, after its commit; if that is refused, remove this version.

        Raises:
            CheckpointExistsError: Another publisher has taken the right.
        """
        record = dataclasses.replace(self._own, version=version, step=step, save_id=save_id)
        there: NewestRecord | None = None
        for _ in range(_ATTEMPTS):
            there = self._put(record)
            if there == record:
                return
            if there is None or there.publisher != self._own.publisher:
                break  # otherwise the store has rejected the write for another reason than its condition
        try:
            _native.ckpt_delete(self._uri, version, save_id=save_id)
        except CheckpointNotFoundError:
            pass  # the publisher that took over has replaced this version by its own
        except Exception as error:  # noqa: BLE001 - no follower reads it, and the refusal counts
            _log.warning("could not remove `%s` under `%s`: %s", version, self._uri, error)
        raise self._refusal(there)

    def _look(self) -> tuple[str | None, NewestRecord | None]:
        """Return the record and its ETag, which is read first: a later record has another one."""
        try:
            etag = Store(self._uri).head(_NAME).etag
        except StoreNotFoundError:
            return None, None
        return etag, NewestRecord.read(self._uri)

    def _put(self, record: NewestRecord) -> NewestRecord | None:
        """Write the record in place of the one that was read last; return the one that is there then."""
        store, text = Store(self._uri), record.to_json()
        try:
            if self._unfenced:
                self._etag = store.put(_NAME, text)
            elif self._etag is None:
                self._etag = store.put(_NAME, text, if_absent=True)
            else:
                self._etag = store.put(_NAME, text, if_match=self._etag)
        except (StoreChangedError, StoreExistsError, StoreTransientError) as error:
            # After a lost response the record may be there all the same.
            self._etag, there = self._look()
            if there != record and isinstance(error, StoreTransientError):
                raise
            return there
        return record

    def _refusal(self, record: NewestRecord | None) -> CheckpointExistsError:
        place = child_uri(self._uri, _NAME)
        if record is None:
            return CheckpointExistsError(f"`{place}` was removed while this publisher ran. Start a new one")
        at = "no version yet" if record.version is None else f"`{record.version}` as the newest version"
        return CheckpointExistsError(
            f"another publisher, on host `{record.host}`, has taken over `{self._uri}`, and names {at}. This "
            "one was taken for dead, or two trainings publish to one place: nothing was published. End one "
            "of them, or give it a prefix of its own"
        )
