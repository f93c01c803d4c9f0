//! Blocks of stored data files: their location, their content, and its verification.

use std::io;
use std::ops::Range;
use std::path::Path;

use super::plan::ByteRead;
use super::reader::{CachePolicy, DataReader, ReaderState};
use crate::error::{CkptError, Result};
use crate::format::digest::{BLOCK_BYTES, xxh3_128};
use crate::manifest::{BlockTable, DataFile};

/// A block of a file.
pub(crate) struct StoredBlock<'a> {
    pub(crate) uri: &'a str,
    pub(crate) file: &'a DataFile,
    pub(crate) table: &'a BlockTable,
    pub(crate) number: u64,
}

impl StoredBlock<'_> {
    /// Returns the block's offset in the file's data.
    pub(crate) fn start(&self) -> u64 {
        self.number * BLOCK_BYTES
    }

    pub(crate) fn bytes(&self) -> usize {
        self.file.block_bytes(self.number) as usize
    }

    pub(crate) fn is_compressed(&self) -> bool {
        self.table.frames.is_some()
    }

    /// Returns the byte range of the block, or of its frame, in the stored file.
    pub(crate) fn stored(&self) -> Range<u64> {
        let at = |index: u64| {
            let frames = self.table.frames.as_deref().unwrap_or_default();
            frames.get(index as usize).copied().unwrap_or_default()
        };
        if self.is_compressed() {
            return at(self.number)..at(self.number + 1);
        }
        let from = self.file.data_start + self.start();
        from..from + self.bytes() as u64
    }

    /// Returns the overlap of a read with this block: (offset in the block, offset in the read, bytes).
    pub(crate) fn overlap(&self, read: &ByteRead) -> (usize, usize, usize) {
        let from = read.offset.max(self.start());
        let to = read.end().min(self.start() + self.bytes() as u64);
        (
            (from - self.start()) as usize,
            (from - read.offset) as usize,
            (to - from) as usize,
        )
    }

    /// Copies the read's part of the block's content to its destination.
    pub(crate) fn scatter(&self, content: &[u8], read: &ByteRead) {
        let (in_block, in_read, length) = self.overlap(read);
        // SAFETY: destinations do not overlap, and only one worker handles this block.
        let target = unsafe { read.memory.slice_mut(in_read, length) };
        target.copy_from_slice(&content[in_block..in_block + length]);
    }

    /// Fills `target` with the block's content, given its stored bytes.
    pub(crate) fn content(&self, stored: &[u8], target: &mut [u8]) -> Result<()> {
        if self.is_compressed() {
            return self.expand(stored, target);
        }
        target.copy_from_slice(stored);
        Ok(())
    }

    /// Decompresses the block's frame into `target`, which has the block's length.
    pub(crate) fn expand(&self, frame: &[u8], target: &mut [u8]) -> Result<()> {
        let Some(planes) = &self.table.planes else {
            return self.decompress(frame, target);
        };
        let mut content = vec![0_u8; target.len()];
        self.decompress(frame, &mut content)?;
        planes.join(self.start(), &content, target);
        Ok(())
    }

    fn decompress(&self, frame: &[u8], target: &mut [u8]) -> Result<()> {
        match zstd::bulk::decompress_to_buffer(frame, target) {
            Ok(length) if length == target.len() => Ok(()),
            Ok(length) => Err(self.corrupt(format!(
                "this block's frame holds {length} bytes, expected {}",
                target.len()
            ))),
            Err(error) => {
                Err(self.corrupt(format!("this block's frame does not decompress: {error}")))
            }
        }
    }

    pub(crate) fn check(&self, bytes: &[u8]) -> Result<()> {
        if xxh3_128(bytes) == self.table.digest(self.number) {
            return Ok(());
        }
        Err(self.corrupt(format!(
            "the {} bytes of this block do not have the digest that was written with them",
            bytes.len()
        )))
    }

    fn corrupt(&self, reason: String) -> CkptError {
        CkptError::Corrupt {
            uri: self.uri.to_owned(),
            file: Some(self.file.path.clone()),
            offset: Some(self.start()),
            reason,
        }
    }
}

/// An open data file with the state of one reading thread.
pub(crate) struct OpenDataFile<'a> {
    pub(crate) root: &'a Path,
    pub(crate) handle: &'a DataReader,
    pub(crate) own: &'a mut ReaderState,
}

impl OpenDataFile<'_> {
    /// Reads a part of a block from an uncompressed file.
    pub(crate) fn read_at(
        &mut self,
        block: &StoredBlock<'_>,
        offset: usize,
        target: &mut [u8],
    ) -> Result<()> {
        self.read_exact(block, block.stored().start + offset as u64, target)
    }

    /// Reads a whole block and decompresses it if necessary. `target` has the block's length.
    pub(crate) fn read_block(&mut self, block: &StoredBlock<'_>, target: &mut [u8]) -> Result<()> {
        if !block.is_compressed() {
            return self.read_at(block, 0, target);
        }
        let stored = block.stored();
        let mut frame = vec![0_u8; (stored.end - stored.start) as usize];
        self.read_exact(block, stored.start, &mut frame)?;
        block.expand(&frame, target)
    }

    fn read_exact(&mut self, block: &StoredBlock<'_>, at: u64, target: &mut [u8]) -> Result<()> {
        let read = self.handle.read_exact_at(target, at, self.own);
        read.map_err(|error| {
            let action = format!("read {} bytes at {at}", target.len());
            CkptError::io(&self.root.join(&block.file.path), &action, &error)
        })
    }
}

/// Opens a data file, checks its size against the manifest, and prepares to read about `wanted` bytes of it.
pub(crate) fn open_data(
    root: &Path,
    uri: &str,
    file: &DataFile,
    wanted: u64,
    caching: CachePolicy,
) -> Result<DataReader> {
    let path = root.join(&file.path);
    let handle = DataReader::open(&path, wanted, caching).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => missing(uri, file),
        _ => CkptError::io(&path, "open the data file", &error),
    })?;
    let size = handle
        .size()
        .map_err(|error| CkptError::io(&path, "look at the data file", &error))?;
    check_size(uri, file, size)?;
    Ok(handle)
}

pub(crate) fn missing(uri: &str, file: &DataFile) -> CkptError {
    let reason = format!(
        "the manifest names data file `{}`, which does not exist",
        file.path
    );
    CkptError::not_found(uri, reason)
}

pub(crate) fn check_size(uri: &str, file: &DataFile, size: u64) -> Result<()> {
    let expected = file.stored_bytes();
    if size == expected {
        return Ok(());
    }
    Err(CkptError::Corrupt {
        uri: uri.to_owned(),
        file: Some(file.path.clone()),
        offset: None,
        reason: format!("it has {size} bytes, {expected} were written"),
    })
}
