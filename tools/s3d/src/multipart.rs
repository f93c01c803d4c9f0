//! Multipart uploads: each part is a file of its own, and completion combines them into the object.

use std::collections::BTreeMap;

use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::{CompleteMultipartUploadInput, CompletedPart, CreateMultipartUploadInput, ETag};
use s3s::dto::{UploadPartInput, UploadPartOutput};
use s3s::{S3Request, S3Result, s3_error};

use crate::blobs::{hex, receive};
use crate::journal::Object;
use crate::objects::claims;
use crate::pieces::Piece;
use crate::store::{Condition, Part, Store, Upload, now_ms};

const SMALLEST_PART: u64 = 5 << 20;
const MOST_PARTS: i32 = 10_000;

/// Starts an upload; returns its id.
///
/// # Errors
/// `NoSuchBucket`.
pub fn create(store: &Store, input: CreateMultipartUploadInput) -> S3Result<String> {
    store.create_upload(Upload {
        bucket: input.bucket,
        key: input.key,
        content_type: input.content_type,
        metadata: input.metadata.unwrap_or_default(),
        created_ms: now_ms(),
        parts: BTreeMap::new(),
    })
}

/// Receives a part; it replaces an earlier one with the same number.
///
/// # Errors
/// `NoSuchUpload`, `InvalidArgument` for a number outside 1 to 10 000, or as [`receive`].
pub async fn upload_part(
    store: &Store,
    mut request: S3Request<UploadPartInput>,
) -> S3Result<UploadPartOutput> {
    let body = request.input.body.take();
    let claims = claims!(request);
    let input = request.input;
    let number = input.part_number;
    let received = receive(&store.blobs, body, claims).await?;
    if !(1..=MOST_PARTS).contains(&number) {
        return Err(s3_error!(
            InvalidArgument,
            "part number {number}; expected 1 to {MOST_PARTS}"
        ));
    }
    let (blob, md5, size) = (received.blob, received.md5, received.size);
    let replaced = store.with_upload(&input.bucket, &input.key, &input.upload_id, |upload| {
        let part = Part {
            blob: blob.keep(),
            size,
            md5,
            modified_ms: now_ms(),
        };
        Ok(upload.parts.insert(number, part))
    })?;
    if let Some(replaced) = replaced {
        store.blobs.remove(replaced.blob);
    }
    let sums = received.checksum;
    Ok(UploadPartOutput {
        e_tag: Some(ETag::Strong(hex(&md5))),
        checksum_crc32: sums.checksum_crc32,
        checksum_crc32c: sums.checksum_crc32c,
        checksum_crc64nvme: sums.checksum_crc64nvme,
        checksum_sha1: sums.checksum_sha1,
        checksum_sha256: sums.checksum_sha256,
        ..UploadPartOutput::default()
    })
}

/// Combines the parts that the client lists into the object. The upload stays open until this succeeds.
///
/// # Errors
/// `NoSuchUpload`, `InvalidPart`, `InvalidPartOrder`, `EntityTooSmall`, or as [`Store::put`].
pub fn complete(store: &Store, input: CompleteMultipartUploadInput) -> S3Result<Object> {
    let id = input.upload_id.clone();
    let upload = store.take_upload(&input.bucket, &input.key, &id)?;
    match join(store, &upload, input) {
        Ok(object) => {
            store.drop_parts(&upload, &object.pieces);
            Ok(object)
        }
        Err(error) => {
            store.return_upload(&id, upload);
            Err(error)
        }
    }
}

/// Aborts an upload and removes its parts.
///
/// # Errors
/// `NoSuchUpload`.
pub fn abort(store: &Store, bucket: &str, key: &str, id: &str) -> S3Result<()> {
    let upload = store.take_upload(bucket, key, id)?;
    store.drop_parts(&upload, &[]);
    Ok(())
}

fn join(store: &Store, upload: &Upload, input: CompleteMultipartUploadInput) -> S3Result<Object> {
    let listed = input
        .multipart_upload
        .and_then(|upload| upload.parts)
        .unwrap_or_default();
    let parts = choose(upload, &listed)?;
    let condition = Condition {
        if_match: input.if_match,
        if_none_match: input.if_none_match,
    };
    let mut md5 = Md5::new();
    for part in &parts {
        md5.update(&part.md5);
    }
    let object = Object {
        size: parts.iter().map(|part| part.size).sum(),
        etag: format!("{}-{}", hex(&md5.finalize()), parts.len()),
        modified_ms: now_ms(),
        content_type: upload.content_type.clone(),
        metadata: upload.metadata.clone(),
        ..Object::default()
    };
    let piece = |part: &&Part| Piece {
        blob: part.blob,
        size: part.size,
    };
    let keep = || parts.iter().map(piece).collect();
    store.put(&input.bucket, &input.key, keep, object, &condition)
}

fn choose<'a>(upload: &'a Upload, listed: &[CompletedPart]) -> S3Result<Vec<&'a Part>> {
    if listed.is_empty() {
        return Err(s3_error!(
            MalformedXML,
            "no parts are listed; expected at least one"
        ));
    }
    let mut chosen = Vec::with_capacity(listed.len());
    let mut last = 0;
    for entry in listed {
        let number = entry.part_number.unwrap_or_default();
        if number <= last {
            return Err(s3_error!(
                InvalidPartOrder,
                "part {number} follows part {last}; expected ascending numbers"
            ));
        }
        last = number;
        let part = upload
            .parts
            .get(&number)
            .ok_or_else(|| s3_error!(InvalidPart, "part {number} was not uploaded"))?;
        let etag = ETag::Strong(hex(&part.md5));
        if entry
            .e_tag
            .as_ref()
            .is_some_and(|listed| !listed.weak_cmp(&etag))
        {
            return Err(s3_error!(
                InvalidPart,
                "part {number} has the ETag {}",
                etag.value()
            ));
        }
        chosen.push(part);
    }
    if let Some(small) = chosen
        .iter()
        .rev()
        .skip(1)
        .find(|part| part.size < SMALLEST_PART)
    {
        return Err(s3_error!(
            EntityTooSmall,
            "a part that is not the last has {} bytes; expected {SMALLEST_PART}",
            small.size
        ));
    }
    Ok(chosen)
}
