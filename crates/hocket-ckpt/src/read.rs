//! Reads of byte ranges of data files into the caller's memory, with verification of every block.

use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use hocket_store::Store;

use crate::block::{Block, Source, Table, check_size, missing, open_data};
use crate::data_reader::{Caching, DataReader};
use crate::digest::BLOCK_BYTES;
use crate::error::Result;
use crate::location::{Kind, Location};
use crate::manifest::DataFile;
use crate::plan::{Read, Touch, spans};
use crate::remote;
use crate::remote::found_remote;
use crate::workers::{self, Interrupted};

const MAX_WORKERS: usize = 8;

/// The plan of a read with its inputs.
pub(crate) struct Job<'a> {
    location: &'a Location,
    files: &'a [DataFile],
    reads: &'a [Read],
    spans: Vec<&'a [Touch]>,
    /// Block tables by file.
    tables: &'a [Table],
    check: bool,
}

impl<'a> Job<'a> {
    pub(crate) fn new(
        location: &'a Location,
        files: &'a [DataFile],
        tables: &'a [Table],
        reads: &'a [Read],
        touches: &'a [Touch],
        check: bool,
    ) -> Self {
        Self {
            location,
            files,
            reads,
            spans: spans(touches),
            tables,
            check,
        }
    }

    /// Executes the reads; `caching` applies to files on a disk.
    pub(crate) fn run(&self, caching: Caching, interrupted: Interrupted<'_>) -> Result<()> {
        match self.location.kind() {
            Kind::Local(root) => {
                read_local(root, self, &open_all(root, self, caching)?, interrupted)
            }
            Kind::Remote(store) => read_remote(store, self, interrupted),
        }
    }

    /// Returns the blocks of a span, each with the reads that touch it.
    fn blocks(&self, index: usize) -> impl Iterator<Item = (Block<'_>, &'a [Touch])> {
        self.spans[index]
            .chunk_by(|a, b| a.block == b.block)
            .map(move |group| (self.block(group[0]), group))
    }

    fn block(&self, touch: Touch) -> Block<'_> {
        Block {
            location: self.location,
            file: &self.files[touch.file],
            table: &self.tables[touch.file],
            number: touch.block,
        }
    }

    /// Returns whether a block is read whole, because it is verified or compressed.
    fn is_whole(&self, block: &Block<'_>) -> bool {
        self.check || block.is_compressed()
    }

    /// Returns the indices of the files that the plan touches.
    fn touched(&self) -> Vec<usize> {
        let mut files: Vec<usize> = self.spans.iter().map(|span| span[0].file).collect();
        files.dedup();
        files
    }

    /// Returns the byte range of the stored file that a span needs.
    fn stored(&self, index: usize) -> Range<u64> {
        let span = self.spans[index];
        let (first, last) = (self.block(span[0]), self.block(span[span.len() - 1]));
        let whole = first.stored().start..last.stored().end;
        if self.is_whole(&first) {
            return whole;
        }
        let data_start = self.files[span[0].file].data_start;
        let reads = span.iter().map(|touch| &self.reads[touch.read]);
        let from = reads.clone().map(|read| read.offset).min().unwrap_or(0);
        let to = reads.map(Read::end).max().unwrap_or(0);
        whole.start.max(data_start + from)..whole.end.min(data_start + to)
    }
}

fn read_local(
    root: &Path,
    job: &Job<'_>,
    opened: &[Option<DataReader>],
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let workers = MAX_WORKERS.min(cores * 2);
    // The buffer for a block is allocated when first needed; partial reads go straight to their destinations.
    let start = || Ok((Vec::new(), None));
    workers::run(
        workers,
        job.spans.len(),
        interrupted,
        start,
        |(scratch, buffer), index| {
            for (block, touches) in job.blocks(index) {
                let Some(handle) = opened[touches[0].file].as_ref() else {
                    continue;
                };
                let mut source = Source {
                    root,
                    handle,
                    buffer,
                };
                if job.is_whole(&block) {
                    read_whole(&mut source, &block, touches, job, scratch)?;
                } else {
                    read_bare(&mut source, &block, touches, job.reads)?;
                }
            }
            Ok(())
        },
    )
}

/// Reads one block and verifies it; it is read straight into a destination that covers it.
fn read_whole(
    source: &mut Source<'_>,
    block: &Block<'_>,
    touches: &[Touch],
    job: &Job<'_>,
    scratch: &mut Vec<u8>,
) -> Result<()> {
    let bytes = block.bytes();
    let direct = touches
        .iter()
        .position(|touch| block.overlap(&job.reads[touch.read]).2 == bytes);
    let content: &[u8] = if let Some(position) = direct {
        let read = &job.reads[touches[position].read];
        // SAFETY: destinations do not overlap, and only this worker handles this block.
        let target = unsafe { read.memory.slice_mut(block.overlap(read).1, bytes) };
        source.read_block(block, target)?;
        target
    } else {
        scratch.resize(BLOCK_BYTES as usize, 0);
        source.read_block(block, &mut scratch[..bytes])?;
        &scratch[..bytes]
    };
    if job.check {
        block.check(content)?;
    }
    for (position, touch) in touches.iter().enumerate() {
        if Some(position) != direct {
            block.scatter(content, &job.reads[touch.read]);
        }
    }
    Ok(())
}

/// Reads only the requested bytes, without verification.
fn read_bare(
    source: &mut Source<'_>,
    block: &Block<'_>,
    touches: &[Touch],
    reads: &[Read],
) -> Result<()> {
    for touch in touches {
        let read = &reads[touch.read];
        let (in_block, in_read, length) = block.overlap(read);
        // SAFETY: destinations do not overlap, and only this worker handles this block.
        let target = unsafe { read.memory.slice_mut(in_read, length) };
        source.read_at(block, in_block, target)?;
    }
    Ok(())
}

/// Fetches the spans by ranged requests; the calling thread verifies and scatters the results.
fn read_remote(store: &Store, job: &Job<'_>, interrupted: Interrupted<'_>) -> Result<()> {
    check_sizes(store, job, interrupted)?;
    let fetch = |index: usize| {
        let (store, file) = (store.clone(), &job.files[job.spans[index][0].file]);
        let (key, range) = (file.path.clone(), job.stored(index));
        let gone = missing(job.location, file);
        async move { found_remote(store.get_range(&key, range).await)?.ok_or(gone) }
    };
    let mut scratch = vec![0_u8; BLOCK_BYTES as usize];
    remote::gather(
        job.spans.len(),
        fetch,
        |index, bytes: Bytes| {
            let from = job.stored(index).start;
            for (block, touches) in job.blocks(index) {
                let stored = block.stored();
                if !job.is_whole(&block) {
                    take_bare(&block, touches, job.reads, &bytes, from);
                    continue;
                }
                let mut content =
                    &bytes[(stored.start - from) as usize..(stored.end - from) as usize];
                if block.is_compressed() {
                    block.expand(content, &mut scratch[..block.bytes()])?;
                    content = &scratch[..block.bytes()];
                }
                if job.check {
                    block.check(content)?;
                }
                for touch in touches {
                    block.scatter(content, &job.reads[touch.read]);
                }
            }
            Ok(())
        },
        interrupted,
    )
}

/// Copies the reads' parts out of bytes that start at `from` in the file and contain no more than was
/// requested.
fn take_bare(block: &Block<'_>, touches: &[Touch], reads: &[Read], bytes: &[u8], from: u64) {
    for touch in touches {
        let read = &reads[touch.read];
        let (in_block, in_read, length) = block.overlap(read);
        let at = (block.stored().start + in_block as u64 - from) as usize;
        // SAFETY: destinations do not overlap, and only this thread writes them.
        let target = unsafe { read.memory.slice_mut(in_read, length) };
        target.copy_from_slice(&bytes[at..at + length]);
    }
}

/// Checks the sizes of the files that the plan touches, so that a truncated or extended file is reported before
/// it is read.
fn check_sizes(store: &Store, job: &Job<'_>, interrupted: Interrupted<'_>) -> Result<()> {
    let touched = job.touched();
    let sizes = |index: usize| remote::size(store.clone(), job.files[touched[index]].path.clone());
    remote::gather(
        touched.len(),
        sizes,
        |index, size: Option<u64>| {
            let file = &job.files[touched[index]];
            check_size(
                job.location,
                file,
                size.ok_or_else(|| missing(job.location, file))?,
            )
        },
        interrupted,
    )
}

/// Opens the files that the plan touches.
fn open_all(root: &Path, job: &Job<'_>, caching: Caching) -> Result<Vec<Option<DataReader>>> {
    let mut opened: Vec<Option<DataReader>> = job.files.iter().map(|_| None).collect();
    let mut wanted = vec![0; job.files.len()];
    for read in job.reads {
        wanted[read.file] += read.memory.bytes() as u64;
    }
    for index in job.touched() {
        let file = &job.files[index];
        opened[index] = Some(open_data(root, job.location, file, wanted[index], caching)?);
    }
    Ok(opened)
}
