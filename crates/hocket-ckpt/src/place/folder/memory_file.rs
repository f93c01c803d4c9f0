//! A data file in shared memory that is written again and again.
//!
//! The first access to a page of memory costs as much as filling it, and so does giving it back. A file that keeps its
//! pages and its mapping between saves is filled as fast as other memory is.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use hocket_store::durable::BUFFER_BYTES;
use memmap2::{MmapMut, MmapOptions};

use super::local_file::create_folder;
use crate::error::{CkptError, NEVER_REPLACED, Result};
use crate::format::digest::{BLOCK_BYTES, DIGEST_BYTES, xxh3_128};
use crate::format::names::is_data_path;
use crate::format::safetensors::{CallerMemory, FileLayout, TensorEntry, lay_out};
use crate::workers::{self, Interrupted};
use crate::write::written::{FileRecord, WrittenDataFile};

const MAX_WORKERS: usize = 8;

/// A file in shared memory: [`fill`](Self::fill) copies tensors into it, [`publish`](Self::publish) makes it the data
/// file of a checkpoint. It may be filled again once that checkpoint is removed.
pub struct MemoryFile {
    path: PathBuf,
    file: File,
    map: Option<MmapMut>,
    filled: Option<FileLayout>,
    process: u32,
}

impl MemoryFile {
    /// Creates the file; returns none where a folder is not in memory, since a write to a mapping ends the process
    /// with SIGBUS if a disk fails or is full.
    ///
    /// # Errors
    /// Errors of the file system, such as a file of that name.
    pub fn create(path: &Path) -> Result<Option<Self>> {
        create_folder(path.parent().unwrap_or(Path::new(".")))?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|error| CkptError::io(path, "create the file", &error))?;
        if !is_in_memory(&file) {
            let removed = std::fs::remove_file(path);
            removed.map_err(|error| CkptError::io(path, "remove the file", &error))?;
            return Ok(None);
        }
        Ok(Some(Self {
            path: path.to_owned(),
            file,
            map: None,
            filled: None,
            process: std::process::id(),
        }))
    }

    /// Copies tensors into the file, and returns the address of each copy, in the order of the file.
    ///
    /// # Errors
    /// `Invalid` for a bad entry, and a full memory.
    pub fn fill(
        &mut self,
        entries: Vec<TensorEntry>,
        metadata: &BTreeMap<String, String>,
        interrupted: Interrupted<'_>,
    ) -> Result<Vec<usize>> {
        self.filled = None;
        let mut layout = lay_out(entries, metadata)?;
        let start = layout.header.len();
        let map = self.resized(start + layout.data_bytes as usize)?;
        let (header, data) = map.split_at_mut(start);
        header.copy_from_slice(&layout.header);
        let address = data.as_ptr() as usize;
        let pieces: Vec<_> = data.chunks_mut(BUFFER_BYTES).map(Mutex::new).collect();
        let source = &layout;
        run(pieces.len(), false, interrupted, |index| {
            let mut piece = pieces[index].lock().unwrap_or_else(PoisonError::into_inner);
            source.fill((index * BUFFER_BYTES) as u64, &mut piece);
            Ok(())
        })?;
        for (offset, entry) in &mut layout.entries {
            let bytes = entry.memory.bytes();
            // SAFETY: within the mapping, which `self` owns and does not write until it is filled again, and then it
            // has dropped these.
            entry.memory = unsafe { CallerMemory::new(address + *offset as usize, bytes) };
        }
        let offsets = layout.entries.iter();
        let addresses = offsets
            .map(|(offset, _)| address + *offset as usize)
            .collect();
        self.filled = Some(layout);
        Ok(addresses)
    }

    /// Computes the digests, at a lower CPU priority, and gives the file its name in a checkpoint as well.
    ///
    /// # Errors
    /// `Invalid` if the file is not filled or the path is not that of a data file, `Exists` if there is a file of that
    /// name.
    pub fn publish(
        &mut self,
        root: &Path,
        path: &str,
        interrupted: Interrupted<'_>,
    ) -> Result<WrittenDataFile> {
        let target = root.join(path);
        let (Some(layout), Some(map)) = (&self.filled, &self.map) else {
            return Err(CkptError::Invalid(format!(
                "`{}` is not filled",
                self.path.display()
            )));
        };
        if !is_data_path(path) {
            return Err(CkptError::Invalid(format!(
                "`{path}`: expected a plain path below `data/`"
            )));
        }
        let pieces: Vec<_> = map[layout.header.len()..].chunks(BUFFER_BYTES).collect();
        let digests: Vec<_> = pieces.iter().map(|_| Mutex::new(Vec::new())).collect();
        run(pieces.len(), true, interrupted, |index| {
            let mut own = digests[index]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            own.reserve(BUFFER_BYTES / BLOCK_BYTES as usize * DIGEST_BYTES);
            own.extend(
                pieces[index]
                    .chunks(BLOCK_BYTES as usize)
                    .flat_map(xxh3_128),
            );
            Ok(())
        })?;
        let digests = digests
            .into_iter()
            .flat_map(|own| own.into_inner().unwrap_or_else(PoisonError::into_inner));
        let content = FileRecord::plain(digests.collect());
        create_folder(target.parent().unwrap_or(root))?;
        std::fs::hard_link(&self.path, &target).map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => CkptError::Exists {
                uri: target.display().to_string(),
                reason: NEVER_REPLACED.to_owned(),
            },
            _ => CkptError::io(&target, "link the file to its name", &error),
        })?;
        let layout = self.filled.take();
        let layout = layout.ok_or_else(|| CkptError::panicked("a fill"))?;
        Ok(WrittenDataFile::of(path, layout, content))
    }

    /// Returns the mapping of the file at a size.
    fn resized(&mut self, size: usize) -> Result<&mut MmapMut> {
        let map = match self.map.take() {
            Some(map) if map.len() == size => map,
            old => {
                // The end of a mapping beyond its file must not be touched.
                drop(old);
                let failed =
                    |error| CkptError::io(&self.path, &format!("reserve {size} bytes"), &error);
                self.file.set_len(size as u64).map_err(failed)?;
                // Without its pages reserved, a full memory would end the process with SIGBUS.
                let flags = rustix::fs::FallocateFlags::empty();
                rustix::fs::fallocate(&self.file, flags, 0, size as u64)
                    .map_err(|error| failed(error.into()))?;
                // SAFETY: the file is this process's own, under a name that no other writes or shortens.
                unsafe { MmapOptions::new().len(size).map_mut(&self.file) }.map_err(failed)?
            }
        };
        Ok(self.map.insert(map))
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        // The checkpoint that has it keeps it under its own name; a forked child leaves it to its parent.
        if self.process == std::process::id() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn run(
    count: usize,
    background: bool,
    interrupted: Interrupted<'_>,
    job: impl Fn(usize) -> Result<()> + Sync,
) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let start = || {
        if background {
            workers::give_way();
        }
        Ok(())
    };
    workers::run(
        MAX_WORKERS.min(cores),
        count,
        interrupted,
        start,
        |(), index| job(index),
    )
}

/// Returns whether a file is in memory, as those of `/dev/shm` are. Only Linux tells.
#[cfg(target_os = "linux")]
fn is_in_memory(file: &File) -> bool {
    const TMPFS: rustix::fs::FsWord = 0x0102_1994;
    rustix::fs::fstatfs(file).is_ok_and(|system| system.f_type == TMPFS)
}

#[cfg(not(target_os = "linux"))]
fn is_in_memory(_file: &File) -> bool {
    false
}
