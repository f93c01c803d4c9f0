//! Hidden files of unfinished writes, and removal of those whose writer was killed.
//!
//! A writer holds a lock on its file, which the system releases whenever the process ends.

use super::error::{DurableError, Result};
use super::folder::{folder_of, open_in_folder};
use super::lock::{FileLock, is_same_file, open_regular};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Suffix of hidden names. No other program uses it, so every file with it was written by Hocket.
const SUFFIX: &str = ".hocket-unfinished";

/// Limit of a target's name inside a hidden name, in bytes: file systems take names of 255.
const STEM_BYTES: usize = 200;

/// Number of attempts to create a hidden file that other processes remove before it is locked.
const ATTEMPTS: u32 = 16;

/// A file with contents that are not yet complete, under a hidden name beside its target. Dropping it removes it if it
/// has no final name yet. The writer flushes the file before it gives it that name, and the folder afterwards.
#[derive(Debug)]
pub struct HiddenFile {
    path: PathBuf,
    target: PathBuf,
    file: File,
    pid: u32,
}

impl HiddenFile {
    /// Creates the file, and its folder if necessary, and marks it as having a writer.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn create(target: &Path) -> Result<Self> {
        let (path, file) = create_hidden(target)?;
        Ok(Self {
            path,
            target: target.to_owned(),
            file,
            pid: std::process::id(),
        })
    }

    /// Returns the hidden path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path that the complete file will have.
    #[must_use]
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Returns the open file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its final name, in place of a file that has the name.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn replace(&self) -> io::Result<()> {
        fs::rename(&self.path, &self.target)
    }

    /// Gives the file its final name; returns false if the name exists.
    ///
    /// # Errors
    /// As [`link_as_new`].
    pub fn link_as_new(&self) -> io::Result<bool> {
        link_as_new(&self.path, &self.target)
    }
}

impl Drop for HiddenFile {
    fn drop(&mut self) {
        // The copy in a forked child must not remove the parent's file. After a rename the hidden name is gone.
        if self.pid == std::process::id() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Creates a hidden file beside `target`, and its folder if necessary, and marks it as having a writer.
fn create_hidden(target: &Path) -> Result<(PathBuf, File)> {
    let mut attempt = 1;
    loop {
        let hidden = hidden_path(target);
        let mut options = OpenOptions::new();
        let file = open_in_folder(&hidden, options.write(true).create_new(true))?;
        mark_alive(&file);
        // A sweep of another process may have come between the creation and the lock.
        if is_same_file(&file, &hidden) {
            return Ok((hidden, file));
        }
        if attempt == ATTEMPTS {
            let error = io::Error::other("other processes keep removing it");
            return Err(DurableError::of(&hidden, "create the file")(error));
        }
        attempt += 1;
    }
}

/// Returns a hidden path beside `target`. The number in it is that of the process followed by a random one, since
/// several threads, or processes with the same number in other containers, may write the same target.
fn hidden_path(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let name = stem(&name);
    let random = fastrand::u32(..1_000_000_000);
    target.with_file_name(format!(".{name}.{}{random:09}{SUFFIX}", std::process::id()))
}

/// Returns a target's name as hidden names contain it: a long one is cut, and ends with its hash.
fn stem(name: &str) -> Cow<'_, str> {
    if name.len() <= STEM_BYTES {
        return name.into();
    }
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    let mut kept = STEM_BYTES - 17;
    while !name.is_char_boundary(kept) {
        kept -= 1;
    }
    format!("{}-{:016x}", &name[..kept], hasher.finish()).into()
}

/// Returns the final name of a hidden file (a long one as `stem` cuts it); none if the name is not a hidden name.
#[must_use]
pub fn name_of_hidden(hidden: &str) -> Option<&str> {
    let (name, writer) = hidden
        .strip_prefix('.')?
        .strip_suffix(SUFFIX)?
        .rsplit_once('.')?;
    let is_ours = !writer.is_empty() && writer.bytes().all(|byte| byte.is_ascii_digit());
    is_ours.then_some(name)
}

/// Marks a new file as having a writer, by a lock. Waits for other processes that look for a writer, which hold the lock
/// for a moment. Has no effect if the file system does not support locks.
pub fn mark_alive(file: &File) {
    while matches!(file.lock(), Err(error) if error.kind() == io::ErrorKind::Interrupted) {}
}

/// Gives a complete file its final name in place of the hidden one; returns false if the name exists.
///
/// # Errors
/// The error of the system call, for example of a file system without hard links.
pub fn link_as_new(hidden: &Path, target: &Path) -> io::Result<bool> {
    // A hard link, unlike a rename, fails if the name exists.
    match fs::hard_link(hidden, target) {
        Ok(()) => {
            let _ = fs::remove_file(hidden);
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes hidden files that killed writers of `target` left beside it. Failures are ignored, because the files
/// only waste space.
pub fn sweep(target: &Path) {
    let Some(name) = target.file_name() else {
        return;
    };
    let name = name.to_string_lossy();
    let name = stem(&name);
    remove_dead(folder_of(target), |hidden| hidden == name);
}

/// Removes all hidden files that killed writers left in the folder of `target`, when this process first comes to it:
/// a folder may have very many files.
pub fn sweep_folder_once(target: &Path) {
    static SWEPT: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let folder = folder_of(target);
    let is_first = {
        let mut swept = SWEPT.lock().unwrap_or_else(PoisonError::into_inner);
        swept.insert(folder.to_owned())
    };
    if is_first {
        remove_dead(folder, |_| true);
    }
}

/// Removes hidden files without a writer, of targets whose names (as `stem` cuts them) `matches` accepts.
fn remove_dead(folder: &Path, matches: impl Fn(&str) -> bool) {
    for entry in folder.read_dir().into_iter().flatten().flatten() {
        let is_ours = name_of_hidden(&entry.file_name().to_string_lossy()).is_some_and(&matches);
        // The lock is held until the file is gone, so that its writer, which may be about to take the lock, finds the
        // removal afterwards.
        if is_ours && let Ok(Some(_lock)) = open_regular(&entry.path()).and_then(FileLock::take) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::lock::has_writer;
    use super::*;

    #[test]
    fn a_sweep_removes_files_of_killed_writers_of_the_same_target() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.bin");
        let dead = target.with_file_name(".a.bin.1.hocket-unfinished");
        let alive = hidden_path(&target);
        let other = target.with_file_name(".b.bin.1.hocket-unfinished");
        for path in [&dead, &other, &target] {
            fs::write(path, b"x").unwrap();
        }
        let writer = File::create(&alive).unwrap();
        mark_alive(&writer);
        sweep(&target);
        assert!(!dead.exists());
        assert!(alive.exists() && other.exists() && target.exists());
        drop(writer);
        sweep(&target);
        assert!(!alive.exists());
    }

    #[test]
    fn a_dropped_file_is_removed_unless_it_has_its_final_name_or_another_process_owns_it() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.bin");
        let left = || fs::read_dir(folder.path()).unwrap().count();
        drop(HiddenFile::create(&target).unwrap());
        assert_eq!(left(), 0);
        assert!(HiddenFile::create(&target).unwrap().link_as_new().unwrap());
        assert!(!HiddenFile::create(&target).unwrap().link_as_new().unwrap());
        HiddenFile::create(&target).unwrap().replace().unwrap();
        assert_eq!((left(), target.exists()), (1, true));
        let mut in_child = HiddenFile::create(&target).unwrap();
        in_child.pid += 1;
        drop(in_child);
        assert_eq!(left(), 2);
    }

    #[test]
    fn a_process_sweeps_a_folder_once() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.bin");
        let dead = target.with_file_name(".b.bin.1.hocket-unfinished");
        for is_left in [false, true] {
            fs::write(&dead, b"x").unwrap();
            sweep_folder_once(&target);
            assert_eq!(dead.exists(), is_left);
        }
    }

    #[test]
    fn several_writers_of_one_target_have_hidden_files_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.bin");
        let writers: Vec<_> = (0..3).map(|_| create_hidden(&target).unwrap()).collect();
        sweep(&target);
        for (hidden, file) in &writers {
            let name = hidden.file_name().unwrap().to_str().unwrap();
            assert_eq!(name_of_hidden(name), Some("a.bin"));
            assert_eq!(has_writer(hidden), Some(true));
            assert!(is_same_file(file, hidden));
        }
    }

    #[test]
    fn a_file_that_a_sweep_removes_before_it_is_locked_is_created_again() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.bin");
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    sweep(&target);
                }
            });
            let created = (0..3000).all(|_| {
                create_hidden(&target).is_ok_and(|(hidden, _file)| {
                    hidden.exists() && fs::remove_file(&hidden).is_ok()
                })
            });
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(created);
        });
    }

    #[test]
    fn a_name_of_any_length_has_a_hidden_name_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let names = [
            "é".repeat(127),
            "é".repeat(126) + "e",
            "a".repeat(255),
            "a".repeat(200),
        ];
        for name in &names {
            let target = folder.path().join("new").join(name);
            drop(create_hidden(&target).unwrap());
        }
        let left = || fs::read_dir(folder.path().join("new")).unwrap().count();
        for (number, name) in names.iter().enumerate() {
            sweep(&folder.path().join("new").join(name));
            assert_eq!(left(), names.len() - 1 - number);
        }
    }

    #[test]
    fn only_hockets_own_names_are_hidden_names() {
        let target = Path::new("run/a.bin");
        let hidden = hidden_path(target);
        assert_eq!(hidden.parent(), target.parent());
        let name = hidden.file_name().unwrap().to_str().unwrap();
        assert_eq!(name_of_hidden(name), Some("a.bin"));
        for other in [
            "a.bin.7.hocket-unfinished",
            ".a.bin.x7.hocket-unfinished",
            ".a.bin.hocket-unfinished",
            ".a.bin.7.unfinished",
        ] {
            assert_eq!(name_of_hidden(other), None, "{other}");
        }
    }
}
