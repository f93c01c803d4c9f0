//! The bytes of objects and parts: one immutable file each.
//!
//! An overwritten object gets a new file and the old one is unlinked. A reader that has the old file open reads
//! it to its end, so a response never mixes two versions.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use futures::StreamExt;
use http::HeaderMap;
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::{Checksum, StreamingBlob};
use s3s::{S3Error, S3ErrorCode, S3Result, StdError, s3_error};
use tokio::fs::File;
use tokio::io::{AsyncWriteExt, BufWriter};

const WRITE_BYTES: usize = 256 << 10;

/// The folder of data files.
pub struct Blobs {
    folder: PathBuf,
    next: AtomicU64,
}

impl Blobs {
    /// Opens `folder`, creating it if necessary, and removes every file for which `is_used` returns false: the
    /// remains of a server that was killed.
    ///
    /// # Errors
    /// The folder cannot be created, listed or cleaned.
    pub fn open(folder: PathBuf, is_used: impl Fn(u64) -> bool) -> io::Result<Self> {
        std::fs::create_dir_all(&folder)?;
        let mut next = 0;
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            let id = path
                .file_name()
                .and_then(|name| name.to_str()?.parse::<u64>().ok());
            match id {
                Some(id) if is_used(id) => next = next.max(id + 1),
                _ => std::fs::remove_file(path)?,
            }
        }
        Ok(Self {
            folder,
            next: AtomicU64::new(next),
        })
    }

    /// Returns the file of blob `id`.
    pub fn path(&self, id: u64) -> PathBuf {
        self.folder.join(id.to_string())
    }

    /// Creates a new blob, which is removed when dropped unless [`Blob::keep`] is called.
    pub fn create(&self) -> Blob {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        Blob {
            id,
            path: self.path(id),
            is_kept: false,
        }
    }

    /// Removes a blob that no object refers to any more. A missing file is not an error.
    pub fn remove(&self, id: u64) {
        let _ = std::fs::remove_file(self.path(id));
    }
}

/// A data file that is being written.
pub struct Blob {
    id: u64,
    path: PathBuf,
    is_kept: bool,
}

impl Blob {
    /// Returns the path to write to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps the file and returns its number; the caller must record it.
    pub fn keep(mut self) -> u64 {
        self.is_kept = true;
        self.id
    }
}

impl Drop for Blob {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A complete body that matched the declarations of its sender.
pub struct Received {
    /// The file with the bytes.
    pub blob: Blob,
    /// Size in bytes.
    pub size: u64,
    /// The MD5 digest of the bytes.
    pub md5: [u8; 16],
    /// The checksums that the sender requested.
    pub checksum: Checksum,
}

/// The sender's declarations about a body, in headers or in trailers.
#[derive(Default)]
pub struct Claims {
    /// `Content-MD5`, base64.
    pub md5: Option<String>,
    /// The `x-amz-checksum-*` headers.
    pub checksum: Checksum,
    /// The trailers announced by `x-amz-trailer`.
    pub announced: Vec<String>,
    /// The announced trailers, available once the body has been read.
    pub trailers: Option<s3s::TrailingHeaders>,
}

impl Claims {
    /// Reads the declarations from the headers of a request.
    pub fn of(
        headers: &HeaderMap,
        md5: Option<String>,
        checksum: Checksum,
        trailers: Option<s3s::TrailingHeaders>,
    ) -> Self {
        let announced = headers
            .get_all("x-amz-trailer")
            .iter()
            .filter_map(|value| value.to_str().ok());
        Self {
            md5,
            checksum,
            announced: announced
                .flat_map(|value| value.split(','))
                .map(|name| name.trim().to_lowercase())
                .collect(),
            trailers,
        }
    }
}

/// Writes `body` to a new blob and checks it against the sender's declarations.
///
/// # Errors
/// `BadDigest` if a digest differs, `IncompleteBody` if the body is truncated, `InternalError` if the disk
/// fails.
pub async fn receive(
    blobs: &Blobs,
    body: Option<StreamingBlob>,
    mut claims: Claims,
) -> S3Result<Received> {
    let blob = blobs.create();
    let mut file =
        BufWriter::with_capacity(WRITE_BYTES, File::create(blob.path()).await.map_err(disk)?);
    let mut hasher = hasher_for(&claims);
    let mut md5 = Md5::new();
    let mut size = 0;
    if let Some(mut body) = body {
        while let Some(chunk) = body.next().await {
            let chunk = chunk.map_err(broken_body)?;
            md5.update(&chunk);
            hasher.update(&chunk);
            size += chunk.len() as u64;
            file.write_all(&chunk).await.map_err(disk)?;
        }
    }
    file.flush().await.map_err(disk)?;
    let (md5, checksum) = (md5.finalize(), hasher.finalize());
    read_trailers(&mut claims);
    check_md5(claims.md5.as_deref(), &md5)?;
    for (name, claimed) in fields(&claims.checksum) {
        let found = fields(&checksum)
            .into_iter()
            .find(|(other, _)| *other == name)
            .and_then(|(_, value)| value);
        if let Some(claimed) = claimed
            && found != Some(claimed)
        {
            let found = found.unwrap_or("none");
            return Err(s3_error!(
                BadDigest,
                "x-amz-checksum-{name} is {claimed}; the body has {found}"
            ));
        }
    }
    Ok(Received {
        blob,
        size,
        md5,
        checksum,
    })
}

fn hasher_for(claims: &Claims) -> ChecksumHasher {
    let is_wanted = |name: &str, header: &Option<String>| {
        header.is_some()
            || claims
                .announced
                .iter()
                .any(|header| header == &format!("x-amz-checksum-{name}"))
    };
    let sums = &claims.checksum;
    ChecksumHasher {
        crc32: is_wanted("crc32", &sums.checksum_crc32).then(Default::default),
        crc32c: is_wanted("crc32c", &sums.checksum_crc32c).then(Default::default),
        sha1: is_wanted("sha1", &sums.checksum_sha1).then(Default::default),
        sha256: is_wanted("sha256", &sums.checksum_sha256).then(Default::default),
        crc64nvme: is_wanted("crc64nvme", &sums.checksum_crc64nvme).then(Default::default),
    }
}

fn read_trailers(claims: &mut Claims) {
    let Some(trailers) = claims
        .trailers
        .as_ref()
        .and_then(s3s::TrailingHeaders::take)
    else {
        return;
    };
    let read = |name: &str| {
        trailers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned)
    };
    let sums = &mut claims.checksum;
    for (field, name) in [
        (&mut sums.checksum_crc32, "x-amz-checksum-crc32"),
        (&mut sums.checksum_crc32c, "x-amz-checksum-crc32c"),
        (&mut sums.checksum_sha1, "x-amz-checksum-sha1"),
        (&mut sums.checksum_sha256, "x-amz-checksum-sha256"),
        (&mut sums.checksum_crc64nvme, "x-amz-checksum-crc64nvme"),
    ] {
        if let Some(value) = read(name) {
            *field = Some(value);
        }
    }
}

fn check_md5(claimed: Option<&str>, found: &[u8; 16]) -> S3Result<()> {
    match claimed {
        Some(claimed) if claimed != base64(found) => Err(s3_error!(
            BadDigest,
            "Content-MD5 is {claimed}; the body has {}",
            base64(found)
        )),
        _ => Ok(()),
    }
}

fn fields(sums: &Checksum) -> [(&'static str, Option<&str>); 5] {
    [
        ("crc32", sums.checksum_crc32.as_deref()),
        ("crc32c", sums.checksum_crc32c.as_deref()),
        ("sha1", sums.checksum_sha1.as_deref()),
        ("sha256", sums.checksum_sha256.as_deref()),
        ("crc64nvme", sums.checksum_crc64nvme.as_deref()),
    ]
}

/// Returns standard base64 with padding.
pub fn base64(data: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(data.len().div_ceil(3) * 4);
    for group in data.chunks(3) {
        let bits = group
            .iter()
            .fold(0u32, |bits, byte| bits << 8 | u32::from(*byte))
            << (8 * (3 - group.len()));
        for place in 0..4 {
            let digit = ALPHABET[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place > group.len() {
                '='
            } else {
                char::from(digit)
            });
        }
    }
    text
}

/// Returns lower-case hexadecimal.
pub fn hex(data: &[u8]) -> String {
    data.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Builds the error for a failure of the server's own disk.
pub fn disk(error: io::Error) -> S3Error {
    S3Error::with_source(S3ErrorCode::InternalError, Box::new(error))
}

fn broken_body(error: StdError) -> S3Error {
    let text = error.to_string();
    if text.contains("Sha256Mismatch") {
        return s3_error!(
            BadDigest,
            "the body does not have the SHA-256 that its request was signed with"
        );
    }
    s3_error!(IncompleteBody, "the body broke off: {text}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn base64_is_the_rfcs() {
        for (plain, coded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
    }

    #[test]
    fn a_dropped_blob_is_gone_and_a_kept_one_is_not() {
        let folder = std::env::temp_dir().join(format!("s3d-blobs-{}", std::process::id()));
        let blobs = Blobs::open(folder.clone(), |_| true).unwrap();
        let (dropped, kept) = (blobs.create(), blobs.create());
        std::fs::write(dropped.path(), b"a").unwrap();
        std::fs::write(kept.path(), b"b").unwrap();
        let (gone, path) = (dropped.path().to_owned(), kept.path().to_owned());
        drop(dropped);
        let id = kept.keep();
        assert!(!gone.exists() && path.exists());
        let again = Blobs::open(folder.clone(), |other| other == id).unwrap();
        assert!(path.exists() && again.create().id > id);
        Blobs::open(folder.clone(), |_| false).unwrap();
        assert!(!path.exists());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
