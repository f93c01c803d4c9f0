//! Stores of local files.

mod meta;
mod write;

use crate::backend::{StoreBackend, Writer};
use crate::durable::name_of_hidden;
use crate::error::{Result, StoreError};
use crate::local::meta::{describe, etag, write_error};
use crate::local::write::ObjectWrite;
use crate::process::runtime::blocking;
use crate::values::handle::StoreHandle;
use crate::values::meta::{LevelListing, ObjectMeta, OpenUpload, PutMode};
use crate::values::pin::VersionPin;
use async_trait::async_trait;
use bytes::Bytes;
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// A directory as a store.
pub(crate) struct LocalStore(pub(crate) StoreHandle);

impl LocalStore {
    /// Runs `work` with the handle and `key` on a blocking thread.
    async fn run<T: Send + 'static>(
        &self,
        key: &str,
        work: impl FnOnce(StoreHandle, String) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (handle, key) = (self.0.clone(), key.to_owned());
        blocking(move || work(handle, key)).await
    }
}

#[async_trait]
impl StoreBackend for LocalStore {
    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        self.run(key, |handle, key| {
            let (path, uri) = handle.locate(&key);
            let metadata = fs::metadata(&path)
                .map_err(|error| StoreError::from_io(&uri, "look at", &error))?;
            describe(&key, &uri, &metadata)
        })
        .await
    }

    async fn get(&self, key: &str, pin: VersionPin, size: Option<u64>) -> Result<Bytes> {
        self.run(key, move |handle, key| {
            let reader = LocalObject::open(&handle, &key, &pin)?;
            reader.meta.check_size(reader.uri.clone(), size)?;
            let data = reader.read(0..reader.meta.size)?;
            reader.check_unchanged()?;
            Ok(data)
        })
        .await
    }

    async fn get_ranges(
        &self,
        key: &str,
        pin: VersionPin,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Bytes>> {
        let ranges = ranges.to_vec();
        self.run(key, move |handle, key| {
            let reader = LocalObject::open(&handle, &key, &pin)?;
            let pieces = ranges
                .into_iter()
                .map(|range| reader.read(range))
                .collect::<Result<Vec<_>>>()?;
            reader.check_unchanged()?;
            Ok(pieces)
        })
        .await
    }

    async fn download(
        &self,
        key: &str,
        pin: VersionPin,
        path: &Path,
        size: Option<u64>,
    ) -> Result<ObjectMeta> {
        let to = path.to_owned();
        self.run(key, move |handle, key| {
            let mut reader = LocalObject::open(&handle, &key, &pin)?;
            reader.meta.check_size(reader.uri.clone(), size)?;
            let name = to.to_string_lossy().into_owned();
            let mut target =
                File::create(&to).map_err(|error| write_error(&name, "create", &error))?;
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

    async fn put(&self, key: &str, data: Bytes, mode: PutMode) -> Result<Option<String>> {
        self.run(key, move |handle, key| {
            let mut write = ObjectWrite::create(&handle, &key)?;
            write.write(&data)?;
            Ok(write.publish(&mode)?.etag)
        })
        .await
    }

    async fn writer(&self, key: &str, _size_hint: Option<u64>) -> Result<Box<dyn Writer>> {
        let write = self.run(key, |handle, key| ObjectWrite::create(&handle, &key));
        let (write, uri) = (Some(write.await?), self.0.object_uri(key));
        Ok(Box::new(LocalWriter { uri, write }))
    }

    /// Also removes directories that this leaves empty, because object stores have none.
    async fn delete(&self, key: &str) -> Result<()> {
        self.run(key, |handle, key| {
            let (path, uri) = handle.locate(&key);
            match fs::remove_file(&path) {
                Ok(()) => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory
                    ) => {}
                Err(error) => return Err(write_error(&uri, "delete", &error)),
            }
            let root = handle.local_root();
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

    async fn list(&self, prefix: &str, one_level: bool) -> Result<LevelListing> {
        self.run(prefix, move |handle, prefix| {
            list(&handle, prefix, one_level)
        })
        .await
    }

    async fn list_uploads(&self) -> Result<Vec<OpenUpload>> {
        Ok(Vec::new())
    }

    async fn abort_upload(&self, _key: &str, _id: &str) -> Result<()> {
        Ok(())
    }
}

/// A streaming write; `None` after an error.
struct LocalWriter {
    uri: String,
    write: Option<ObjectWrite>,
}

impl LocalWriter {
    fn take(&mut self) -> Result<ObjectWrite> {
        let write = self.write.take();
        write.ok_or_else(|| StoreError::upload_ended(&self.uri))
    }
}

#[async_trait]
impl Writer for LocalWriter {
    async fn write(&mut self, data: Bytes) -> Result<()> {
        let mut write = self.take()?;
        self.write = Some(blocking(move || write.write(&data).map(|()| write)).await?);
        Ok(())
    }

    async fn finish(&mut self, _size: u64) -> Result<ObjectMeta> {
        let write = self.take()?;
        blocking(move || write.publish(&PutMode::Overwrite)).await
    }

    async fn abort(&mut self) -> Result<()> {
        drop(self.write.take());
        Ok(())
    }
}

/// Lists all files below `prefix`, or one level.
fn list(handle: &StoreHandle, prefix: String, one_level: bool) -> Result<LevelListing> {
    let mut listing = LevelListing::default();
    let mut seen = HashSet::new();
    let mut pending = vec![prefix];
    while let Some(dir) = pending.pop() {
        let (path, uri) = handle.locate(&dir);
        let failed = |error: &io::Error| StoreError::from_io(&uri, "list", error);
        // Following a link to a parent directory would never end.
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() && seen.insert((metadata.dev(), metadata.ino())) => {}
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
                .filter(|name| name_of_hidden(name).is_none())
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
}

/// An object's open file. A rename over its name does not affect reads in progress.
struct LocalObject {
    file: File,
    uri: String,
    meta: ObjectMeta,
}

impl LocalObject {
    fn open(handle: &StoreHandle, key: &str, pin: &VersionPin) -> Result<Self> {
        let (path, uri) = handle.locate(key);
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
