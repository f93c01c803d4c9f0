//! The commit to an object store, by conditional writes, or without conditions where the caller allows it.

use std::collections::BTreeSet;
use std::sync::Mutex;

use bytes::Bytes;
use hocket_store::{PutMode, Store, StoreError};

use crate::error::{CkptError, Result};
use crate::format::names::PROBE_PREFIX;
use crate::manifest::write::ManifestWrite;
use crate::manifest::{HEAD_BYTES, MANIFEST_NAME};
use crate::place::remote::{self, found_remote};
use crate::workers::Interrupted;

/// Writes the manifest if the existing one is as the options require.
pub(super) fn commit(
    store: &Store,
    manifest: &ManifestWrite,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let put = ManifestPut {
        store,
        manifest,
        interrupted,
    };
    if manifest.options.unfenced {
        return put.put_unfenced();
    }
    let replaces = manifest.options.replaces.is_some();
    if let Some(reason) = probe(store, &manifest.save_id, replaces, interrupted)? {
        return Err(manifest.unfenced(&reason));
    }
    match &manifest.options.replaces {
        Some(old) => put.replace(old),
        None => put.put(PutMode::Create),
    }
}

/// Tests whether a commit of a new checkpoint will be conditional.
///
/// # Errors
/// `Unfenced` if the store ignores or rejects conditions, and errors of the store.
pub(super) fn check_fence(
    store: &Store,
    save_id: &str,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    match probe(store, save_id, false, interrupted)? {
        Some(reason) => Err(CkptError::Unfenced {
            uri: store.uri().to_owned(),
            reason,
        }),
        None => Ok(()),
    }
}

/// A manifest to be written to an object store.
struct ManifestPut<'a> {
    store: &'a Store,
    manifest: &'a ManifestWrite,
    interrupted: Interrupted<'a>,
}

impl ManifestPut<'_> {
    /// Writes the manifest if the current one belongs to `old` or does not exist.
    fn replace(&self, old: &str) -> Result<()> {
        let store = self.store.clone();
        // The ETag is read first: if the manifest changes before it is read below, the ETag no longer matches.
        let look = async move { found_remote(store.head(MANIFEST_NAME).await) };
        let Some(meta) = remote::wait(look, self.interrupted)? else {
            self.manifest.allow_missing()?;
            return self.put(PutMode::Create);
        };
        match self.read_back()? {
            None => {
                self.manifest.allow_missing()?;
                self.put(PutMode::Create)
            }
            Some(there) if self.manifest.is_of(&there, old) => match meta.etag {
                Some(etag) => self.put(PutMode::Match(etag)),
                None => Err(self.manifest.unfenced("has objects without an ETag")),
            },
            Some(there) => self.manifest.compare(&there),
        }
    }

    /// Writes the manifest without a condition after a look at what is there. A store that knows no conditions
    /// rejects a request with one.
    fn put_unfenced(&self) -> Result<()> {
        let old = self.manifest.options.replaces.as_deref();
        match self.read_back()? {
            Some(there) if !old.is_some_and(|old| self.manifest.is_of(&there, old)) => {
                self.manifest.compare(&there)
            }
            None => {
                self.manifest.allow_missing()?;
                self.put(PutMode::Overwrite)
            }
            _ => self.put(PutMode::Overwrite),
        }
    }

    fn put(&self, mode: PutMode) -> Result<()> {
        let (store, bytes) = (self.store.clone(), self.manifest.bytes.clone());
        let put = async move { Ok(store.put(MANIFEST_NAME, bytes, mode).await) };
        match remote::wait(put, self.interrupted)? {
            Ok(_) => Ok(()),
            Err(error) if remote::is_unsettled(&error) => match self.read_back()? {
                // Only the object itself shows which save wrote it.
                Some(there) => self.manifest.compare(&there),
                None => Err(error.into()),
            },
            Err(error) => Err(error.into()),
        }
    }

    fn read_back(&self) -> Result<Option<Vec<u8>>> {
        let get = remote::get_start(self.store.clone(), MANIFEST_NAME.to_owned(), HEAD_BYTES);
        remote::wait(get, self.interrupted)
    }
}

/// Addresses and buckets that were found to honour conditions, by this process or by its parent before a fork.
static FENCED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// The reason to refuse a store that honours no conditions.
const IGNORED: &str = "lets a conditional write replace what is there";

/// An ETag that no object has.
const NO_TAG: &str = "\"00000000000000000000000000000000\"";

/// Tests on a separate key whether the store honours the condition, and returns the reason if it does not.
/// Without the condition, concurrent commits would overwrite each other.
fn probe(
    store: &Store,
    save_id: &str,
    replaces: bool,
    interrupted: Interrupted<'_>,
) -> Result<Option<String>> {
    let bucket: Vec<&str> = store.uri().splitn(4, '/').take(3).collect();
    let asked = store.clone();
    let address = remote::wait(async move { Ok(asked.address().await?) }, interrupted)?;
    let tried = format!("{address} {} {replaces}", bucket.join("/"));
    // If the lock is taken (or was taken at the fork), the cost is one extra probe, never a wait.
    if FENCED
        .try_lock()
        .is_ok_and(|fenced| fenced.contains(&tried))
    {
        return Ok(None);
    }
    let store = store.clone();
    let key = format!("{PROBE_PREFIX}{save_id}-{}", std::process::id());
    let second = if replaces {
        PutMode::Match(NO_TAG.to_owned())
    } else {
        PutMode::Create
    };
    let attempt = async move {
        let put = |mode| store.put(&key, Bytes::from_static(b"probe"), mode);
        let first = put(PutMode::Create).await;
        let outcome = match first {
            Err(error) if !remote::is_unsettled(&error) => Err(error),
            _ => put(second).await,
        };
        // A request may be rejected for other reasons than its condition: then one without a condition is, too.
        let mut is_rejected = false;
        if matches!(outcome, Err(StoreError::Io { .. })) {
            is_rejected = put(PutMode::Overwrite).await.is_ok();
        }
        let deleted = store.delete(&key).await;
        if let Err(StoreError::Io { reason, .. }) = &outcome
            && is_rejected
        {
            return Ok(Some(format!("rejects conditional writes ({reason})")));
        }
        match outcome {
            Ok(_) => {
                deleted?;
                Ok(Some(IGNORED.to_owned()))
            }
            // A lost response followed by a violated condition is reported as `Transient`; the store honours
            // conditions in this case, too.
            Err(error) if remote::is_unsettled(&error) => {
                deleted?;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    };
    let reason = remote::wait(attempt, interrupted)?;
    if reason.is_none()
        && let Ok(mut fenced) = FENCED.try_lock()
    {
        fenced.insert(tried);
    }
    Ok(reason)
}
