//! A rank's report of the files and chunks that it wrote: columns, compressed, for the coordinator of the save.
//!
//! A report is two zstd frames: JSON with the files and the rank's own values, and the columns of the chunks as
//! little-endian integers. Only ranks of one job exchange reports, so their form may change with each version.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::{CkptError, Result};
use crate::manifest::{DataFile, compress, decompress};

/// Limit of a frame's content.
const CONTENT_LIMIT: u64 = 1 << 28;

/// The tensor of a chunk of the rank's own values, which is in no state tree.
const OWN_VALUES: u32 = u32::MAX;

/// A chunk that a rank wrote.
pub struct WrittenChunk {
    /// Index of the tensor in the rank's tree; none for the rank's own values.
    pub tensor: Option<u32>,
    /// Index of the file among the rank's files.
    pub file: u32,
    /// Offset in the data of the file.
    pub offset: u64,
    /// Size in bytes.
    pub length: u64,
    /// Offsets in the global tensor.
    pub start: Vec<u64>,
    /// Shape.
    pub size: Vec<u64>,
}

/// The JSON of a report.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ReportHead {
    files: Vec<DataFile>,
    #[serde(deserialize_with = "Option::deserialize")]
    per_rank: Option<Box<RawValue>>,
}

/// Packs a rank's report.
///
/// # Arguments
/// - `files`: the files that the rank wrote.
/// - `chunks`: the chunks in them.
/// - `per_rank`: the rank's own values as JSON.
///
/// # Errors
/// `Invalid` if the values are not JSON.
pub fn pack_report(
    files: Vec<DataFile>,
    chunks: &[WrittenChunk],
    per_rank: Option<String>,
) -> Result<Vec<u8>> {
    let invalid = |error| CkptError::Invalid(format!("a rank's report is no JSON: {error}"));
    let per_rank = per_rank.map(RawValue::from_string).transpose();
    let head = ReportHead {
        files,
        per_rank: per_rank.map_err(invalid)?,
    };
    let head = serde_json::to_vec(&head).map_err(invalid)?;
    let mut report = compress(&head)?;
    report.extend(compress(&columns_of(chunks)?)?);
    Ok(report)
}

fn columns_of(chunks: &[WrittenChunk]) -> Result<Vec<u8>> {
    let too_many =
        || CkptError::Invalid("a rank's report has more than 2³² chunks or dims".to_owned());
    let count = u32::try_from(chunks.len()).map_err(|_| too_many())?;
    let mut bytes = Vec::with_capacity(chunks.len() * 64 + 4);
    bytes.extend(count.to_le_bytes());
    for chunk in chunks {
        bytes.extend(chunk.tensor.unwrap_or(OWN_VALUES).to_le_bytes());
    }
    for chunk in chunks {
        bytes.extend(chunk.file.to_le_bytes());
    }
    for chunk in chunks {
        let dims = u8::try_from(chunk.size.len()).map_err(|_| too_many())?;
        bytes.push(dims);
    }
    // Most chunks follow the one before, so the distances are mostly zeros.
    let mut end = 0_u64;
    for chunk in chunks {
        bytes.extend(chunk.offset.wrapping_sub(end).to_le_bytes());
        end = chunk.offset.wrapping_add(chunk.length);
    }
    for chunk in chunks {
        bytes.extend(chunk.length.to_le_bytes());
    }
    for chunk in chunks {
        let extents = chunk.start.iter().chain(&chunk.size);
        bytes.extend(extents.flat_map(|extent| extent.to_le_bytes()));
    }
    Ok(bytes)
}

/// A rank's report, whose chunks are still packed.
pub(super) struct UnpackedReport {
    pub(super) files: Vec<DataFile>,
    pub(super) per_rank: Option<Box<RawValue>>,
    /// Offset of the chunks' frame in the report.
    pub(super) chunks_at: usize,
}

impl UnpackedReport {
    pub(super) fn of(report: &[u8]) -> std::result::Result<Self, String> {
        let (head, chunks_at) = decompress(report, CONTENT_LIMIT)?;
        let head: ReportHead = serde_json::from_slice(&head).map_err(|error| error.to_string())?;
        Ok(Self {
            files: head.files,
            per_rank: head.per_rank,
            chunks_at,
        })
    }
}

/// The chunks of a report.
pub(super) struct ChunkReport {
    bytes: Vec<u8>,
    count: usize,
}

/// A chunk of a report; `start` and `size` are in `extents`, one after the other.
pub(super) struct ReportedChunk<'a> {
    pub(super) tensor: Option<usize>,
    pub(super) file: u64,
    pub(super) offset: u64,
    pub(super) length: u64,
    extents: &'a [[u8; 8]],
}

impl ReportedChunk<'_> {
    /// Returns the number of dims.
    pub(super) fn dims(&self) -> usize {
        self.extents.len() / 2
    }

    pub(super) fn start(&self, dim: usize) -> u64 {
        u64::from_le_bytes(self.extents[dim])
    }

    pub(super) fn size(&self, dim: usize) -> u64 {
        u64::from_le_bytes(self.extents[self.dims() + dim])
    }
}

impl ChunkReport {
    pub(super) fn of(frame: &[u8]) -> std::result::Result<Self, String> {
        let (bytes, _) = decompress(frame, CONTENT_LIMIT)?;
        let count = bytes
            .first_chunk::<4>()
            .map(|count| u32::from_le_bytes(*count));
        let count = count.ok_or("no number of chunks")? as usize;
        Ok(Self { bytes, count })
    }

    /// Calls `visit` for each chunk in turn.
    ///
    /// # Errors
    /// A text if the columns do not have as many bytes as their number of chunks says, and those of `visit`.
    pub(super) fn for_each(
        &self,
        mut visit: impl FnMut(&ReportedChunk<'_>) -> std::result::Result<(), String>,
    ) -> std::result::Result<(), String> {
        let short = "its columns are cut short";
        let count = self.count;
        let mut rest = self.bytes.get(4..).ok_or(short)?;
        let mut column = |bytes: usize| {
            let (column, after) = rest.split_at_checked(bytes)?;
            rest = after;
            Some(column)
        };
        let tensors = column(4 * count).ok_or(short)?.as_chunks::<4>().0;
        let files = column(4 * count).ok_or(short)?.as_chunks::<4>().0;
        let dims = column(count).ok_or(short)?;
        let gaps = column(8 * count).ok_or(short)?.as_chunks::<8>().0;
        let lengths = column(8 * count).ok_or(short)?.as_chunks::<8>().0;
        let (mut extents, beyond) = rest.as_chunks::<8>();
        let mut end = 0_u64;
        for index in 0..count {
            let own: &[[u8; 8]];
            (own, extents) = extents
                .split_at_checked(2 * usize::from(dims[index]))
                .ok_or(short)?;
            let tensor = u32::from_le_bytes(tensors[index]);
            let chunk = ReportedChunk {
                tensor: (tensor != OWN_VALUES).then_some(tensor as usize),
                file: u64::from(u32::from_le_bytes(files[index])),
                offset: end.wrapping_add(u64::from_le_bytes(gaps[index])),
                length: u64::from_le_bytes(lengths[index]),
                extents: own,
            };
            end = chunk.offset.wrapping_add(chunk.length);
            visit(&chunk)?;
        }
        if extents.is_empty() && beyond.is_empty() {
            Ok(())
        } else {
            Err("its columns have more bytes than chunks".to_owned())
        }
    }
}
