//! Reading byte ranges of data files into the caller's memory, every block checked.

use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use hocket_store::Store;

use crate::block::{Block, Source, Table, check_size, missing, open_data};
use crate::digest::BLOCK_BYTES;
use crate::error::Result;
use crate::manifest::DataFile;
use crate::opened::Opened;
use crate::pace::{self, Interrupted};
use crate::place::{Kind, Place, found_remote};
use crate::plan::{Read, Touch, plan, spans};
use crate::remote;

const MAX_WORKERS: usize = 8;

/// Reads ranges of `files`; with `check`, every block that a range touches is hashed first.
///
/// # Errors
/// `Corrupt` with file and offset where a block or a size differs (destinations are then undefined), `NotFound` where a
/// file is gone, `Invalid` for a range outside its file, and what the disk or the store says.
pub fn read(
    place: &Place,
    files: &[DataFile],
    reads: &[Read],
    check: bool,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let touches = plan(files, reads)?;
    let job = Job {
        place,
        files,
        reads,
        spans: spans(&touches),
        tables: tables(place, files, &touches, check)?,
        check,
    };
    match place.kind() {
        Kind::Local(root) => read_local(root, &job, &open_all(root, &job)?, interrupted),
        Kind::Remote(store) => read_remote(store, &job, interrupted),
    }
}

/// A verb's plan and what it needs.
struct Job<'a> {
    place: &'a Place,
    files: &'a [DataFile],
    reads: &'a [Read],
    spans: Vec<&'a [Touch]>,
    /// By file; empty where no read touches it.
    tables: Vec<Table>,
    check: bool,
}

impl<'a> Job<'a> {
    /// The blocks of a span, each with the reads that touch it.
    fn blocks(&self, index: usize) -> impl Iterator<Item = (Block<'_>, &'a [Touch])> {
        self.spans[index]
            .chunk_by(|a, b| a.block == b.block)
            .map(move |group| (self.block(group[0]), group))
    }

    fn block(&self, touch: Touch) -> Block<'_> {
        Block {
            place: self.place,
            file: &self.files[touch.file],
            table: &self.tables[touch.file],
            number: touch.block,
        }
    }

    /// Whether a block is read whole: to be hashed, or because it is compressed.
    fn is_whole(&self, block: &Block<'_>) -> bool {
        self.check || block.is_compressed()
    }

    /// Indices of the files that the plan touches.
    fn touched(&self) -> Vec<usize> {
        let mut files: Vec<usize> = self.spans.iter().map(|span| span[0].file).collect();
        files.dedup();
        files
    }

    /// Which bytes of its file, as it is stored, a span needs.
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
    opened: &[Option<Opened>],
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let workers = MAX_WORKERS.min(cores * 2);
    // Memory for a block is taken where a block needs it: bare ranges go to their places.
    let start = || Ok((Vec::new(), None));
    pace::run(
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

/// Reads one block, into its destination where it lies wholly in one, and hashes it.
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
        // SAFETY: destinations do not overlap, and this worker alone has this block.
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

/// Reads just what is asked for.
fn read_bare(
    source: &mut Source<'_>,
    block: &Block<'_>,
    touches: &[Touch],
    reads: &[Read],
) -> Result<()> {
    for touch in touches {
        let read = &reads[touch.read];
        let (in_block, in_read, length) = block.overlap(read);
        // SAFETY: destinations do not overlap, and this worker alone has this block.
        let target = unsafe { read.memory.slice_mut(in_read, length) };
        source.read_at(block, in_block, target)?;
    }
    Ok(())
}

/// Fetches the spans by ranged requests; what arrives is hashed and scattered on the calling thread.
fn read_remote(store: &Store, job: &Job<'_>, interrupted: Interrupted<'_>) -> Result<()> {
    check_sizes(store, job, interrupted)?;
    let fetch = |index: usize| {
        let (store, file) = (store.clone(), &job.files[job.spans[index][0].file]);
        let (key, range) = (file.path.clone(), job.stored(index));
        let gone = missing(job.place, file);
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

/// Copies what the reads want out of bytes that begin at `from` of the file and hold no more than is asked for.
fn take_bare(block: &Block<'_>, touches: &[Touch], reads: &[Read], bytes: &[u8], from: u64) {
    for touch in touches {
        let read = &reads[touch.read];
        let (in_block, in_read, length) = block.overlap(read);
        let at = (block.stored().start + in_block as u64 - from) as usize;
        // SAFETY: destinations do not overlap, and this thread alone writes them.
        let target = unsafe { read.memory.slice_mut(in_read, length) };
        target.copy_from_slice(&bytes[at..at + length]);
    }
}

/// Compares the sizes of the files that the plan touches: a file that was cut or added to is told before it is read.
fn check_sizes(store: &Store, job: &Job<'_>, interrupted: Interrupted<'_>) -> Result<()> {
    let touched = job.touched();
    let sizes = |index: usize| remote::size(store.clone(), job.files[touched[index]].path.clone());
    remote::gather(
        touched.len(),
        sizes,
        |index, size: Option<u64>| {
            let file = &job.files[touched[index]];
            check_size(
                job.place,
                file,
                size.ok_or_else(|| missing(job.place, file))?,
            )
        },
        interrupted,
    )
}

/// Opens the files that the plan touches.
fn open_all(root: &Path, job: &Job<'_>) -> Result<Vec<Option<Opened>>> {
    let mut opened: Vec<Option<Opened>> = job.files.iter().map(|_| None).collect();
    let mut wanted = vec![0; job.files.len()];
    for read in job.reads {
        wanted[read.file] += read.memory.bytes() as u64;
    }
    for index in job.touched() {
        let file = &job.files[index];
        opened[index] = Some(open_data(root, job.place, file, wanted[index])?);
    }
    Ok(opened)
}

/// What the manifest says of the blocks of the files that the plan touches.
fn tables(place: &Place, files: &[DataFile], touches: &[Touch], check: bool) -> Result<Vec<Table>> {
    let mut tables: Vec<Table> = files.iter().map(|_| Table::default()).collect();
    for group in touches.chunk_by(|a, b| a.file == b.file) {
        tables[group[0].file] = Table::of(place, &files[group[0].file], check)?;
    }
    Ok(tables)
}
