//! Assembly of shard files in memory, from their parts to the stored bytes.

use std::ops::Deref;

use hocket_store::durable::PAGE_BYTES;

use crate::error::{Result, StreamError};
use crate::shard::buffers::Buffer;
use crate::shard::samples::Samples;

/// An unfinished shard file: a header and the bytes after it.
#[derive(Debug, Default)]
pub struct RawFile {
    /// Base name of the uncompressed file.
    pub basename: String,
    /// The header. It is known last, so the thread that stores the file prepends it.
    pub head: Vec<u8>,
    /// The bytes after the header.
    pub rest: Buffer,
}

impl RawFile {
    /// Joins both parts.
    pub fn into_contents(self) -> AssembledFile {
        AssembledFile::new(&self.head, self.rest)
    }
}

/// The bytes of a file, starting at a page boundary in memory.
#[derive(Debug)]
pub struct AssembledFile {
    memory: Buffer,
    /// Offset of the file in `memory`.
    start: usize,
    length: usize,
}

impl AssembledFile {
    /// Joins `head` and `rest`; `rest` is moved within its memory.
    pub(crate) fn new(head: &[u8], rest: Buffer) -> Self {
        let (moved, length) = (rest.len(), head.len() + rest.len());
        let mut memory = rest;
        // Reserve the maximum for alignment and padding, so that the steps below do not reallocate.
        memory.reserve(head.len() + 2 * PAGE_BYTES);
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        memory.resize(start + length.next_multiple_of(PAGE_BYTES), 0);
        memory.copy_within(..moved, start + head.len());
        memory[start..start + head.len()].copy_from_slice(head);
        Self {
            memory,
            start,
            length,
        }
    }

    /// Returns the file padded with zeros to the end of a page.
    pub(crate) fn padded(&self) -> &[u8] {
        &self.memory[self.start..]
    }
}

impl Deref for AssembledFile {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }
}

impl AsRef<[u8]> for AssembledFile {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Builds the single file of an MDS shard: count, offsets, `config`, samples.
///
/// # Errors
/// [`StreamError::Config`] if the shard would exceed the 4 GiB that its offsets can address.
pub fn assemble(basename: String, config: &[u8], samples: Samples) -> Result<RawFile> {
    let first = 4 + 4 * (samples.len() + 1) + config.len();
    let mut head = table(first, &samples)?;
    head.extend_from_slice(config);
    Ok(RawFile {
        basename,
        head,
        rest: samples.data,
    })
}

/// Builds the two files of a text shard: `header` and samples; count, offsets and `config`.
///
/// # Errors
/// As [`assemble`].
pub fn assemble_text(
    basename: String,
    config: &[u8],
    header: &[u8],
    samples: Samples,
) -> Result<(RawFile, RawFile)> {
    let mut meta = table(header.len(), &samples)?;
    meta.extend_from_slice(config);
    let meta = RawFile {
        basename: format!("{basename}.meta"),
        head: meta,
        rest: Buffer::default(),
    };
    let data = RawFile {
        basename,
        head: header.into(),
        rest: samples.data,
    };
    Ok((data, meta))
}

/// Returns the count and the offsets of samples that start at `first`.
fn table(first: usize, samples: &Samples) -> Result<Vec<u8>> {
    let end = first + samples.data.len();
    let (Ok(count), Ok(_)) = (u32::try_from(samples.len()), u32::try_from(end)) else {
        return Err(StreamError::config(format!(
            "a shard of {} samples would have {end} bytes: expected fewer than 2^32; set `size_limit` below 4 GiB",
            samples.len()
        )));
    };
    let mut table = Vec::with_capacity(first);
    table.extend_from_slice(&count.to_le_bytes());
    for end in [0].iter().chain(&samples.ends) {
        table.extend_from_slice(&((first + end) as u32).to_le_bytes());
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use crate::shard::hash::Algorithm;

    /// Two samples of the columns `a: int`, `b: str`, `c: ndarray`, laid out as by the format's own writer:
    /// offsets 239, 267 and 290.
    #[test]
    fn matches_the_reference_writer() {
        let config = br#"{"column_encodings": ["int", "str", "ndarray"], "column_names": ["a", "b", "c"], "column_sizes": [8, null, null], "compression": "zstd:7", "format": "mds", "hashes": ["sha1", "xxh3_64"], "size_limit": 1048576, "version": 2}"#;
        let samples: [&[u8]; 2] = [
            b"\x02\0\0\0\x0a\0\0\0\x05\0\0\0\0\0\0\0hi\x11\x08\x01\x03\x01\0\x02\0\x03\0",
            b"\0\0\0\0\x07\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\x22\x04\x01\0\0\xe0\x40",
        ];
        let file = assemble(String::new(), config, samples.iter().collect()).unwrap();
        let shard = file.into_contents();
        assert_eq!(shard.len(), 290);
        assert_eq!(
            shard[..16],
            [2, 0, 0, 0, 239, 0, 0, 0, 11, 1, 0, 0, 34, 1, 0, 0]
        );
        assert_eq!(
            Algorithm::Sha1.hex(&shard),
            "c7bf4d885a9acb8f883d43c4552ed7e9e7ba677e"
        );
        assert_eq!(Algorithm::Xxh3_64.hex(&shard), "d02a354e92e5a0d0");
    }

    /// The memory of the samples is never accessed.
    #[test]
    fn four_gib_of_samples_are_an_error() {
        let samples = || Samples {
            data: vec![0; 1 << 32].into(),
            ends: vec![1 << 32],
            ..Samples::default()
        };
        for refused in [
            assemble(String::new(), b"{}", samples()).unwrap_err(),
            assemble_text(String::new(), b"{}", b"", samples()).unwrap_err(),
        ] {
            let message = refused.to_string();
            assert!(
                message.contains("2^32") && message.contains("size_limit"),
                "{message}"
            );
        }
    }

    #[test]
    fn contents_start_at_a_page_and_are_padded_to_a_page() {
        for (head, rest) in [(0, 0), (0, 1), (7, 4089), (7, 4090), (5000, 100_000)] {
            let (head, rest) = (vec![1; head], vec![2; rest]);
            let contents = AssembledFile::new(&head, rest.clone().into());
            assert_eq!(*contents, [head, rest].concat());
            let padded = contents.padded();
            assert_eq!(padded.as_ptr().align_offset(PAGE_BYTES), 0);
            assert_eq!(padded.len(), contents.len().next_multiple_of(PAGE_BYTES));
            assert!(padded[contents.len()..].iter().all(|&byte| byte == 0));
        }
    }
}
