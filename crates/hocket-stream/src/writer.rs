//! Shards written: assembled, digested, compressed, and put in place whole.

use std::path::Path;

use crate::error::{Result, StreamError};
use crate::files::write_whole;
use crate::hash::Algorithm;
use crate::index::FileInfo;

/// How shards of a data set are stored.
#[derive(Clone, Debug)]
pub struct SealOptions {
    /// zstd level, or `None` for raw shards.
    pub zstd_level: Option<i32>,
    /// Names of the digests that the index is to carry.
    pub hashes: Vec<String>,
}

/// A shard's bytes: count, offsets, `config`, samples.
///
/// # Errors
/// [`StreamError::Config`] where the shard would pass the 4 GiB that its offsets can reach.
pub fn assemble<S: AsRef<[u8]>>(config: &[u8], samples: &[S]) -> Result<Vec<u8>> {
    let first = 4 + 4 * (samples.len() + 1) + config.len();
    let total = first
        + samples
            .iter()
            .map(|sample| sample.as_ref().len())
            .sum::<usize>();
    let (Ok(count), Ok(_)) = (u32::try_from(samples.len()), u32::try_from(total)) else {
        return Err(StreamError::config(format!(
            "a shard of {} samples would have {total} bytes: expected fewer than 2^32; set `size_limit` below 4 GiB",
            samples.len()
        )));
    };
    let mut shard = Vec::with_capacity(total);
    shard.extend_from_slice(&count.to_le_bytes());
    let mut offset = first as u32;
    shard.extend_from_slice(&offset.to_le_bytes());
    for sample in samples {
        offset += sample.as_ref().len() as u32;
        shard.extend_from_slice(&offset.to_le_bytes());
    }
    shard.extend_from_slice(config);
    for sample in samples {
        shard.extend_from_slice(sample.as_ref());
    }
    Ok(shard)
}

/// Writes one shard into `folder` as `basename`, or as `basename.zstd` where it is compressed, and says
/// what the index is to say of it: the raw file and, if there is one, the compressed file.
///
/// # Errors
/// [`StreamError::Config`] for an unknown hash, a bad level or too large a shard; [`StreamError::Io`]
/// where the disk refuses. Nothing is then left under the final name.
pub fn seal<S: AsRef<[u8]>>(
    folder: &Path,
    basename: &str,
    config: &[u8],
    samples: &[S],
    options: &SealOptions,
) -> Result<(FileInfo, Option<FileInfo>)> {
    let shard = assemble(config, samples)?;
    let raw = describe(basename, &shard, &options.hashes)?;
    let Some(level) = options.zstd_level else {
        write_whole(&folder.join(basename), &shard)?;
        return Ok((raw, None));
    };
    let name = format!("{basename}.zstd");
    let packed = zstd::bulk::compress(&shard, level).map_err(|error| {
        StreamError::config(format!(
            "zstd level {level} failed: {error}; expected a level of 1 to 22"
        ))
    })?;
    let zip = describe(&name, &packed, &options.hashes)?;
    write_whole(&folder.join(&name), &packed)?;
    Ok((raw, Some(zip)))
}

fn describe(basename: &str, bytes: &[u8], hashes: &[String]) -> Result<FileInfo> {
    let hashes = hashes
        .iter()
        .map(|name| Ok((name.clone(), Algorithm::parse(name)?.hex(bytes))))
        .collect::<Result<Vec<_>>>()?;
    Ok(FileInfo {
        basename: basename.into(),
        bytes: bytes.len() as u64,
        hashes,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    /// Two samples of the columns `a: int`, `b: str`, `c: ndarray`, as the format's own writer lays them
    /// out: offsets 239, 267 and 290.
    #[test]
    fn matches_the_reference_writer() {
        let config = br#"{"column_encodings": ["int", "str", "ndarray"], "column_names": ["a", "b", "c"], "column_sizes": [8, null, null], "compression": "zstd:7", "format": "mds", "hashes": ["sha1", "xxh3_64"], "size_limit": 1048576, "version": 2}"#;
        let samples: [&[u8]; 2] = [
            b"\x02\0\0\0\x0a\0\0\0\x05\0\0\0\0\0\0\0hi\x11\x08\x01\x03\x01\0\x02\0\x03\0",
            b"\0\0\0\0\x07\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\x22\x04\x01\0\0\xe0\x40",
        ];
        let shard = assemble(config, &samples).unwrap();
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
}
