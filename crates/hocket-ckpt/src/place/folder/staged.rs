//! A file written in pieces under a hidden name.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use hocket_store::durable::{
    DirectFile, SequentialWriter, create_hidden, link_as_new, sync_parent,
};

use super::local_file::create_folder;
use crate::error::{CkptError, NEVER_REPLACED, Result};
use crate::place::files::PieceWriter;
use crate::workers::{self, Interrupted};

/// A local file under a hidden name.
pub(super) struct StagedFile {
    hidden: PathBuf,
    target: PathBuf,
    file: File,
    stream: Option<SequentialWriter>,
    replaces: bool,
    pid: u32,
}

impl StagedFile {
    pub(super) fn create(target: &Path, size: u64, replaces: bool) -> Result<Self> {
        if !replaces && target.symlink_metadata().is_ok() {
            return Err(taken(target));
        }
        create_folder(target.parent().unwrap_or(Path::new(".")))?;
        let (hidden, file) = create_hidden(target)?;
        let direct = DirectFile::open(&hidden, &file, size)
            .map_err(|error| CkptError::io(&hidden, "open the file again", &error))?;
        let staged = Self {
            hidden,
            target: target.to_owned(),
            file,
            stream: Some(SequentialWriter::new(direct)),
            replaces,
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

    fn publish(mut self) -> Result<()> {
        let written = self.stream.take().map_or(Ok(()), SequentialWriter::finish);
        written.map_err(|error| CkptError::io(&self.hidden, "write", &error))?;
        self.file
            .sync_all()
            .map_err(|error| CkptError::io(&self.hidden, "flush the file", &error))?;
        if self.replaces {
            std::fs::rename(&self.hidden, &self.target).map_err(|error| {
                CkptError::io(&self.target, "rename the file to its name", &error)
            })?;
            return Ok(sync_parent(&self.target)?);
        }
        let is_new = link_as_new(&self.hidden, &self.target)
            .map_err(|error| CkptError::io(&self.target, "link the file to its name", &error))?;
        if !is_new {
            return Err(taken(&self.target));
        }
        Ok(sync_parent(&self.target)?)
    }
}

impl PieceWriter for StagedFile {
    fn write(&mut self, bytes: &[u8], _: Interrupted<'_>) -> Result<()> {
        let outcome = match &mut self.stream {
            Some(stream) => stream.write(bytes),
            None => Ok(()),
        };
        outcome.map_err(|error| CkptError::io(&self.hidden, "write", &error))
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

impl Drop for StagedFile {
    fn drop(&mut self) {
        // The writer's threads end first, so that they do not write to the file after its removal.
        self.stream = None;
        // The copy in a forked child must not remove the parent's file.
        if self.pid != std::process::id() {
            return;
        }
        // Already gone if it was published.
        let _ = std::fs::remove_file(&self.hidden);
    }
}
