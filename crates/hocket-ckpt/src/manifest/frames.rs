//! The manifest's encoding: a small frame with the head, the document's frame, and a skippable frame with the
//! digest of both.

use std::collections::HashSet;
use std::io::Write;

use serde::{Deserialize, Serialize};
use zstd::zstd_safe::{CParameter, find_frame_compressed_size, get_frame_content_size};

use super::document::{LATEST_FORMAT, ManifestDocument};
use super::rules;
use super::table::BlockTable;
use crate::error::{CkptError, Result};
use crate::format::digest::{DIGEST_BYTES, hex, xxh3_128};

/// The manifest's name inside a checkpoint; its presence marks the checkpoint as committed.
pub const MANIFEST_NAME: &str = "checkpoint.json.zst";

/// Number of bytes that contain the first frame of every manifest.
pub(crate) const HEAD_BYTES: u64 = 4096;

/// Limit of a document in bytes. Documents above a small size are also limited to a multiple of their stored
/// size. A manifest of a million chunks stays below both limits, and a small one that would expand to more than
/// memory is rejected before decompression.
const DOCUMENT_LIMIT: u64 = 1 << 30;
const DOCUMENT_FREE_BYTES: u64 = 4 << 20;
const DOCUMENT_RATIO: u64 = 256;

/// Size of the pieces that are compressed separately. A compressed piece takes at least 4 bytes, 1/128 of its
/// size.
const PIECE_BYTES: usize = 512;

/// Magic number of a skippable frame, and the length of the manifest's.
const SKIPPABLE: [u8; 8] = [0x50, 0x2a, 0x4d, 0x18, DIGEST_BYTES as u8, 0, 0, 0];

/// Length of the last frame, which every whole manifest ends with.
pub(crate) const TRAILER_BYTES: usize = SKIPPABLE.len() + DIGEST_BYTES;

/// The place that errors name before a manifest is written.
const UNWRITTEN: &str = "(not yet written)";

/// zstd's default level: a manifest consists mostly of digests, which do not compress at any level.
const LEVEL: i32 = 3;

/// The head: the manifest's first frame, which listings show. Later formats keep these fields and may add
/// others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestHead {
    /// Number of the format.
    pub format: u64,
    /// Version of Hocket that wrote it.
    pub version: String,
    /// Id of the save that wrote it: 32 hexadecimal digits.
    pub save_id: String,
    /// The caller's step.
    pub step: u64,
    /// Time of writing, in UTC.
    pub created: String,
    /// Number of data files.
    pub files: u64,
    /// Number of tensors.
    pub tensors: u64,
    /// Total size of the data files in bytes.
    pub bytes: u64,
    /// Whether a part of the saved state was dropped later.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub thinned: bool,
    /// Name of the checkpoint beside it that this one is a delta to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Hexadecimal digest of the document's frame.
    pub digest: String,
}

/// Compresses a document into a manifest's bytes.
///
/// # Errors
/// `Corrupt` if the document violates a rule, `Incompatible` if its format is not the one this version writes.
pub fn encode(document: &[u8]) -> Result<Vec<u8>> {
    let parsed = parse(document, UNWRITTEN)?;
    let least = parsed.least_format();
    if parsed.format != least {
        return Err(CkptError::Incompatible {
            uri: UNWRITTEN.to_owned(),
            reason: format!(
                "asked to write format {}; this build writes such a checkpoint in format {least}",
                parsed.format
            ),
        });
    }
    rules::check(&parsed, UNWRITTEN)?;
    frames_of(&parsed, document)
}

/// Returns the manifest of a document that is not yet JSON; its format becomes the least that has its fields.
///
/// # Errors
/// As [`encode`].
pub(crate) fn encode_document(mut document: ManifestDocument) -> Result<Vec<u8>> {
    document.format = document.least_format();
    rules::check(&document, UNWRITTEN)?;
    let mut json = serde_json::to_vec(&document).map_err(|error| {
        CkptError::Invalid(format!("the document cannot be encoded as JSON: {error}"))
    })?;
    json.push(b'\n');
    document.forget_chunks();
    frames_of(&document, &json)
}

/// Returns the manifest's bytes of a checked document.
fn frames_of(parsed: &ManifestDocument, document: &[u8]) -> Result<Vec<u8>> {
    let mut frame = compress(document)?;
    if document.len() as u64 > document_limit(&frame) {
        frame = compress_less(document)?;
    }
    let head = head_of(parsed, hex(&xxh3_128(&frame)));
    let mut json = serde_json::to_vec(&head).map_err(|error| {
        CkptError::Invalid(format!("the head cannot be encoded as JSON: {error}"))
    })?;
    json.push(b'\n');
    let mut bytes = compress(&json)?;
    if bytes.len() as u64 > HEAD_BYTES || json.len() as u64 > HEAD_BYTES {
        return Err(CkptError::Invalid(format!(
            "the head has {} bytes, expected at most {HEAD_BYTES}",
            json.len()
        )));
    }
    bytes.extend_from_slice(&frame);
    let digest = xxh3_128(&bytes);
    bytes.extend_from_slice(&SKIPPABLE);
    bytes.extend_from_slice(&digest);
    Ok(bytes)
}

/// A checked document of a manifest: as JSON, parsed, and with the decoded block tables of its files.
pub(crate) struct DecodedManifest {
    pub(crate) json: Vec<u8>,
    pub(crate) document: ManifestDocument,
    pub(crate) tables: Vec<BlockTable>,
}

impl DecodedManifest {
    /// Returns the paths of the data files.
    pub(crate) fn data_paths(self) -> HashSet<String> {
        let files = self.document.files.into_iter();
        files.map(|file| file.path).collect()
    }
}

/// Returns the JSON of the document inside a manifest's bytes after all checks.
///
/// # Errors
/// `Corrupt` if a digest or a rule is violated, `Incompatible` for a later format.
pub fn decode(bytes: &[u8], uri: &str) -> Result<Vec<u8>> {
    decode_checked(bytes, uri).map(|decoded| decoded.json)
}

/// Verifies the digests of a manifest's bytes; returns the head and the document's frame.
pub(crate) fn check_digests<'a>(bytes: &'a [u8], uri: &str) -> Result<(ManifestHead, &'a [u8])> {
    let bad = |reason: String| CkptError::bad_manifest(uri, reason);
    // A later format may end otherwise. The head has a checksum of its own.
    if let Err(later @ CkptError::Incompatible { .. }) = decode_head(bytes, uri) {
        return Err(later);
    }
    let split = bytes
        .len()
        .checked_sub(TRAILER_BYTES)
        .ok_or_else(|| bad(format!("it has only {} bytes", bytes.len())))?;
    let (content, trailer) = bytes.split_at(split);
    let digest = digest_at_end(trailer, uri)?;
    if digest != xxh3_128(content) {
        return Err(bad(
            "its bytes do not have the digest that was written with them".to_owned(),
        ));
    }
    let (head, _, head_frame) = decode_head(content, uri)?;
    let frame = &content[head_frame..];
    if hex(&xxh3_128(frame)) != head.digest {
        return Err(bad(
            "the document's frame does not have the digest that the head names".to_owned(),
        ));
    }
    Ok((head, frame))
}

/// Returns the digest in the last [`TRAILER_BYTES`] of a manifest.
///
/// # Errors
/// `Corrupt` if they are not its last frame.
pub(crate) fn digest_at_end<'a>(end: &'a [u8], uri: &str) -> Result<&'a [u8]> {
    end.strip_prefix(&SKIPPABLE).ok_or_else(|| {
        let reason = "its last frame is not the digest: it was cut short or added to";
        CkptError::bad_manifest(uri, reason)
    })
}

/// Returns the document inside a manifest's bytes after all checks.
pub(crate) fn decode_checked(bytes: &[u8], uri: &str) -> Result<DecodedManifest> {
    let bad = |reason: String| CkptError::bad_manifest(uri, reason);
    let (head, frame) = check_digests(bytes, uri)?;
    let (json, used) = decompress(frame, document_limit(frame))
        .map_err(|reason| bad(format!("document: {reason}")))?;
    if used != frame.len() {
        return Err(bad(format!(
            "{} bytes stand between the document and the digest",
            frame.len() - used
        )));
    }
    let document = parse(&json, uri)?;
    let tables = rules::check(&document, uri)?;
    if head != head_of(&document, head.digest.clone()) {
        return Err(bad("its head and its document do not agree".to_owned()));
    }
    Ok(DecodedManifest {
        json,
        document,
        tables,
    })
}

/// Decodes the first frame; returns the parsed head, its JSON, and the size of the frame in bytes.
pub(crate) fn decode_head(bytes: &[u8], uri: &str) -> Result<(ManifestHead, Vec<u8>, usize)> {
    let bad = |reason: String| CkptError::bad_manifest(uri, format!("head: {reason}"));
    let (json, used) = decompress(bytes, HEAD_BYTES).map_err(bad)?;
    // A later format may have a different head, so only its number and version are parsed.
    #[derive(Deserialize)]
    struct Peek {
        format: u64,
        version: String,
    }
    let peek: Peek = serde_json::from_slice(&json).map_err(|error| bad(error.to_string()))?;
    if peek.format > LATEST_FORMAT {
        return Err(CkptError::Incompatible {
            uri: uri.to_owned(),
            reason: format!(
                "it has format {}, this build reads up to {LATEST_FORMAT}. Hocket {} wrote it: install hocket-ckpt>={2}",
                peek.format, peek.version, peek.version
            ),
        });
    }
    let head: ManifestHead =
        serde_json::from_slice(&json).map_err(|error| bad(error.to_string()))?;
    rules::check_created(&head.created).map_err(bad)?;
    Ok((head, json, used))
}

fn parse(document: &[u8], uri: &str) -> Result<ManifestDocument> {
    serde_json::from_slice(document)
        .map_err(|error| CkptError::bad_manifest(uri, format!("document: {error}")))
}

fn head_of(document: &ManifestDocument, digest: String) -> ManifestHead {
    ManifestHead {
        format: document.format,
        version: document.version.clone(),
        save_id: document.save_id.clone(),
        step: document.step,
        created: document.created.clone(),
        files: document.files.len() as u64,
        tensors: document.tensors.0.len() as u64,
        bytes: document
            .files
            .iter()
            .fold(0, |sum, file| sum.saturating_add(file.stored_bytes())),
        thinned: document.thinned.is_some(),
        base: document.delta.as_ref().map(|delta| delta.base.clone()),
        digest,
    }
}

/// Returns the limit of the document in a frame, in bytes.
fn document_limit(frame: &[u8]) -> u64 {
    (frame.len() as u64 * DOCUMENT_RATIO + DOCUMENT_FREE_BYTES).min(DOCUMENT_LIMIT)
}

/// Returns a frame that is at most [`DOCUMENT_RATIO`] times smaller than `bytes`, for very repetitive
/// documents.
fn compress_less(bytes: &[u8]) -> Result<Vec<u8>> {
    let run = || {
        let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL)?;
        encoder.include_checksum(true)?;
        encoder.set_pledged_src_size(Some(bytes.len() as u64))?;
        for piece in bytes.chunks(PIECE_BYTES) {
            encoder.write_all(piece)?;
            encoder.flush()?;
        }
        encoder.finish()
    };
    run().map_err(|error: std::io::Error| CkptError::process(format!("zstd: {error}")))
}

/// Returns a zstd frame that records its decompressed size and a checksum.
pub(crate) fn compress(bytes: &[u8]) -> Result<Vec<u8>> {
    let run = || {
        let mut compressor = zstd::bulk::Compressor::new(LEVEL)?;
        compressor.set_parameter(CParameter::ChecksumFlag(true))?;
        compressor.compress(bytes)
    };
    run().map_err(|error: std::io::Error| CkptError::process(format!("zstd: {error}")))
}

/// Returns the content of the first frame in `bytes`, and the size of the frame.
pub(crate) fn decompress(
    bytes: &[u8],
    limit: u64,
) -> std::result::Result<(Vec<u8>, usize), String> {
    let used = find_frame_compressed_size(bytes).map_err(|_| "no whole zstd frame".to_owned())?;
    let frame = bytes.get(..used).ok_or("a zstd frame that is cut short")?;
    let length = match get_frame_content_size(frame) {
        Ok(Some(length)) if length <= limit => length,
        Ok(Some(length)) => {
            return Err(format!(
                "{length} bytes when decompressed, at most {limit} are read"
            ));
        }
        _ => return Err("a zstd frame does not record its decompressed size".to_owned()),
    };
    let content =
        zstd::bulk::decompress(frame, length as usize).map_err(|error| format!("zstd: {error}"))?;
    Ok((content, used))
}
