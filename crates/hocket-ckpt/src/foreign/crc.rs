//! Verification of the CRC-32 of zip members, which torch writes and never checks.

use std::ops::Range;
use std::sync::Mutex;

use super::unpacking::{ItemStream, ends};
use super::zip::{LOCAL_BYTES, ZipFile, local_data};
use crate::error::{CkptError, Result};
use crate::place::CheckpointPlace;
use crate::place::blob::Blob;
use crate::workers::{self, Interrupted};

/// Bytes read at a time.
const PIECE_BYTES: u64 = 8 << 20;

const MAX_WORKERS: usize = 4;

/// Limit of the unpacked size of a compressed item. Unpacking takes time but not memory in proportion to it.
const UNPACKED_LIMIT: u64 = 1 << 40;

/// A zip member whose bytes differ from those written.
#[derive(Debug, Clone)]
pub struct BadMember {
    /// Index of the zip among those passed in.
    pub zip: usize,
    /// The member's name; empty if the zip itself cannot be read.
    pub member: String,
    /// Offset of the member's data, or of the zip, in the file (in the unpacked data, if the zip is
    /// compressed).
    pub offset: u64,
    /// Bytes of the data, or of the zip.
    pub length: u64,
    /// A description of the problem.
    pub problem: String,
}

/// Checks every member of several zips in one file, each given by its offset, its size in bytes, and whether it
/// is compressed.
///
/// # Errors
/// `NotFound` if the file is gone, and errors of the disk or the store. Bad bytes are a result, not an error.
pub fn verify_zips(
    place: &CheckpointPlace,
    path: &str,
    zips: &[(u64, u64, bool)],
    interrupted: Interrupted<'_>,
) -> Result<Vec<BadMember>> {
    let blob = Blob::open(place, path, interrupted)?;
    let bad = Mutex::new(Vec::new());
    workers::run(
        MAX_WORKERS,
        zips.len(),
        interrupted,
        || Ok(()),
        |(), index| {
            // Workers are not interrupted; they take no further jobs after the caller is interrupted.
            let never: Interrupted<'_> = &|| false;
            let Some(&(offset, length, is_packed)) = zips.get(index) else {
                return Ok(());
            };
            let verified = if is_packed {
                unpack_and_verify(&blob, offset, length, index, never)
            } else {
                let zip = ZipFile::open(&blob, offset..offset.saturating_add(length), never);
                zip.and_then(|zip| verify_zip(&blob, &zip, index, never))
            };
            let found = match verified {
                Err(CkptError::Corrupt { reason, .. }) => vec![BadMember {
                    zip: index,
                    member: String::new(),
                    offset,
                    length,
                    problem: reason,
                }],
                other => other?,
            };
            if let Ok(mut bad) = bad.lock() {
                bad.extend(found);
            }
            Ok(())
        },
    )?;
    let mut bad = bad
        .into_inner()
        .map_err(|_| CkptError::panicked("a worker"))?;
    bad.sort_by_key(|one| (one.zip, one.offset));
    Ok(bad)
}

/// Unpacks and checks an item in two passes: one for the directory at the end, one for the members.
fn unpack_and_verify(
    blob: &Blob,
    offset: u64,
    length: u64,
    index: usize,
    never: Interrupted<'_>,
) -> Result<Vec<BadMember>> {
    let packed = offset..offset.saturating_add(length);
    let unpacked = ends(blob, packed.clone(), UNPACKED_LIMIT, never)?;
    let mut members = ZipFile::open(&unpacked, 0..unpacked.size(), never)?.members;
    members.sort_by_key(|member| member.header);
    let mut stream = ItemStream::open(blob, packed)?;
    let mut bad = Vec::new();
    for member in members {
        let misplaced = |reason: &str| {
            blob.corrupt(Some(offset), format!("member `{}`: {reason}", member.name))
        };
        if member.header < stream.position() {
            return Err(misplaced("it begins inside another entry"));
        }
        stream.pass(member.header, |_| (), never)?;
        let mut header = [0_u8; LOCAL_BYTES as usize];
        stream.fill(&mut header, never)?;
        let start = local_data(&header, member.header).map_err(misplaced)?;
        let end = start.saturating_add(member.size);
        stream.pass(start, |_| (), never)?;
        let mut hasher = crc32fast::Hasher::new();
        stream.pass(end, |bytes| hasher.update(bytes), never)?;
        if hasher.finalize() != member.crc {
            bad.push(bad_member(index, member.name, start..end));
        }
    }
    Ok(bad)
}

fn bad_member(zip: usize, member: String, range: Range<u64>) -> BadMember {
    BadMember {
        zip,
        member,
        offset: range.start,
        length: range.end - range.start,
        problem: "its bytes do not have the CRC-32 that was written with them".to_owned(),
    }
}

fn verify_zip(
    blob: &Blob,
    zip: &ZipFile,
    index: usize,
    never: Interrupted<'_>,
) -> Result<Vec<BadMember>> {
    let members: Vec<_> = zip.members.iter().collect();
    let places = zip.locate(blob, &members, never)?;
    let mut bad = Vec::new();
    for (member, range) in members.iter().zip(places) {
        let mut hasher = crc32fast::Hasher::new();
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + PIECE_BYTES);
            hasher.update(&blob.read(at..end, never)?);
            at = end;
        }
        if hasher.finalize() != member.crc {
            bad.push(bad_member(index, member.name.clone(), range));
        }
    }
    Ok(bad)
}
