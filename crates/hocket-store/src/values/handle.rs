//! The part of a store that needs no client: its URI, options, environment variables and object names.

use crate::error::{Result, StoreError};
use crate::process::counters::RequestCounters;
use crate::values::env::EnvSnapshot;
use crate::values::meta::ObjectMeta;
use crate::values::options::StoreOptions;
use crate::values::uri::StoreLocation;
use object_store::path::Path as ObjectPath;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The state shared by all clones of a store. It holds no client.
#[derive(Debug, Clone)]
pub(crate) struct StoreHandle {
    inner: Arc<HandleState>,
}

#[derive(Debug)]
struct HandleState {
    uri: String,
    location: StoreLocation,
    options: StoreOptions,
    env: EnvSnapshot,
    counters: RequestCounters,
}

impl StoreHandle {
    /// See [`Store::open`](crate::Store::open).
    pub(crate) fn open(uri: &str, options: StoreOptions) -> Result<Self> {
        options.validate()?;
        let location = StoreLocation::parse(uri)?;
        let env = match &location {
            StoreLocation::Bucket { bucket, .. } => EnvSnapshot::read(bucket.service.variables())?,
            _ => EnvSnapshot::default(),
        };
        let uri = location.uri();
        Ok(Self {
            inner: Arc::new(HandleState {
                uri,
                location,
                options,
                env,
                counters: RequestCounters::default(),
            }),
        })
    }

    pub(crate) fn uri(&self) -> &str {
        &self.inner.uri
    }

    pub(crate) fn location(&self) -> &StoreLocation {
        &self.inner.location
    }

    pub(crate) fn options(&self) -> &StoreOptions {
        &self.inner.options
    }

    pub(crate) fn env(&self) -> &EnvSnapshot {
        &self.inner.env
    }

    /// Returns the counters of this handle and its clones.
    pub(crate) fn counters(&self) -> &RequestCounters {
        &self.inner.counters
    }

    /// Returns the full URI of `key`.
    pub(crate) fn object_uri(&self, key: &str) -> String {
        match key {
            "" => self.inner.uri.clone(),
            _ => format!("{}/{key}", self.inner.uri.trim_end_matches('/')),
        }
    }

    /// Returns the directory of a store of local files.
    pub(crate) fn local_root(&self) -> Option<&Path> {
        match &self.inner.location {
            StoreLocation::Local { root } => Some(root),
            _ => None,
        }
    }

    /// Returns the path and the full URI of `key` in a store of local files.
    pub(crate) fn locate(&self, key: &str) -> (PathBuf, String) {
        let root = self.local_root().unwrap_or(Path::new("/"));
        let path = if key.is_empty() {
            root.to_owned()
        } else {
            root.join(key)
        };
        (path, self.object_uri(key))
    }

    /// Rejects an operation that the service does not support.
    pub(crate) fn check_verb(&self, verb: &str) -> Result<()> {
        self.inner.location.check_verb(verb)
    }

    /// Returns `key` with the store's prefix, as the client's path type.
    pub(crate) fn path(&self, key: &str) -> Result<ObjectPath> {
        ObjectPath::parse(self.inner.location.full_key(key)).map_err(|error| {
            StoreError::config(format!(
                "`{}` is not a valid key: {error}",
                self.object_uri(key)
            ))
        })
    }

    /// Returns the store's prefix inside its bucket or memory.
    pub(crate) fn prefix(&self) -> &str {
        self.inner.location.prefix()
    }

    /// Converts the client's metadata to this crate's.
    pub(crate) fn meta(&self, key: &str, meta: &object_store::ObjectMeta) -> ObjectMeta {
        ObjectMeta {
            key: key.to_owned(),
            size: meta.size,
            etag: meta.e_tag.clone(),
            modified_ms: meta.last_modified.timestamp_millis(),
        }
    }
}
