//! Checkpoints in an object store.

mod commit;
mod read;
mod removal;
mod write;

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use hocket_store::{LevelListing, Store, Upload};

use super::files::{FolderPeek, NewFile, OpenFile, Opened, PieceWriter, PlaceFiles};
use super::remote::{self, found_remote};
use crate::error::{CkptError, Result};
use crate::format::safetensors::FileLayout;
use crate::manifest::write::ManifestWrite;
use crate::manifest::{HEAD_BYTES, MANIFEST_NAME, TRAILER_BYTES};
use crate::read::byte_reads::ByteReadJob;
use crate::read::reader::CachePolicy;
use crate::read::verify::{BadBlock, FileCheck};
use crate::workers::Interrupted;
use crate::write::compress;
use crate::write::written::{FileRecord, WriteOptions};

/// A prefix of object names.
#[derive(Debug)]
pub(crate) struct PrefixPlace {
    uri: String,
    store: Store,
}

impl PrefixPlace {
    pub(crate) fn new(uri: &str, store: Store) -> Self {
        let uri = uri.to_owned();
        Self { uri, store }
    }
}

impl PlaceFiles for PrefixPlace {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn get_start(
        &self,
        path: &str,
        limit: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<Vec<u8>>> {
        let get = remote::get_start(self.store.clone(), path.to_owned(), limit);
        remote::wait(get, interrupted)
    }

    fn has_data(&self, interrupted: Interrupted<'_>) -> Result<bool> {
        remote::wait(
            remote::has_data(self.store.clone(), String::new()),
            interrupted,
        )
    }

    fn folders(&self, interrupted: Interrupted<'_>) -> Result<Vec<String>> {
        let listing = remote::level(&self.store, interrupted)?;
        if listing.dirs.is_empty() && listing.objects.is_empty() {
            let reason = "nothing exists under this prefix";
            return Err(CkptError::not_found(&self.uri, reason));
        }
        Ok(listing.dirs)
    }

    fn peek(&self, folders: &[String], interrupted: Interrupted<'_>) -> Result<Vec<FolderPeek>> {
        let look = |index: usize| {
            let (store, name) = (self.store.clone(), folders[index].clone());
            let found = async move {
                let key = format!("{name}/{MANIFEST_NAME}");
                let ends = remote::get_ends(store.clone(), key, HEAD_BYTES, TRAILER_BYTES).await?;
                let has_data = ends.is_none() && remote::has_data(store, name + "/").await?;
                Ok((ends, has_data))
            };
            async move { FolderPeek::of(found.await) }
        };
        remote::gather_all(folders.len(), look, interrupted)
    }

    fn level(&self, interrupted: Interrupted<'_>) -> Result<Option<LevelListing>> {
        remote::level(&self.store, interrupted).map(Some)
    }

    fn sizes(&self, paths: &[String], interrupted: Interrupted<'_>) -> Result<Vec<Option<u64>>> {
        let look = |index: usize| remote::size(self.store.clone(), paths[index].clone());
        remote::gather_all(paths.len(), look, interrupted)
    }

    fn open(&self, path: &str, interrupted: Interrupted<'_>) -> Result<Option<Opened>> {
        let (store, key) = (self.store.clone(), path.to_owned());
        let size = remote::wait(remote::size(store.clone(), key.clone()), interrupted)?;
        Ok(size.map(|size| -> Opened { (size, Arc::new(PrefixObject { store, key })) }))
    }

    fn read(
        &self,
        job: &ByteReadJob<'_>,
        _: CachePolicy,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        read::read(&self.store, job, interrupted)
    }

    fn verify(&self, check: &FileCheck<'_>, interrupted: Interrupted<'_>) -> Result<Vec<BadBlock>> {
        read::verify(&self.store, check, interrupted)
    }

    fn write(
        &self,
        path: &str,
        layout: &FileLayout,
        options: WriteOptions,
        interrupted: Interrupted<'_>,
    ) -> Result<FileRecord> {
        Ok(match options.encoding {
            None => FileRecord::plain(write::write(&self.store, path, layout, interrupted)?),
            Some(encoding) => {
                write::write_compressed(&self.store, path, layout, encoding, interrupted)?.into()
            }
        })
    }

    fn begin(
        &self,
        path: &str,
        file: NewFile,
        interrupted: Interrupted<'_>,
    ) -> Result<Box<dyn PieceWriter>> {
        let (store, key) = (self.store.clone(), path.to_owned());
        let size = if file.is_exact {
            file.size
        } else {
            compress::largest_size(file.size)
        };
        let start = async move { Ok(store.upload(&key, Some(size)).await?) };
        let upload = remote::wait(start, interrupted)?;
        Ok(Box::new(PieceUpload(Some(upload))))
    }

    fn check_fence(&self, save_id: &str, interrupted: Interrupted<'_>) -> Result<()> {
        commit::check_fence(&self.store, save_id, interrupted)
    }

    fn commit(&self, manifest: &ManifestWrite, interrupted: Interrupted<'_>) -> Result<()> {
        commit::commit(&self.store, manifest, interrupted)
    }
}

struct PrefixObject {
    store: Store,
    key: String,
}

impl OpenFile for PrefixObject {
    fn read(
        &self,
        ranges: &[Range<u64>],
        interrupted: Interrupted<'_>,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        let (store, key, ranges) = (self.store.clone(), self.key.clone(), ranges.to_vec());
        let fetch = async move { found_remote(store.get_ranges(&key, &ranges).await) };
        let pieces = remote::wait(fetch, interrupted)?;
        Ok(pieces.map(|pieces| pieces.iter().map(|bytes| bytes.to_vec()).collect()))
    }
}

/// An upload; none after an error.
struct PieceUpload(Option<Upload>);

impl PieceWriter for PieceUpload {
    fn write(&mut self, bytes: &[u8], interrupted: Interrupted<'_>) -> Result<()> {
        if let Some(upload) = self.0.take() {
            let piece = Bytes::copy_from_slice(bytes);
            self.0 = Some(write::send(upload, piece, interrupted)?);
        }
        Ok(())
    }

    fn finish(self: Box<Self>, interrupted: Interrupted<'_>) -> Result<()> {
        let Some(upload) = self.0 else { return Ok(()) };
        remote::wait(async move { Ok(upload.finish().await?) }, interrupted).map(drop)
    }
}
