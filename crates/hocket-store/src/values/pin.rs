//! The pinned version of an object, shared by several reads.

use crate::error::{Result, StoreError};
use crate::values::meta::ObjectMeta;
use std::sync::{Arc, OnceLock};

/// The version set by the first response, shared between clones.
#[derive(Debug, Clone, Default)]
pub(crate) struct VersionPin(Arc<OnceLock<VersionTag>>);

/// The attributes that distinguish two versions.
#[derive(Debug)]
pub(crate) struct VersionTag {
    pub(crate) etag: Option<String>,
    pub(crate) size: u64,
    pub(crate) modified_ms: i64,
}

impl VersionPin {
    pub(crate) fn seen(&self) -> Option<&VersionTag> {
        self.0.get()
    }

    /// Pins the version of the first response, and rejects a response of any other version.
    pub(crate) fn check(&self, uri: String, meta: &ObjectMeta) -> Result<()> {
        let seen = self.0.get_or_init(|| VersionTag {
            etag: meta.etag.clone(),
            size: meta.size,
            modified_ms: meta.modified_ms,
        });
        // Plain HTTP servers may omit ETags; the modification time is the fallback.
        let is_same_time = meta.etag.is_some() || seen.modified_ms == meta.modified_ms;
        if seen.etag == meta.etag && seen.size == meta.size && is_same_time {
            return Ok(());
        }
        let text = |etag: &Option<String>, size| {
            let size = || format!("({size} bytes)");
            etag.clone().unwrap_or_else(size)
        };
        Err(StoreError::Changed {
            uri,
            expected: text(&seen.etag, seen.size),
            actual: text(&meta.etag, meta.size),
        })
    }
}
