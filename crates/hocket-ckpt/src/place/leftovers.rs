//! Files, uploads and probes that saves and conversions leave in a folder or under a prefix.

use std::time::SystemTime;

use hocket_store::durable::name_of_hidden;

use crate::format::names::save_of;

/// The kind of a collected item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LeftoverKind {
    /// A data file that no manifest names.
    File,
    /// An unfinished multipart upload.
    Upload,
    /// A temporary manifest that was never published.
    Manifest,
    /// A key that a commit wrote to test whether its store honours conditions.
    Probe,
    /// A hidden file outside `data/`, from an unfinished conversion to another format.
    Unfinished,
}

/// A file, an upload or a probe that may be garbage.
pub(crate) struct LeftoverItem {
    pub(crate) path: String,
    pub(crate) waste: LeftoverKind,
    /// The save it belongs to: the first digits of its id, or another key that its files share.
    pub(crate) save: String,
    pub(crate) bytes: u64,
    pub(crate) changed: SystemTime,
    /// The store's id of the upload.
    pub(crate) upload: Option<String>,
    /// Whether it has a live writer.
    pub(crate) is_held: bool,
}

impl LeftoverItem {
    pub(crate) fn new(
        path: impl Into<String>,
        waste: LeftoverKind,
        save: &str,
        bytes: u64,
        changed: SystemTime,
    ) -> Self {
        Self {
            path: path.into(),
            waste,
            save: save.to_owned(),
            bytes,
            changed,
            upload: None,
            is_held: false,
        }
    }

    /// Recognizes a data file by its name, final or hidden; returns none if the name is not one of Hocket's.
    pub(crate) fn data_file(name: &str, bytes: u64, changed: SystemTime) -> Option<Self> {
        let save = save_of(name_of_hidden(name).unwrap_or(name))?;
        let path = format!("data/{name}");
        Some(Self::new(path, LeftoverKind::File, save, bytes, changed))
    }
}
