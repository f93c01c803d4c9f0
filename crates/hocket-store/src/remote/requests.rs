//! Requests on whole objects of a remote store, each repeated until its outcome is known.

use crate::client::StoreClient;
use crate::error::{Result, StoreError};
use crate::process::budget;
use crate::remote::failed_attempt::FailedAttempt;
use crate::remote::retry::{RetryState, TransferBytes};
use crate::values::handle::StoreHandle;
use crate::values::meta::{ObjectMeta, PutMode};
use bytes::Bytes;
use object_store::{GetOptions, ObjectStoreExt, PutOptions, UpdateVersion};
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

/// A store and its client in this process.
#[derive(Clone)]
pub(crate) struct RemoteStore {
    pub(crate) handle: StoreHandle,
    pub(crate) client: Arc<StoreClient>,
}

impl RemoteStore {
    /// Makes `request` for `key`, which transfers `load`, until it succeeds or the retry policy ends it. A request
    /// whose attempts depend on each other has its own loop over [`RetryState`].
    pub(crate) async fn with_retries<T, F>(
        &self,
        key: &str,
        load: TransferBytes,
        mut request: impl FnMut() -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let mut tries = RetryState::new(&self.handle, key, load);
        loop {
            match tries.attempt(&self.client, request()).await {
                Ok(value) => return Ok(value),
                Err(fault) => tries.pause(fault).await?,
            }
        }
    }

    /// See [`Store::head`](crate::Store::head).
    pub(crate) async fn head(&self, key: &str) -> Result<ObjectMeta> {
        let path = self.handle.path(key)?;
        let request = || self.client.objects.head(&path);
        let meta = self.with_retries(key, TransferBytes::None, request).await?;
        Ok(self.handle.meta(key, &meta))
    }

    /// See [`Store::delete`](crate::Store::delete).
    pub(crate) async fn delete(&self, key: &str) -> Result<()> {
        let path = self.handle.path(key)?;
        let request = || self.client.objects.delete(&path);
        let deleted = self.with_retries(key, TransferBytes::None, request).await;
        found(deleted).map(Option::unwrap_or_default)
    }

    /// Sends one PUT request, with retries, until its outcome is known.
    pub(crate) async fn put_once(
        &self,
        key: &str,
        data: Bytes,
        mode: &PutMode,
    ) -> Result<Option<String>> {
        let size = data.len() as u64;
        let path = self.handle.path(key)?;
        let options = PutOptions::from(match mode {
            PutMode::Overwrite => object_store::PutMode::Overwrite,
            PutMode::Create => object_store::PutMode::Create,
            PutMode::Match(etag) => object_store::PutMode::Update(UpdateVersion {
                e_tag: Some(etag.clone()),
                version: self.generation(key, etag).await?,
            }),
        });
        let _bytes = budget::of_process()
            .take(size, self.handle.options().budget_bytes)
            .await;
        // Not `with_retries`: the meaning of a violated condition depends on whether an earlier attempt may have
        // taken effect.
        let mut tries = RetryState::new(&self.handle, key, TransferBytes::Up(size));
        loop {
            let request = self
                .client
                .objects
                .put_opts(&path, data.clone().into(), options.clone());
            match tries.attempt(&self.client, request).await {
                Ok(result) => return Ok(result.e_tag),
                // An earlier attempt of this write may have caused the violation of the condition.
                Err(
                    FailedAttempt::Final(StoreError::Exists { .. }) | FailedAttempt::Precondition,
                ) if tries.may_have_landed() => {
                    return Err(tries.give_up("the response to an earlier attempt was lost, and the condition no longer holds; read the object back to find out which write succeeded"));
                }
                Err(FailedAttempt::Precondition) => {
                    let expected = if let PutMode::Match(etag) = mode {
                        etag.clone()
                    } else {
                        "(none)".to_owned()
                    };
                    return Err(self.changed(key, expected).await);
                }
                Err(FailedAttempt::Final(StoreError::Io { uri, reason }))
                    if *mode != PutMode::Overwrite =>
                {
                    let header = match mode {
                        PutMode::Match(_) => "If-Match",
                        _ => "If-None-Match",
                    };
                    let reason = format!(
                        "{reason}; the write had the condition `{header}`, which some stores reject"
                    );
                    return Err(StoreError::Io { uri, reason });
                }
                Err(fault) => tries.pause(fault).await?,
            }
        }
    }

    /// Returns the generation of the object with `etag`, on services whose conditions use generations.
    async fn generation(&self, key: &str, etag: &str) -> Result<Option<String>> {
        if !self.client.has_generations {
            return Ok(None);
        }
        let path = self.handle.path(key)?;
        let request = || self.client.objects.head(&path);
        let meta = self.with_retries(key, TransferBytes::None, request).await;
        match found(meta)? {
            Some(meta) if meta.e_tag.as_deref() == Some(etag) && meta.version.is_some() => {
                Ok(meta.version)
            }
            _ => Err(self.changed(key, etag.to_owned()).await),
        }
    }

    /// Builds the error for a violated ETag condition, with the current ETag.
    pub(crate) async fn changed(&self, key: &str, expected: String) -> StoreError {
        let actual = match self.head(key).await {
            Ok(meta) => meta.etag.unwrap_or_else(|| "(no ETag)".to_owned()),
            Err(StoreError::NotFound { .. }) => "(deleted)".to_owned(),
            Err(_) => "(unknown)".to_owned(),
        };
        StoreError::Changed {
            uri: self.handle.object_uri(key),
            expected,
            actual,
        }
    }
}

/// Returns the outcome of a request, or none if its object or upload does not exist.
pub(crate) fn found<T>(outcome: Result<T>) -> Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns GET options for one range, conditional on an ETag if one is known. A weak ETag never matches (RFC
/// 9110, 13.1.1), so it is left out; the caller compares the response's ETag in any case.
pub(crate) fn get_options(range: Option<Range<u64>>, if_match: Option<String>) -> GetOptions {
    GetOptions {
        range: range.map(Into::into),
        if_match: if_match.filter(|etag| !etag.starts_with("W/")),
        ..GetOptions::default()
    }
}
