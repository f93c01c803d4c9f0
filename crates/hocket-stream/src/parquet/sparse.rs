//! A Parquet file of which only some ranges are in memory.

use bytes::buf::Reader;
use bytes::{Buf, Bytes};
use parquet::errors::{ParquetError, Result};
use parquet::file::reader::{ChunkReader, Length};

use crate::shard::row_group::RowGroup;

/// The ranges of a file that a row group needs.
pub(crate) struct SparseFile {
    /// The start of each range, and its bytes.
    parts: Vec<(u64, Bytes)>,
    bytes: u64,
}

impl SparseFile {
    /// Creates the file from the contents of [`RowGroup::reads`], in order.
    pub(crate) fn new(group: &RowGroup, parts: Vec<Bytes>) -> Self {
        let starts = group.reads().into_iter().map(|range| range.start);
        Self {
            parts: starts.zip(parts).collect(),
            bytes: group.file_bytes,
        }
    }

    fn from(&self, start: u64) -> Result<Bytes> {
        let holds = |first: u64, part: &Bytes| (first..first + part.len() as u64).contains(&start);
        let found = self.parts.iter().find(|(first, part)| holds(*first, part));
        let (first, part) = found.ok_or_else(|| {
            ParquetError::General(format!("a page at {start}, outside of its column"))
        })?;
        Ok(part.slice((start - first) as usize..))
    }
}

impl Length for SparseFile {
    fn len(&self) -> u64 {
        self.bytes
    }
}

impl ChunkReader for SparseFile {
    type T = Reader<Bytes>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        Ok(self.from(start)?.reader())
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        let rest = self.from(start)?;
        if length > rest.len() {
            return Err(ParquetError::General(format!(
                "a page of {length} bytes at {start}, beyond the end of its column"
            )));
        }
        Ok(rest.slice(..length))
    }
}
