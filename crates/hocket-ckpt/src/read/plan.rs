//! The read plan: the blocks that a set of reads touches, divided into requests.

use crate::error::{CkptError, Result};
use crate::format::digest::BLOCK_BYTES;
use crate::format::safetensors::CallerMemory;
use crate::manifest::DataFile;

/// Limit of blocks in one span, the unit of a worker's job or of one request.
const SPAN_BLOCKS: u64 = 8;

/// Limit of a gap inside a span, in unrequested blocks.
const GAP_BLOCKS: u64 = 1;

/// A byte range to read, with its destination.
#[derive(Debug, Clone, Copy)]
pub struct ByteRead {
    /// Index of the file.
    pub file: usize,
    /// Offset in the file's data.
    pub offset: u64,
    /// Destination; its length is the length of the read.
    pub memory: CallerMemory,
}

impl ByteRead {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.memory.bytes() as u64
    }
}

/// A block that one read touches. Sorted by file and block, these form the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockTouch {
    pub(crate) file: usize,
    pub(crate) block: u64,
    pub(crate) read: usize,
}

/// Returns every block that the reads touch, sorted.
pub(crate) fn plan(files: &[DataFile], reads: &[ByteRead]) -> Result<Vec<BlockTouch>> {
    let mut touches = Vec::with_capacity(reads.len());
    for (index, read) in reads.iter().enumerate() {
        let file = files.get(read.file).ok_or_else(|| {
            CkptError::Invalid(format!(
                "a read names file {}, there are {}",
                read.file,
                files.len()
            ))
        })?;
        let bytes = read.memory.bytes() as u64;
        if read
            .offset
            .checked_add(bytes)
            .is_none_or(|end| end > file.data_bytes())
        {
            return Err(CkptError::Invalid(format!(
                "a read of {bytes} bytes at {} ends beyond the {} bytes of data of `{}`",
                read.offset,
                file.data_bytes(),
                file.path
            )));
        }
        if bytes > 0 {
            let blocks = read.offset / BLOCK_BYTES..=(read.end() - 1) / BLOCK_BYTES;
            touches.extend(blocks.map(|block| BlockTouch {
                file: read.file,
                block,
                read: index,
            }));
        }
    }
    touches.sort_unstable();
    Ok(touches)
}

/// Divides the plan into spans of nearby blocks of one file.
pub(crate) fn spans(touches: &[BlockTouch]) -> Vec<&[BlockTouch]> {
    let mut spans = Vec::new();
    let mut from = 0;
    for index in 1..=touches.len() {
        let is_cut = touches.get(index).is_none_or(|touch| {
            let (first, before) = (touches[from], touches[index - 1]);
            touch.file != first.file
                || touch.block > before.block + 1 + GAP_BLOCKS
                || touch.block >= first.block + SPAN_BLOCKS
        });
        if is_cut {
            spans.push(&touches[from..index]);
            from = index;
        }
    }
    spans
}
