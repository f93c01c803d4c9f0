//! Verification of a whole data file.

use std::path::Path;
use std::sync::Mutex;

use hocket_store::Store;

use crate::block::{Block, Source, Table, check_size, missing, open_data};
use crate::data_reader::{Caching, DataReader};
use crate::digest::{BLOCK_BYTES, Digest, num_blocks, xxh3_128};
use crate::error::{CkptError, Result};
use crate::location::{Kind, Location};
use crate::manifest::DataFile;
use crate::remote;
use crate::remote::found_remote;
use crate::workers::{self, Interrupted};

const MAX_WORKERS: usize = 4;

/// Number of blocks that one request fetches.
const REQUEST_BLOCKS: u64 = 8;

/// A bad block: its number and its offset in the data.
type Bad = (i64, i64);

/// Returns every bad block of a file as (block, offset in the data); (-1, -`data_start`) is a header that
/// differs.
///
/// # Errors
/// `NotFound` if the file is gone, `Corrupt` if its size differs, and errors of the disk or the store.
pub fn verify_file(
    location: &Location,
    file: &DataFile,
    interrupted: Interrupted<'_>,
) -> Result<Vec<Bad>> {
    let header = file.header_digest().ok_or_else(|| {
        let reason = format!("file `{}`: `header` is not a digest", file.path);
        CkptError::bad_manifest(location.uri(), reason)
    })?;
    let task = Task {
        location,
        file,
        table: Table::of(location, file, true)?,
        header,
    };
    let mut bad = match location.kind() {
        Kind::Local(root) => {
            // A whole checkpoint is verified file by file, however large it is.
            let handle = open_data(root, location, file, file.stored_bytes(), Caching::Bypass)?;
            task.run_local(root, &handle, interrupted)?
        }
        Kind::Remote(store) => task.run_remote(store, interrupted)?,
    };
    bad.sort_unstable();
    Ok(bad)
}

struct Task<'a> {
    location: &'a Location,
    file: &'a DataFile,
    table: Table,
    header: Digest,
}

impl Task<'_> {
    /// Verifies the stored bytes before the first block: the header, or its frame.
    fn judge_header(&self, stored: &[u8]) -> Option<Bad> {
        let start = self.file.data_start;
        let digest = if self.file.frames.is_some() {
            // A frame that does not decompress yields empty content, whose digest does not match.
            xxh3_128(&zstd::bulk::decompress(stored, start as usize).unwrap_or_default())
        } else {
            xxh3_128(stored)
        };
        (digest != self.header).then(|| (-1, -(start as i64)))
    }

    fn block(&self, number: u64) -> Block<'_> {
        Block {
            location: self.location,
            file: self.file,
            table: &self.table,
            number,
        }
    }

    /// Verifies a block after its read; passes on a failure of the disk or the store.
    fn judge(block: &Block<'_>, read: Result<()>, content: &[u8]) -> Result<Option<Bad>> {
        match read.and_then(|()| block.check(content)) {
            Ok(()) => Ok(None),
            Err(CkptError::Corrupt { .. }) => Ok(Some((block.number as i64, block.start() as i64))),
            Err(error) => Err(error),
        }
    }

    fn run_local(
        &self,
        root: &Path,
        handle: &DataReader,
        interrupted: Interrupted<'_>,
    ) -> Result<Vec<Bad>> {
        let mut start = vec![0_u8; self.block(0).stored().start as usize];
        let read = handle.read_exact_at(&mut start, 0, &mut None);
        read.map_err(|error| {
            CkptError::io(&root.join(&self.file.path), "read the header", &error)
        })?;
        let bad = Mutex::new(Vec::from_iter(self.judge_header(&start)));
        let start = || Ok((vec![0_u8; BLOCK_BYTES as usize], None));
        let count = num_blocks(self.file.data_bytes()) as usize;
        let judge = |(content, buffer): &mut (Vec<u8>, _), index: usize| {
            let block = self.block(index as u64);
            let content = &mut content[..block.bytes()];
            let mut source = Source {
                root,
                handle,
                buffer,
            };
            let read = source.read_block(&block, content);
            if let (Some(found), Ok(mut bad)) = (Self::judge(&block, read, content)?, bad.lock()) {
                bad.push(found);
            }
            Ok(())
        };
        workers::run(MAX_WORKERS, count, interrupted, start, judge)?;
        bad.into_inner()
            .map_err(|_| CkptError::process("a worker panicked; this is a defect of Hocket"))
    }

    fn run_remote(&self, store: &Store, interrupted: Interrupted<'_>) -> Result<Vec<Bad>> {
        let file = self.file;
        let size = remote::wait(remote::size(store.clone(), file.path.clone()), interrupted)?;
        check_size(
            self.location,
            file,
            size.ok_or_else(|| missing(self.location, file))?,
        )?;
        let blocks = num_blocks(file.data_bytes());
        // Request 0 fetches the header.
        let of_request = |index: usize| {
            let first = (index as u64 - 1) * REQUEST_BLOCKS;
            first..(first + REQUEST_BLOCKS).min(blocks)
        };
        let range = |index: usize| {
            if index == 0 {
                return 0..self.block(0).stored().start;
            }
            let blocks = of_request(index);
            self.block(blocks.start).stored().start..self.block(blocks.end - 1).stored().end
        };
        let fetch = |index: usize| {
            let (store, key, range) = (store.clone(), file.path.clone(), range(index));
            let gone = missing(self.location, file);
            async move { found_remote(store.get_range(&key, range).await)?.ok_or(gone) }
        };
        let mut bad = Vec::new();
        let mut scratch = vec![0_u8; BLOCK_BYTES as usize];
        let count = 1 + blocks.div_ceil(REQUEST_BLOCKS) as usize;
        let judge = |index: usize, bytes: bytes::Bytes| {
            if index == 0 {
                bad.extend(self.judge_header(&bytes));
                return Ok(());
            }
            let from = range(index).start;
            for number in of_request(index) {
                let block = self.block(number);
                let stored = block.stored();
                let piece = &bytes[(stored.start - from) as usize..(stored.end - from) as usize];
                let content = &mut scratch[..block.bytes()];
                let read = block.content(piece, content);
                bad.extend(Self::judge(&block, read, content)?);
            }
            Ok(())
        };
        remote::gather(count, fetch, judge, interrupted)?;
        Ok(bad)
    }
}
