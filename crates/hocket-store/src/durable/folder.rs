//! Creation of folders, and flushes of their entries.

use super::error::{DurableError, Result};
use super::lock::FileLock;
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Number of attempts to create a folder, or a file in it, that other processes keep removing.
const ATTEMPTS: u32 = 16;

/// An open folder.
#[derive(Debug)]
pub struct OpenFolder {
    path: PathBuf,
    file: File,
}

impl OpenFolder {
    /// Opens the folder.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(DurableError::of(path, "open the folder"))?;
        Ok(Self {
            path: path.to_owned(),
            file,
        })
    }

    /// Flushes the folder's entries, so that they survive a power failure.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn sync(&self) -> Result<()> {
        match self.file.sync_all() {
            // Some network file systems do not support a flush of a folder.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
            outcome => outcome.map_err(DurableError::of(&self.path, "flush the folder")),
        }
    }

    /// Waits for the folder's lock.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn lock(&self) -> Result<FileLock> {
        let file = self.file.try_clone().and_then(FileLock::wait);
        file.map_err(DurableError::of(&self.path, "lock the folder"))
    }
}

/// Flushes a folder, so that its entries survive a power failure.
///
/// # Errors
/// The error of the system call.
pub fn sync_folder(path: &Path) -> Result<()> {
    OpenFolder::open(path)?.sync()
}

/// Flushes the folder of `path`.
///
/// # Errors
/// The error of the system call.
pub fn sync_parent(path: &Path) -> Result<()> {
    sync_folder(folder_of(path))
}

/// Creates a folder and its parents.
///
/// # Errors
/// The error of the system call.
pub fn create_folder(path: &Path) -> Result<()> {
    let mut attempt = 1;
    loop {
        match fs::create_dir_all(path) {
            // Another process removed the folder, or one above it, between two system calls: after `mkdir` had
            // found the folder, or after its parent had been created.
            Err(error) if is_removal(&error) && attempt < ATTEMPTS => attempt += 1,
            created => return created.map_err(DurableError::of(path, "create the folder")),
        }
    }
}

/// Returns whether an error of [`fs::create_dir_all`] may come from another process that removes the folder.
fn is_removal(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::AlreadyExists)
}

/// Opens a file that `options` create, and creates its folder if necessary.
///
/// # Errors
/// The error of the system call.
pub fn open_in_folder(path: &Path, options: &OpenOptions) -> Result<File> {
    let mut attempt = 1;
    loop {
        let opened = create_folder(folder_of(path)).and_then(|()| {
            let opened = options.open(path);
            opened.map_err(DurableError::of(path, "create the file"))
        });
        match opened {
            // Another process removed the folder after it was created.
            Err(failed) if failed.error.kind() == ErrorKind::NotFound && attempt < ATTEMPTS => {
                attempt += 1;
            }
            opened => return opened,
        }
    }
}

/// Returns the folder that holds the entry `path`.
pub(super) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) => Path::new("."),
        None => path,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    /// Pause between removals, far longer than creating a folder and a file, so that creation can succeed.
    const PAUSE: Duration = Duration::from_millis(1);

    #[test]
    fn a_file_is_created_while_its_folder_is_removed_as_empty() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/b");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = fs::remove_dir(&folder);
                    std::thread::sleep(PAUSE);
                }
            });
            let created = (0..20_000).try_for_each(|number| {
                let path = folder.join(number.to_string());
                let mut options = OpenOptions::new();
                open_in_folder(&path, options.write(true).create_new(true))?;
                fs::remove_file(&path).map_err(DurableError::of(&path, "remove the file"))
            });
            is_over.store(true, Ordering::Relaxed);
            created.unwrap();
        });
    }

    #[test]
    fn a_folder_is_created_while_a_tree_that_contains_it_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let above = root.path().join("a");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = fs::remove_dir_all(&above);
                    std::thread::sleep(PAUSE);
                }
            });
            let created = (0..50_000).try_for_each(|_| create_folder(&above.join("b")));
            is_over.store(true, Ordering::Relaxed);
            created.unwrap();
        });
    }

    #[test]
    fn an_error_names_the_folder_or_the_file() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, b"x").unwrap();
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        let below = open_in_folder(&file.join("x"), &options).unwrap_err();
        assert_eq!(
            (below.path.as_path(), below.action),
            (&*file, "create the folder")
        );
        let taken = open_in_folder(&file, &options).unwrap_err();
        assert_eq!(
            (taken.path.as_path(), taken.error.kind()),
            (&*file, ErrorKind::AlreadyExists)
        );
    }

    #[test]
    fn a_folder_is_locked_until_the_lock_is_dropped() {
        let root = tempfile::tempdir().unwrap();
        let folder = OpenFolder::open(root.path()).unwrap();
        let held = folder.lock().unwrap();
        let other = || FileLock::take(File::open(root.path()).unwrap()).unwrap();
        assert!(other().is_none());
        drop(held);
        assert!(other().is_some());
        sync_parent(&root.path().join("x")).unwrap();
    }
}
