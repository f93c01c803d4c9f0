"""The services that give AWS keys to machines and users, implemented from their documentation, on loopback.

One server speaks all of them: the instance metadata service (version 2), the containers' endpoint, IAM
Identity Center ("SSO") and the Security Token Service. The keys are those that `s3d --keys-expire` takes.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from support.proxy import Authority, serving

ROLE = "trainer"
ACCOUNT = "123456789012"
TOKEN = "a token of these tests alone"
#: Host and path of a container's credentials at a relative URI, which need no authorization.
CONTAINERS, RELATIVE = "169.254.170.2", "/v2/credentials/of-this-task"
METADATA = "/latest/meta-data/iam/security-credentials/"


class Identity(ThreadingHTTPServer):
    """Gives keys that are valid for `life_s` seconds to correct requests, and records the requests."""

    def __init__(self, life_s: float):
        self.life_s = life_s
        self.given: list[str] = []
        self.ends: list[float] = []
        self.refused: list[str] = []
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def address(self) -> str:
        """Return the URL of all services."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def keys(self, way: str) -> dict[str, Any]:
        """Return new keys, and their expiry in seconds since 1970."""
        until = time.time() + self.life_s
        self.ends.append(until)
        self.given.append(way)
        return {"id": f"hocket-{int(until * 1000)}", "secret": "hocket-secret", "token": "t", "until": until}


class _Answer(BaseHTTPRequestHandler):
    server: Identity
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        """Answer a request for a session of the metadata service."""
        is_asked = "x-aws-ec2-metadata-token-ttl-seconds" in self.headers
        if self.path == "/latest/api/token" and is_asked:
            self._say(200, TOKEN)
        else:
            self._refuse(400)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path.startswith(METADATA):
            self._metadata(url.path.removeprefix(METADATA))
        elif url.path == "/container":
            self._container()
        elif url.path == RELATIVE and urlsplit(self.path).netloc == CONTAINERS:
            self._say(200, _document(self.server.keys("relative")))
        elif url.path == "/federation/credentials":
            self._sso(parse_qs(url.query))
        else:
            self._refuse(404)

    def do_POST(self) -> None:
        """Answer as the token service: keys of a role, for other keys or for a web identity's token."""
        length = int(self.headers.get("content-length", 0))
        # The service reads arguments from the body and from the URL.
        text = f"{self.rfile.read(length).decode()}&{urlsplit(self.path).query}"
        form = {name: values[0] for name, values in parse_qs(text).items()}
        action = form.get("Action", "")
        is_signed = "Credential=base-key/" in self.headers.get("authorization", "")
        is_good = {
            "AssumeRole": is_signed,
            "AssumeRoleWithWebIdentity": form.get("WebIdentityToken") == TOKEN,
        }.get(action, False)
        if not is_good or not form.get("RoleArn", "").endswith(f":role/{ROLE}"):
            self._refuse(403)
            return
        keys = self.server.keys(action)
        self._say(
            200,
            f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result><Credentials>'
            f"<AccessKeyId>{keys['id']}</AccessKeyId><SecretAccessKey>{keys['secret']}</SecretAccessKey>"
            f"<SessionToken>{keys['token']}</SessionToken><Expiration>{_moment(keys)}</Expiration></Credentials>"
            f"<AssumedRoleUser><AssumedRoleId>A:s</AssumedRoleId><Arn>{form['RoleArn']}</Arn></AssumedRoleUser>"
            f"</{action}Result></{action}Response>",
        )

    def _metadata(self, role: str) -> None:
        if self.headers.get("x-aws-ec2-metadata-token") != TOKEN:
            self._refuse(401)
        elif not role:
            self._say(200, ROLE)
        elif role == ROLE:
            keys = _document(self.server.keys("instance"))
            self._say(200, {"Code": "Success", "Type": "AWS-HMAC", **keys})
        else:
            self._refuse(404)

    def _container(self) -> None:
        if self.headers.get("authorization") == TOKEN:
            self._say(200, _document(self.server.keys("container")))
        else:
            self._refuse(401)

    def _sso(self, query: dict[str, list[str]]) -> None:
        is_known = query == {"role_name": [ROLE], "account_id": [ACCOUNT]}
        if not is_known or self.headers.get("x-amz-sso_bearer_token") != TOKEN:
            self._refuse(401)
            return
        keys = self.server.keys("sso")
        document = {
            "accessKeyId": keys["id"],
            "secretAccessKey": keys["secret"],
            "sessionToken": keys["token"],
        }
        self._say(200, {"roleCredentials": {**document, "expiration": int(keys["until"] * 1000)}})

    def _refuse(self, status: int) -> None:
        self.server.refused.append(f"{self.command} {self.path}: {status}")
        self._say(status, {"message": "refused"})

    def _say(self, status: int, body: str | dict[str, Any]) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response_only(status)
        if not isinstance(body, str):
            self.send_header("Content-Type", "application/json")
        ttl = self.headers.get("x-aws-ec2-metadata-token-ttl-seconds")
        if ttl is not None:
            self.send_header("x-aws-ec2-metadata-token-ttl-seconds", ttl)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002
        pass


def _document(keys: dict[str, Any]) -> dict[str, str]:
    names = {"AccessKeyId": keys["id"], "SecretAccessKey": keys["secret"], "Token": keys["token"]}
    return {**names, "Expiration": _moment(keys)}


def _moment(keys: dict[str, Any]) -> str:
    return datetime.fromtimestamp(keys["until"], UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@contextlib.contextmanager
def identities(life_s: float, *, authority: Authority | None = None) -> Iterator[Identity]:
    """Run a server of keys, with TLS if there is an `authority`."""
    server = Identity(life_s)
    if authority is not None:
        authority.secure(server)
    with serving(server):
        yield server
