//! Conditional writes of the manifest: under a lock on a disk, by the store's conditions on an object store.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use bytes::Bytes;
use hocket_store::durable::{Locked, open_regular};
use hocket_store::{PutMode, Store};

use crate::error::{CkptError, Result};
use crate::local_file::found;
use crate::location::Location;
use crate::manifest::{HEAD_BYTES, MANIFEST_NAME, decode_head};
use crate::publish::{compare, publish};
use crate::remote;
use crate::remote::found_remote;
use crate::workers::Interrupted;

/// The lock for replacing or removing a folder's manifest. Creating one needs no lock, because a link is
/// atomic.
pub(crate) struct Lock(#[expect(dead_code, reason = "dropped, it unlocks")] Locked);

impl Lock {
    /// Waits for the lock; call it on a thread that may block.
    pub(crate) fn take(root: &Path) -> Result<Self> {
        let path = root.join(format!(".{MANIFEST_NAME}.lock"));
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .map_err(|error| CkptError::io(&path, "open the lock", &error))?;
        Locked::wait(file)
            .map(Self)
            .map_err(|error| CkptError::io(&path, "lock the manifest", &error))
    }
}

/// Renames the file to the manifest if the current manifest belongs to the save `old` or does not exist;
/// returns false if it belongs to another save.
pub(crate) fn replace(
    location: &Location,
    temporary: &Path,
    name: &Path,
    old: &str,
    unfenced: bool,
) -> Result<bool> {
    let _lock = Lock::take(temporary.parent().unwrap_or(Path::new(".")))?;
    let mut start = Vec::new();
    let mut read = || open_regular(name)?.take(HEAD_BYTES).read_to_end(&mut start);
    if found(read(), name, "read the manifest")?.is_none() {
        return publish(temporary, name, unfenced);
    }
    if compare(location, &start, old).is_err() {
        return Ok(false);
    }
    std::fs::rename(temporary, name)
        .map(|()| true)
        .map_err(|error| CkptError::io(name, "replace the manifest", &error))
}

/// A manifest to be written to an object store.
pub(crate) struct Put<'a> {
    pub(crate) location: &'a Location,
    pub(crate) store: &'a Store,
    pub(crate) manifest: Bytes,
    pub(crate) save_id: &'a str,
    pub(crate) interrupted: Interrupted<'a>,
}

impl Put<'_> {
    /// Writes the manifest if there is none.
    pub(crate) fn create(&self) -> Result<()> {
        self.put(PutMode::Create)
    }

    /// Writes the manifest if the current one belongs to `old` or does not exist.
    pub(crate) fn replace(&self, old: &str) -> Result<()> {
        let store = self.store.clone();
        // The ETag is read first: if the manifest changes before it is read below, the ETag no longer matches.
        let look = async move { found_remote(store.head(MANIFEST_NAME).await) };
        let Some(meta) = remote::wait(look, self.interrupted)? else {
            return self.create();
        };
        match self.read_back()? {
            None => self.create(),
            Some(there) if is_of(self.location, &there, old) => match meta.etag {
                Some(etag) => self.put(PutMode::Match(etag)),
                None => Err(CkptError::Unfenced {
                    uri: self.location.uri().to_owned(),
                }),
            },
            Some(there) => compare(self.location, &there, self.save_id),
        }
    }

    fn put(&self, mode: PutMode) -> Result<()> {
        let (store, manifest) = (self.store.clone(), self.manifest.clone());
        let put = async move { Ok(store.put(MANIFEST_NAME, manifest, mode).await) };
        match remote::wait(put, self.interrupted)? {
            Ok(_) => Ok(()),
            Err(error) if remote::is_unsettled(&error) => match self.read_back()? {
                // Only the object itself shows which save wrote it.
                Some(there) => compare(self.location, &there, self.save_id),
                None => Err(error.into()),
            },
            Err(error) => Err(error.into()),
        }
    }

    fn read_back(&self) -> Result<Option<Vec<u8>>> {
        self.location
            .get_start(MANIFEST_NAME, HEAD_BYTES, self.interrupted)
    }
}

fn is_of(location: &Location, manifest: &[u8], save_id: &str) -> bool {
    decode_head(manifest, location.uri()).is_ok_and(|(head, _, _)| head.save_id == save_id)
}

/// Endpoints and buckets known to honour conditions, from this process or the one it was forked from.
static FENCED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Prefix of the probe key below the checkpoint; the save's id follows.
const PROBE_PREFIX: &str = ".hocket-probe-";

/// Returns the first digits of the id of the save that wrote a probe with this key, if it is a probe.
pub(crate) fn save_of_probe(key: &str) -> Option<&str> {
    let (id, pid) = key.strip_prefix(PROBE_PREFIX)?.split_once('-')?;
    let is_hex = |digit: u8| digit.is_ascii_hexdigit();
    (id.len() == 32 && id.bytes().all(is_hex) && pid.parse::<u32>().is_ok()).then(|| id.get(..8))?
}

/// An ETag that no object has.
const NO_TAG: &str = "\"00000000000000000000000000000000\"";

/// Tests on a separate key whether the store honours the condition; without it, concurrent commits would
/// overwrite each other.
///
/// # Errors
/// `Unfenced` if the store ignores the condition, and errors of the store.
pub(crate) fn probe(write: &Put<'_>, replaces: bool) -> Result<()> {
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
    let key = format!("{PROBE_PREFIX}{}-{}", write.save_id, std::process::id());
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
        return Err(CkptError::Unfenced {
            uri: write.location.uri().to_owned(),
        });
    }
    if let Ok(mut fenced) = FENCED.try_lock() {
        fenced.insert(tried);
    }
    Ok(())
}
