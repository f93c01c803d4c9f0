//! Checkpoints on a disk, through system calls: direct I/O, hard links, locks.

mod commit;
mod local_file;
pub(crate) mod memory_file;
mod piece_file;
mod read;
mod removal;
mod shares;
mod write;

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hocket_store::durable::{open_regular, sweep};
use hocket_store::{LevelListing, Store};

use super::files::{FolderPeek, NewFile, OpenFile, Opened, PieceWriter, PlaceFiles};
use super::remote;
use crate::error::{CkptError, Result};
use crate::format::names::is_ours;
use crate::format::safetensors::FileLayout;
use crate::manifest::write::ManifestWrite;
use crate::manifest::{HEAD_BYTES, MANIFEST_NAME, TRAILER_BYTES};
use crate::read::byte_reads::ByteReadJob;
use crate::read::reader::CachePolicy;
use crate::read::verify::{BadBlock, FileCheck};
use crate::workers::{self, Interrupted};
use crate::write::written::{FileRecord, WriteOptions};
use local_file::{found, list_folder, read_ends, read_start};
use piece_file::PieceFile;

/// A folder.
#[derive(Debug)]
pub(crate) struct FolderPlace {
    uri: String,
    root: PathBuf,
    store: Store,
}

impl FolderPlace {
    pub(crate) fn new(uri: &str, root: &Path, store: &Store) -> Self {
        Self {
            uri: uri.to_owned(),
            root: root.to_owned(),
            store: store.clone(),
        }
    }
}

impl PlaceFiles for FolderPlace {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn get_start(&self, path: &str, limit: u64, _: Interrupted<'_>) -> Result<Option<Vec<u8>>> {
        read_start(&self.root.join(path), limit, "read the file")
    }

    fn has_data(&self, _: Interrupted<'_>) -> Result<bool> {
        has_data(&self.root)
    }

    fn folders(&self, _: Interrupted<'_>) -> Result<Vec<String>> {
        let mut folders = list_folder(&self.root)?
            .ok_or_else(|| CkptError::not_found(&self.uri, "there is no such folder"))?;
        folders.retain(|path| !path.is_symlink() && path.is_dir());
        Ok(folders.iter().map(|path| name_of(path)).collect())
    }

    fn peek(&self, folders: &[String], _: Interrupted<'_>) -> Result<Vec<FolderPeek>> {
        let look = |name: &String| {
            let root = self.root.join(name);
            let path = root.join(MANIFEST_NAME);
            let ends = read_ends(&path, HEAD_BYTES, TRAILER_BYTES, "read the file")?;
            let has_data = ends.is_none() && has_data(&root)?;
            Ok((ends, has_data))
        };
        folders.iter().map(look).map(FolderPeek::of).collect()
    }

    fn level(&self, interrupted: Interrupted<'_>) -> Result<Option<LevelListing>> {
        if !self.root.is_dir() {
            return Ok(None);
        }
        remote::level(&self.store, interrupted).map(Some)
    }

    fn sizes(&self, paths: &[String], _: Interrupted<'_>) -> Result<Vec<Option<u64>>> {
        let size = |path: &String| {
            let path = self.root.join(path);
            let metadata = found(path.metadata(), &path, "look at the file")?;
            Ok(metadata.map(|metadata| metadata.len()))
        };
        paths.iter().map(size).collect()
    }

    fn open(&self, path: &str, _: Interrupted<'_>) -> Result<Option<Opened>> {
        let path = self.root.join(path);
        let Some(file) = found(open_regular(&path), &path, "open the file")? else {
            return Ok(None);
        };
        let metadata = file
            .metadata()
            .map_err(|error| CkptError::io(&path, "look at the file", &error))?;
        Ok(Some((metadata.len(), Arc::new(OpenLocal { path, file }))))
    }

    fn read(
        &self,
        job: &ByteReadJob<'_>,
        caching: CachePolicy,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        read::read(&self.root, job, caching, interrupted)
    }

    fn verify(&self, check: &FileCheck<'_>, interrupted: Interrupted<'_>) -> Result<Vec<BadBlock>> {
        read::verify(&self.root, check, interrupted)
    }

    fn write(
        &self,
        path: &str,
        layout: &FileLayout,
        options: WriteOptions,
        interrupted: Interrupted<'_>,
    ) -> Result<FileRecord> {
        write::write(&self.root.join(path), layout, options, interrupted)
    }

    fn begin(&self, path: &str, file: NewFile, _: Interrupted<'_>) -> Result<Box<dyn PieceWriter>> {
        let reserved = if file.is_exact { file.size } else { 0 };
        let target = self.root.join(path);
        Ok(Box::new(PieceFile::create(
            &target,
            reserved,
            file.replaces,
        )?))
    }

    fn commit(&self, manifest: &ManifestWrite, interrupted: Interrupted<'_>) -> Result<()> {
        let (root, manifest) = (self.root.clone(), manifest.clone());
        // A flush cannot be cancelled: after an interrupt the commit may or may not take effect, as after a
        // kill.
        workers::detached(interrupted, move || commit::commit(&root, &manifest))
    }

    fn sweep_beside(&self, path: &str) {
        sweep(&self.root.join(path));
    }
}

fn has_data(root: &Path) -> Result<bool> {
    let Some(entries) = list_folder(&root.join("data"))? else {
        return Ok(false);
    };
    let is_alone = || Ok(list_folder(root)?.is_some_and(|all| all.len() == 1));
    match entries.as_slice() {
        [] => is_alone(),
        all => Ok(all
            .iter()
            .any(|path| is_ours(&format!("data/{}", name_of(path))))),
    }
}

/// Returns the last component of a path.
fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

struct OpenLocal {
    path: PathBuf,
    file: File,
}

impl OpenFile for OpenLocal {
    fn read(&self, ranges: &[Range<u64>], _: Interrupted<'_>) -> Result<Option<Vec<Vec<u8>>>> {
        let read = |range: &Range<u64>| {
            let mut bytes = vec![0_u8; (range.end - range.start) as usize];
            let read = self.file.read_exact_at(&mut bytes, range.start);
            read.map_err(|error| {
                let action = format!("read {} bytes at {}", bytes.len(), range.start);
                CkptError::io(&self.path, &action, &error)
            })?;
            Ok(bytes)
        };
        ranges.iter().map(read).collect::<Result<_>>().map(Some)
    }
}
