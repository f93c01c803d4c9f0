//! The document's fields, named as in `packages/ckpt/docs/format.md`.

use std::fmt;

use serde::de::IgnoredAny;
use serde::{Deserialize as DeriveDeserialize, Serialize};

use crate::digest::{BLOCK_BYTES, DIGEST_BYTES, Digest, from_base64, num_blocks};
use crate::json_pairs;

/// The format number that is written, and the greatest that is read.
pub const FORMAT: u64 = 1;

/// The manifest's record of a data file.
#[derive(Debug, Clone, PartialEq, Eq, DeriveDeserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// Path inside the checkpoint.
    pub path: String,
    /// Size of the whole file in bytes.
    pub size: u64,
    /// Offset of the data in the file.
    pub data_start: u64,
    /// Base64 digest of the bytes before the data.
    pub header: String,
    /// Base64 of the concatenated digests of the data's blocks.
    pub digests: String,
    /// For a compressed file: base64 of the frames' sizes in bytes, the header's first, as little-endian 32-bit
    /// integers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frames: Option<String>,
}

impl DataFile {
    /// Returns the size of the stored file in bytes. For a compressed file, `size` is the decompressed size.
    pub(crate) fn stored_bytes(&self) -> u64 {
        match &self.frames {
            None => self.size,
            Some(_) => self
                .frame_starts()
                .and_then(|starts| starts.last().copied())
                .unwrap_or(0),
        }
    }

    /// Returns the offset of each block's frame, and the end of the last; none if the frames do not match the
    /// blocks.
    pub(crate) fn frame_starts(&self) -> Option<Vec<u64>> {
        let bytes = from_base64(self.frames.as_deref()?)?;
        let (lengths, rest) = bytes.as_chunks::<4>();
        let fits = rest.is_empty() && lengths.len() as u64 == num_blocks(self.data_bytes()) + 1;
        let mut end = 0;
        let starts = lengths.iter().map(|length| {
            end += u64::from(u32::from_le_bytes(*length));
            end
        });
        fits.then(|| starts.collect())
    }

    /// Returns the size of the data in bytes.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.size.saturating_sub(self.data_start)
    }

    /// Returns the digests of the blocks; none if their number does not match the blocks.
    pub(crate) fn block_digests(&self) -> Option<Vec<Digest>> {
        let bytes = from_base64(&self.digests)?;
        let (digests, rest) = bytes.as_chunks::<DIGEST_BYTES>();
        let fits = rest.is_empty() && digests.len() as u64 == num_blocks(self.data_bytes());
        fits.then(|| digests.to_vec())
    }

    /// Returns the digest of the bytes before the data.
    pub(crate) fn header_digest(&self) -> Option<Digest> {
        from_base64(&self.header)?.try_into().ok()
    }

    /// Returns the size of one block in bytes.
    pub(crate) fn block_bytes(&self, block: u64) -> u64 {
        self.data_bytes()
            .saturating_sub(block * BLOCK_BYTES)
            .min(BLOCK_BYTES)
    }
}

#[derive(DeriveDeserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Document {
    pub(super) format: u64,
    pub(super) version: String,
    pub(super) save_id: String,
    pub(super) step: u64,
    pub(super) created: String,
    #[allow(dead_code, reason = "its type is checked")]
    writer: String,
    pub(super) world_size: u64,
    #[allow(dead_code, reason = "its type is checked")]
    mesh: Option<Pairs<u64>>,
    pub(super) files: Vec<DataFile>,
    pub(super) tensors: Pairs<Tensor>,
    pub(super) values: Pairs<Leaf>,
    pub(super) per_rank: Option<PerRank>,
    #[allow(dead_code, reason = "anything is allowed, but it has to be there")]
    user: IgnoredAny,
    #[serde(default)]
    #[allow(dead_code, reason = "its type is checked")]
    integer_keyed: Vec<Vec<Step>>,
}

#[derive(DeriveDeserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tensor {
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) path: Vec<Step>,
    pub(super) same_as: Option<String>,
    pub(super) chunks: Option<Chunks>,
    pub(super) data: Option<String>,
}

#[derive(DeriveDeserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Chunks {
    pub(super) file: Vec<u64>,
    pub(super) offset: Vec<u64>,
    pub(super) length: Vec<u64>,
    pub(super) start: Vec<Vec<u64>>,
    pub(super) size: Vec<Vec<u64>>,
}

#[derive(DeriveDeserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Leaf {
    pub(super) path: Vec<Step>,
    #[allow(dead_code, reason = "anything is allowed, but it has to be there")]
    value: IgnoredAny,
}

#[derive(DeriveDeserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PerRank {
    #[allow(dead_code, reason = "its name is checked")]
    policy: Policy,
    pub(super) ranks: Vec<IgnoredAny>,
}

#[derive(DeriveDeserialize)]
#[serde(rename_all = "lowercase")]
enum Policy {
    Reseed,
    Require,
    Drop,
}

/// A step of a leaf's path: a key or a position.
#[derive(DeriveDeserialize)]
#[serde(untagged)]
pub(super) enum Step {
    Key(String),
    Position(i64),
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => formatter.write_str(key),
            Self::Position(position) => write!(formatter, "{position}"),
        }
    }
}

/// A JSON object in its original order, without duplicate keys.
pub(super) type Pairs<T> = json_pairs::Pairs<T, true>;
