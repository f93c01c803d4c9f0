"""AWS credentials from boto3's chain: profiles, SSO, assumed roles, `credential_process`, instance roles.

The Rust clients read keys from the environment by themselves. When a request needs keys and there are none,
the thread that waits for the request calls `provide`. From then on a thread of this module,
`hocket-credentials`, gets keys from boto3 and passes them to Rust, again before they expire, until no request
has used them for half their lifetime. No I/O thread of Rust ever calls Python. boto3 is imported when it is
first needed; a process whose environment has keys never needs it. Without boto3, the Rust client itself
requests the role of an EC2 instance. Forked children start from scratch.

For keys of an instance role that expire soon, boto3 reports a later expiry than the true one. A store may
therefore reject keys that should be valid; boto3 is then queried again at once, in a new session. The same
holds for keys without an expiry, which another program may have rotated.
"""

import importlib
import os
import threading
import time
from datetime import datetime
from typing import Any

from hocket.native._native import (
    credentials_claim,
    credentials_fail,
    credentials_provide,
    credentials_rest,
    credentials_used,
)

INSTALL = (
    "profiles and SSO need boto3: `pip install 'hocket-native[s3]'`, or set "
    "`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`"
)
EARLY_S = 900.0  # botocore gives new keys, instead of those it has, this long before they expire
SHORTEST_PAUSE_S = 0.2
UNKNOWN_LIFE_S = 60.0  # of keys that boto3 renews at a time that it does not expose


def provide(profile: str) -> None:
    """Start the thread that provides keys of `profile`; an empty name is boto3's default chain.

    Imports boto3 on the calling thread, and returns without waiting for the keys. Any failure is reported to
    the requests that wait. Safe from several threads: only one of them starts the lookup.
    """
    if not credentials_claim(profile):
        return
    try:
        # Imported here and not on the thread: a fork during an import would leave it locked in the child.
        boto3 = importlib.import_module("boto3")
    except ImportError:
        credentials_fail(profile, INSTALL, is_provider_missing=True)
        return
    thread = threading.Thread(target=_serve, args=(profile, boto3), name="hocket-credentials", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the limit of threads, or the interpreter's end
        credentials_fail(profile, f"boto3 could not be asked: {error}")


def _serve(profile: str, boto3: Any) -> None:
    """Pass keys to Rust for as long as they expire and are used."""
    session: Any = None
    until_s, is_refused = 0.0, True
    while True:
        try:
            if is_refused:  # the existing session would return the rejected keys again
                # boto3 itself reads only `AWS_DEFAULT_REGION`; a role cannot be assumed without a region.
                region = os.environ.get("AWS_REGION") or None
                session = boto3.Session(profile_name=profile or None, region_name=region)
            expires_s = _push(profile, session)
        except Exception as error:  # noqa: BLE001 - the waiting requests' answer, unless the old keys are good
            if is_refused or time.time() >= until_s:
                credentials_fail(profile, _say(error))
                return
        else:
            if expires_s is None:
                return
            until_s = expires_s
        left_s = until_s - time.time()
        is_refused = credentials_rest(profile, max(left_s - min(EARLY_S, left_s / 2), SHORTEST_PAUSE_S))
        if not is_refused and not credentials_used(profile):
            return


def _push(profile: str, session: Any) -> float | None:
    """Pass the current keys to Rust, and return when they expire (seconds since 1970), or None if never."""
    source = session.get_credentials()
    if source is None:
        raise LookupError("boto3's chain has no credentials either")
    keys = source.get_frozen_credentials()  # fetches new ones if the old ones expire soon
    expires_s = _expiry(source)
    credentials_provide(
        profile,
        key_id=keys.access_key,
        secret_key=keys.secret_key,
        token=keys.token,
        expires_s=expires_s,
    )
    return expires_s


def _expiry(source: Any) -> float | None:
    """Return when keys expire (seconds since 1970), or None for keys that do not.

    botocore keeps the time in a private attribute. Without a readable one, keys that botocore renews count as
    short-lived.
    """
    expires = getattr(source, "_expiry_time", None)
    if isinstance(expires, datetime):
        return expires.timestamp()
    return time.time() + UNKNOWN_LIFE_S if hasattr(source, "refresh_needed") else None


def _say(error: Exception) -> str:
    """Return the error's text without the output of a `credential_process`, which may contain secrets."""
    kind = type(error).__name__
    return kind if "CredentialRetrieval" in kind else f"{kind}: {error}"
