//! Reads and verification of data files on a disk.

use std::path::Path;
use std::sync::Mutex;

use crate::error::{CkptError, Result};
use crate::format::digest::{BLOCK_BYTES, num_blocks};
use crate::read::block::{OpenDataFile, StoredBlock, open_data};
use crate::read::byte_reads::ByteReadJob;
use crate::read::plan::{BlockTouch, ByteRead};
use crate::read::reader::{CachePolicy, DataReader, ReaderState};
use crate::read::verify::{BadBlock, FileCheck};
use crate::workers::{self, Interrupted};

use super::shares::WorkRanges;

const READ_WORKERS: usize = 8;

const VERIFY_WORKERS: usize = 4;

/// Reads blocks on several threads, straight into the destinations where possible.
pub(super) fn read(
    root: &Path,
    job: &ByteReadJob<'_>,
    caching: CachePolicy,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let opened = open_all(root, job, caching)?;
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let shares = WorkRanges::new(job.spans.len(), READ_WORKERS.min(cores * 2));
    // The memory for a block is allocated when first needed; partial reads go straight to their destinations.
    let start = || Ok((shares.join(), Vec::new(), ReaderState::default()));
    workers::run(
        shares.len(),
        job.spans.len(),
        interrupted,
        start,
        |(share, scratch, own), _| {
            let Some(index) = shares.take(*share) else {
                return Ok(());
            };
            for (block, touches) in job.blocks(index) {
                let Some(handle) = opened[touches[0].file].as_ref() else {
                    continue;
                };
                let mut source = OpenDataFile { root, handle, own };
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

/// Reads one block, directly into a destination that covers it if there is one, and verifies it.
fn read_whole(
    source: &mut OpenDataFile<'_>,
    block: &StoredBlock<'_>,
    touches: &[BlockTouch],
    job: &ByteReadJob<'_>,
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
    source: &mut OpenDataFile<'_>,
    block: &StoredBlock<'_>,
    touches: &[BlockTouch],
    reads: &[ByteRead],
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

/// Opens the files that the plan touches.
fn open_all(
    root: &Path,
    job: &ByteReadJob<'_>,
    caching: CachePolicy,
) -> Result<Vec<Option<DataReader>>> {
    let mut opened: Vec<Option<DataReader>> = job.files.iter().map(|_| None).collect();
    let mut wanted = vec![0; job.files.len()];
    for read in job.reads {
        wanted[read.file] += read.memory.bytes() as u64;
    }
    for index in job.touched() {
        let file = &job.files[index];
        opened[index] = Some(open_data(root, job.uri, file, wanted[index], caching)?);
    }
    Ok(opened)
}

pub(super) fn verify(
    root: &Path,
    check: &FileCheck<'_>,
    interrupted: Interrupted<'_>,
) -> Result<Vec<BadBlock>> {
    // A whole checkpoint is verified file by file, however large it is.
    let (file, caching) = (check.file, CachePolicy::Bypass);
    let handle = &open_data(root, check.uri, file, file.stored_bytes(), caching)?;
    let mut start = vec![0_u8; check.block(0).stored().start as usize];
    let read = handle.read_exact_at(&mut start, 0, &mut ReaderState::default());
    read.map_err(|error| CkptError::io(&root.join(&file.path), "read the header", &error))?;
    let bad = Mutex::new(Vec::from_iter(check.judge_header(&start)));
    let start = || Ok((vec![0_u8; BLOCK_BYTES as usize], ReaderState::default()));
    let count = num_blocks(file.data_bytes()) as usize;
    let judge = |(content, own): &mut (Vec<u8>, _), index: usize| {
        let block = check.block(index as u64);
        let content = &mut content[..block.bytes()];
        let mut source = OpenDataFile { root, handle, own };
        let read = source.read_block(&block, content);
        if let (Some(found), Ok(mut bad)) = (FileCheck::judge(&block, read, content)?, bad.lock()) {
            bad.push(found);
        }
        Ok(())
    };
    workers::run(VERIFY_WORKERS, count, interrupted, start, judge)?;
    bad.into_inner()
        .map_err(|_| CkptError::panicked("a worker"))
}
