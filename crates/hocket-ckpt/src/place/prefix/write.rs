//! Uploads of data files.

use bytes::Bytes;
use hocket_store::{Store, Upload};

use crate::error::{CkptError, NEVER_REPLACED, Result};
use crate::format::digest::{BLOCK_BYTES, xxh3_128};
use crate::format::safetensors::FileLayout;
use crate::place::remote::{self, found_remote};
use crate::workers::Interrupted;
use crate::write::compress::{self, BlockEncoding, CompressedFile, largest_size};

/// Starts the upload of a data file that must not exist yet.
fn begin_upload(
    store: &Store,
    key: &str,
    size: u64,
    interrupted: Interrupted<'_>,
) -> Result<Upload> {
    let (handle, name) = (store.clone(), key.to_owned());
    let start = async move {
        if found_remote(handle.head(&name).await)?.is_some() {
            return Err(CkptError::Exists {
                uri: handle.object_uri(&name),
                reason: NEVER_REPLACED.to_owned(),
            });
        }
        Ok(handle.upload(&name, Some(size)).await?)
    };
    remote::wait(start, interrupted)
}

/// Appends a piece to an upload. Parts are sent on the I/O threads while the caller produces the next piece. An
/// upload that is dropped after an error or an interrupt is aborted.
pub(super) fn send(
    mut upload: Upload,
    bytes: Bytes,
    interrupted: Interrupted<'_>,
) -> Result<Upload> {
    remote::wait(
        async move {
            upload.write(bytes).await?;
            Ok(upload)
        },
        interrupted,
    )
}

/// Uploads a plain data file; returns the digests of its blocks.
pub(super) fn write(
    store: &Store,
    key: &str,
    layout: &FileLayout,
    interrupted: Interrupted<'_>,
) -> Result<Vec<u8>> {
    let size = layout.header.len() as u64 + layout.data_bytes;
    let mut upload = begin_upload(store, key, size, interrupted)?;
    let mut digests = Vec::new();
    upload = send(upload, Bytes::copy_from_slice(&layout.header), interrupted)?;
    let mut offset = 0;
    while offset < layout.data_bytes {
        // Block by block: a part in flight then holds little memory beyond its own bytes.
        let length = (layout.data_bytes - offset).min(BLOCK_BYTES);
        let mut piece = Vec::with_capacity(length as usize);
        layout.append(offset, length as usize, &mut piece);
        digests.extend(xxh3_128(&piece));
        upload = send(upload, Bytes::from(piece), interrupted)?;
        offset += length;
    }
    remote::wait(async move { Ok(upload.finish().await?) }, interrupted)?;
    Ok(digests)
}

/// Compresses and uploads a data file.
pub(super) fn write_compressed(
    store: &Store,
    key: &str,
    layout: &FileLayout,
    encoding: BlockEncoding,
    interrupted: Interrupted<'_>,
) -> Result<CompressedFile> {
    let size = largest_size(layout.header.len() as u64 + layout.data_bytes);
    let mut upload = Some(begin_upload(store, key, size, interrupted)?);
    let compressed = compress::compress(layout, encoding, false, interrupted, |bytes| {
        if let Some(begun) = upload.take() {
            upload = Some(send(begun, Bytes::from(bytes), interrupted)?);
        }
        Ok(())
    })?;
    if let Some(upload) = upload {
        remote::wait(async move { Ok(upload.finish().await?) }, interrupted)?;
    }
    Ok(compressed)
}
