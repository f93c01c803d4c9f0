//! Reading byte ranges of data files into the caller's memory, every block checked.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;
use hocket_store::Store;

use crate::digest::{BLOCK_BYTES, Digest, xxh3_128};
use crate::error::{CkptError, Result};
use crate::manifest::DataFile;
use crate::pace::{self, Interrupted};
use crate::place::{Kind, Place, found_remote};
use crate::remote;
use crate::safetensors::Memory;

/// Blocks of one span, the unit that a worker takes or one request fetches.
const SPAN_BLOCKS: u64 = 8;

/// A span may pass over so many blocks that nobody asked for.
const GAP_BLOCKS: u64 = 1;

const MAX_WORKERS: usize = 8;

/// A byte range to read, and where it goes.
#[derive(Debug, Clone, Copy)]
pub struct Read {
    /// Index of the file.
    pub file: usize,
    /// Offset in the file's data.
    pub offset: u64,
    /// Destination; its length is the read's.
    pub memory: Memory,
}

impl Read {
    fn end(&self) -> u64 {
        self.offset + self.memory.bytes() as u64
    }
}

/// A block that one read touches. Sorted by file and block, they are the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Touch {
    file: usize,
    block: u64,
    read: usize,
}

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
    let digests = digests_of(place, files, &touches, check)?;
    let job = Job {
        place,
        files,
        reads,
        spans: spans(&touches),
        digests,
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
    /// By file; empty where nothing is hashed.
    digests: Vec<Vec<Digest>>,
    check: bool,
}

impl<'a> Job<'a> {
    /// The blocks of a span, each with the reads that touch it.
    fn blocks(&self, index: usize) -> impl Iterator<Item = (Block<'a>, &'a [Touch])> {
        let (place, files) = (self.place, self.files);
        self.spans[index]
            .chunk_by(|a, b| a.block == b.block)
            .map(move |group| {
                let (file, number) = (&files[group[0].file], group[0].block);
                (
                    Block {
                        place,
                        file,
                        number,
                    },
                    group,
                )
            })
    }

    /// Indices of the files that the plan touches.
    fn touched(&self) -> Vec<usize> {
        let mut files: Vec<usize> = self.spans.iter().map(|span| span[0].file).collect();
        files.dedup();
        files
    }

    /// Where a span begins and ends in its file's data.
    fn range(&self, index: usize) -> (u64, u64) {
        if !self.check {
            let reads = self.spans[index]
                .iter()
                .map(|touch| &self.reads[touch.read]);
            let from = reads.clone().map(|read| read.offset).min().unwrap_or(0);
            let to = reads.map(Read::end).max().unwrap_or(0);
            let (low, high) = self.blocks_range(index);
            return (from.max(low), to.min(high));
        }
        self.blocks_range(index)
    }

    fn blocks_range(&self, index: usize) -> (u64, u64) {
        let span = self.spans[index];
        let (file, last) = (&self.files[span[0].file], span[span.len() - 1].block);
        let from = span[0].block * BLOCK_BYTES;
        (from, last * BLOCK_BYTES + file.block_bytes(last))
    }
}

fn read_local(
    root: &Path,
    job: &Job<'_>,
    opened: &[Option<File>],
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let workers = MAX_WORKERS.min(cores * 2);
    let start = || Ok(vec![0_u8; BLOCK_BYTES as usize]);
    pace::run(
        workers,
        job.spans.len(),
        interrupted,
        start,
        |scratch, index| {
            for (block, touches) in job.blocks(index) {
                let file = touches[0].file;
                let Some(handle) = opened[file].as_ref() else {
                    continue;
                };
                let source = Source { root, handle };
                if job.check {
                    let digest = job.digests[file][block.number as usize];
                    read_checked(&source, &block, digest, touches, job.reads, scratch)?;
                } else {
                    read_bare(&source, &block, touches, job.reads)?;
                }
            }
            Ok(())
        },
    )
}

/// Fetches the spans by ranged requests; what arrives is hashed and scattered on the calling thread.
fn read_remote(store: &Store, job: &Job<'_>, interrupted: Interrupted<'_>) -> Result<()> {
    check_sizes(store, job, interrupted)?;
    let fetch = |index: usize| {
        let (store, file) = (store.clone(), &job.files[job.spans[index][0].file]);
        let (from, to) = job.range(index);
        let (key, range) = (
            file.path.clone(),
            file.data_start + from..file.data_start + to,
        );
        let gone = missing(job.place, file);
        async move { found_remote(store.get_range(&key, range).await)?.ok_or(gone) }
    };
    remote::gather(
        job.spans.len(),
        fetch,
        |index, bytes: Bytes| {
            let (from, _) = job.range(index);
            for (block, touches) in job.blocks(index) {
                if job.check {
                    let at = (block.start() - from) as usize;
                    let content = &bytes[at..at + block.bytes()];
                    block.check(content, job.digests[touches[0].file][block.number as usize])?;
                }
                for touch in touches {
                    let read = &job.reads[touch.read];
                    let (in_block, in_read, length) = block.overlap(read);
                    let at = (block.start() + in_block as u64 - from) as usize;
                    // SAFETY: destinations do not overlap, and this thread alone writes them.
                    let target = unsafe { read.memory.slice_mut(in_read, length) };
                    target.copy_from_slice(&bytes[at..at + length]);
                }
            }
            Ok(())
        },
        interrupted,
    )
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

/// Every block that the reads touch, sorted.
fn plan(files: &[DataFile], reads: &[Read]) -> Result<Vec<Touch>> {
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
            touches.extend(blocks.map(|block| Touch {
                file: read.file,
                block,
                read: index,
            }));
        }
    }
    touches.sort_unstable();
    Ok(touches)
}

/// Cuts the plan into spans of nearby blocks of one file.
fn spans(touches: &[Touch]) -> Vec<&[Touch]> {
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

/// Opens the files that the plan touches.
fn open_all(root: &Path, job: &Job<'_>) -> Result<Vec<Option<File>>> {
    let mut opened: Vec<Option<File>> = job.files.iter().map(|_| None).collect();
    for index in job.touched() {
        opened[index] = Some(open_data(root, job.place, &job.files[index])?);
    }
    Ok(opened)
}

/// Opens a data file whose size is what the manifest says.
pub(crate) fn open_data(root: &Path, place: &Place, file: &DataFile) -> Result<File> {
    let path = root.join(&file.path);
    let handle = File::open(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => missing(place, file),
        _ => CkptError::io(&path, "open the data file", &error),
    })?;
    let size = handle
        .metadata()
        .map_err(|error| CkptError::io(&path, "look at the data file", &error))?
        .len();
    check_size(place, file, size)?;
    Ok(handle)
}

pub(crate) fn missing(place: &Place, file: &DataFile) -> CkptError {
    place.not_found(format!(
        "the manifest names data file `{}`, which is not there",
        file.path
    ))
}

pub(crate) fn check_size(place: &Place, file: &DataFile, size: u64) -> Result<()> {
    if size == file.size {
        return Ok(());
    }
    Err(CkptError::Corrupt {
        uri: place.uri().to_owned(),
        file: Some(file.path.clone()),
        offset: None,
        reason: format!("it has {size} bytes, {} were written", file.size),
    })
}

/// The digests of the files that the plan touches.
fn digests_of(
    place: &Place,
    files: &[DataFile],
    touches: &[Touch],
    check: bool,
) -> Result<Vec<Vec<Digest>>> {
    let mut digests = vec![Vec::new(); files.len()];
    if check {
        for group in touches.chunk_by(|a, b| a.file == b.file) {
            let file = &files[group[0].file];
            digests[group[0].file] = file.block_digests().ok_or_else(|| {
                CkptError::bad_manifest(
                    place.uri(),
                    format!("file `{}`: `digests` has not one digest a block", file.path),
                )
            })?;
        }
    }
    Ok(digests)
}

/// A block of a file.
pub(crate) struct Block<'a> {
    pub(crate) place: &'a Place,
    pub(crate) file: &'a DataFile,
    pub(crate) number: u64,
}

impl Block<'_> {
    pub(crate) fn start(&self) -> u64 {
        self.number * BLOCK_BYTES
    }

    pub(crate) fn bytes(&self) -> usize {
        self.file.block_bytes(self.number) as usize
    }

    /// What of a read lies in this block: (offset in the block, offset in the read, bytes).
    fn overlap(&self, read: &Read) -> (usize, usize, usize) {
        let from = read.offset.max(self.start());
        let to = read.end().min(self.start() + self.bytes() as u64);
        (
            (from - self.start()) as usize,
            (from - read.offset) as usize,
            (to - from) as usize,
        )
    }

    pub(crate) fn check(&self, bytes: &[u8], digest: Digest) -> Result<()> {
        if xxh3_128(bytes) == digest {
            return Ok(());
        }
        Err(CkptError::Corrupt {
            uri: self.place.uri().to_owned(),
            file: Some(self.file.path.clone()),
            offset: Some(self.start()),
            reason: format!(
                "the {} bytes of this block do not have the digest that was written with them",
                bytes.len()
            ),
        })
    }
}

/// An open data file.
pub(crate) struct Source<'a> {
    pub(crate) root: &'a Path,
    pub(crate) handle: &'a File,
}

impl Source<'_> {
    /// Reads a part of a block.
    pub(crate) fn read_at(
        &self,
        block: &Block<'_>,
        offset: usize,
        target: &mut [u8],
    ) -> Result<()> {
        let at = block.file.data_start + block.start() + offset as u64;
        self.handle.read_exact_at(target, at).map_err(|error| {
            let action = format!("read {} bytes at {at}", target.len());
            CkptError::io(&self.root.join(&block.file.path), &action, &error)
        })
    }
}

/// Reads one block, into its destination where it lies wholly in one, and hashes it.
fn read_checked(
    source: &Source<'_>,
    block: &Block<'_>,
    digest: Digest,
    touches: &[Touch],
    reads: &[Read],
    scratch: &mut [u8],
) -> Result<()> {
    let bytes = block.bytes();
    let direct = touches
        .iter()
        .position(|touch| block.overlap(&reads[touch.read]).2 == bytes);
    let content: &[u8] = if let Some(position) = direct {
        let read = &reads[touches[position].read];
        // SAFETY: destinations do not overlap, and this worker alone has this block.
        let target = unsafe { read.memory.slice_mut(block.overlap(read).1, bytes) };
        source.read_at(block, 0, target)?;
        target
    } else {
        source.read_at(block, 0, &mut scratch[..bytes])?;
        &scratch[..bytes]
    };
    block.check(content, digest)?;
    for (position, touch) in touches.iter().enumerate() {
        if Some(position) != direct {
            scatter(block, content, &reads[touch.read]);
        }
    }
    Ok(())
}

/// Copies what a read wants of a block's content.
fn scatter(block: &Block<'_>, content: &[u8], read: &Read) {
    let (in_block, in_read, length) = block.overlap(read);
    // SAFETY: destinations do not overlap, and this worker alone has this block.
    let target = unsafe { read.memory.slice_mut(in_read, length) };
    target.copy_from_slice(&content[in_block..in_block + length]);
}

/// Reads just what is asked for.
fn read_bare(
    source: &Source<'_>,
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
