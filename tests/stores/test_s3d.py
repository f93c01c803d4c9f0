"""`tools/s3d` behaves as S3 does for boto3, an independent client."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.s3d import Server, ServerError, build

MIB = 1 << 20


def code_of(error: pytest.ExceptionInfo[ClientError]) -> tuple[str, int]:
    answer = error.value.response
    return answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]


def keys(client: Any, bucket: str, **query: Any) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, **query)
    found: list[str] = []
    for page in pages:
        assert page["KeyCount"] <= query.get("MaxKeys", 1000)
        found += [entry["Key"] for entry in page.get("Contents", [])]
        found += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
    return found


def test_an_object_round_trips_with_its_metadata(client: Any, bucket: str) -> None:
    data = bytes(range(256)) * 1000
    put = client.put_object(
        Bucket=bucket, Key="dir/a b+%2F ü\n", Body=data, ContentType="text/x", Metadata={"step": "17"}
    )
    assert put["ETag"] == f'"{hashlib.md5(data).hexdigest()}"'
    got = client.get_object(Bucket=bucket, Key="dir/a b+%2F ü\n", ChecksumMode="ENABLED")
    assert got["Body"].read() == data
    assert (got["ETag"], got["ContentType"], got["Metadata"]) == (put["ETag"], "text/x", {"step": "17"})
    assert got["ChecksumCRC32"] == put["ChecksumCRC32"]
    head = client.head_object(Bucket=bucket, Key="dir/a b+%2F ü\n")
    assert (head["ContentLength"], head["ETag"]) == (len(data), put["ETag"])
    assert head["LastModified"] == got["LastModified"]
    assert keys(client, bucket) == ["dir/a b+%2F ü\n"]


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [("bytes=0-0", 0, 1), ("bytes=3-", 3, 10), ("bytes=-4", 6, 10), ("bytes=2-99", 2, 10)],
)
def test_ranges_are_read(client: Any, bucket: str, asked: str, start: int, stop: int) -> None:
    client.put_object(Bucket=bucket, Key="k", Body=b"0123456789")
    got = client.get_object(Bucket=bucket, Key="k", Range=asked)
    assert got["Body"].read() == b"0123456789"[start:stop]
    assert got["ContentRange"] == f"bytes {start}-{stop - 1}/10"
    assert got["ResponseMetadata"]["HTTPStatusCode"] == 206


def test_a_range_beyond_the_end_raises(client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="k", Body=b"0123456789")
    with pytest.raises(ClientError) as error:
        client.get_object(Bucket=bucket, Key="k", Range="bytes=10-12")
    assert code_of(error) == ("InvalidRange", 416)


def test_reads_with_if_match_fail_after_an_overwrite(client: Any, bucket: str) -> None:
    etag = client.put_object(Bucket=bucket, Key="k", Body=b"one")["ETag"]
    assert client.get_object(Bucket=bucket, Key="k", IfMatch=etag, Range="bytes=1-")["Body"].read() == b"ne"
    with pytest.raises(ClientError) as error:
        client.get_object(Bucket=bucket, Key="k", IfNoneMatch=etag)
    assert code_of(error)[1] == 304
    client.put_object(Bucket=bucket, Key="k", Body=b"two")
    with pytest.raises(ClientError) as error:
        client.get_object(Bucket=bucket, Key="k", IfMatch=etag)
    assert code_of(error) == ("PreconditionFailed", 412)


def test_a_read_started_before_an_overwrite_returns_the_old_bytes(client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="k", Body=b"a" * (16 * MIB))
    body = client.get_object(Bucket=bucket, Key="k")["Body"]
    first = body.read(1)
    client.put_object(Bucket=bucket, Key="k", Body=b"b" * MIB)
    assert first + body.read() == b"a" * (16 * MIB)


def test_missing_objects_and_buckets_have_error_codes(client: Any, bucket: str) -> None:
    with pytest.raises(ClientError) as error:
        client.get_object(Bucket=bucket, Key="absent")
    assert code_of(error) == ("NoSuchKey", 404)
    with pytest.raises(ClientError) as error:
        client.put_object(Bucket="no-such-bucket", Key="k", Body=b"x")
    assert code_of(error) == ("NoSuchBucket", 404)
    with pytest.raises(ClientError) as error:
        client.create_bucket(Bucket=bucket)
    assert code_of(error) == ("BucketAlreadyOwnedByYou", 409)


def test_one_of_eight_conditional_creates_wins(client: Any, bucket: str) -> None:
    def write(number: int) -> str:
        try:
            client.put_object(Bucket=bucket, Key=key, Body=str(number).encode() * 1000, IfNoneMatch="*")
        except ClientError as error:
            return error.response["Error"]["Code"]
        return f"won {number}"

    with ThreadPoolExecutor(8) as pool:
        for key in ("first", "second", "third"):
            answers = sorted(pool.map(write, range(8)))
            assert answers[:7] == ["PreconditionFailed"] * 7
            winner = answers[7].removeprefix("won ").encode()
            assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == winner * 1000


def test_one_of_eight_conditional_replacements_of_a_version_wins(client: Any, bucket: str) -> None:
    def write(number: int, turn: int) -> str:
        try:
            # The ETag is the digest of the content, so equal contents would be one version.
            body = f"{turn} {number}".encode()
            return client.put_object(Bucket=bucket, Key="k", Body=body, IfMatch=etag)["ETag"]
        except ClientError as error:
            return error.response["Error"]["Code"]

    etag = client.put_object(Bucket=bucket, Key="k", Body=b"first")["ETag"]
    with ThreadPoolExecutor(8) as pool:
        for turn in range(3):
            answers = list(pool.map(write, range(8), [turn] * 8))
            assert answers.count("PreconditionFailed") == 7
            (etag,) = set(answers) - {"PreconditionFailed"}
            assert client.head_object(Bucket=bucket, Key="k")["ETag"] == etag
    with pytest.raises(ClientError) as error:
        client.put_object(Bucket=bucket, Key="absent", Body=b"x", IfMatch=etag)
    assert code_of(error) == ("NoSuchKey", 404)


def upload(client: Any, bucket: str, key: str, *parts: bytes) -> dict[str, Any]:
    """Upload parts, the last one first; return the arguments that complete the upload."""
    upload_id = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    done = []
    for number, part in reversed(list(enumerate(parts, 1))):
        answer = client.upload_part(Bucket=bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=part)
        done.insert(0, {"PartNumber": number, "ETag": answer["ETag"]})
    return {"Bucket": bucket, "Key": key, "UploadId": upload_id, "MultipartUpload": {"Parts": done}}


def test_parts_join_into_one_object(client: Any, bucket: str) -> None:
    parts = [b"a" * (5 * MIB), b"b" * (5 * MIB + 1), b"c"]
    complete = upload(client, bucket, "k", *parts)
    listed = client.list_parts(Bucket=bucket, Key="k", UploadId=complete["UploadId"], MaxParts=2)
    assert [part["Size"] for part in listed["Parts"]] == [5 * MIB, 5 * MIB + 1]
    assert (listed["IsTruncated"], listed["NextPartNumberMarker"]) == (True, 2)
    assert [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket)["Uploads"]] == ["k"]
    assert keys(client, bucket) == []
    etag = client.complete_multipart_upload(**complete)["ETag"]
    digests = b"".join(hashlib.md5(part).digest() for part in parts)
    assert etag == f'"{hashlib.md5(digests).hexdigest()}-3"'
    got = client.get_object(Bucket=bucket, Key="k")
    assert (got["ETag"], got["Body"].read()) == (etag, b"".join(parts))
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    with pytest.raises(ClientError) as error:
        client.complete_multipart_upload(**complete)
    assert code_of(error) == ("NoSuchUpload", 404)


def test_one_of_eight_conditional_completions_wins_and_the_other_uploads_remain(
    client: Any, bucket: str
) -> None:
    def complete(arguments: dict[str, Any]) -> str:
        try:
            return client.complete_multipart_upload(**arguments, IfNoneMatch="*")["ETag"]
        except ClientError as error:
            return error.response["Error"]["Code"]

    uploads = [upload(client, bucket, "k", bytes([number]) * 100) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(complete, uploads))
    assert answers.count("PreconditionFailed") == 7
    winner = next(number for number, answer in enumerate(answers) if answer != "PreconditionFailed")
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == bytes([winner]) * 100
    loser = uploads[(winner + 1) % 8]
    client.complete_multipart_upload(**loser)
    for arguments in uploads:
        if arguments not in (uploads[winner], loser):
            client.abort_multipart_upload(**{name: arguments[name] for name in ("Bucket", "Key", "UploadId")})
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([], "MalformedXML"),
        ([(2, None), (1, None)], "InvalidPartOrder"),
        ([(1, None), (3, None)], "InvalidPart"),
        ([(1, '"00000000000000000000000000000000"')], "InvalidPart"),
        ([(1, None), (2, None)], "EntityTooSmall"),
    ],
)
def test_a_completion_that_does_not_match_the_parts_raises(
    client: Any, bucket: str, parts: list[tuple[int, str | None]], code: str
) -> None:
    complete = upload(client, bucket, "k", b"small", b"small")
    etags = {part["PartNumber"]: part["ETag"] for part in complete["MultipartUpload"]["Parts"]}
    wrong = [{"PartNumber": n, "ETag": etag or etags.get(n, etags[1])} for n, etag in parts]
    with pytest.raises(ClientError) as error:
        client.complete_multipart_upload(**{**complete, "MultipartUpload": {"Parts": wrong}})
    assert code_of(error)[0] == code
    assert keys(client, bucket) == []
    right = [{"PartNumber": 2, "ETag": etags[2]}]
    client.complete_multipart_upload(**{**complete, "MultipartUpload": {"Parts": right}})
    assert keys(client, bucket) == ["k"]


@pytest.mark.parametrize("name", ["ContentMD5", "ChecksumCRC32", "ChecksumCRC32C", "ChecksumSHA256"])
def test_a_wrong_checksum_raises_and_changes_nothing(client: Any, bucket: str, name: str) -> None:
    size = {"ContentMD5": 16, "ChecksumSHA256": 32}.get(name, 4)
    wrong = {name: base64.b64encode(bytes(size)).decode()}
    client.put_object(Bucket=bucket, Key="k", Body=b"before")
    with pytest.raises(ClientError) as error:
        client.put_object(Bucket=bucket, Key="k", Body=b"after", **wrong)
    assert code_of(error) == ("BadDigest", 400)
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"before"
    upload_id = client.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    with pytest.raises(ClientError) as error:
        client.upload_part(Bucket=bucket, Key="k", UploadId=upload_id, PartNumber=1, Body=b"after", **wrong)
    assert code_of(error) == ("BadDigest", 400)


def test_correct_checksums_are_stored(client: Any, bucket: str) -> None:
    digest = base64.b64encode(hashlib.sha256(b"data").digest()).decode()
    client.put_object(Bucket=bucket, Key="k", Body=b"data", ChecksumSHA256=digest)
    assert client.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")["ChecksumSHA256"] == digest


@pytest.mark.parametrize("wrong", [{"aws_secret_access_key": "wrong"}, {"aws_access_key_id": "nobody"}])
def test_a_wrong_signature_raises(
    s3d: Server, client: Any, bucket: str, client_of: Callable[..., Any], wrong: dict[str, str]
) -> None:
    with pytest.raises(ClientError) as error:
        client_of(s3d, **wrong).put_object(Bucket=bucket, Key="k", Body=b"x")
    assert code_of(error)[1] == 403
    assert keys(client, bucket) == []


def test_a_request_without_signature_raises(s3d: Server, client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="k", Body=b"secret")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as error:
        opener.open(f"{s3d.endpoint}/{bucket}/k", timeout=60)
    with error.value as answer:
        assert answer.code == 403
        assert b"secret" not in answer.read()


def test_objects_are_deleted_one_by_one_and_in_bulk(client: Any, bucket: str) -> None:
    for key in ("a", "a/b", "a/b/c"):
        client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    client.delete_object(Bucket=bucket, Key="a/b")
    client.delete_object(Bucket=bucket, Key="absent")
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"a"
    assert keys(client, bucket) == ["a", "a/b/c"]
    with pytest.raises(ClientError) as error:
        client.delete_bucket(Bucket=bucket)
    assert code_of(error) == ("BucketNotEmpty", 409)
    gone = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "a"}, {"Key": "a/b/c"}]})
    assert [entry["Key"] for entry in gone["Deleted"]] == ["a", "a/b/c"]
    client.delete_bucket(Bucket=bucket)
    with pytest.raises(ClientError) as error:
        client.head_bucket(Bucket=bucket)
    assert code_of(error)[1] == 404


def test_a_listing_has_pages_and_common_prefixes(client: Any, bucket: str) -> None:
    names = [*(f"step-{step}/part-{part}" for step in range(5) for part in range(5)), "z"]
    for name in names:
        client.put_object(Bucket=bucket, Key=name, Body=b"")
    for size in (1, 2, 7, 1000):
        assert keys(client, bucket, MaxKeys=size) == names
        assert keys(client, bucket, MaxKeys=size, Prefix="step-3/") == names[15:20]
        folded = keys(client, bucket, MaxKeys=size, Delimiter="/")
        assert sorted(folded) == ["step-0/", "step-1/", "step-2/", "step-3/", "step-4/", "z"]
    assert keys(client, bucket, StartAfter="step-4/part-3") == ["step-4/part-4", "z"]
    old = client.list_objects(Bucket=bucket, MaxKeys=2, Delimiter="/", Marker="step-2/")
    assert [entry["Prefix"] for entry in old["CommonPrefixes"]] == ["step-3/", "step-4/"]
    assert old["IsTruncated"]


@pytest.mark.parametrize("token", ["zz", "f", "ff", "é"])
def test_an_unknown_continuation_token_raises(client: Any, bucket: str, token: str) -> None:
    with pytest.raises(ClientError) as error:
        client.list_objects_v2(Bucket=bucket, ContinuationToken=token)
    assert code_of(error) == ("InvalidArgument", 400)


def test_an_unknown_upload_id_raises(client: Any, bucket: str) -> None:
    for upload_id in ("x", "../../x", "é"):
        with pytest.raises(ClientError) as error:
            client.upload_part(Bucket=bucket, Key="k", UploadId=upload_id, PartNumber=1, Body=b"x")
        assert code_of(error) == ("NoSuchUpload", 404)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=200)
    .filter(lambda key: len(key.encode()) <= 1024)
    .filter(lambda key: not key.startswith("/"))
)
def test_any_key_is_listed_unchanged(client: Any, bucket: str, key: str) -> None:
    client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    try:
        assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == key.encode()
        assert keys(client, bucket) == [key]
    finally:
        client.delete_object(Bucket=bucket, Key=key)


@pytest.mark.parametrize(
    "key", ["../../escape", "a//b", "a/./b", "a/../b", "x" * 1024, "dir/", "a" * 300 + "/b"]
)
def test_keys_that_are_no_valid_paths_are_accepted(client: Any, bucket: str, key: str) -> None:
    client.put_object(Bucket=bucket, Key=key, Body=b"x")
    assert keys(client, bucket) == [key]
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"x"


def test_a_copy_has_the_bytes_and_the_metadata(client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="k", Body=b"data", Metadata={"a": "b"})
    client.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": "k"})
    client.delete_object(Bucket=bucket, Key="k")
    got = client.get_object(Bucket=bucket, Key="copy")
    assert (got["Body"].read(), got["Metadata"]) == (b"data", {"a": "b"})


def test_a_new_server_on_the_same_folder_has_the_same_objects(
    tmp_path: Path, client_of: Callable[..., Any]
) -> None:
    with Server(root=tmp_path) as server:
        client = client_of(server)
        etag = client.put_object(Bucket=server.bucket, Key="kept", Body=b"1")["ETag"]
        client.put_object(Bucket=server.bucket, Key="gone", Body=b"2")
        client.delete_object(Bucket=server.bucket, Key="gone")
        upload(client, server.bucket, "unfinished", b"3")
        with pytest.raises(ServerError, match="did not start"), Server(root=tmp_path):
            pass
    with Server(root=tmp_path) as server:
        client = client_of(server)
        assert keys(client, server.bucket) == ["kept"]
        assert client.get_object(Bucket=server.bucket, Key="kept")["ETag"] == etag
        assert len(list((tmp_path / "blobs").iterdir())) == 1


def test_the_server_exits_when_its_standard_input_closes() -> None:
    with Server() as server:
        process = server._process
        assert process is not None
        assert process.poll() is None
    assert process.returncode == 0


def test_started_by_hand_the_server_prints_variables_to_export(tmp_path: Path) -> None:
    import signal
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(build()), "--root", str(tmp_path), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert lines[0] == f"export AWS_ENDPOINT_URL=http://127.0.0.1:{port}\n"
    assert all(line.startswith(("export AWS_", "#")) for line in lines)


@pytest.mark.parametrize("option", [["--fault", "kind=fire"], ["--bucket", "No_Bucket"]])
def test_an_invalid_option_raises(tmp_path: Path, option: list[str]) -> None:
    done = subprocess.run(
        [str(build()), "--root", str(tmp_path), "--port", "0", *option],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert option[1] in done.stderr
    assert "panicked" not in done.stderr
