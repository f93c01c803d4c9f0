//! The directory of a zip as torch writes it: stored members, sizes in the central directory, zip64 where
//! needed.

use std::ops::Range;

use crate::error::{CkptError, Result};
use crate::workers::Interrupted;

use super::unsupported;
use crate::place::blob::Blob;

/// Number of bytes at the end of the zip that are searched for the end record, a comment after it, and the
/// zip64 records before it.
const TAIL_BYTES: u64 = 4096;
const LONGEST_COMMENT: u64 = 65_535;

/// Limit of a central directory in bytes: about 2 million members.
const DIRECTORY_LIMIT: u64 = 256 << 20;

const END_BYTES: usize = 22;
const END: [u8; 4] = *b"PK\x05\x06";
const END64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR: [u8; 4] = *b"PK\x06\x07";
const CENTRAL: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";
/// Bytes of a local header without the name.
pub(crate) const LOCAL_BYTES: u64 = 30;

/// A member of a zip.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ZipMember {
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) crc: u32,
    /// Neither compressed nor encrypted.
    is_stored: bool,
    /// Offset of its local header in the file.
    pub(crate) header: u64,
}

/// A zip inside a file, starting at `range.start`.
#[derive(Debug)]
pub(crate) struct ZipFile {
    pub(crate) range: Range<u64>,
    pub(crate) members: Vec<ZipMember>,
}

impl ZipFile {
    /// Reads the directory of the zip in `range` of a file.
    pub(crate) fn open(
        blob: &Blob,
        range: Range<u64>,
        interrupted: Interrupted<'_>,
    ) -> Result<Self> {
        let bad = |reason: &str| {
            blob.corrupt(
                Some(range.start),
                format!("it is not a zip file written by torch: {reason}"),
            )
        };
        if range.start > range.end || range.end > blob.size() {
            return Err(bad("it ends beyond its file"));
        }
        let length = range.end - range.start;
        let mut tail = Vec::new();
        let mut found = None;
        for wanted in [TAIL_BYTES, LONGEST_COMMENT + TAIL_BYTES] {
            tail = blob.read(range.end - wanted.min(length)..range.end, interrupted)?;
            found = find_end(&tail);
            if found.is_some() {
                break;
            }
        }
        let end = found.ok_or_else(|| bad("it has no end record; it may have been cut short"))?;
        let tail_start = length - tail.len() as u64;
        let location = directory_place(&tail, tail_start, end)
            .ok_or_else(|| bad("its end records do not say where the directory is"))?;
        let ZipDirectory {
            offset,
            bytes,
            count,
        } = location;
        if bytes > DIRECTORY_LIMIT || offset.checked_add(bytes).is_none_or(|end| end > length) {
            return Err(bad("its directory lies outside the file, or is too long"));
        }
        let from = range.start + offset;
        let directory = blob.read(from..from + bytes, interrupted)?;
        let members = members(&directory, range.start, length).map_err(|reason| bad(&reason))?;
        if members.len() as u64 != count {
            return Err(bad(
                "the number of members in its directory differs from its end record",
            ));
        }
        let is_plain = members.iter().all(|member| member.is_stored);
        let has_pickle = members
            .iter()
            .any(|member| member.name.ends_with("/data.pkl"));
        let names = members.iter().map(|member| member.name.as_str());
        if let Some(reason) = unsupported::zip(names).filter(|_| !is_plain || !has_pickle) {
            return Err(CkptError::Incompatible {
                uri: format!("{}/{}", blob.uri().trim_end_matches('/'), blob.name()),
                reason: reason.to_owned(),
            });
        }
        if let Some(member) = members.iter().find(|member| !member.is_stored) {
            return Err(CkptError::Incompatible {
                uri: blob.uri().to_owned(),
                reason: format!(
                    "member `{}` of `{}` is compressed or encrypted, and torch stores plainly; load and save it once \
                     with torch",
                    member.name,
                    blob.name()
                ),
            });
        }
        Ok(Self { range, members })
    }

    /// Returns the member with the pickle, and the part of its name before `/data.pkl`.
    pub(crate) fn pickle(&self) -> Option<(&ZipMember, &str)> {
        let prefix = |member: &'_ ZipMember| member.name.strip_suffix("/data.pkl").map(str::len);
        let found = self.members.iter().filter_map(|member| {
            let length = prefix(member)?;
            Some((member, member.name.get(..length)?))
        });
        found.min_by_key(|(_, prefix)| prefix.len())
    }

    pub(crate) fn member(&self, name: &str) -> Option<&ZipMember> {
        self.members.iter().find(|member| member.name == name)
    }

    /// Reads the members' local headers and returns the range of each member's data in the file.
    pub(crate) fn locate(
        &self,
        blob: &Blob,
        members: &[&ZipMember],
        interrupted: Interrupted<'_>,
    ) -> Result<Vec<Range<u64>>> {
        let bad = |member: &ZipMember, reason: &str| {
            blob.corrupt(
                Some(member.header),
                format!("member `{}`: {reason}", member.name),
            )
        };
        let mut ranges = Vec::with_capacity(members.len());
        for member in members {
            let end = member
                .header
                .checked_add(LOCAL_BYTES)
                .filter(|&end| end <= self.range.end);
            let end = end.ok_or_else(|| bad(member, "its header lies outside of the zip"))?;
            ranges.push(member.header..end);
        }
        let headers = blob.read_many(&ranges, interrupted)?;
        let location = |(member, header): (&&ZipMember, &Vec<u8>)| {
            let start = local_data(header, member.header).map_err(|reason| bad(member, reason))?;
            match start.checked_add(member.size) {
                Some(end) if end <= self.range.end => Ok(start..end),
                _ => Err(bad(member, "its data ends beyond the zip")),
            }
        };
        members.iter().zip(&headers).map(location).collect()
    }

    /// Reads the content of a member of at most `limit` bytes.
    pub(crate) fn read(
        &self,
        blob: &Blob,
        member: &ZipMember,
        limit: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<Vec<u8>> {
        if member.size > limit {
            return Err(blob.corrupt(
                Some(member.header),
                format!(
                    "member `{}` has {} bytes; expected at most {limit}",
                    member.name, member.size
                ),
            ));
        }
        let location = self.locate(blob, &[member], interrupted)?;
        let content = blob.read(location.into_iter().next().unwrap_or_default(), interrupted)?;
        if crc32fast::hash(&content) == member.crc {
            return Ok(content);
        }
        Err(self.bad_crc(blob, member))
    }

    pub(crate) fn bad_crc(&self, blob: &Blob, member: &ZipMember) -> CkptError {
        blob.corrupt(
            Some(member.header),
            format!(
                "member `{}` does not have the CRC-32 that was written with it",
                member.name
            ),
        )
    }
}

/// Returns the start of a member's data, given its local header at `at`.
pub(crate) fn local_data(header: &[u8], at: u64) -> std::result::Result<u64, &'static str> {
    if header.get(..4) != Some(&LOCAL) {
        return Err("it does not begin with a local header");
    }
    match (u16_at(header, 26), u16_at(header, 28)) {
        (Some(name), Some(extra)) => Ok(at + LOCAL_BYTES + u64::from(name) + u64::from(extra)),
        _ => Err("its local header is cut short"),
    }
}

/// Returns the offset of the end record in the tail: the last one whose comment ends at the end of the zip.
fn find_end(tail: &[u8]) -> Option<usize> {
    let last = tail.len().checked_sub(END_BYTES)?;
    (0..=last).rev().find(|&at| {
        let comment = u16_at(tail, at + 20).map(usize::from);
        tail.get(at..at + 4) == Some(&END) && comment == Some(last - at)
    })
}

struct ZipDirectory {
    /// Relative to the start of the zip.
    offset: u64,
    bytes: u64,
    count: u64,
}

/// Returns the location of the directory from the end record at `end` of the tail, or from the zip64 record if
/// there is one.
fn directory_place(tail: &[u8], tail_start: u64, end: usize) -> Option<ZipDirectory> {
    let plain = ZipDirectory {
        count: u16_at(tail, end + 10)?.into(),
        bytes: u32_at(tail, end + 12)?.into(),
        offset: u32_at(tail, end + 16)?.into(),
    };
    let is_plain = plain.count != 0xffff
        && plain.bytes != u64::from(u32::MAX)
        && plain.offset != u64::from(u32::MAX);
    let locator = end.checked_sub(20);
    let locator = locator.filter(|&at| tail.get(at..at + 4) == Some(&LOCATOR));
    let Some(locator) = locator else {
        return is_plain.then_some(plain);
    };
    // The offset is relative to the zip, like all others; the zip64 record is shortly before its locator.
    let at = u64_at(tail, locator + 8)?.checked_sub(tail_start)?;
    let at = usize::try_from(at).ok()?;
    if tail.get(at..at.checked_add(4)?) != Some(&END64) {
        return None;
    }
    Some(ZipDirectory {
        count: u64_at(tail, at + 32)?,
        bytes: u64_at(tail, at + 40)?,
        offset: u64_at(tail, at + 48)?,
    })
}

/// Returns the members of a directory. `base` is the offset of the zip in its file, `length` its size in bytes.
fn members(mut rest: &[u8], base: u64, length: u64) -> std::result::Result<Vec<ZipMember>, String> {
    let cut = || "its directory is cut short".to_owned();
    let mut members = Vec::new();
    while !rest.is_empty() {
        if rest.get(..4) != Some(&CENTRAL) {
            return Err("its directory holds an invalid entry".to_owned());
        }
        let lengths = [28, 30, 32].map(|at| u16_at(rest, at).map(usize::from));
        let [Some(name_bytes), Some(extra_bytes), Some(comment_bytes)] = lengths else {
            return Err(cut());
        };
        let name = rest.get(46..46 + name_bytes).ok_or_else(cut)?;
        let name = std::str::from_utf8(name).map_err(|_| "a member's name is not valid UTF-8")?;
        let extra_at = 46 + name_bytes;
        let extra = rest.get(extra_at..extra_at + extra_bytes).ok_or_else(cut)?;
        let method = u16_at(rest, 10).ok_or_else(cut)?;
        let flags = u16_at(rest, 8).ok_or_else(cut)?;
        let is_stored = method == 0 && flags & 1 == 0;
        let mut wide = Zip64Extra::new(extra);
        let size = wide
            .widen(u32_at(rest, 24).ok_or_else(cut)?)
            .ok_or_else(cut)?;
        let stored = wide
            .widen(u32_at(rest, 20).ok_or_else(cut)?)
            .ok_or_else(cut)?;
        let header = wide
            .widen(u32_at(rest, 42).ok_or_else(cut)?)
            .ok_or_else(cut)?;
        if (is_stored && stored != size) || header >= length {
            return Err(format!(
                "member `{name}` has two sizes, or begins beyond the zip"
            ));
        }
        members.push(ZipMember {
            name: name.to_owned(),
            size,
            crc: u32_at(rest, 16).ok_or_else(cut)?,
            is_stored,
            header: base + header,
        });
        rest = rest
            .get(extra_at + extra_bytes + comment_bytes..)
            .ok_or_else(cut)?;
    }
    Ok(members)
}

/// The 64-bit numbers of an entry's extra field, in order.
struct Zip64Extra<'a>(&'a [u8]);

impl<'a> Zip64Extra<'a> {
    fn new(mut extra: &'a [u8]) -> Self {
        while let (Some(tag), Some(length)) = (u16_at(extra, 0), u16_at(extra, 2)) {
            let end = 4 + usize::from(length);
            if tag == 1 {
                return Self(extra.get(4..end).unwrap_or_default());
            }
            extra = extra.get(end..).unwrap_or_default();
        }
        Self(&[])
    }

    /// Returns `number`, or the next 64-bit number if `number` is the placeholder for it.
    fn widen(&mut self, number: u32) -> Option<u64> {
        if number != u32::MAX {
            return Some(number.into());
        }
        let wide = u64_at(self.0, 0)?;
        self.0 = self.0.get(8..)?;
        Some(wide)
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}
