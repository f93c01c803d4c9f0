//! A file on a disk that is written in pieces.

use std::fs::File;
use std::io;
use std::path::Path;

use hocket_store::durable::{DirectFile, HiddenFile, SequentialWriter, sync_parent};

use super::local_file::create_folder;
use crate::error::{CkptError, NEVER_REPLACED, Result};
use crate::place::files::PieceWriter;
use crate::workers::{self, Interrupted};

/// A file written in pieces with direct I/O, under a hidden name until it is complete.
pub(super) struct PieceFile {
    /// Before `hidden`, so that the writer's threads end before the file is removed.
    stream: Option<SequentialWriter>,
    hidden: HiddenFile,
    replaces: bool,
}

impl PieceFile {
    pub(super) fn create(target: &Path, size: u64, replaces: bool) -> Result<Self> {
        if !replaces && target.symlink_metadata().is_ok() {
            return Err(taken(target));
        }
        create_folder(target.parent().unwrap_or(Path::new(".")))?;
        let hidden = HiddenFile::create(target)?;
        let direct = DirectFile::open(hidden.path(), hidden.file(), size)
            .map_err(|error| CkptError::io(hidden.path(), "open the file again", &error))?;
        // Reserves the space, so that a full disk is reported before anything is written; some file systems do
        // not support it.
        match reserve(hidden.file(), size.max(1)) {
            Err(error @ (rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT)) => {
                let action = format!("reserve {size} bytes");
                Err(CkptError::io(
                    hidden.path(),
                    &action,
                    &io::Error::from(error),
                ))
            }
            _ => Ok(Self {
                stream: Some(SequentialWriter::new(direct)),
                hidden,
                replaces,
            }),
        }
    }

    fn publish(mut self) -> Result<()> {
        let written = self.stream.take().map_or(Ok(()), SequentialWriter::finish);
        let (hidden, target) = (&self.hidden, self.hidden.target());
        written.map_err(|error| CkptError::io(hidden.path(), "write", &error))?;
        let flushed = hidden.file().sync_all();
        flushed.map_err(|error| CkptError::io(hidden.path(), "flush the file", &error))?;
        if self.replaces {
            hidden
                .replace()
                .map_err(|error| CkptError::io(target, "rename the file to its name", &error))?;
            return Ok(sync_parent(target)?);
        }
        let is_new = hidden
            .link_as_new()
            .map_err(|error| CkptError::io(target, "link the file to its name", &error))?;
        if !is_new {
            return Err(taken(target));
        }
        Ok(sync_parent(target)?)
    }
}

impl PieceWriter for PieceFile {
    fn write(&mut self, bytes: &[u8], _: Interrupted<'_>) -> Result<()> {
        let outcome = match &mut self.stream {
            Some(stream) => stream.write(bytes),
            None => Ok(()),
        };
        outcome.map_err(|error| CkptError::io(self.hidden.path(), "write", &error))
    }

    fn finish(self: Box<Self>, interrupted: Interrupted<'_>) -> Result<()> {
        workers::detached(interrupted, move || self.publish())
    }
}

fn taken(target: &Path) -> CkptError {
    CkptError::Exists {
        uri: target.display().to_string(),
        reason: NEVER_REPLACED.to_owned(),
    }
}

/// Reserves space without changing the length of the file. Only Linux supports this.
#[cfg(target_os = "linux")]
fn reserve(file: &File, size: u64) -> rustix::io::Result<()> {
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, size)
}

#[cfg(not(target_os = "linux"))]
fn reserve(_file: &File, _size: u64) -> rustix::io::Result<()> {
    Ok(())
}
