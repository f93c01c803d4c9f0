//! Reading byte ranges of data files into the caller's memory, every block checked.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::digest::{BLOCK_BYTES, Digest, xxh3_128};
use crate::error::{CkptError, Result};
use crate::manifest::DataFile;
use crate::pace::{self, Interrupted};
use crate::place::Place;
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
    let spans = spans(&touches);
    let opened = open_local(place, files, &touches)?;
    let digests = digests_of(place, files, &touches, check)?;
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let workers = MAX_WORKERS.min(cores * 2);
    pace::run(
        workers,
        spans.len(),
        interrupted,
        || Ok(vec![0_u8; BLOCK_BYTES as usize]),
        |scratch, index| {
            for group in spans[index].chunk_by(|a, b| a.block == b.block) {
                let file = group[0].file;
                let Some(handle) = opened[file].as_ref() else {
                    continue;
                };
                let block = Block {
                    place,
                    file: &files[file],
                    number: group[0].block,
                };
                if check {
                    let digest = digests[file][group[0].block as usize];
                    read_checked(handle, &block, digest, group, reads, scratch)?;
                } else {
                    read_bare(handle, &block, group, reads)?;
                }
            }
            Ok(())
        },
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

/// Opens the files that the plan touches and compares their sizes.
fn open_local(place: &Place, files: &[DataFile], touches: &[Touch]) -> Result<Vec<Option<File>>> {
    let mut opened: Vec<Option<File>> = files.iter().map(|_| None).collect();
    for group in touches.chunk_by(|a, b| a.file == b.file) {
        let index = group[0].file;
        opened[index] = Some(open_data(place, &files[index])?);
    }
    Ok(opened)
}

/// Opens a data file whose size is what the manifest says.
pub(crate) fn open_data(place: &Place, file: &DataFile) -> Result<File> {
    let path = place.root().join(&file.path);
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
    CkptError::NotFound {
        uri: place.uri().to_owned(),
        reason: format!(
            "the manifest names data file `{}`, which is not there",
            file.path
        ),
    }
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
    fn start(&self) -> u64 {
        self.number * BLOCK_BYTES
    }

    fn bytes(&self) -> usize {
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

    /// Reads a part of the block.
    pub(crate) fn read_at(&self, handle: &File, offset: usize, target: &mut [u8]) -> Result<()> {
        let at = self.file.data_start + self.start() + offset as u64;
        handle.read_exact_at(target, at).map_err(|error| {
            let path = self.place.root().join(&self.file.path);
            CkptError::io(
                &path,
                &format!("read {} bytes at {at}", target.len()),
                &error,
            )
        })
    }
}

/// Reads one block, into its destination where it lies wholly in one, and hashes it.
fn read_checked(
    handle: &File,
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
        block.read_at(handle, 0, target)?;
        target
    } else {
        block.read_at(handle, 0, &mut scratch[..bytes])?;
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
fn read_bare(handle: &File, block: &Block<'_>, touches: &[Touch], reads: &[Read]) -> Result<()> {
    for touch in touches {
        let read = &reads[touch.read];
        let (in_block, in_read, length) = block.overlap(read);
        // SAFETY: destinations do not overlap, and this worker alone has this block.
        let target = unsafe { read.memory.slice_mut(in_read, length) };
        block.read_at(handle, in_block, target)?;
    }
    Ok(())
}
