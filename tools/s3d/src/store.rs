//! Buckets, objects and uploads in one folder. Every condition is checked and every change made under one lock.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use s3s::dto::{ETag, ETagCondition};
use s3s::{S3Result, s3_error};

use crate::blobs::{Blobs, disk};
use crate::journal::{Bucket, Buckets, Change, Journal, Object};
use crate::pieces::Piece;

/// The conditions of a write on the object that it would replace.
#[derive(Clone, Default)]
pub struct Condition {
    /// `If-Match`: an object with this ETag exists.
    pub if_match: Option<ETagCondition>,
    /// `If-None-Match`: no object exists, or none with this ETag.
    pub if_none_match: Option<ETagCondition>,
}

impl Condition {
    /// Checks whether a write may replace `present`.
    ///
    /// # Errors
    /// `PreconditionFailed`, or `NoSuchKey` if `If-Match` finds no object, as on S3.
    pub fn check(&self, present: Option<&Object>) -> S3Result<()> {
        if self.if_match.is_some() && present.is_none() {
            return Err(s3_error!(
                NoSuchKey,
                "If-Match was given, and there is no object"
            ));
        }
        if let (Some(wanted), Some(object)) = (&self.if_match, present)
            && !is_matched(wanted, object)
        {
            return Err(s3_error!(
                PreconditionFailed,
                "If-Match was given, and the ETag is \"{}\"",
                object.etag
            ));
        }
        if let (Some(unwanted), Some(object)) = (&self.if_none_match, present)
            && is_matched(unwanted, object)
        {
            return Err(s3_error!(
                PreconditionFailed,
                "If-None-Match was given, and there is an object"
            ));
        }
        Ok(())
    }
}

/// Returns whether `object` has the ETag of `condition`; `*` matches every object.
pub fn is_matched(condition: &ETagCondition, object: &Object) -> bool {
    condition
        .as_etag()
        .is_none_or(|wanted| wanted.weak_cmp(&ETag::Strong(object.etag.clone())))
}

/// An uploaded part.
#[derive(Clone, Debug)]
pub struct Part {
    /// Number of the data file.
    pub blob: u64,
    /// Size in bytes.
    pub size: u64,
    /// The MD5 digest of its bytes; in hexadecimal, its ETag.
    pub md5: [u8; 16],
    /// Milliseconds since 1970.
    pub modified_ms: u64,
}

/// A multipart upload between its creation and its completion.
#[derive(Debug)]
pub struct Upload {
    /// The bucket of its object.
    pub bucket: String,
    /// Its key.
    pub key: String,
    /// The `Content-Type` of the object.
    pub content_type: Option<String>,
    /// The `x-amz-meta-*` headers of the object.
    pub metadata: HashMap<String, String>,
    /// Milliseconds since 1970.
    pub created_ms: u64,
    /// Parts by number.
    pub parts: BTreeMap<i32, Part>,
}

struct Contents {
    journal: Journal,
    buckets: Buckets,
    uploads: BTreeMap<String, Upload>,
    created_uploads: u64,
}

/// The store of one root folder.
pub struct Store {
    /// The data files.
    pub blobs: Blobs,
    contents: Mutex<Contents>,
    _lock: File,
}

impl Store {
    /// Opens the store in `root`, creating it if necessary. Incomplete uploads are discarded.
    ///
    /// # Errors
    /// The folder cannot be used, or another server uses it.
    pub fn open(root: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(root)?;
        let lock = File::create(root.join("lock"))?;
        lock.try_lock().map_err(|error| {
            io::Error::other(format!(
                "`{}` is used by another server ({error}); give another --root",
                root.display()
            ))
        })?;
        let (journal, buckets) = Journal::open(root.join("journal"))?;
        let used: std::collections::HashSet<u64> = buckets
            .values()
            .flat_map(|bucket| bucket.values())
            .flat_map(|object| object.pieces.iter().map(|piece| piece.blob))
            .collect();
        let blobs = Blobs::open(root.join("blobs"), |id| used.contains(&id))?;
        let contents = Contents {
            journal,
            buckets,
            uploads: BTreeMap::new(),
            created_uploads: 0,
        };
        Ok(Self {
            blobs,
            contents: Mutex::new(contents),
            _lock: lock,
        })
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // Poisoning is harmless: a change is applied after its line was written, by code that does not panic in
        // between.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `read` with the objects of `bucket`.
    ///
    /// # Errors
    /// `NoSuchBucket`, or what `read` returns.
    pub fn read<T>(&self, bucket: &str, read: impl FnOnce(&Bucket) -> S3Result<T>) -> S3Result<T> {
        read(find(&self.contents().buckets, bucket)?)
    }

    /// Returns the names of all buckets.
    pub fn bucket_names(&self) -> Vec<String> {
        self.contents().buckets.keys().cloned().collect()
    }

    /// Returns the object at `key`.
    ///
    /// # Errors
    /// `NoSuchBucket`, `NoSuchKey`.
    pub fn object(&self, bucket: &str, key: &str) -> S3Result<Object> {
        self.read(bucket, |objects| {
            objects
                .get(key)
                .cloned()
                .ok_or_else(|| s3_error!(NoSuchKey, "no object `{key}`"))
        })
    }

    /// Creates a bucket; returns false if it exists.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn create_bucket(&self, bucket: &str) -> S3Result<bool> {
        let mut contents = self.contents();
        if contents.buckets.contains_key(bucket) {
            return Ok(false);
        }
        contents.commit(Change::Create {
            bucket: bucket.to_owned(),
        })?;
        Ok(true)
    }

    /// Deletes an empty bucket.
    ///
    /// # Errors
    /// `NoSuchBucket`, `BucketNotEmpty`.
    pub fn delete_bucket(&self, bucket: &str) -> S3Result<()> {
        let mut contents = self.contents();
        if !find(&contents.buckets, bucket)?.is_empty() {
            return Err(s3_error!(
                BucketNotEmpty,
                "bucket `{bucket}` holds objects; delete them first"
            ));
        }
        contents.commit(Change::Drop {
            bucket: bucket.to_owned(),
        })?;
        Ok(())
    }

    /// Sets the bytes of the object at `key` to the result of `keep` if the current object meets `condition`.
    /// Of several writers with the same condition, one succeeds.
    ///
    /// # Errors
    /// `NoSuchBucket`, or as [`Condition::check`]; `keep` is then not called.
    pub fn put(
        &self,
        bucket: &str,
        key: &str,
        keep: impl FnOnce() -> Vec<Piece>,
        object: Object,
        condition: &Condition,
    ) -> S3Result<Object> {
        let mut contents = self.contents();
        condition.check(find(&contents.buckets, bucket)?.get(key))?;
        // After a failure between these two statements no object refers to the file; the next start removes it.
        let object = Object {
            pieces: keep(),
            ..object
        };
        let (bucket, key) = (bucket.to_owned(), key.to_owned());
        let replaced = contents.commit(Change::Put {
            bucket,
            key,
            object: object.clone(),
        })?;
        if let Some(replaced) = replaced {
            self.remove(&replaced);
        }
        Ok(object)
    }

    /// Deletes the object at `key`. Deleting a missing object succeeds, as on S3.
    ///
    /// # Errors
    /// `NoSuchBucket`, or as [`Condition::check`].
    pub fn delete(&self, bucket: &str, key: &str, condition: &Condition) -> S3Result<()> {
        let mut contents = self.contents();
        let present = find(&contents.buckets, bucket)?.get(key);
        condition.check(present)?;
        if present.is_some() {
            let removed = contents.commit(Change::Delete {
                bucket: bucket.to_owned(),
                key: key.to_owned(),
            })?;
            if let Some(removed) = removed {
                self.remove(&removed);
            }
        }
        Ok(())
    }

    fn remove(&self, object: &Object) {
        for piece in &object.pieces {
            self.blobs.remove(piece.blob);
        }
    }

    /// Starts an upload and returns its id.
    ///
    /// # Errors
    /// `NoSuchBucket`.
    pub fn create_upload(&self, upload: Upload) -> S3Result<String> {
        let mut contents = self.contents();
        find(&contents.buckets, &upload.bucket)?;
        contents.created_uploads += 1;
        // The time in the id prevents a reuse of ids that an earlier server on this folder issued.
        let id = format!("{:012x}{:08x}", upload.created_ms, contents.created_uploads);
        contents.uploads.insert(id.clone(), upload);
        Ok(id)
    }

    /// Calls `act` with the upload `id` of the object at `key`.
    ///
    /// # Errors
    /// `NoSuchUpload`, or what `act` returns.
    pub fn with_upload<T>(
        &self,
        bucket: &str,
        key: &str,
        id: &str,
        act: impl FnOnce(&mut Upload) -> S3Result<T>,
    ) -> S3Result<T> {
        let mut contents = self.contents();
        let upload = contents
            .uploads
            .get_mut(id)
            .filter(|upload| upload.bucket == bucket && upload.key == key);
        act(upload.ok_or_else(|| no_upload(id))?)
    }

    /// Removes the upload `id` from the table, so that only one request completes or aborts it; see
    /// [`Store::return_upload`].
    ///
    /// # Errors
    /// `NoSuchUpload`.
    pub fn take_upload(&self, bucket: &str, key: &str, id: &str) -> S3Result<Upload> {
        self.with_upload(bucket, key, id, |_| Ok(()))?;
        self.contents()
            .uploads
            .remove(id)
            .ok_or_else(|| no_upload(id))
    }

    /// Returns an upload to the table after its completion failed, so that its client may retry.
    pub fn return_upload(&self, id: &str, upload: Upload) {
        self.contents().uploads.insert(id.to_owned(), upload);
    }

    /// Removes the files of a finished upload, except those that the object now uses.
    pub fn drop_parts(&self, upload: &Upload, kept: &[Piece]) {
        for part in upload.parts.values() {
            if kept.iter().all(|piece| piece.blob != part.blob) {
                self.blobs.remove(part.blob);
            }
        }
    }

    /// Returns the uploads into `bucket` whose keys start with `prefix`: key, id and creation time in
    /// milliseconds.
    ///
    /// # Errors
    /// `NoSuchBucket`.
    pub fn uploads(&self, bucket: &str, prefix: &str) -> S3Result<Vec<(String, String, u64)>> {
        let contents = self.contents();
        find(&contents.buckets, bucket)?;
        let mut found: Vec<_> = contents
            .uploads
            .iter()
            .filter(|(_, upload)| upload.bucket == bucket && upload.key.starts_with(prefix))
            .map(|(id, upload)| (upload.key.clone(), id.clone(), upload.created_ms))
            .collect();
        found.sort();
        Ok(found)
    }
}

impl Contents {
    fn commit(&mut self, change: Change) -> S3Result<Option<Object>> {
        self.journal.append(&change).map_err(disk)?;
        Ok(change.apply(&mut self.buckets))
    }
}

fn find<'a>(buckets: &'a Buckets, bucket: &str) -> S3Result<&'a Bucket> {
    buckets
        .get(bucket)
        .ok_or_else(|| s3_error!(NoSuchBucket, "no bucket `{bucket}`"))
}

fn no_upload(id: &str) -> s3s::S3Error {
    s3_error!(
        NoSuchUpload,
        "no upload `{id}`: never created for this key, completed, or aborted"
    )
}

/// Returns the current time in milliseconds since 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
