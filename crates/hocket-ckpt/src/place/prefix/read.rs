//! Reads and verification of data files in an object store.

use bytes::Bytes;
use hocket_store::Store;

use crate::error::Result;
use crate::format::digest::{BLOCK_BYTES, num_blocks};
use crate::place::remote::{self, found_remote};
use crate::read::block::{StoredBlock, check_size, missing};
use crate::read::byte_reads::ByteReadJob;
use crate::read::plan::{BlockTouch, ByteRead};
use crate::read::verify::{BadBlock, FileCheck};
use crate::workers::Interrupted;

/// Number of blocks that one request of a verification fetches.
const REQUEST_BLOCKS: u64 = 8;

/// Fetches the spans by ranged requests; the calling thread verifies and scatters the results.
pub(super) fn read(
    store: &Store,
    job: &ByteReadJob<'_>,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    check_sizes(store, job, interrupted)?;
    let fetch = |index: usize| {
        let (store, file) = (store.clone(), &job.files[job.spans[index][0].file]);
        let (key, range) = (file.path.clone(), job.stored(index));
        let gone = missing(job.uri, file);
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
fn take_bare(
    block: &StoredBlock<'_>,
    touches: &[BlockTouch],
    reads: &[ByteRead],
    bytes: &[u8],
    from: u64,
) {
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
fn check_sizes(store: &Store, job: &ByteReadJob<'_>, interrupted: Interrupted<'_>) -> Result<()> {
    let touched = job.touched();
    let sizes = |index: usize| remote::size(store.clone(), job.files[touched[index]].path.clone());
    remote::gather(
        touched.len(),
        sizes,
        |index, size: Option<u64>| {
            let file = &job.files[touched[index]];
            check_size(job.uri, file, size.ok_or_else(|| missing(job.uri, file))?)
        },
        interrupted,
    )
}

pub(super) fn verify(
    store: &Store,
    check: &FileCheck<'_>,
    interrupted: Interrupted<'_>,
) -> Result<Vec<BadBlock>> {
    let file = check.file;
    let size = remote::wait(remote::size(store.clone(), file.path.clone()), interrupted)?;
    check_size(
        check.uri,
        file,
        size.ok_or_else(|| missing(check.uri, file))?,
    )?;
    let blocks = num_blocks(file.data_bytes());
    // Request 0 fetches the header.
    let of_request = |index: usize| {
        let first = (index as u64 - 1) * REQUEST_BLOCKS;
        first..(first + REQUEST_BLOCKS).min(blocks)
    };
    let range = |index: usize| {
        if index == 0 {
            return 0..check.block(0).stored().start;
        }
        let blocks = of_request(index);
        check.block(blocks.start).stored().start..check.block(blocks.end - 1).stored().end
    };
    let fetch = |index: usize| {
        let (store, key, range) = (store.clone(), file.path.clone(), range(index));
        let gone = missing(check.uri, file);
        async move { found_remote(store.get_range(&key, range).await)?.ok_or(gone) }
    };
    let mut bad = Vec::new();
    let mut scratch = vec![0_u8; BLOCK_BYTES as usize];
    let count = 1 + blocks.div_ceil(REQUEST_BLOCKS) as usize;
    let judge = |index: usize, bytes: Bytes| {
        if index == 0 {
            bad.extend(check.judge_header(&bytes));
            return Ok(());
        }
        let from = range(index).start;
        for number in of_request(index) {
            let block = check.block(number);
            let stored = block.stored();
            let piece = &bytes[(stored.start - from) as usize..(stored.end - from) as usize];
            let content = &mut scratch[..block.bytes()];
            let read = block.content(piece, content);
            bad.extend(FileCheck::judge(&block, read, content)?);
        }
        Ok(())
    };
    remote::gather(count, fetch, judge, interrupted)?;
    Ok(bad)
}
