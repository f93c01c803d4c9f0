//! Verification of the blocks of a data file.

use super::block::StoredBlock;
use crate::error::{CkptError, Result};
use crate::format::digest::{Digest, xxh3_128};
use crate::manifest::{BlockTable, DataFile};

/// A bad block: its number and its offset in the data.
pub(crate) type BadBlock = (i64, i64);

/// A data file to be verified, with its digests.
pub(crate) struct FileCheck<'a> {
    pub(crate) uri: &'a str,
    pub(crate) file: &'a DataFile,
    table: BlockTable,
    header: Digest,
}

impl<'a> FileCheck<'a> {
    pub(crate) fn new(uri: &'a str, file: &'a DataFile) -> Result<Self> {
        let header = file.header_digest().ok_or_else(|| {
            let reason = format!("file `{}`: `header` is not a digest", file.path);
            CkptError::bad_manifest(uri, reason)
        })?;
        Ok(Self {
            uri,
            file,
            table: BlockTable::of(uri, file)?,
            header,
        })
    }

    /// Verifies the stored bytes before the first block: the header, or its frame.
    pub(crate) fn judge_header(&self, stored: &[u8]) -> Option<BadBlock> {
        let start = self.file.data_start;
        let digest = if self.file.frames.is_some() {
            // A frame that does not decompress yields empty content, whose digest does not match.
            xxh3_128(&zstd::bulk::decompress(stored, start as usize).unwrap_or_default())
        } else {
            xxh3_128(stored)
        };
        (digest != self.header).then(|| (-1, -(start as i64)))
    }

    pub(crate) fn block(&self, number: u64) -> StoredBlock<'_> {
        StoredBlock {
            uri: self.uri,
            file: self.file,
            table: &self.table,
            number,
        }
    }

    /// Verifies a block after its read; passes on a failure of the disk or the store.
    pub(crate) fn judge(
        block: &StoredBlock<'_>,
        read: Result<()>,
        content: &[u8],
    ) -> Result<Option<BadBlock>> {
        match read.and_then(|()| block.check(content)) {
            Ok(()) => Ok(None),
            Err(CkptError::Corrupt { .. }) => Ok(Some((block.number as i64, block.start() as i64))),
            Err(error) => Err(error),
        }
    }
}
