//! The plan of a read of data files, with its inputs.

use std::ops::Range;

use super::block::StoredBlock;
use super::plan::{BlockTouch, ByteRead, spans};
use crate::manifest::{BlockTable, DataFile};

/// The plan of a read with its inputs.
pub(crate) struct ByteReadJob<'a> {
    pub(crate) uri: &'a str,
    pub(crate) files: &'a [DataFile],
    pub(crate) reads: &'a [ByteRead],
    pub(crate) spans: Vec<&'a [BlockTouch]>,
    /// Block tables by file.
    tables: &'a [BlockTable],
    pub(crate) check: bool,
}

impl<'a> ByteReadJob<'a> {
    pub(crate) fn new(
        uri: &'a str,
        files: &'a [DataFile],
        tables: &'a [BlockTable],
        reads: &'a [ByteRead],
        touches: &'a [BlockTouch],
        check: bool,
    ) -> Self {
        Self {
            uri,
            files,
            reads,
            spans: spans(touches),
            tables,
            check,
        }
    }

    /// Returns the blocks of a span, each with the reads that touch it.
    pub(crate) fn blocks(
        &self,
        index: usize,
    ) -> impl Iterator<Item = (StoredBlock<'_>, &'a [BlockTouch])> {
        self.spans[index]
            .chunk_by(|a, b| a.block == b.block)
            .map(move |group| (self.block(group[0]), group))
    }

    fn block(&self, touch: BlockTouch) -> StoredBlock<'_> {
        StoredBlock {
            uri: self.uri,
            file: &self.files[touch.file],
            table: &self.tables[touch.file],
            number: touch.block,
        }
    }

    /// Returns whether a block is read whole, because it is verified or compressed.
    pub(crate) fn is_whole(&self, block: &StoredBlock<'_>) -> bool {
        self.check || block.is_compressed()
    }

    /// Returns the indices of the files that the plan touches.
    pub(crate) fn touched(&self) -> Vec<usize> {
        let mut files: Vec<usize> = self.spans.iter().map(|span| span[0].file).collect();
        files.dedup();
        files
    }

    /// Returns the byte range of the stored file that a span needs.
    pub(crate) fn stored(&self, index: usize) -> Range<u64> {
        let span = self.spans[index];
        let (first, last) = (self.block(span[0]), self.block(span[span.len() - 1]));
        let whole = first.stored().start..last.stored().end;
        if self.is_whole(&first) {
            return whole;
        }
        let data_start = self.files[span[0].file].data_start;
        let reads = span.iter().map(|touch| &self.reads[touch.read]);
        let from = reads.clone().map(|read| read.offset).min().unwrap_or(0);
        let to = reads.map(ByteRead::end).max().unwrap_or(0);
        whole.start.max(data_start + from)..whole.end.min(data_start + to)
    }
}
