//! Writes of data files straight from the caller's memory.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use hocket_store::durable::{
    BUFFER_BYTES, Direct, PageBuffer, mark_alive, open_in_folder, sync_parent,
};

use crate::compress::{self, Compressed};
use crate::digest::{BLOCK_BYTES, DIGEST_BYTES, num_blocks, to_base64, xxh3_128};
use crate::error::{CkptError, NEVER_REPLACED, Result};
use crate::file_names::{BLOCKS_SUFFIX, is_data_path};
use crate::local_file::create_folder;
use crate::location::{Kind, Location};
use crate::manifest::DataFile;
use crate::remote;
use crate::safetensors::{Entry, Layout, lay_out};
use crate::workers::{self, Interrupted};

/// Limit of worker threads, each with one buffer: 32 MiB in total.
const MAX_WORKERS: usize = 8;

/// A file that was written: its manifest record, and the location of each entry in the data.
#[derive(Debug, Clone)]
pub struct Written {
    /// The manifest record.
    pub file: DataFile,
    /// Name, offset in the data, bytes.
    pub entries: Vec<(String, u64, u64)>,
}

/// Options for writing a data file.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// Whether to flush file and folder before returning.
    pub sync: bool,
    /// zstd level for a `.blocks` file; `None` for a plain safetensors file.
    pub level: Option<i32>,
    /// Whether to run at a lower CPU priority. For local files.
    pub background: bool,
}

/// Writes one data file of a checkpoint and computes its digests.
///
/// # Errors
/// `Exists` if `path` exists already, `Invalid` for a bad entry, path or level, and errors of the disk or the
/// store. After an error no file remains.
pub fn write_file(
    location: &Location,
    path: &str,
    entries: Vec<Entry>,
    metadata: &BTreeMap<String, String>,
    options: WriteOptions,
    interrupted: Interrupted<'_>,
) -> Result<Written> {
    check_arguments(path, options.level)?;
    let layout = lay_out(entries, metadata)?;
    let content = match (location.kind(), options.level) {
        (Kind::Local(root), _) => write_local(&root.join(path), &layout, options, interrupted)?,
        (Kind::Remote(store), None) => {
            Content::plain(remote::write(store, path, &layout, interrupted)?)
        }
        (Kind::Remote(store), Some(level)) => {
            compress::write_remote(store, path, &layout, level, interrupted)?.into()
        }
    };
    Ok(written(path, layout, content))
}

/// Returns the record that `write_file` would produce for these entries, without writing a file.
///
/// # Errors
/// `Invalid` for a bad entry, path or level.
pub fn describe_file(
    path: &str,
    entries: Vec<Entry>,
    metadata: &BTreeMap<String, String>,
    level: Option<i32>,
    interrupted: Interrupted<'_>,
) -> Result<Written> {
    check_arguments(path, level)?;
    let layout = lay_out(entries, metadata)?;
    if let Some(level) = level {
        let content = compress::describe(&layout, level, interrupted)?.into();
        return Ok(written(path, layout, content));
    }
    let mut digests = Vec::new();
    let mut block = vec![0_u8; BLOCK_BYTES as usize];
    for number in 0..num_blocks(layout.data_bytes) {
        let offset = number * BLOCK_BYTES;
        let length = (layout.data_bytes - offset).min(BLOCK_BYTES) as usize;
        layout.fill(offset, &mut block[..length]);
        digests.extend(xxh3_128(&block[..length]));
    }
    Ok(written(path, layout, Content::plain(digests)))
}

fn written(path: &str, layout: Layout, content: Content) -> Written {
    let data_start = layout.header.len() as u64;
    Written {
        file: DataFile {
            path: path.to_owned(),
            size: data_start + layout.data_bytes,
            data_start,
            header: to_base64(&xxh3_128(&layout.header)),
            digests: to_base64(&content.digests),
            frames: content.frames,
        },
        entries: layout
            .entries
            .into_iter()
            .map(|(offset, entry)| (entry.name, offset, entry.memory.bytes() as u64))
            .collect(),
    }
}

fn check_arguments(path: &str, level: Option<i32>) -> Result<()> {
    if !is_data_path(path) {
        return Err(CkptError::Invalid(format!(
            "`{path}`: expected a plain path below `data/`"
        )));
    }
    if path.ends_with(BLOCKS_SUFFIX) != level.is_some() {
        return Err(CkptError::Invalid(format!(
            "`{path}`: compressed files, and no others, end with `{BLOCKS_SUFFIX}`"
        )));
    }
    let levels = zstd::compression_level_range();
    match level {
        Some(level) if level == 0 || !levels.contains(&level) => Err(CkptError::Invalid(format!(
            "zstd has no level {level}; expected one from {} to {}, not 0",
            levels.start(),
            levels.end()
        ))),
        _ => Ok(()),
    }
}

/// The manifest's data about a file's bytes.
struct Content {
    digests: Vec<u8>,
    frames: Option<String>,
}

impl Content {
    fn plain(digests: Vec<u8>) -> Self {
        Self {
            digests,
            frames: None,
        }
    }
}

impl From<Compressed> for Content {
    fn from(compressed: Compressed) -> Self {
        let frames: Vec<u8> = compressed
            .frames
            .iter()
            .flat_map(|length| length.to_le_bytes())
            .collect();
        Self {
            digests: compressed.digests,
            frames: Some(to_base64(&frames)),
        }
    }
}

/// Creates the file and fills it; removes it if anything fails.
fn write_local(
    path: &Path,
    layout: &Layout,
    options: WriteOptions,
    interrupted: Interrupted<'_>,
) -> Result<Content> {
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
    layout: &Layout,
    options: WriteOptions,
    interrupted: Interrupted<'_>,
) -> Result<Content> {
    match options.level {
        Some(level) => {
            compress::write_local(path, file, layout, level, options.background, interrupted)
                .map(Content::from)
        }
        None => fill_plain(path, file, layout, options.background, interrupted).map(Content::plain),
    }
}

fn fill_plain(
    path: &Path,
    file: &File,
    layout: &Layout,
    background: bool,
    interrupted: Interrupted<'_>,
) -> Result<Vec<u8>> {
    let data_start = layout.header.len() as u64;
    let size = data_start + layout.data_bytes;
    preallocate(file, size)
        .map_err(|error| CkptError::io(path, &format!("reserve {size} bytes"), &error))?;
    file.write_all_at(&layout.header, 0)
        .map_err(|error| CkptError::io(path, "write the header", &error))?;
    let sink = Direct::open(path, file, layout.data_bytes)
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
                    Err(_) => {
                        return Err(CkptError::Invalid("another writer panicked".to_owned()));
                    }
                }
                Ok(())
            };
            let failed = |error: io::Error| {
                CkptError::io(path, &format!("write {length} bytes at {offset}"), &error)
            };
            let at = data_start + offset;
            if let Some(bytes) = layout.run(offset, length).filter(|bytes| sink.takes(bytes)) {
                store(bytes)?;
                return sink.write(bytes, length, at).map_err(failed);
            }
            let buffer = match copy {
                Some(buffer) => buffer,
                none => none.insert(
                    PageBuffer::new().map_err(|error| CkptError::process(error.to_string()))?,
                ),
            };
            layout.fill(offset, &mut buffer.bytes_mut()[..length]);
            store(&buffer.bytes()[..length])?;
            sink.write(buffer.padded(length), length, at)
                .map_err(failed)
        },
    )?;
    // A direct write of the tail writes whole pages.
    file.set_len(size)
        .map_err(|error| CkptError::io(path, "set the length", &error))?;
    digests
        .into_inner()
        .map_err(|_| CkptError::Invalid("a writer panicked".to_owned()))
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
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS | rustix::io::Errno::INVAL) => {
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}
