//! The interface implemented by folders on a disk and by prefixes of an object store.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hocket_store::LevelListing;

use super::leftovers::LeftoverItem;
use crate::error::Result;
use crate::format::safetensors::FileLayout;
use crate::manifest::write::ManifestWrite;
use crate::read::byte_reads::ByteReadJob;
use crate::read::reader::CachePolicy;
use crate::read::verify::{BadBlock, FileCheck};
use crate::workers::Interrupted;
use crate::write::written::{FileRecord, WriteOptions};

/// The files of a place, which holds one or several checkpoints. The caller has checked the paths. An
/// implementation holds no client and may be kept across a fork.
pub(crate) trait PlaceFiles: PlaceCleanup + Debug + Send + Sync {
    /// Returns the URI as it was given.
    fn uri(&self) -> &str;

    /// Reads at most the first `limit` bytes of a file; returns none if it does not exist.
    fn get_start(
        &self,
        path: &str,
        limit: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<Vec<u8>>>;

    /// Returns whether data files of Hocket exist, or only the empty folder for them, which a save leaves if it
    /// is killed before its first file.
    fn has_data(&self, interrupted: Interrupted<'_>) -> Result<bool>;

    /// Returns the names of the folders. Symbolic links are left out: they are second names of other folders.
    fn folders(&self, interrupted: Interrupted<'_>) -> Result<Vec<String>>;

    /// Looks for a checkpoint in each of the folders.
    fn peek(&self, folders: &[String], interrupted: Interrupted<'_>) -> Result<Vec<FolderPeek>>;

    /// Returns the files and folders directly inside the place, including links; none if there is no such
    /// folder.
    fn level(&self, interrupted: Interrupted<'_>) -> Result<Option<LevelListing>>;

    /// Returns the size of each file in bytes; none for a missing file.
    fn sizes(&self, paths: &[String], interrupted: Interrupted<'_>) -> Result<Vec<Option<u64>>>;

    /// Opens a file, and returns it with its size in bytes; none if it does not exist.
    fn open(&self, path: &str, interrupted: Interrupted<'_>) -> Result<Option<Opened>>;

    /// Reads data files into the caller's memory; `caching` applies to files on a disk.
    fn read(
        &self,
        job: &ByteReadJob<'_>,
        caching: CachePolicy,
        interrupted: Interrupted<'_>,
    ) -> Result<()>;

    /// Returns the bad blocks of a data file, unsorted.
    fn verify(&self, check: &FileCheck<'_>, interrupted: Interrupted<'_>) -> Result<Vec<BadBlock>>;

    /// Writes a new data file; after an error no file remains.
    fn write(
        &self,
        path: &str,
        layout: &FileLayout,
        options: WriteOptions,
        interrupted: Interrupted<'_>,
    ) -> Result<FileRecord>;

    /// Starts a new file that is written in pieces.
    fn begin(
        &self,
        path: &str,
        file: NewFile,
        interrupted: Interrupted<'_>,
    ) -> Result<Box<dyn PieceWriter>>;

    /// Tests, before anything is written, whether the place can commit conditionally. A folder shows it at the
    /// commit.
    fn check_fence(&self, _save_id: &str, _interrupted: Interrupted<'_>) -> Result<()> {
        Ok(())
    }

    /// Writes the manifest under its final name, conditionally and durably.
    fn commit(&self, manifest: &ManifestWrite, interrupted: Interrupted<'_>) -> Result<()>;

    /// Removes hidden files that killed writers of `path` left beside it.
    fn sweep_beside(&self, _path: &str) {}
}

/// The removal of checkpoints, and of files that saves and conversions leave.
pub(crate) trait PlaceCleanup {
    /// Rejects a place that is itself a symbolic link.
    fn refuse_link(&self) -> Result<()> {
        Ok(())
    }

    /// Rejects paths and a data folder that lead through symbolic links.
    fn refuse_links(&self, _paths: &HashSet<String>) -> Result<()> {
        Ok(())
    }

    /// Removes a checkpoint: first the manifest, then its files. Returns false, with nothing removed, if it finds
    /// another manifest than `doomed` has.
    fn delete(&self, doomed: CheckpointToRemove, interrupted: Interrupted<'_>) -> Result<bool>;

    /// Removes data files, and their folders if these are then empty. Missing files are not an error.
    fn delete_files(&self, paths: &[String], interrupted: Interrupted<'_>) -> Result<()>;

    /// Returns whether a live process writes the file. An object appears only when complete, so it has no writer.
    fn has_writer(&self, _path: &str) -> bool {
        false
    }

    /// Returns the items inside a checkpoint's place that may be garbage.
    fn garbage(&self, interrupted: Interrupted<'_>) -> Result<Vec<LeftoverItem>>;

    /// Returns items outside the checkpoints' places that may be garbage, grouped by the name of the
    /// checkpoint; `.` for files that belong to no checkpoint.
    fn garbage_beside(
        &self,
        interrupted: Interrupted<'_>,
    ) -> Result<BTreeMap<String, Vec<LeftoverItem>>>;

    /// Removes garbage other than data files.
    fn sweep(
        &self,
        waste: &[(LeftoverItem, Duration)],
        is_partial: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<()>;
}

/// The manifest and the files of a checkpoint to be removed.
pub(crate) struct CheckpointToRemove {
    /// The first bytes of the manifest, at most [`HEAD_BYTES`](crate::manifest::HEAD_BYTES); none if there is none.
    pub(crate) start: Option<Vec<u8>>,
    /// The paths of all other files.
    pub(crate) paths: HashSet<String>,
}

/// A new file that is written in pieces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewFile {
    /// The size in bytes before compression.
    pub(crate) size: u64,
    /// Whether the file has this size, because it is not compressed.
    pub(crate) is_exact: bool,
    /// Whether it replaces a file of its name, in one step. An object always does.
    pub(crate) replaces: bool,
}

/// The first and the last bytes of a file, which overlap where it is short.
#[derive(Debug)]
pub(crate) struct FileEnds {
    /// The first bytes.
    pub(crate) start: Vec<u8>,
    /// The last bytes.
    pub(crate) end: Vec<u8>,
}

/// The result of [`PlaceFiles::peek`] for one folder.
pub(crate) struct FolderPeek {
    /// The first [`HEAD_BYTES`](crate::manifest::HEAD_BYTES) and the last
    /// [`TRAILER_BYTES`](crate::manifest::TRAILER_BYTES) of its manifest.
    pub(crate) manifest: Option<FileEnds>,
    /// Whether it has data files and no manifest.
    pub(crate) has_data: bool,
    /// The reason why it cannot be read.
    pub(crate) problem: Option<String>,
}

impl FolderPeek {
    /// Returns the outcome of a look at one folder.
    ///
    /// # Errors
    /// The errors that concern more than that folder.
    pub(crate) fn of(found: Result<(Option<FileEnds>, bool)>) -> Result<Self> {
        let (manifest, has_data, problem) = match found {
            Ok((manifest, has_data)) => (manifest, has_data, None),
            Err(error) if error.is_of_one_checkpoint() => (None, false, Some(error.to_string())),
            Err(error) => return Err(error),
        };
        Ok(Self {
            manifest,
            has_data,
            problem,
        })
    }
}

/// An open file with its size in bytes.
pub(crate) type Opened = (u64, Arc<dyn OpenFile>);

/// A file that is open for reads of byte ranges.
pub(crate) trait OpenFile: Send + Sync {
    /// Reads ranges inside the file; returns none if it is gone.
    fn read(
        &self,
        ranges: &[Range<u64>],
        interrupted: Interrupted<'_>,
    ) -> Result<Option<Vec<Vec<u8>>>>;
}

/// A file that is written in pieces. If it is dropped unfinished, nothing remains.
pub(crate) trait PieceWriter: Send {
    /// Appends bytes; after an error the file is abandoned.
    fn write(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<()>;

    /// Makes the file durable and gives it its final name.
    fn finish(self: Box<Self>, interrupted: Interrupted<'_>) -> Result<()>;
}
