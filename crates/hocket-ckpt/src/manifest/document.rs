//! The document's fields, named as in `packages/ckpt/docs/format.md`.

use std::fmt;

use serde::{Deserialize as DeriveDeserialize, Serialize};
use serde_json::value::RawValue;

use super::column::IntegerColumn;
use crate::format::digest::{BLOCK_BYTES, DIGEST_BYTES, Digest, from_base64, num_blocks};
use crate::format::json_pairs;

/// The format number of a checkpoint that uses nothing of a later format.
pub const FORMAT: u64 = 1;

/// The format number of a thinned checkpoint.
const THINNED_FORMAT: u64 = 2;

/// The format number of a checkpoint with byte planes.
const PLANES_FORMAT: u64 = 3;

/// The format number of a delta.
const DELTA_FORMAT: u64 = 4;

/// The writer of versions of published weights, whole ones and deltas.
pub const VERSION_WRITER: &str = "hocket.ckpt.publish";

/// The greatest format number that is read.
pub const LATEST_FORMAT: u64 = DELTA_FORMAT;

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
    /// For a compressed file whose blocks are stored as byte planes: width of an item and bytes of each run; from
    /// format 3 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planes: Option<Vec<(u64, u64)>>,
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

/// A manifest's document.
#[derive(DeriveDeserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestDocument {
    /// Number of the format.
    pub format: u64,
    /// Version of Hocket that wrote it.
    pub version: String,
    /// Id of the save: 32 hexadecimal digits.
    pub save_id: String,
    /// The caller's step.
    pub step: u64,
    /// Time of writing, in UTC.
    pub created: String,
    /// The function that wrote it.
    pub writer: String,
    /// Number of ranks that wrote it.
    pub world_size: u64,
    /// Size of each axis of the writers' mesh.
    pub mesh: Option<UniquePairs<u64>>,
    /// The data files.
    pub files: Vec<DataFile>,
    /// The tensors by name.
    pub tensors: UniquePairs<ManifestTensor>,
    /// The other leaves by name.
    pub values: UniquePairs<ValueLeaf>,
    /// The values of each rank.
    #[serde(deserialize_with = "Option::deserialize")]
    pub per_rank: Option<PerRank>,
    /// The caller's value.
    pub user: Box<RawValue>,
    /// Paths of mappings with integer keys, which would otherwise look like lists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub integer_keyed: Vec<Vec<PathStep>>,
    /// The part of the saved state that was dropped later; from format 2 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinned: Option<ThinnedState>,
    /// The checkpoint that the tensors are stored as a difference from; from format 4 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta: Option<DeltaBase>,
}

impl ManifestDocument {
    /// Returns whether this is a version of published weights, which may be the base of a delta.
    pub(crate) fn is_version(&self) -> bool {
        self.delta.is_some() || self.writer == VERSION_WRITER
    }

    /// Returns the least format number that has every field of the document.
    pub(super) fn least_format(&self) -> u64 {
        if self.delta.is_some() {
            DELTA_FORMAT
        } else if self.files.iter().any(|file| file.planes.is_some()) {
            PLANES_FORMAT
        } else if self.thinned.is_some() {
            THINNED_FORMAT
        } else {
            FORMAT
        }
    }

    /// Frees the memory of the chunks.
    pub(super) fn forget_chunks(&mut self) {
        for (_, tensor) in &mut self.tensors.0 {
            tensor.chunks = None;
        }
    }
}

/// The base of a delta.
#[derive(Debug, Clone, PartialEq, Eq, DeriveDeserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaBase {
    /// Its name in the folder that holds the delta too.
    pub base: String,
    /// The id of its save.
    pub save_id: String,
}

/// The part of a saved state that was dropped later.
#[derive(Debug, Clone, DeriveDeserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ThinnedState {
    /// Id of the whole save.
    pub save_id: String,
    /// Globs of the names that were dropped.
    pub dropped: Vec<String>,
    /// Number of tensors that were dropped.
    pub tensors: u64,
    /// Their size in bytes.
    pub bytes: u64,
}

/// A tensor.
#[derive(DeriveDeserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestTensor {
    /// The dtype's safetensors name.
    pub dtype: String,
    /// The global shape.
    pub shape: Vec<u64>,
    /// The path in the state tree.
    pub path: Vec<PathStep>,
    /// The tensor whose storage this one shares.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_as: Option<String>,
    /// The chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<ManifestChunks>,
    /// Base64 of the whole tensor, if it is small.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
}

/// The chunks of a tensor as columns; `start` and `size` have one per dimension.
#[derive(Clone, DeriveDeserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestChunks {
    /// Index of the file.
    pub file: IntegerColumn,
    /// Offset in the file's data.
    pub offset: IntegerColumn,
    /// Size in bytes.
    pub length: IntegerColumn,
    /// Offsets in the global tensor.
    pub start: Vec<IntegerColumn>,
    /// Shape.
    pub size: Vec<IntegerColumn>,
}

impl ManifestChunks {
    /// Returns columns without entries, for this number of dims.
    pub(crate) fn empty(num_dims: usize) -> Self {
        Self {
            file: IntegerColumn::default(),
            offset: IntegerColumn::default(),
            length: IntegerColumn::default(),
            start: vec![IntegerColumn::default(); num_dims],
            size: vec![IntegerColumn::default(); num_dims],
        }
    }
}

/// A leaf that is not a tensor.
#[derive(DeriveDeserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ValueLeaf {
    /// The path in the state tree.
    pub path: Vec<PathStep>,
    /// The value as JSON.
    pub value: Box<RawValue>,
}

/// The values of each rank.
#[derive(DeriveDeserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PerRank {
    /// The policy for a load with another number of ranks.
    pub policy: PerRankPolicy,
    /// The value of each rank as JSON.
    pub ranks: Vec<Box<RawValue>>,
}

/// The policy for the values of each rank in a load with another number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, DeriveDeserialize, Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "`packages/ckpt/docs/format.md` describes them")]
pub enum PerRankPolicy {
    Reseed,
    Require,
    Drop,
}

/// A step of a leaf's path.
#[derive(Debug, Clone, PartialEq, Eq, DeriveDeserialize, Serialize)]
#[serde(untagged)]
pub enum PathStep {
    /// A mapping's key.
    Key(String),
    /// A list's index, or an integer key.
    Position(i64),
}

impl fmt::Display for PathStep {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => formatter.write_str(key),
            Self::Position(position) => write!(formatter, "{position}"),
        }
    }
}

/// A JSON object in its original order, without duplicate keys.
pub type UniquePairs<T> = json_pairs::JsonPairs<T, true>;
