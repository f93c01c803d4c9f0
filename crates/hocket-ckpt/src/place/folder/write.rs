//! Writes of data files on a disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use hocket_store::durable::{
    BUFFER_BYTES, DirectFile, PageBuffer, mark_alive, open_in_folder, sync_parent,
};

use super::local_file::{create_folder, is_unsupported};
use crate::error::{CkptError, NEVER_REPLACED, Result};
use crate::format::digest::{BLOCK_BYTES, DIGEST_BYTES, num_blocks, xxh3_128};
use crate::format::safetensors::FileLayout;
use crate::workers::{self, Interrupted};
use crate::write::compress::{self, BlockEncoding, CompressedFile};
use crate::write::written::{FileRecord, WriteOptions};

/// Limit of worker threads, each with one buffer: 32 MiB in total.
const MAX_WORKERS: usize = 8;

/// Creates the file and fills it; removes it if anything fails.
pub(super) fn write(
    path: &Path,
    layout: &FileLayout,
    options: WriteOptions,
    interrupted: Interrupted<'_>,
) -> Result<FileRecord> {
    let folder = path.parent().unwrap_or(Path::new("."));
    create_folder(folder)?;
    // A failed save may remove its empty folder at the same time.
    let mut new = OpenOptions::new();
    let file =
        open_in_folder(path, new.write(true).create_new(true)).map_err(|failed| {
            match failed.error.kind() {
                io::ErrorKind::AlreadyExists => CkptError::Exists {
                    uri: path.display().to_string(),
                    reason: NEVER_REPLACED.to_owned(),
                },
                _ => failed.into(),
            }
        })?;
    mark_alive(&file);
    let outcome = fill(path, &file, layout, options, interrupted).and_then(|content| {
        if options.sync {
            flush(path.to_owned(), file, interrupted)?;
        }
        Ok(content)
    });
    if outcome.is_err() {
        // The first error is reported; a file that remains is found as an orphan.
        let _ = std::fs::remove_file(path);
    }
    outcome
}

fn fill(
    path: &Path,
    file: &File,
    layout: &FileLayout,
    options: WriteOptions,
    interrupted: Interrupted<'_>,
) -> Result<FileRecord> {
    match options.encoding {
        Some(encoding) => compress_into(
            path,
            file,
            layout,
            encoding,
            options.background,
            interrupted,
        )
        .map(FileRecord::from),
        None => {
            fill_plain(path, file, layout, options.background, interrupted).map(FileRecord::plain)
        }
    }
}

fn fill_plain(
    path: &Path,
    file: &File,
    layout: &FileLayout,
    background: bool,
    interrupted: Interrupted<'_>,
) -> Result<Vec<u8>> {
    let data_start = layout.header.len() as u64;
    let size = data_start + layout.data_bytes;
    preallocate(file, size)
        .map_err(|error| CkptError::io(path, &format!("reserve {size} bytes"), &error))?;
    file.write_all_at(&layout.header, 0)
        .map_err(|error| CkptError::io(path, "write the header", &error))?;
    let direct = DirectFile::open(path, file, layout.data_bytes)
        .map_err(|error| CkptError::io(path, "open the file again", &error))?;
    let digests = Mutex::new(vec![
        0_u8;
        num_blocks(layout.data_bytes) as usize * DIGEST_BYTES
    ]);
    let pieces = layout.data_bytes.div_ceil(BUFFER_BYTES as u64) as usize;
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    workers::run(
        MAX_WORKERS.min(cores * 2),
        pieces,
        interrupted,
        || {
            if background {
                workers::give_way();
            }
            Ok(None)
        },
        |copy: &mut Option<PageBuffer>, index| {
            let offset = (index * BUFFER_BYTES) as u64;
            let length = (layout.data_bytes - offset).min(BUFFER_BYTES as u64) as usize;
            let store = |bytes: &[u8]| {
                let blocks: Vec<u8> = bytes
                    .chunks(BLOCK_BYTES as usize)
                    .flat_map(xxh3_128)
                    .collect();
                let at = (offset / BLOCK_BYTES) as usize * DIGEST_BYTES;
                match digests.lock() {
                    Ok(mut digests) => digests[at..at + blocks.len()].copy_from_slice(&blocks),
                    Err(_) => return Err(CkptError::panicked("another writer")),
                }
                Ok(())
            };
            let failed = |error: io::Error| {
                CkptError::io(path, &format!("write {length} bytes at {offset}"), &error)
            };
            let at = data_start + offset;
            if let Some(bytes) = layout
                .run(offset, length)
                .filter(|bytes| direct.takes(bytes))
            {
                store(bytes)?;
                return direct.write(bytes, length, at).map_err(failed);
            }
            let buffer = match copy {
                Some(buffer) => buffer,
                none => none.insert(
                    PageBuffer::new().map_err(|error| CkptError::process(error.to_string()))?,
                ),
            };
            layout.fill(offset, &mut buffer.bytes_mut()[..length]);
            store(&buffer.bytes()[..length])?;
            direct
                .write(buffer.padded(length), length, at)
                .map_err(failed)
        },
    )?;
    // A direct write of the tail writes whole pages.
    file.set_len(size)
        .map_err(|error| CkptError::io(path, "set the length", &error))?;
    digests
        .into_inner()
        .map_err(|_| CkptError::panicked("a writer"))
}

/// Flushes file and folder; after an interrupt the flush finishes in the background.
fn flush(path: PathBuf, file: File, interrupted: Interrupted<'_>) -> Result<()> {
    workers::detached(interrupted, move || {
        file.sync_all()
            .map_err(|error| CkptError::io(&path, "flush the file", &error))?;
        Ok(sync_parent(&path)?)
    })
}

/// Reserves space for the whole file, so that a full disk is reported before anything is written.
fn preallocate(file: &File, size: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, size) {
        Ok(()) => Ok(()),
        // Some file systems do not support this; the writes report a full disk instead.
        Err(error) if is_unsupported(error) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Compresses into a new file; the caller flushes it.
fn compress_into(
    path: &Path,
    mut file: &File,
    layout: &FileLayout,
    encoding: BlockEncoding,
    background: bool,
    interrupted: Interrupted<'_>,
) -> Result<CompressedFile> {
    compress::compress(layout, encoding, background, interrupted, |bytes| {
        file.write_all(&bytes)
            .map_err(|error| CkptError::io(path, &format!("write {} bytes", bytes.len()), &error))
    })
}
