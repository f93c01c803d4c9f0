//! The data files of one checkpoint, with their digests decoded once for any number of reads.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Result;
use crate::manifest::{BlockTable, DataFile};
use crate::place::CheckpointPlace;
use crate::read::byte_reads::ByteReadJob;
use crate::read::free_memory::free_memory;
use crate::read::plan::{ByteRead, plan};
use crate::read::reader::CachePolicy;
use crate::read::verify::{BadBlock, FileCheck};
use crate::workers::Interrupted;

/// Reads go through the page cache if their total size is at most the free memory divided by this number;
/// larger reads would only evict the cached data of other programs.
const CACHED_SHARE: u64 = 4;

/// The data files of a checkpoint. It holds no open file and may be kept across a fork.
#[derive(Debug)]
pub struct DataFiles {
    place: CheckpointPlace,
    files: Vec<DataFile>,
    tables: Vec<BlockTable>,
    has_digests: bool,
    /// Bytes of all reads so far.
    num_read: AtomicU64,
}

impl DataFiles {
    /// Decodes the tables of files that a manifest lists; does no I/O.
    ///
    /// # Errors
    /// `Corrupt` if the digests or the frames of a file do not match its size.
    pub fn new(place: CheckpointPlace, files: Vec<DataFile>) -> Result<Self> {
        let uri = place.uri();
        let tables = files.iter().map(|file| BlockTable::of(uri, file));
        let tables = tables.collect::<Result<Vec<_>>>()?;
        Ok(Self::with_tables(place, files, tables))
    }

    /// Wraps the files of a format without digests.
    pub(crate) fn without_digests(place: CheckpointPlace, files: Vec<DataFile>) -> Self {
        let tables = files.iter().map(|_| BlockTable::default()).collect();
        Self {
            has_digests: false,
            ..Self::with_tables(place, files, tables)
        }
    }

    /// Wraps files and their decoded tables.
    pub(crate) fn with_tables(
        place: CheckpointPlace,
        mut files: Vec<DataFile>,
        tables: Vec<BlockTable>,
    ) -> Self {
        for file in &mut files {
            // The table holds the decoded digests. In a large checkpoint the digests are most of the manifest.
            file.digests = String::new();
        }
        Self {
            place,
            files,
            tables,
            has_digests: true,
            num_read: AtomicU64::new(0),
        }
    }

    /// Returns the paths of the files, in order.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &str> {
        self.files.iter().map(|file| file.path.as_str())
    }

    /// Returns the manifest's records of the files.
    pub fn records(&self) -> impl Iterator<Item = DataFile> {
        let both = self.files.iter().zip(&self.tables);
        both.map(|(file, table)| DataFile {
            digests: table.digests_base64(),
            ..file.clone()
        })
    }

    /// Reads byte ranges of the files into the caller's memory. With `check`, verifies the digest of every block
    /// that they touch, in formats that have digests.
    ///
    /// # Errors
    /// `Corrupt` with file and offset if a block or a size differs (destinations are then undefined), `NotFound`
    /// if a file is gone, `Invalid` for a range outside its file, and errors of the disk or the store.
    pub fn read(
        &self,
        reads: &[ByteRead],
        check: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let touches = plan(&self.files, reads)?;
        let wanted: u64 = reads.iter().map(|read| read.memory.bytes() as u64).sum();
        let total = self.num_read.fetch_add(wanted, Ordering::Relaxed) + wanted;
        let is_kept = free_memory().is_some_and(|free| total <= free / CACHED_SHARE);
        let caching = if is_kept {
            CachePolicy::Keep
        } else {
            CachePolicy::Bypass
        };
        let uri = self.place.uri();
        let job = ByteReadJob::new(
            uri,
            &self.files,
            &self.tables,
            reads,
            &touches,
            check && self.has_digests,
        );
        self.place.files().read(&job, caching, interrupted)
    }
}

/// Returns every bad block of a file as (block, offset in the data); (-1, -`data_start`) is a header that
/// differs.
///
/// # Errors
/// `NotFound` if the file is gone, `Corrupt` if its size differs, and errors of the disk or the store.
pub fn verify_file(
    place: &CheckpointPlace,
    file: &DataFile,
    interrupted: Interrupted<'_>,
) -> Result<Vec<BadBlock>> {
    let check = FileCheck::new(place.uri(), file)?;
    let mut bad = place.files().verify(&check, interrupted)?;
    bad.sort_unstable();
    Ok(bad)
}
