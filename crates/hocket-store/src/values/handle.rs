//! The part of a store that needs no client: its URI, options, environment variables and object names.

use crate::error::{Result, StoreError};
use crate::process::counters::Counters;
use crate::values::env::Env;
use crate::values::meta::ObjectMeta;
use crate::values::options::StoreOptions;
use crate::values::uri::Location;
use object_store::path::Path as ObjectPath;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The state shared by all clones of a store. It holds no client.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    uri: String,
    location: Location,
    options: StoreOptions,
    env: Env,
    counters: Counters,
}

impl Handle {
    /// See [`Store::open`](crate::Store::open).
    pub(crate) fn open(uri: &str, options: StoreOptions) -> Result<Self> {
        options.validate()?;
        let location = Location::parse(uri)?;
        let env = match &location {
            Location::Bucket { bucket, .. } => Env::read(bucket.service.variables()),
            _ => Env::default(),
        };
        let uri = location.uri();
        Ok(Self {
            inner: Arc::new(Inner {
                uri,
                location,
                options,
                env,
                counters: Counters::default(),
            }),
        })
    }

    pub(crate) fn uri(&self) -> &str {
        &self.inner.uri
    }

    pub(crate) fn location(&self) -> &Location {
        &self.inner.location
    }

    pub(crate) fn options(&self) -> &StoreOptions {
        &self.inner.options
    }

    pub(crate) fn env(&self) -> &Env {
        &self.inner.env
    }

    /// Returns the counters of this handle and its clones.
    pub(crate) fn counters(&self) -> &Counters {
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
            Location::Local { root } => Some(root),
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
