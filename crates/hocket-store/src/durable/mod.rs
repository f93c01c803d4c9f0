//! Durable files on local disks: folders, locks, hidden files of unfinished writes, and direct I/O.
//!
//! All functions block. This module is independent of stores and formats: an error names the path and the
//! system call that failed, and each crate maps it to its own error type.

mod direct;
mod error;
mod folder;
mod hidden;
mod lock;
mod pages;
mod sequential;

pub use direct::{DIRECT_MIN_BYTES, DirectFile, PAGE_BYTES};
pub use error::{DurableError, Result};
pub use folder::{OpenFolder, create_folder, open_in_folder, sync_folder, sync_parent};
pub use hidden::{HiddenFile, link_as_new, mark_alive, name_of_hidden, sweep, sweep_folder_once};
pub use lock::{
    FileLock, has_writer, is_same_file, open_regular, try_lock, try_lock_shared, unlock,
};
pub use pages::{BUFFER_BYTES, PageBuffer};
pub use sequential::SequentialWriter;
