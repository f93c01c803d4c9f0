//! Atomic writes of local files: a file appears under its final name complete or not at all.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hocket_store::Interrupted;
use hocket_store::durable::{
    DirectFile, DurableError, is_same_file, open_in_folder, sync_parent, try_lock, unlock,
};

use crate::error::{Result, StreamError};
use crate::shard::raw_file::AssembledFile;

const LOCK_POLL: Duration = Duration::from_millis(20);

/// An unfinished file, `.<name>.part` beside its target, held by a kernel lock.
///
/// The lock is on the part itself: it ends with the process that holds it, and the next process to take it
/// starts over in the same file. No lock files are left behind, and of several processes that need the same
/// target, one creates it while the others wait.
#[derive(Debug)]
pub struct UnfinishedFile {
    file: File,
    path: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl UnfinishedFile {
    /// Waits for the lock to create `target`, whose folder is created, and truncates its part. The caller must
    /// then check again whether the target exists, because another process may just have finished it.
    ///
    /// # Errors
    /// [`StreamError::Io`] if the folder is not writable; [`StreamError::Closed`] if interrupted.
    pub fn lock(target: &Path, interrupted: Interrupted<'_>) -> Result<Self> {
        let path = part_path(target);
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let file = open_in_folder(&path, &options).map_err(|failed| not_writable(&failed))?;
            // If the part was renamed or removed during the wait, the open file is no longer the part.
            if wait_for_lock(&file, &path, interrupted)? {
                let part = Self {
                    file,
                    path,
                    target: target.into(),
                    committed: false,
                };
                part.file
                    .set_len(0)
                    .map_err(|e| StreamError::io(&part.path, "empty it", &e))?;
                return Ok(part);
            }
        }
    }

    /// Returns the path to write to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the bytes; with direct I/O if they are large enough and the file system supports it.
    ///
    /// # Errors
    /// [`StreamError::Io`] if the disk reports an error.
    pub fn write(&self, contents: &AssembledFile) -> Result<()> {
        let fill = || {
            let direct = DirectFile::open(&self.path, &self.file, contents.len() as u64)?;
            direct.write(contents.padded(), contents.len(), 0)?;
            direct.set_len(contents.len() as u64)
        };
        fill().map_err(|e| StreamError::io(&self.path, "write", &e))
    }

    /// Makes the part's bytes durable.
    ///
    /// # Errors
    /// [`StreamError::Io`] if the disk reports an error.
    pub fn sync(&self) -> Result<()> {
        self.file
            .sync_all()
            .map_err(|e| StreamError::io(&self.path, "write it to disk", &e))
    }

    /// Returns whether the part was removed by another program. Its path may then be the part of another
    /// process.
    pub(crate) fn is_removed(&self) -> bool {
        !is_same_file(&self.file, &self.path)
    }

    /// Makes the part durable and renames it to the target, replacing an existing file.
    ///
    /// # Errors
    /// [`StreamError::Removed`] if the part was removed; [`StreamError::Io`] if the disk reports an error.
    pub fn commit(mut self) -> Result<()> {
        self.sync()?;
        if self.is_removed() {
            return Err(StreamError::removed(&self.path));
        }
        fs::rename(&self.path, &self.target).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => StreamError::removed(&self.path),
            _ => StreamError::io(&self.target, "rename into place", &e),
        })?;
        self.committed = true;
        // Makes the name durable. Some file systems cannot sync a folder; there the file may be missing after a
        // crash.
        let _ = sync_parent(&self.target);
        Ok(())
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        if !self.committed && !self.is_removed() {
            let _ = fs::remove_file(&self.path);
        }
        // A child forked in the meantime shares the lock; unlocking explicitly releases it for both.
        unlock(&self.file);
    }
}

/// Writes `contents` to a part whose commit replaces `target` or, with `only_new`, requires that it does not
/// exist.
///
/// # Errors
/// [`StreamError::Exists`]; [`StreamError::Io`] if the disk reports an error.
pub fn stage(target: &Path, contents: &AssembledFile, only_new: bool) -> Result<UnfinishedFile> {
    let part = UnfinishedFile::lock(target, &|| false)?;
    // Checked under the lock that every writer of this target takes.
    if only_new && target.exists() {
        return Err(StreamError::Exists {
            path: target.display().to_string(),
        });
    }
    part.write(contents)?;
    Ok(part)
}

fn part_path(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.part"))
}

/// Returns the target of a part with this name; none if it is not the name of a part.
pub(crate) fn part_target(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let target = name.strip_prefix('.')?.strip_suffix(".part")?;
    Some(path.with_file_name(target))
}

/// Waits for the lock; returns false if `path` then refers to another file or to none.
fn wait_for_lock(file: &File, path: &Path, interrupted: Interrupted<'_>) -> Result<bool> {
    loop {
        let is_locked = try_lock(file).map_err(|e| StreamError::io(path, "lock it", &e))?;
        if !is_same_file(file, path) {
            return Ok(false);
        }
        if is_locked {
            return Ok(true);
        }
        if interrupted() {
            return Err(StreamError::Closed);
        }
        std::thread::sleep(LOCK_POLL);
    }
}

fn not_writable(failed: &DurableError) -> StreamError {
    let DurableError {
        path,
        action,
        error,
    } = failed;
    StreamError::Io {
        path: path.display().to_string(),
        reason: format!(
            "could not {action}: {error}; pass a writable folder with free space as `local`"
        ),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use crate::shard::buffers::Buffer;
    use hocket_store::durable::DIRECT_MIN_BYTES;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_partial_file_becomes_the_target_or_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.bin");
        drop(UnfinishedFile::lock(&target, &|| false).unwrap());
        assert!(names(folder.path()).is_empty());
        let write = |text: &[u8], only_new| {
            let contents = AssembledFile::new(text, Buffer::default());
            stage(&target, &contents, only_new)?.commit()
        };
        write(b"one", true).unwrap();
        write(b"two", false).unwrap();
        let taken = write(b"three", true).unwrap_err();
        assert!(matches!(taken, StreamError::Exists { .. }));
        assert_eq!(names(folder.path()), ["a.bin"]);
        assert_eq!(fs::read(&target).unwrap(), b"two");
    }

    #[test]
    fn a_large_file_has_its_length() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.bin");
        for count in [DIRECT_MIN_BYTES as usize, DIRECT_MIN_BYTES as usize + 4097] {
            let bytes: Vec<u8> = (0..count).map(|at| ((at * 31) >> 7) as u8).collect();
            let contents = AssembledFile::new(&[], bytes.clone().into());
            stage(&target, &contents, false).unwrap().commit().unwrap();
            assert!(fs::read(&target).unwrap() == bytes, "{count}");
        }
    }

    #[test]
    fn one_thread_creates_the_file_while_the_others_wait() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.bin");
        let made = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let part = UnfinishedFile::lock(&target, &|| false).unwrap();
                    if !target.exists() {
                        made.fetch_add(1, Ordering::Relaxed);
                        fs::write(part.path(), b"whole").unwrap();
                        part.commit().unwrap();
                    }
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
        assert_eq!(names(folder.path()), ["a.bin"]);
    }

    #[test]
    fn an_interrupted_waiter_returns() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.bin");
        let _held = UnfinishedFile::lock(&target, &|| false).unwrap();
        assert!(matches!(
            UnfinishedFile::lock(&target, &|| true),
            Err(StreamError::Closed)
        ));
    }
}
