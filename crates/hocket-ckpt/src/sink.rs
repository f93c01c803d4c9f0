//! A file written front to back in pieces: what writes checkpoints that are larger than memory.
//!
//! It appears under its name when it is whole, and never in the place of another. A file that stands there already is
//! compared with what comes: the one that an earlier run finished before it was killed is good as it is.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use hocket_store::Upload;
use hocket_store::direct::Direct;

use crate::digest::{BLOCK_BYTES, to_base64, xxh3_128};
use crate::durable::sync_parent;
use crate::error::{CkptError, Result};
use crate::finished::Finished;
use crate::leftover;
use crate::manifest::DataFile;
use crate::pace::{self, Interrupted};
use crate::place::{Kind, Place, is_plain_name};
use crate::remote;
use crate::squeeze::Squeezer;
use crate::stream::Stream;
use crate::write::NEVER_REPLACED;

/// How a file is written in pieces.
#[derive(Debug, Clone, Copy, Default)]
pub struct SinkOptions {
    /// Bytes of the header, where it and the blocks behind it are to be hashed.
    pub data_start: Option<u64>,
    /// zstd's level: header and blocks are written as a frame each. Only where they are hashed.
    pub level: Option<i32>,
}

/// A file under construction. Dropped unfinished, it leaves nothing.
pub struct Sink {
    path: String,
    size: u64,
    written: u64,
    target: Option<Target>,
    digests: Option<Digests>,
}

enum Target {
    Local(Staged),
    Remote(Upload),
    Finished(Finished),
}

/// What a finished file was.
#[derive(Debug)]
pub struct Sunk {
    /// Its manifest record, where digests were asked for.
    pub file: Option<DataFile>,
}

impl Sink {
    /// Begins `path` inside `place`, to which exactly `size` bytes will come (before they are compressed).
    ///
    /// # Errors
    /// `Exists` where another file stands there, `Invalid` for a path that is not plain, and what the disk or the store
    /// says.
    pub fn create(
        place: &Place,
        path: &str,
        size: u64,
        options: SinkOptions,
        interrupted: Interrupted<'_>,
    ) -> Result<Self> {
        if path.is_empty() || !path.split('/').all(is_plain_name) {
            return Err(CkptError::Invalid(format!(
                "`{path}`: expected a plain relative path"
            )));
        }
        if let Kind::Local(root) = place.kind() {
            leftover::sweep(&root.join(path));
        }
        // What a compressed file will have is not known before.
        let expected = options.level.is_none().then_some(size);
        let target = match Finished::find(place, path, expected, interrupted)? {
            Some(finished) => Target::Finished(finished),
            None => Self::begin(place, path, size, expected.is_some(), interrupted)?,
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
        place: &Place,
        path: &str,
        size: u64,
        is_reserved: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<Target> {
        match place.kind() {
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

    /// Whether the file stood there already, so that what comes is only compared with it.
    #[must_use]
    pub fn is_found(&self) -> bool {
        matches!(self.target, Some(Target::Finished(_)))
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// `Exists` where the file that stands there differs, and what the disk or the store says; the file is then given up.
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
            Some(Target::Finished(mut finished)) => {
                finished.compare(bytes, interrupted)?;
                Some(Target::Finished(finished))
            }
            None => return Err(CkptError::Invalid(format!("`{}` was given up", self.path))),
        };
        Ok(())
    }

    /// Makes the file durable and gives it its name.
    ///
    /// # Errors
    /// `Exists` where the name was taken meanwhile, `Invalid` where not all bytes came, and what the disk or the store
    /// says.
    pub fn finish(mut self, interrupted: Interrupted<'_>) -> Result<Sunk> {
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
            Some(Target::Local(staged)) => pace::detached(interrupted, move || staged.publish())?,
            Some(Target::Remote(upload)) => {
                remote::wait(async move { Ok(upload.finish().await?) }, interrupted)?;
            }
            Some(Target::Finished(finished)) => finished.end()?,
            None => return Err(CkptError::Invalid(format!("`{}` was given up", self.path))),
        }
        let (path, size) = (self.path, self.size);
        Ok(Sunk {
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

/// Header and blocks, hashed and perhaps compressed as they pass.
struct Digests {
    data_start: usize,
    header: Vec<u8>,
    block: Vec<u8>,
    digests: Vec<u8>,
    squeezer: Option<Squeezer>,
}

impl Digests {
    fn new(data_start: u64, level: Option<i32>) -> Result<Self> {
        Ok(Self {
            data_start: data_start as usize,
            header: Vec::new(),
            block: Vec::new(),
            digests: Vec::new(),
            squeezer: level.map(Squeezer::new).transpose()?,
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

    /// Takes what has come of the current block for all of it.
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

    /// What is to be written in place of what came; none where that is written as it is.
    fn take_frames(&mut self) -> Option<Vec<u8>> {
        self.squeezer.as_mut().map(Squeezer::take)
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
    stream: Option<Stream>,
    pid: u32,
}

impl Staged {
    fn create(target: &Path, size: u64) -> Result<Self> {
        if target.symlink_metadata().is_ok() {
            return Err(taken(target.display().to_string()));
        }
        let folder = target.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)
            .map_err(|error| CkptError::io(folder, "make the folder", &error))?;
        let name = target
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        let name = name.unwrap_or_default();
        let hidden = folder.join(leftover::hidden_name(&name));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&hidden)
            .map_err(|error| CkptError::io(&hidden, "create the file", &error))?;
        leftover::mark_alive(&file);
        let direct = Direct::open(&hidden, &file, size)
            .map_err(|error| CkptError::io(&hidden, "open the file again", &error))?;
        let staged = Self {
            hidden,
            target: target.to_owned(),
            file,
            stream: Some(Stream::new(direct)),
            pid: std::process::id(),
        };
        // A full disk is told before anything is written; not every file system can say.
        match rustix::fs::fallocate(
            &staged.file,
            rustix::fs::FallocateFlags::KEEP_SIZE,
            0,
            size.max(1),
        ) {
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
        let written = self.stream.take().map_or(Ok(()), Stream::finish);
        written.map_err(|error| CkptError::io(&self.hidden, "write", &error))?;
        self.file
            .sync_all()
            .map_err(|error| CkptError::io(&self.hidden, "flush the file", &error))?;
        // A link, unlike a rename, refuses a name that is taken.
        std::fs::hard_link(&self.hidden, &self.target).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => taken(self.target.display().to_string()),
            _ => CkptError::io(&self.target, "link the file to its name", &error),
        })?;
        let _ = std::fs::remove_file(&self.hidden);
        sync_parent(&self.target)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // Its threads first: what they write after that would be nobody's.
        self.stream = None;
        // A forked child's copy must not take its parent's file away.
        if self.pid != std::process::id() {
            return;
        }
        // Gone already where it was published.
        let _ = std::fs::remove_file(&self.hidden);
    }
}
