//! Hashing a whole data file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;

use hocket_store::Store;

use crate::digest::{BLOCK_BYTES, Digest, num_blocks, xxh3_128};
use crate::error::{CkptError, Result};
use crate::manifest::DataFile;
use crate::pace::{self, Interrupted};
use crate::place::{Kind, Place, found_remote};
use crate::read::{Block, Source, check_size, missing, open_data};
use crate::remote;

const MAX_WORKERS: usize = 4;

/// Blocks that one request fetches.
const REQUEST_BLOCKS: u64 = 8;

/// A bad block: its number and where it begins in the data.
type Bad = (i64, i64);

/// Every bad block of a file as (block, offset in the data); (-1, -`data_start`) is a header that differs.
///
/// # Errors
/// `NotFound` where the file is gone, `Corrupt` where its size differs, and what the disk or the store says.
pub fn verify_file(
    place: &Place,
    file: &DataFile,
    interrupted: Interrupted<'_>,
) -> Result<Vec<Bad>> {
    let unusable = || {
        let reason = format!("file `{}`: its digests do not fit it", file.path);
        CkptError::bad_manifest(place.uri(), reason)
    };
    let digests = file.block_digests().ok_or_else(unusable)?;
    let header = file.header_digest().ok_or_else(unusable)?;
    let task = Task {
        place,
        file,
        digests,
        header,
    };
    let mut bad = match place.kind() {
        Kind::Local(root) => task.run_local(root, &open_data(root, place, file)?, interrupted)?,
        Kind::Remote(store) => task.run_remote(store, interrupted)?,
    };
    bad.sort_unstable();
    Ok(bad)
}

struct Task<'a> {
    place: &'a Place,
    file: &'a DataFile,
    digests: Vec<Digest>,
    header: Digest,
}

impl Task<'_> {
    fn judge_header(&self, bytes: &[u8]) -> Option<Bad> {
        (xxh3_128(bytes) != self.header).then(|| (-1, -(self.file.data_start as i64)))
    }

    fn judge(&self, number: u64, bytes: &[u8]) -> Option<Bad> {
        let is_good = xxh3_128(bytes) == self.digests[number as usize];
        (!is_good).then_some((number as i64, (number * BLOCK_BYTES) as i64))
    }

    fn run_local(
        &self,
        root: &Path,
        handle: &File,
        interrupted: Interrupted<'_>,
    ) -> Result<Vec<Bad>> {
        let file = self.file;
        let mut start = vec![0_u8; file.data_start as usize];
        handle
            .read_exact_at(&mut start, 0)
            .map_err(|error| CkptError::io(&root.join(&file.path), "read the header", &error))?;
        let bad = Mutex::new(Vec::from_iter(self.judge_header(&start)));
        let buffer = || Ok(vec![0_u8; BLOCK_BYTES as usize]);
        let count = num_blocks(file.data_bytes()) as usize;
        pace::run(MAX_WORKERS, count, interrupted, buffer, |buffer, index| {
            let block = Block {
                place: self.place,
                file,
                number: index as u64,
            };
            let content = &mut buffer[..block.bytes()];
            Source { root, handle }.read_at(&block, 0, content)?;
            if let (Some(found), Ok(mut bad)) = (self.judge(block.number, content), bad.lock()) {
                bad.push(found);
            }
            Ok(())
        })?;
        bad.into_inner()
            .map_err(|_| CkptError::process("a worker panicked; this is a defect of Hocket"))
    }

    fn run_remote(&self, store: &Store, interrupted: Interrupted<'_>) -> Result<Vec<Bad>> {
        let file = self.file;
        let size = remote::wait(remote::size(store.clone(), file.path.clone()), interrupted)?;
        check_size(
            self.place,
            file,
            size.ok_or_else(|| missing(self.place, file))?,
        )?;
        // Request 0 is the header's.
        let span = REQUEST_BLOCKS * BLOCK_BYTES;
        let range = |index: usize| match index as u64 {
            0 => 0..file.data_start,
            number => {
                let from = file.data_start + (number - 1) * span;
                from..(from + span).min(file.size)
            }
        };
        let fetch = |index: usize| {
            let (store, key, range) = (store.clone(), file.path.clone(), range(index));
            let gone = missing(self.place, file);
            async move { found_remote(store.get_range(&key, range).await)?.ok_or(gone) }
        };
        let mut bad = Vec::new();
        let count = 1 + file.data_bytes().div_ceil(span) as usize;
        let judge = |index: usize, bytes: bytes::Bytes| {
            if index == 0 {
                bad.extend(self.judge_header(&bytes));
                return Ok(());
            }
            let first = (index as u64 - 1) * REQUEST_BLOCKS;
            for (number, content) in bytes.chunks(BLOCK_BYTES as usize).enumerate() {
                bad.extend(self.judge(first + number as u64, content));
            }
            Ok(())
        };
        remote::gather(count, fetch, judge, interrupted)?;
        Ok(bad)
    }
}
