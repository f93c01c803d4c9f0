//! The interface implemented by folders on a disk and by prefixes of an object store.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hocket_store::Listing;

use super::leftovers::Found;
use crate::error::Result;
use crate::format::safetensors::Layout;
use crate::manifest::write::ManifestWrite;
use crate::read::byte_reads::Job;
use crate::read::reader::Caching;
use crate::read::verify::{Bad, Check};
use crate::workers::Interrupted;
use crate::write::written::{Content, WriteOptions};

/// The location of one or several checkpoints. The caller has checked the paths. An implementation holds no
/// client and may be kept across a fork.
pub(crate) trait Files: Removal + Debug + Send + Sync {
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
    fn peek(&self, folders: &[String], interrupted: Interrupted<'_>) -> Result<Vec<Peek>>;

    /// Returns the files and folders directly inside the location, including links; none if there is no such
    /// folder.
    fn level(&self, interrupted: Interrupted<'_>) -> Result<Option<Listing>>;

    /// Returns the size of each file in bytes; none for a missing file.
    fn sizes(&self, paths: &[String], interrupted: Interrupted<'_>) -> Result<Vec<Option<u64>>>;

    /// Opens a file, and returns it with its size in bytes; none if it does not exist.
    fn open(&self, path: &str, interrupted: Interrupted<'_>) -> Result<Option<Opened>>;

    /// Reads data files into the caller's memory; `caching` applies to files on a disk.
    fn read(&self, job: &Job<'_>, caching: Caching, interrupted: Interrupted<'_>) -> Result<()>;

    /// Returns the bad blocks of a data file, unsorted.
    fn verify(&self, check: &Check<'_>, interrupted: Interrupted<'_>) -> Result<Vec<Bad>>;

    /// Writes a new data file; after an error no file remains.
    fn write(
        &self,
        path: &str,
        layout: &Layout,
        options: WriteOptions,
        interrupted: Interrupted<'_>,
    ) -> Result<Content>;

    /// Starts a new file that is written in pieces.
    fn begin(
        &self,
        path: &str,
        file: NewFile,
        interrupted: Interrupted<'_>,
    ) -> Result<Box<dyn Target>>;

    /// Writes the manifest under its final name, conditionally and durably.
    fn commit(&self, manifest: &ManifestWrite, interrupted: Interrupted<'_>) -> Result<()>;

    /// Removes hidden files that killed writers of `path` left beside it.
    fn sweep_beside(&self, _path: &str) {}
}

/// The removal of checkpoints, and of files that saves and conversions leave.
pub(crate) trait Removal {
    /// Rejects a location that is itself a symbolic link.
    fn refuse_link(&self) -> Result<()> {
        Ok(())
    }

    /// Rejects paths and a data folder that lead through symbolic links.
    fn refuse_links(&self, _paths: &HashSet<String>) -> Result<()> {
        Ok(())
    }

    /// Removes a checkpoint: first the manifest, then its files. Returns false, with nothing removed, if it finds
    /// another manifest than `doomed` has.
    fn delete(&self, doomed: Doomed, interrupted: Interrupted<'_>) -> Result<bool>;

    /// Removes data files, and their folders if these are then empty. Missing files are not an error.
    fn delete_files(&self, paths: &[String], interrupted: Interrupted<'_>) -> Result<()>;

    /// Returns whether a live process writes the file. An object appears only when complete, so it has no writer.
    fn has_writer(&self, _path: &str) -> bool {
        false
    }

    /// Returns the items inside a checkpoint's location that may be garbage.
    fn garbage(&self, interrupted: Interrupted<'_>) -> Result<Vec<Found>>;

    /// Returns items outside the checkpoints' locations that may be garbage, grouped by the name of the
    /// checkpoint; `.` for files that belong to no checkpoint.
    fn garbage_beside(&self, interrupted: Interrupted<'_>) -> Result<BTreeMap<String, Vec<Found>>>;

    /// Removes garbage other than data files.
    fn sweep(
        &self,
        waste: &[(Found, Duration)],
        is_partial: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<()>;
}

/// The manifest and the files of a checkpoint to be removed.
pub(crate) struct Doomed {
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

/// The result of [`Files::peek`] for one folder.
pub(crate) struct Peek {
    /// The start of its manifest.
    pub(crate) start: Option<Vec<u8>>,
    /// Whether it has data files and no manifest.
    pub(crate) has_data: bool,
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
pub(crate) trait Target: Send {
    /// Appends bytes; after an error the file is abandoned.
    fn write(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<()>;

    /// Makes the file durable and gives it its final name.
    fn finish(self: Box<Self>, interrupted: Interrupted<'_>) -> Result<()>;
}
