//! A file written front to back in pieces: what writes checkpoints that are larger than memory.
//!
//! It appears under its name when it is whole, and never in the place of another.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use hocket_store::Upload;

use crate::digest::{BLOCK_BYTES, to_base64, xxh3_128};
use crate::durable::sync_parent;
use crate::error::{CkptError, Result};
use crate::manifest::DataFile;
use crate::pace::{self, Interrupted};
use crate::place::{Kind, Place, found_remote, is_plain_name};
use crate::remote;
use crate::write::NEVER_REPLACED;

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
}

/// What a finished file was.
#[derive(Debug)]
pub struct Sunk {
    /// Its manifest record, where digests were asked for.
    pub file: Option<DataFile>,
}

impl Sink {
    /// Begins `path` inside `place`, of exactly `size` bytes. With `data_start`, header and blocks are hashed.
    ///
    /// # Errors
    /// `Exists` where the path is taken, `Invalid` for a path that is not plain, and what the disk or the store says.
    pub fn create(
        place: &Place,
        path: &str,
        size: u64,
        data_start: Option<u64>,
        interrupted: Interrupted<'_>,
    ) -> Result<Self> {
        if path.is_empty() || !path.split('/').all(is_plain_name) {
            return Err(CkptError::Invalid(format!(
                "`{path}`: expected a plain relative path"
            )));
        }
        let target = match place.kind() {
            Kind::Local(root) => Target::Local(Staged::create(&root.join(path), size)?),
            Kind::Remote(store) => {
                let (store, key) = (store.clone(), path.to_owned());
                let start = async move {
                    if found_remote(store.head(&key).await)?.is_some() {
                        return Err(taken(store.object_uri(&key)));
                    }
                    Ok(store.upload(&key, Some(size)).await?)
                };
                Target::Remote(remote::wait(start, interrupted)?)
            }
        };
        Ok(Self {
            path: path.to_owned(),
            size,
            written: 0,
            target: Some(target),
            digests: data_start.map(Digests::new),
        })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// What the disk or the store says; the file is then given up.
    pub fn write(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<()> {
        if let Some(digests) = &mut self.digests {
            digests.update(bytes);
        }
        self.written += bytes.len() as u64;
        self.target = match self.target.take() {
            Some(Target::Local(mut staged)) => {
                staged.write(bytes)?;
                Some(Target::Local(staged))
            }
            Some(Target::Remote(mut upload)) => {
                let piece = Bytes::copy_from_slice(bytes);
                let send = async move {
                    upload.write(piece).await?;
                    Ok(upload)
                };
                Some(Target::Remote(remote::wait(send, interrupted)?))
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
        match self.target.take() {
            Some(Target::Local(staged)) => pace::detached(interrupted, move || staged.publish())?,
            Some(Target::Remote(upload)) => {
                remote::wait(async move { Ok(upload.finish().await?) }, interrupted)?;
            }
            None => return Err(CkptError::Invalid(format!("`{}` was given up", self.path))),
        }
        let (path, size) = (self.path, self.size);
        Ok(Sunk {
            file: self.digests.map(|digests| digests.finish(path, size)),
        })
    }
}

fn taken(uri: String) -> CkptError {
    CkptError::Exists {
        uri,
        reason: NEVER_REPLACED.to_owned(),
    }
}

/// Header and blocks, hashed as they pass.
struct Digests {
    data_start: usize,
    header: Vec<u8>,
    block: Vec<u8>,
    digests: Vec<u8>,
}

impl Digests {
    fn new(data_start: u64) -> Self {
        Self {
            data_start: data_start as usize,
            header: Vec::new(),
            block: Vec::new(),
            digests: Vec::new(),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        let left = self.data_start - self.header.len();
        let (header, mut data) = bytes.split_at(left.min(bytes.len()));
        self.header.extend_from_slice(header);
        let block_bytes = BLOCK_BYTES as usize;
        while !data.is_empty() {
            if self.block.is_empty() && data.len() >= block_bytes {
                let (block, rest) = data.split_at(block_bytes);
                self.digests.extend(xxh3_128(block));
                data = rest;
                continue;
            }
            let (part, rest) = data.split_at((block_bytes - self.block.len()).min(data.len()));
            self.block.extend_from_slice(part);
            data = rest;
            if self.block.len() == block_bytes {
                self.digests.extend(xxh3_128(&self.block));
                self.block.clear();
            }
        }
    }

    fn finish(mut self, path: String, size: u64) -> DataFile {
        if !self.block.is_empty() {
            self.digests.extend(xxh3_128(&self.block));
        }
        DataFile {
            frames: None,
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
        let hidden = folder.join(format!(
            ".{}.{}.unfinished",
            name.unwrap_or_default(),
            std::process::id()
        ));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&hidden)
            .map_err(|error| CkptError::io(&hidden, "create the file", &error))?;
        let staged = Self {
            hidden,
            target: target.to_owned(),
            file,
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
        self.file
            .write_all(bytes)
            .map_err(|error| CkptError::io(&self.hidden, "write", &error))
    }

    fn publish(self) -> Result<()> {
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
        // Gone already where it was published.
        let _ = std::fs::remove_file(&self.hidden);
    }
}
