//! The S3 operations on whole objects, mapped to [`Store`].

use std::io;
use std::ops::Range;
use std::time::{Duration, UNIX_EPOCH};

use futures::StreamExt;
use s3s::dto::{
    Checksum, ChecksumMode, CopyObjectInput, CopySource, ETag, ETagCondition, GetObjectInput,
};
use s3s::dto::{
    GetObjectOutput, HeadObjectInput, HeadObjectOutput, PutObjectInput, PutObjectOutput,
};
use s3s::dto::{StreamingBlob, Timestamp};
use s3s::{S3Request, S3Result, s3_error};
use tokio::fs::File;
use tokio::io::AsyncWriteExt;

use crate::blobs::{disk, hex, receive};
use crate::journal::Object;
use crate::pieces::{Piece, PieceStream};
use crate::store::{Condition, Store, is_matched, now_ms};

/// Collects an upload's declarations about its body. A macro, because the inputs of the two operations have the
/// same fields but no common trait.
macro_rules! claims {
    ($request:ident) => {{
        let input = &mut $request.input;
        let checksum = s3s::dto::Checksum {
            checksum_crc32: input.checksum_crc32.take(),
            checksum_crc32c: input.checksum_crc32c.take(),
            checksum_crc64nvme: input.checksum_crc64nvme.take(),
            checksum_sha1: input.checksum_sha1.take(),
            checksum_sha256: input.checksum_sha256.take(),
            ..Default::default()
        };
        let md5 = input.content_md5.take();
        let trailers = $request.trailing_headers.clone();
        $crate::blobs::Claims::of(&$request.headers, md5, checksum, trailers)
    }};
}
pub(crate) use claims;

/// Stores the body of `request`.
///
/// # Errors
/// As [`receive`] and [`Store::put`].
pub async fn put(
    store: &Store,
    mut request: S3Request<PutObjectInput>,
) -> S3Result<PutObjectOutput> {
    let body = request.input.body.take();
    let claims = claims!(request);
    let input = request.input;
    // The body is read before any rejection, because a client may not look for a response while it sends.
    let received = receive(&store.blobs, body, claims).await?;
    let object = Object {
        size: received.size,
        etag: hex(&received.md5),
        modified_ms: now_ms(),
        content_type: input.content_type,
        metadata: input.metadata.unwrap_or_default(),
        checksums: stored_checksums(&received.checksum),
        ..Object::default()
    };
    let condition = Condition {
        if_match: input.if_match,
        if_none_match: input.if_none_match,
    };
    let (blob, size) = (received.blob, received.size);
    let keep = || {
        vec![Piece {
            blob: blob.keep(),
            size,
        }]
    };
    let object = store.put(&input.bucket, &input.key, keep, object, &condition)?;
    let sums = received.checksum;
    Ok(PutObjectOutput {
        e_tag: Some(ETag::Strong(object.etag)),
        checksum_crc32: sums.checksum_crc32,
        checksum_crc32c: sums.checksum_crc32c,
        checksum_crc64nvme: sums.checksum_crc64nvme,
        checksum_sha1: sums.checksum_sha1,
        checksum_sha256: sums.checksum_sha256,
        ..PutObjectOutput::default()
    })
}

/// Returns the object's bytes, or a range of them.
///
/// # Errors
/// `NoSuchKey`, `PreconditionFailed`, `NotModified`, `InvalidRange`.
pub async fn get(store: &Store, input: GetObjectInput) -> S3Result<GetObjectOutput> {
    let find = |object: &Object| {
        check_read(
            object,
            input.if_match.as_ref(),
            input.if_none_match.as_ref(),
        )?;
        Ok(match input.range {
            Some(range) => range.check(object.size)?,
            None => 0..object.size,
        })
    };
    let (object, span, stream) = open(store, &input.bucket, &input.key, find).await?;
    let length = span.end - span.start;
    let wants_sums = input
        .checksum_mode
        .is_some_and(|mode| mode.as_str() == ChecksumMode::ENABLED);
    let sums = if wants_sums && length == object.size {
        loaded_checksums(&object)
    } else {
        Checksum::default()
    };
    Ok(GetObjectOutput {
        accept_ranges: Some("bytes".to_owned()),
        body: Some(StreamingBlob::new(stream)),
        content_length: i64::try_from(length).ok(),
        content_range: input
            .range
            .map(|_| format!("bytes {}-{}/{}", span.start, span.end - 1, object.size)),
        last_modified: Some(timestamp(object.modified_ms)),
        e_tag: Some(ETag::Strong(object.etag)),
        content_type: input
            .response_content_type
            .is_none()
            .then_some(object.content_type)
            .flatten(),
        metadata: Some(object.metadata),
        checksum_crc32: sums.checksum_crc32,
        checksum_crc32c: sums.checksum_crc32c,
        checksum_crc64nvme: sums.checksum_crc64nvme,
        checksum_sha1: sums.checksum_sha1,
        checksum_sha256: sums.checksum_sha256,
        ..GetObjectOutput::default()
    })
}

/// Returns the headers of [`get`] without the bytes.
///
/// # Errors
/// `NoSuchKey`, `PreconditionFailed`, `NotModified`.
pub fn head(store: &Store, input: HeadObjectInput) -> S3Result<HeadObjectOutput> {
    let object = store.object(&input.bucket, &input.key)?;
    check_read(
        &object,
        input.if_match.as_ref(),
        input.if_none_match.as_ref(),
    )?;
    let wants_sums = input
        .checksum_mode
        .is_some_and(|mode| mode.as_str() == ChecksumMode::ENABLED);
    let sums = if wants_sums {
        loaded_checksums(&object)
    } else {
        Checksum::default()
    };
    Ok(HeadObjectOutput {
        accept_ranges: Some("bytes".to_owned()),
        content_length: i64::try_from(object.size).ok(),
        last_modified: Some(timestamp(object.modified_ms)),
        e_tag: Some(ETag::Strong(object.etag)),
        content_type: object.content_type,
        metadata: Some(object.metadata),
        checksum_crc32: sums.checksum_crc32,
        checksum_crc32c: sums.checksum_crc32c,
        checksum_crc64nvme: sums.checksum_crc64nvme,
        checksum_sha1: sums.checksum_sha1,
        checksum_sha256: sums.checksum_sha256,
        ..HeadObjectOutput::default()
    })
}

/// Copies an object, with its metadata.
///
/// # Errors
/// `NoSuchKey`, and `NotImplemented` for a source that is not in a bucket.
pub async fn copy(store: &Store, input: CopyObjectInput) -> S3Result<Object> {
    let CopySource::Bucket { bucket, key, .. } = &input.copy_source else {
        return Err(s3_error!(
            NotImplemented,
            "only bucket/key sources are known here"
        ));
    };
    let find = |object: &Object| {
        check_read(
            object,
            input.copy_source_if_match.as_ref(),
            input.copy_source_if_none_match.as_ref(),
        )?;
        Ok(0..object.size)
    };
    let (object, span, mut source) = open(store, bucket, key, find).await?;
    let blob = store.blobs.create();
    let mut target = File::create(blob.path()).await.map_err(disk)?;
    while let Some(data) = source.next().await {
        let data = data.map_err(|error| disk(io::Error::other(error)))?;
        target.write_all(&data).await.map_err(disk)?;
    }
    target.flush().await.map_err(disk)?;
    let object = Object {
        modified_ms: now_ms(),
        ..object
    };
    let keep = || {
        vec![Piece {
            blob: blob.keep(),
            size: span.end,
        }]
    };
    let condition = Condition::default();
    store.put(&input.bucket, &input.key, keep, object, &condition)
}

/// Returns the object at `key`, the range of it that `find` selects, and a stream of that range.
async fn open(
    store: &Store,
    bucket: &str,
    key: &str,
    find: impl Fn(&Object) -> S3Result<Range<u64>>,
) -> S3Result<(Object, Range<u64>, PieceStream)> {
    // An overwrite may unlink the files between the lookup and their opening; the lookup is then repeated.
    for _ in 0..100 {
        let object = store.object(bucket, key)?;
        let span = find(&object)?;
        match PieceStream::open(&store.blobs, &object.pieces, span.clone()).await {
            Ok(stream) => return Ok((object, span, stream)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => tokio::task::yield_now().await,
            Err(error) => return Err(disk(error)),
        }
    }
    Err(s3_error!(
        InternalError,
        "a data file of `{key}` is missing"
    ))
}

fn check_read(
    object: &Object,
    wanted: Option<&ETagCondition>,
    unwanted: Option<&ETagCondition>,
) -> S3Result<()> {
    if wanted.is_some_and(|wanted| !is_matched(wanted, object)) {
        return Err(s3_error!(
            PreconditionFailed,
            "If-Match was given, and the ETag is \"{}\"",
            object.etag
        ));
    }
    if unwanted.is_some_and(|unwanted| is_matched(unwanted, object)) {
        return Err(s3_error!(NotModified));
    }
    Ok(())
}

/// Converts a time to the type of S3's responses.
pub fn timestamp(ms: u64) -> Timestamp {
    Timestamp::from(UNIX_EPOCH + Duration::from_millis(ms))
}

fn stored_checksums(sums: &Checksum) -> std::collections::BTreeMap<String, String> {
    let named = [
        ("crc32", &sums.checksum_crc32),
        ("crc32c", &sums.checksum_crc32c),
        ("crc64nvme", &sums.checksum_crc64nvme),
        ("sha1", &sums.checksum_sha1),
        ("sha256", &sums.checksum_sha256),
    ];
    named
        .into_iter()
        .filter_map(|(name, sum)| Some((name.to_owned(), sum.clone()?)))
        .collect()
}

fn loaded_checksums(object: &Object) -> Checksum {
    let find = |name: &str| object.checksums.get(name).cloned();
    Checksum {
        checksum_crc32: find("crc32"),
        checksum_crc32c: find("crc32c"),
        checksum_crc64nvme: find("crc64nvme"),
        checksum_sha1: find("sha1"),
        checksum_sha256: find("sha256"),
        ..Checksum::default()
    }
}
