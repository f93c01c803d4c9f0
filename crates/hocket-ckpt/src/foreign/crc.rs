//! The CRC-32 of every member of a zip, which torch writes and never looks at.

use std::ops::Range;
use std::sync::Mutex;

use super::blob::Blob;
use super::unpacking::{Stream, ends};
use super::zip::{LOCAL_BYTES, Zip, local_data};
use crate::error::{CkptError, Result};
use crate::pace::{self, Interrupted};
use crate::place::Place;

/// Bytes read at a time.
const PIECE_BYTES: u64 = 8 << 20;

const MAX_WORKERS: usize = 4;

/// A compressed item unpacks to at most so many bytes: no memory is taken for them, but time.
const UNPACKED_LIMIT: u64 = 1 << 40;

/// A member that is not what was written.
#[derive(Debug, Clone)]
pub struct BadMember {
    /// Which of the zips that were asked about.
    pub zip: usize,
    /// The member's name; empty where the zip itself cannot be read.
    pub member: String,
    /// Where its data, or the zip, begins in the file (in what it unpacks to, where the zip is compressed).
    pub offset: u64,
    /// Bytes of the data, or of the zip.
    pub length: u64,
    /// What is wrong.
    pub problem: String,
}

/// Compares every member of zips that stand in one file, each given by where it begins, its bytes, and whether it is
/// compressed.
///
/// # Errors
/// `NotFound` where the file is gone, and what the disk or the store says; bad bytes are no error.
pub fn verify_zips(
    place: &Place,
    path: &str,
    zips: &[(u64, u64, bool)],
    interrupted: Interrupted<'_>,
) -> Result<Vec<BadMember>> {
    let blob = Blob::open(place, path, interrupted)?;
    let bad = Mutex::new(Vec::new());
    pace::run(
        MAX_WORKERS,
        zips.len(),
        interrupted,
        || Ok(()),
        |(), index| {
            // Workers are never interrupted themselves: they take no more jobs once the caller is.
            let never: Interrupted<'_> = &|| false;
            let Some(&(offset, length, is_packed)) = zips.get(index) else {
                return Ok(());
            };
            let verified = if is_packed {
                unpack_and_verify(&blob, offset, length, index, never)
            } else {
                let zip = Zip::open(&blob, offset..offset.saturating_add(length), never);
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
        .map_err(|_| CkptError::process("a worker panicked; this is a defect of Hocket"))?;
    bad.sort_by_key(|one| (one.zip, one.offset));
    Ok(bad)
}

/// Two passes: one for the directory, which stands at the end, one for the members.
fn unpack_and_verify(
    blob: &Blob,
    offset: u64,
    length: u64,
    index: usize,
    never: Interrupted<'_>,
) -> Result<Vec<BadMember>> {
    let packed = offset..offset.saturating_add(length);
    let unpacked = ends(blob, packed.clone(), UNPACKED_LIMIT, never)?;
    let mut members = Zip::open(&unpacked, 0..unpacked.size(), never)?.members;
    members.sort_by_key(|member| member.header);
    let mut stream = Stream::open(blob, packed)?;
    let mut bad = Vec::new();
    for member in members {
        let misplaced = |reason: &str| {
            blob.corrupt(Some(offset), format!("member `{}`: {reason}", member.name))
        };
        if member.header < stream.position() {
            return Err(misplaced("it begins inside of another"));
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

fn bad_member(zip: usize, member: String, place: Range<u64>) -> BadMember {
    BadMember {
        zip,
        member,
        offset: place.start,
        length: place.end - place.start,
        problem: "its bytes do not have the CRC-32 that was written with them".to_owned(),
    }
}

fn verify_zip(
    blob: &Blob,
    zip: &Zip,
    index: usize,
    never: Interrupted<'_>,
) -> Result<Vec<BadMember>> {
    let members: Vec<_> = zip.members.iter().collect();
    let places = zip.locate(blob, &members, never)?;
    let mut bad = Vec::new();
    for (member, place) in members.iter().zip(places) {
        let mut hasher = crc32fast::Hasher::new();
        let mut at = place.start;
        while at < place.end {
            let end = place.end.min(at + PIECE_BYTES);
            hasher.update(&blob.read(at..end, never)?);
            at = end;
        }
        if hasher.finalize() != member.crc {
            bad.push(bad_member(index, member.name.clone(), place));
        }
    }
    Ok(bad)
}
