//! The commit to an object store, by conditional writes.

use std::collections::BTreeSet;
use std::sync::Mutex;

use bytes::Bytes;
use hocket_store::{PutMode, Store};

use crate::error::Result;
use crate::file_names::PROBE_PREFIX;
use crate::manifest::{HEAD_BYTES, MANIFEST_NAME};
use crate::manifest_write::ManifestWrite;
use crate::remote::{self, found_remote};
use crate::workers::Interrupted;

/// Writes the manifest if the existing one is as the options require.
pub(super) fn commit(
    store: &Store,
    manifest: &ManifestWrite,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let put = Put {
        store,
        manifest,
        interrupted,
    };
    if !manifest.options.unfenced {
        probe(&put)?;
    }
    match &manifest.options.replaces {
        Some(old) => put.replace(old),
        None => put.put(PutMode::Create),
    }
}

/// A manifest to be written to an object store.
struct Put<'a> {
    store: &'a Store,
    manifest: &'a ManifestWrite,
    interrupted: Interrupted<'a>,
}

impl Put<'_> {
    /// Writes the manifest if the current one belongs to `old` or does not exist.
    fn replace(&self, old: &str) -> Result<()> {
        let store = self.store.clone();
        // The ETag is read first: if the manifest changes before it is read below, the ETag no longer matches.
        let look = async move { found_remote(store.head(MANIFEST_NAME).await) };
        let Some(meta) = remote::wait(look, self.interrupted)? else {
            return self.put(PutMode::Create);
        };
        match self.read_back()? {
            None => self.put(PutMode::Create),
            Some(there) if self.manifest.is_of(&there, old) => match meta.etag {
                Some(etag) => self.put(PutMode::Match(etag)),
                None => Err(self.manifest.unfenced()),
            },
            Some(there) => self.manifest.compare(&there),
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

/// Endpoints and buckets that were found to honour conditions, by this process or by its parent before a fork.
static FENCED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// An ETag that no object has.
const NO_TAG: &str = "\"00000000000000000000000000000000\"";

/// Tests on a separate key whether the store honours the condition; without the condition, concurrent commits
/// would overwrite each other.
///
/// # Errors
/// `Unfenced` if the store ignores the condition, and errors of the store.
fn probe(write: &Put<'_>) -> Result<()> {
    let replaces = write.manifest.options.replaces.is_some();
    let bucket: Vec<&str> = write.store.uri().splitn(4, '/').take(3).collect();
    let endpoint = std::env::var("AWS_ENDPOINT_URL").unwrap_or_default();
    let tried = format!("{endpoint} {} {replaces}", bucket.join("/"));
    // If the lock is taken (or was taken at the fork), the cost is one extra probe, never a wait.
    if FENCED
        .try_lock()
        .is_ok_and(|fenced| fenced.contains(&tried))
    {
        return Ok(());
    }
    let store = write.store.clone();
    let key = format!(
        "{PROBE_PREFIX}{}-{}",
        write.manifest.save_id,
        std::process::id()
    );
    let second = if replaces {
        PutMode::Match(NO_TAG.to_owned())
    } else {
        PutMode::Create
    };
    let attempt = async move {
        let put = |mode| store.put(&key, Bytes::from_static(b"probe"), mode);
        let first = put(PutMode::Create).await;
        let second = match &first {
            Err(error) if !remote::is_unsettled(error) => None,
            _ => Some(put(second).await),
        };
        store.delete(&key).await?;
        match (first, second) {
            (Err(error), None) => Err(error.into()),
            (_, Some(Ok(_)) | None) => Ok(false),
            // A lost response followed by a violated condition is reported as `Transient`; the store honours
            // conditions in this case, too.
            (_, Some(Err(error))) if remote::is_unsettled(&error) => Ok(true),
            (_, Some(Err(error))) => Err(error.into()),
        }
    };
    if !remote::wait(attempt, write.interrupted)? {
        return Err(write.manifest.unfenced());
    }
    if let Ok(mut fenced) = FENCED.try_lock() {
        fenced.insert(tried);
    }
    Ok(())
}
