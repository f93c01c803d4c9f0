//! Stores of local files.

use crate::error::{Result, StoreError};
use crate::meta::{Listing, ObjectMeta, PutMode};
use crate::object::Pin;
use crate::staged::{HIDDEN, Staged};
use crate::store::Store;
use bytes::Bytes;
use std::collections::HashSet;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Runs file operations on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => Err(StoreError::io(
            "hocket",
            format!("a file operation ended without an answer: {error}"),
        )),
    }
}

/// See [`Store::head`].
pub(crate) async fn head(store: Store, key: String) -> Result<ObjectMeta> {
    blocking(move || {
        let (path, uri) = locate(&store, &key);
        let metadata =
            fs::metadata(&path).map_err(|error| StoreError::from_io(&uri, "look at", &error))?;
        describe(&key, &uri, &metadata)
    })
    .await
}

/// See [`Store::get`].
pub(crate) async fn get(store: Store, key: String, pin: Pin, size: Option<u64>) -> Result<Bytes> {
    blocking(move || {
        let reader = Reader::open(&store, &key, &pin)?;
        reader.meta.check_size(store.object_uri(&key), size)?;
        let data = reader.read(0..reader.meta.size)?;
        reader.check_unchanged()?;
        Ok(data)
    })
    .await
}

/// See [`Store::get_ranges`].
pub(crate) async fn get_ranges(
    store: Store,
    key: String,
    pin: Pin,
    ranges: Vec<Range<u64>>,
) -> Result<Vec<Bytes>> {
    blocking(move || {
        let reader = Reader::open(&store, &key, &pin)?;
        let pieces = ranges
            .into_iter()
            .map(|range| reader.read(range))
            .collect::<Result<Vec<_>>>()?;
        reader.check_unchanged()?;
        Ok(pieces)
    })
    .await
}

/// See [`Store::download`].
pub(crate) async fn download(
    store: Store,
    key: String,
    pin: Pin,
    to: PathBuf,
    size: Option<u64>,
) -> Result<ObjectMeta> {
    blocking(move || {
        let mut reader = Reader::open(&store, &key, &pin)?;
        reader.meta.check_size(reader.uri.clone(), size)?;
        let name = to.to_string_lossy().into_owned();
        let mut target = File::create(&to).map_err(|error| write_error(&name, "create", &error))?;
        let copied = io::copy(&mut reader.file, &mut target)
            .map_err(|error| write_error(&name, "write", &error))?;
        if copied != reader.meta.size {
            return Err(StoreError::io(
                &reader.uri,
                format!("{copied} bytes read, {} expected", reader.meta.size),
            ));
        }
        reader.check_unchanged()?;
        Ok(reader.meta)
    })
    .await
}

/// See [`Store::put`].
pub(crate) async fn put(
    store: Store,
    key: String,
    data: Bytes,
    mode: PutMode,
) -> Result<Option<String>> {
    blocking(move || {
        let mut staged = Staged::create(&store, &key)?;
        staged.write(&data)?;
        Ok(staged.publish(&mode)?.etag)
    })
    .await
}

/// See [`Store::delete`]. Also removes directories that this leaves empty, because object stores have none.
pub(crate) async fn delete(store: Store, key: String) -> Result<()> {
    blocking(move || {
        let (path, uri) = locate(&store, &key);
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory
                ) => {}
            Err(error) => return Err(write_error(&uri, "delete", &error)),
        }
        let root = store.local_root();
        let mut dir = path.parent();
        while let Some(parent) = dir.filter(|dir| Some(*dir) != root) {
            if fs::remove_dir(parent).is_err() {
                break;
            }
            dir = parent.parent();
        }
        Ok(())
    })
    .await
}

/// See [`Store::list`] and [`Store::list_dirs`]; the result is unsorted.
pub(crate) async fn list(store: Store, prefix: String, one_level: bool) -> Result<Listing> {
    blocking(move || {
        let mut listing = Listing::default();
        let mut seen = HashSet::new();
        let mut pending = vec![prefix];
        while let Some(dir) = pending.pop() {
            let (path, uri) = locate(&store, &dir);
            let failed = |error: &io::Error| StoreError::from_io(&uri, "list", error);
            // Following a link to a parent directory would never end.
            match fs::metadata(&path) {
                Ok(metadata)
                    if metadata.is_dir() && seen.insert((metadata.dev(), metadata.ino())) => {}
                Ok(_) => continue,
                Err(error)
                    if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
                {
                    continue;
                }
                Err(error) => return Err(failed(&error)),
            }
            for entry in fs::read_dir(&path).map_err(|error| failed(&error))? {
                let entry = entry.map_err(|error| failed(&error))?;
                let Some(name) = entry
                    .file_name()
                    .to_str()
                    .filter(|name| !name.starts_with(HIDDEN))
                    .map(str::to_owned)
                else {
                    continue;
                };
                let key = if dir.is_empty() {
                    name
                } else {
                    format!("{dir}/{name}")
                };
                // A file deleted during the listing is left out.
                let Ok(metadata) = fs::metadata(entry.path()) else {
                    continue;
                };
                if metadata.is_file() {
                    listing.objects.push(describe(&key, &uri, &metadata)?);
                } else if metadata.is_dir() {
                    if one_level {
                        listing.dirs.push(key)
                    } else {
                        pending.push(key)
                    }
                }
            }
        }
        Ok(listing)
    })
    .await
}

/// An object's open file. A rename over its name does not affect reads in progress.
struct Reader {
    file: File,
    uri: String,
    meta: ObjectMeta,
}

impl Reader {
    fn open(store: &Store, key: &str, pin: &Pin) -> Result<Self> {
        let (path, uri) = locate(store, key);
        let failed = |error: io::Error| StoreError::from_io(&uri, "open", &error);
        // `O_NONBLOCK`: a named pipe opens at once instead of blocking, and is then rejected.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .map_err(failed)?;
        let meta = describe(key, &uri, &file.metadata().map_err(failed)?)?;
        pin.check(uri.clone(), &meta)?;
        Ok(Self { file, uri, meta })
    }

    fn read(&self, range: Range<u64>) -> Result<Bytes> {
        if range.end > self.meta.size {
            let (start, end, size) = (range.start, range.end, self.meta.size);
            return Err(StoreError::io(
                &self.uri,
                format!("range {start}..{end} does not lie within the object's {size} bytes"),
            ));
        }
        let mut data = vec![0; (range.end - range.start) as usize];
        self.file
            .read_exact_at(&mut data, range.start)
            .map_err(|error| {
                StoreError::io(
                    &self.uri,
                    format!("read {}..{}: {error}", range.start, range.end),
                )
            })?;
        Ok(data.into())
    }

    /// Fails if the file itself was modified in place. No store writes in place, but another program might.
    fn check_unchanged(&self) -> Result<()> {
        let metadata = self
            .file
            .metadata()
            .map_err(|error| StoreError::from_io(&self.uri, "look at", &error))?;
        let (expected, actual) = (self.meta.etag.clone().unwrap_or_default(), etag(&metadata));
        if expected == actual {
            return Ok(());
        }
        Err(StoreError::Changed {
            uri: self.uri.clone(),
            expected,
            actual,
        })
    }
}

pub(crate) fn locate(store: &Store, key: &str) -> (PathBuf, String) {
    let root = store.local_root().unwrap_or(Path::new("/"));
    let path = if key.is_empty() {
        root.to_owned()
    } else {
        root.join(key)
    };
    (path, store.object_uri(key))
}

pub(crate) fn describe(key: &str, uri: &str, metadata: &Metadata) -> Result<ObjectMeta> {
    if !metadata.is_file() {
        return Err(StoreError::NotFound {
            uri: uri.to_owned(),
        });
    }
    Ok(ObjectMeta {
        key: key.to_owned(),
        size: metadata.len(),
        etag: Some(etag(metadata)),
        modified_ms: metadata.mtime() * 1000 + metadata.mtime_nsec() / 1_000_000,
    })
}

/// Derives an ETag from the inode, modification time and size.
pub(crate) fn etag(metadata: &Metadata) -> String {
    let time_ns = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
    format!("{:x}-{time_ns:x}-{:x}", metadata.ino(), metadata.len())
}

/// Maps the error of a write. It is never `NotFound`, because the object need not exist.
pub(crate) fn write_error(uri: &str, doing: &str, error: &io::Error) -> StoreError {
    match StoreError::from_io(uri, doing, error) {
        StoreError::NotFound { uri } => StoreError::io(uri, format!("{doing}: {error}")),
        other => other,
    }
}
