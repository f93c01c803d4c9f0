//! Hashing a whole data file.

use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use crate::digest::{BLOCK_BYTES, num_blocks, xxh3_128};
use crate::error::{CkptError, Result};
use crate::manifest::DataFile;
use crate::pace::{self, Interrupted};
use crate::place::Place;
use crate::read::{Block, open_data};

const MAX_WORKERS: usize = 4;

/// Every bad block of a file as (block, offset in the data); (-1, -`data_start`) is a header that differs.
///
/// # Errors
/// `NotFound` where the file is gone, `Corrupt` where its size differs, and what the disk or the store says.
pub fn verify_file(
    place: &Place,
    file: &DataFile,
    interrupted: Interrupted<'_>,
) -> Result<Vec<(i64, i64)>> {
    let unusable = || {
        CkptError::bad_manifest(
            place.uri(),
            format!("file `{}`: its digests do not fit it", file.path),
        )
    };
    let digests = file.block_digests().ok_or_else(unusable)?;
    let header = file.header_digest().ok_or_else(unusable)?;
    let handle = open_data(place, file)?;
    let bad = Mutex::new(Vec::new());
    let note = |block: i64, offset: i64| {
        if let Ok(mut bad) = bad.lock() {
            bad.push((block, offset));
        }
    };
    let mut start = vec![0_u8; usize::try_from(file.data_start).map_err(|_| unusable())?];
    handle.read_exact_at(&mut start, 0).map_err(|error| {
        CkptError::io(&place.root().join(&file.path), "read the header", &error)
    })?;
    if xxh3_128(&start) != header {
        note(-1, -(file.data_start as i64));
    }
    let count = num_blocks(file.data_bytes()) as usize;
    pace::run(
        MAX_WORKERS,
        count,
        interrupted,
        || Ok(vec![0_u8; BLOCK_BYTES as usize]),
        |buffer, index| {
            let block = Block {
                place,
                file,
                number: index as u64,
            };
            let content = &mut buffer[..file.block_bytes(index as u64) as usize];
            block.read_at(&handle, 0, content)?;
            if block.check(content, digests[index]).is_err() {
                note(index as i64, (index as u64 * BLOCK_BYTES) as i64);
            }
            Ok(())
        },
    )?;
    let mut bad = bad.into_inner().map_err(|_| unusable())?;
    bad.sort_unstable();
    Ok(bad)
}
