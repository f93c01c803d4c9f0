//! A sequential file writer, for checkpoints that are larger than memory.
//!
//! The file appears under its final name when it is complete, and never replaces another. An existing file is
//! compared with the incoming data: a file that an earlier run completed before it was killed is kept.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use hocket_store::Upload;
use hocket_store::durable::{
    Direct, SequentialWriter, hidden_path, mark_alive, sweep, sync_parent,
};

use crate::compress::FrameWriter;
use crate::digest::{BLOCK_BYTES, to_base64, xxh3_128};
use crate::error::{CkptError, NEVER_REPLACED, Result};
use crate::existing_file::ExistingFile;
use crate::file_names::is_plain_name;
use crate::local_file::create_folder;
use crate::location::{Kind, Location};
use crate::manifest::DataFile;
use crate::remote;
use crate::workers::{self, Interrupted};

/// Options of a sequential write.
#[derive(Debug, Clone, Copy, Default)]
pub struct StreamOptions {
    /// Size of the header in bytes; if set, the header and the blocks after it are hashed.
    pub data_start: Option<u64>,
    /// zstd level: the header and each block are written as one frame. Requires `data_start`.
    pub level: Option<i32>,
}

/// A file being written. If it is dropped unfinished, nothing remains.
pub struct StreamWriter {
    path: String,
    size: u64,
    written: u64,
    target: Option<Target>,
    digests: Option<Digests>,
}

enum Target {
    Local(Staged),
    Remote(Upload),
    ExistingFile(ExistingFile),
}

/// The result of a finished file.
#[derive(Debug)]
pub struct Streamed {
    /// Its manifest record, if digests were requested.
    pub file: Option<DataFile>,
}

impl StreamWriter {
    /// Starts `path` inside `place`, for exactly `size` bytes (before compression).
    ///
    /// # Errors
    /// `Exists` if a different file is there, `Invalid` for a path that is not plain, and errors of the disk or
    /// the store.
    pub fn create(
        location: &Location,
        path: &str,
        size: u64,
        options: StreamOptions,
        interrupted: Interrupted<'_>,
    ) -> Result<Self> {
        if path.is_empty() || !path.split('/').all(is_plain_name) {
            return Err(CkptError::Invalid(format!(
                "`{path}`: expected a plain relative path"
            )));
        }
        if let Kind::Local(root) = location.kind() {
            sweep(&root.join(path));
        }
        // The size of a compressed file is not known in advance.
        let expected = options.level.is_none().then_some(size);
        let target = match ExistingFile::find(location, path, expected, interrupted)? {
            Some(finished) => Target::ExistingFile(finished),
            None => Self::begin(location, path, size, expected.is_some(), interrupted)?,
        };
        Ok(Self {
            path: path.to_owned(),
            size,
            written: 0,
            target: Some(target),
            digests: options
                .data_start
                .map(|data_start| Digests::new(data_start, options.level))
                .transpose()?,
        })
    }

    fn begin(
        location: &Location,
        path: &str,
        size: u64,
        is_reserved: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<Target> {
        match location.kind() {
            Kind::Local(root) => {
                let reserved = if is_reserved { size } else { 0 };
                Ok(Target::Local(Staged::create(&root.join(path), reserved)?))
            }
            Kind::Remote(store) => {
                let (store, key) = (store.clone(), path.to_owned());
                let start = async move { Ok(store.upload(&key, Some(size)).await?) };
                Ok(Target::Remote(remote::wait(start, interrupted)?))
            }
        }
    }

    /// Returns whether the file existed already, so that the data is only compared with it.
    #[must_use]
    pub fn is_found(&self) -> bool {
        matches!(self.target, Some(Target::ExistingFile(_)))
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// `Exists` if the existing file differs, and errors of the disk or the store; the file is then abandoned.
    pub fn write(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<()> {
        self.written += bytes.len() as u64;
        if let Some(digests) = &mut self.digests {
            digests.update(bytes)?;
            if let Some(frames) = digests.take_frames() {
                return self.put(&frames, interrupted);
            }
        }
        self.put(bytes, interrupted)
    }

    fn put(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<()> {
        self.target = match self.target.take() {
            Some(Target::Local(mut staged)) => {
                staged.write(bytes)?;
                Some(Target::Local(staged))
            }
            Some(Target::Remote(upload)) => {
                let piece = Bytes::copy_from_slice(bytes);
                Some(Target::Remote(remote::send(upload, piece, interrupted)?))
            }
            Some(Target::ExistingFile(mut finished)) => {
                finished.compare(bytes, interrupted)?;
                Some(Target::ExistingFile(finished))
            }
            None => return Err(CkptError::Invalid(format!("`{}` was given up", self.path))),
        };
        Ok(())
    }

    /// Makes the file durable and gives it its final name.
    ///
    /// # Errors
    /// `Exists` if the name is taken by now, `Invalid` if bytes are missing, and errors of the disk or the
    /// store.
    pub fn finish(mut self, interrupted: Interrupted<'_>) -> Result<Streamed> {
        if self.written != self.size {
            return Err(CkptError::Invalid(format!(
                "`{}` was to have {} bytes and got {}",
                self.path, self.size, self.written
            )));
        }
        if let Some(digests) = &mut self.digests {
            digests.end()?;
            if let Some(frames) = digests.take_frames() {
                self.put(&frames, interrupted)?;
            }
        }
        match self.target.take() {
            Some(Target::Local(staged)) => {
                workers::detached(interrupted, move || staged.publish())?
            }
            Some(Target::Remote(upload)) => {
                remote::wait(async move { Ok(upload.finish().await?) }, interrupted)?;
            }
            Some(Target::ExistingFile(finished)) => finished.end()?,
            None => return Err(CkptError::Invalid(format!("`{}` was given up", self.path))),
        }
        let (path, size) = (self.path, self.size);
        Ok(Streamed {
            file: self.digests.map(|digests| digests.describe(path, size)),
        })
    }
}

fn taken(uri: String) -> CkptError {
    CkptError::Exists {
        uri,
        reason: NEVER_REPLACED.to_owned(),
    }
}

/// The running hashes, and optional compression, of header and blocks.
struct Digests {
    data_start: usize,
    header: Vec<u8>,
    block: Vec<u8>,
    digests: Vec<u8>,
    squeezer: Option<FrameWriter>,
}

impl Digests {
    fn new(data_start: u64, level: Option<i32>) -> Result<Self> {
        Ok(Self {
            data_start: data_start as usize,
            header: Vec::new(),
            block: Vec::new(),
            digests: Vec::new(),
            squeezer: level.map(FrameWriter::new).transpose()?,
        })
    }

    fn update(&mut self, bytes: &[u8]) -> Result<()> {
        let left = self.data_start - self.header.len();
        let (header, mut data) = bytes.split_at(left.min(bytes.len()));
        self.header.extend_from_slice(header);
        if let Some(squeezer) = &mut self.squeezer
            && !header.is_empty()
            && self.header.len() == self.data_start
        {
            squeezer.push(&self.header)?;
        }
        let block_bytes = BLOCK_BYTES as usize;
        while !data.is_empty() {
            if self.block.is_empty() && data.len() >= block_bytes {
                let (block, rest) = data.split_at(block_bytes);
                self.seal(block)?;
                data = rest;
                continue;
            }
            let (part, rest) = data.split_at((block_bytes - self.block.len()).min(data.len()));
            self.block.extend_from_slice(part);
            data = rest;
            if self.block.len() == block_bytes {
                self.end()?;
            }
        }
        Ok(())
    }

    /// Ends the current block with the data received so far.
    fn end(&mut self) -> Result<()> {
        let mut block = std::mem::take(&mut self.block);
        if !block.is_empty() {
            self.seal(&block)?;
            block.clear();
        }
        self.block = block;
        Ok(())
    }

    fn seal(&mut self, block: &[u8]) -> Result<()> {
        self.digests.extend(xxh3_128(block));
        match &mut self.squeezer {
            Some(squeezer) => squeezer.push(block),
            None => Ok(()),
        }
    }

    /// Returns the bytes to write in place of the input; none if the input is written unchanged.
    fn take_frames(&mut self) -> Option<Vec<u8>> {
        self.squeezer.as_mut().map(FrameWriter::take)
    }

    fn describe(self, path: String, size: u64) -> DataFile {
        DataFile {
            frames: self.squeezer.map(|squeezer| squeezer.lengths()),
            path,
            size,
            data_start: self.data_start as u64,
            header: to_base64(&xxh3_128(&self.header)),
            digests: to_base64(&self.digests),
        }
    }
}

/// A local file under a hidden name.
struct Staged {
    hidden: PathBuf,
    target: PathBuf,
    file: File,
    stream: Option<SequentialWriter>,
    pid: u32,
}

impl Staged {
    fn create(target: &Path, size: u64) -> Result<Self> {
        if target.symlink_metadata().is_ok() {
            return Err(taken(target.display().to_string()));
        }
        let folder = target.parent().unwrap_or(Path::new("."));
        create_folder(folder)?;
        let hidden = hidden_path(target);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&hidden)
            .map_err(|error| CkptError::io(&hidden, "create the file", &error))?;
        mark_alive(&file);
        let direct = Direct::open(&hidden, &file, size)
            .map_err(|error| CkptError::io(&hidden, "open the file again", &error))?;
        let staged = Self {
            hidden,
            target: target.to_owned(),
            file,
            stream: Some(SequentialWriter::new(direct)),
            pid: std::process::id(),
        };
        // Reserves the space, so that a full disk is reported before anything is written; some file systems do
        // not support it.
        match reserve(&staged.file, size.max(1)) {
            Err(error @ (rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT)) => {
                let action = format!("reserve {size} bytes");
                Err(CkptError::io(
                    &staged.hidden,
                    &action,
                    &io::Error::from(error),
                ))
            }
            _ => Ok(staged),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let outcome = match &mut self.stream {
            Some(stream) => stream.write(bytes),
            None => Ok(()),
        };
        outcome.map_err(|error| CkptError::io(&self.hidden, "write", &error))
    }

    fn publish(mut self) -> Result<()> {
        let written = self.stream.take().map_or(Ok(()), SequentialWriter::finish);
        written.map_err(|error| CkptError::io(&self.hidden, "write", &error))?;
        self.file
            .sync_all()
            .map_err(|error| CkptError::io(&self.hidden, "flush the file", &error))?;
        // A hard link, unlike a rename, fails if the name exists.
        std::fs::hard_link(&self.hidden, &self.target).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => taken(self.target.display().to_string()),
            _ => CkptError::io(&self.target, "link the file to its name", &error),
        })?;
        let _ = std::fs::remove_file(&self.hidden);
        Ok(sync_parent(&self.target)?)
    }
}

/// Reserves space, and leaves the length of the file as it is. Only Linux does both.
#[cfg(target_os = "linux")]
fn reserve(file: &File, size: u64) -> rustix::io::Result<()> {
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, size)
}

#[cfg(not(target_os = "linux"))]
fn reserve(_file: &File, _size: u64) -> rustix::io::Result<()> {
    Ok(())
}

impl Drop for Staged {
    fn drop(&mut self) {
        // Its threads end first, so that they do not write to the file after its removal.
        self.stream = None;
        // The copy in a forked child must not remove the parent's file.
        if self.pid != std::process::id() {
            return;
        }
        // Already gone if it was published.
        let _ = std::fs::remove_file(&self.hidden);
    }
}
