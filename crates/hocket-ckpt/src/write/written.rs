//! The options and the result of the write of a data file.

use super::compress::{BlockEncoding, CompressedFile};
use crate::format::digest::{to_base64, xxh3_128};
use crate::format::planes::RunPairs;
use crate::format::safetensors::FileLayout;
use crate::manifest::DataFile;

/// A file that was written: its manifest record, and the location of each entry in the data.
#[derive(Debug, Clone)]
pub struct WrittenDataFile {
    /// The manifest record.
    pub file: DataFile,
    /// Name, offset in the data, bytes.
    pub entries: Vec<(String, u64, u64)>,
}

impl WrittenDataFile {
    pub(crate) fn of(path: &str, layout: FileLayout, content: FileRecord) -> Self {
        let data_start = layout.header.len() as u64;
        Self {
            file: DataFile {
                path: path.to_owned(),
                size: data_start + layout.data_bytes,
                data_start,
                header: to_base64(&xxh3_128(&layout.header)),
                digests: to_base64(&content.digests),
                frames: content.frames,
                planes: content.planes,
            },
            entries: layout
                .entries
                .into_iter()
                .map(|(offset, entry)| (entry.name, offset, entry.memory.bytes() as u64))
                .collect(),
        }
    }
}

/// Options for writing a data file.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// Whether to flush file and folder before returning.
    pub sync: bool,
    /// The encoding of a `.blocks` file; `None` for a plain safetensors file.
    pub encoding: Option<BlockEncoding>,
    /// Whether to run at a lower CPU priority. For local files.
    pub background: bool,
}

/// The manifest's data about a file's bytes.
pub(crate) struct FileRecord {
    digests: Vec<u8>,
    frames: Option<String>,
    planes: Option<RunPairs>,
}

impl FileRecord {
    pub(crate) fn plain(digests: Vec<u8>) -> Self {
        Self {
            digests,
            frames: None,
            planes: None,
        }
    }
}

impl From<CompressedFile> for FileRecord {
    fn from(compressed: CompressedFile) -> Self {
        let frames: Vec<u8> = compressed
            .frames
            .iter()
            .flat_map(|length| length.to_le_bytes())
            .collect();
        Self {
            digests: compressed.digests,
            frames: Some(to_base64(&frames)),
            planes: compressed.planes,
        }
    }
}
