//! The clients behind store handles, created at first use and kept in the process table.

mod azure;
mod gcs;
mod s3;
mod web;

use crate::counters::Counters;
use crate::env::Env;
use crate::error::{Result, StoreError};
use crate::http::Connector;
use crate::options::StoreOptions;
use crate::process::{self, with_table};
use crate::uploads::Lister;
use crate::uri::{Bucket, Service};
use object_store::list::PaginatedListStore;
use object_store::memory::InMemory;
use object_store::multipart::MultipartStore;
use object_store::{Certificate, ClientOptions, ObjectStore, RetryConfig};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};

/// AWS's variable for additional certificate authorities.
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";

/// A store reached by requests: a service, or the in-memory store in the same role.
pub(crate) struct Remote {
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// `None` for read-only stores.
    pub(crate) multipart: Option<Arc<dyn MultipartStore>>,
    /// Lists page by page, so that a retry repeats one page and not the whole listing.
    pub(crate) pages: Option<Arc<dyn PaginatedListStore>>,
    /// Lists unfinished multipart uploads, where the service supports it.
    pub(crate) uploads: Option<Lister>,
    /// Whether conditional replaces use a generation instead of an ETag.
    pub(crate) has_generations: bool,
    /// The credentials profile whose keys this client uses, if its keys are renewed from outside.
    pub(crate) profile: Option<String>,
    /// The remedy named in a message when access is refused.
    pub(crate) credentials_help: &'static str,
    /// The process-wide counters.
    pub(crate) counters: Arc<Counters>,
    travels: bool,
    requests: Semaphore,
}

impl Remote {
    /// Waits for a permit to make one more request.
    pub(crate) async fn room(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.requests.acquire().await.ok()
    }

    /// Returns whether requests cross a network; only those can fail transiently.
    pub(crate) fn is_http(&self) -> bool {
        self.travels
    }

    fn memory(store: Arc<InMemory>, options: &StoreOptions) -> Self {
        Self {
            objects: Arc::clone(&store) as _,
            multipart: Some(store),
            pages: None,
            uploads: None,
            has_generations: false,
            profile: None,
            credentials_help: "",
            counters: process::counters(),
            travels: false,
            requests: Semaphore::new(options.max_requests.min(Semaphore::MAX_PERMITS)),
        }
    }

    /// Builds a client for a service with all operations.
    fn service<T>(store: Arc<T>, key: &ClientKey) -> Self
    where
        T: ObjectStore + MultipartStore + PaginatedListStore,
    {
        Self {
            multipart: Some(Arc::clone(&store) as _),
            pages: Some(Arc::clone(&store) as _),
            ..Self::reader(store, key)
        }
    }

    /// Builds a client for a service that can only be read.
    fn reader(objects: Arc<dyn ObjectStore>, key: &ClientKey) -> Self {
        Self {
            objects,
            multipart: None,
            pages: None,
            uploads: None,
            has_generations: key.bucket.service == Service::Gcs,
            profile: None,
            credentials_help: key.bucket.service.credentials_help(),
            counters: process::counters(),
            travels: true,
            requests: Semaphore::new(key.max_requests.min(Semaphore::MAX_PERMITS)),
        }
    }
}

/// The key under which handles share a client.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct ClientKey {
    bucket: Bucket,
    endpoint: Option<String>,
    region: Option<String>,
    path_style: Option<bool>,
    anonymous: bool,
    requester_pays: bool,
    connect_timeout: Duration,
    max_requests: usize,
    /// Different credentials in the environment mean a different client.
    env: Env,
}

impl ClientKey {
    fn new(bucket: &Bucket, options: &StoreOptions, env: &Env) -> Self {
        Self {
            bucket: bucket.clone(),
            endpoint: options.endpoint.clone(),
            region: options.region.clone(),
            path_style: options.path_style,
            anonymous: options.anonymous,
            requester_pays: options.requester_pays,
            connect_timeout: options.connect_timeout(),
            max_requests: options.max_requests,
            env: env.clone(),
        }
    }

    /// Returns the endpoint from the option or the first of `variables` that is set, without a trailing slash.
    fn endpoint(&self, variables: &[&str]) -> Option<&str> {
        let given = self.endpoint.as_deref();
        given
            .or_else(|| self.env.first(variables))
            .map(|endpoint| endpoint.trim_end_matches('/'))
    }

    /// Returns the HTTP settings of the client.
    ///
    /// # Errors
    /// `Config` for certificates that cannot be read.
    fn client_options(&self, endpoint: Option<&str>) -> Result<ClientOptions> {
        let options = ClientOptions::new()
            .with_timeout_disabled() // each attempt has its own limit
            .with_connect_timeout(self.connect_timeout)
            .with_pool_idle_timeout(Duration::from_secs(30))
            .with_allow_http(endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")));
        let certificates = match self.env.get(CA_BUNDLE) {
            Some(path) => read_certificates(path)?,
            None => Vec::new(),
        };
        let with = ClientOptions::with_root_certificate;
        Ok(certificates.into_iter().fold(options, with))
    }

    fn refused(&self, variables: &str, error: &object_store::Error) -> StoreError {
        StoreError::config(format!(
            "`{}` cannot be set up from the options and `{variables}` variables: {error}",
            self.bucket.uri()
        ))
    }
}

/// Reads the certificates in a PEM file; they are trusted in addition to the system's own.
fn read_certificates(path: &str) -> Result<Vec<Certificate>> {
    let bad = |reason: &dyn std::fmt::Display| {
        StoreError::config(format!(
            "`{CA_BUNDLE}` is `{path}`: expected a file of certificates in PEM form, and {reason}; correct the \
             path, or unset it to trust those of the system"
        ))
    };
    let text = std::fs::read(path).map_err(|error| bad(&error))?;
    match Certificate::from_pem_bundle(&text) {
        Ok(certificates) if certificates.is_empty() => Err(bad(&"it has none")),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(bad(&error)),
    }
}

/// Returns a configuration without retries: [`retry`](crate::retry) above the client does them.
fn once() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

/// Returns the memory store `name` of this process.
pub(crate) fn memory(name: &str, options: &StoreOptions) -> Arc<Remote> {
    let store = with_table(|table| Arc::clone(table.memories.entry(name.to_owned()).or_default()));
    Arc::new(Remote::memory(store, options))
}

/// Returns the client of `bucket` for the credentials in `env`.
pub(crate) async fn open(
    bucket: &Bucket,
    options: &StoreOptions,
    env: &Env,
) -> Result<Arc<Remote>> {
    let key = ClientKey::new(bucket, options, env);
    if let Some(remote) = with_table(|table| table.clients.get(&key).cloned()) {
        return Ok(remote);
    }
    let remote = Arc::new(match bucket.service {
        Service::S3 | Service::Oci => s3::connect(&key).await?,
        Service::Gcs => gcs::connect(&key)?,
        Service::Azure => azure::connect(&key)?,
        Service::Http | Service::Https => web::connect(&key)?,
    });
    // If two threads created a client at once, the table keeps one of them.
    Ok(with_table(|table| {
        Arc::clone(table.clients.entry(key).or_insert(remote))
    }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use crate::uri::Location;

    impl Remote {
        /// Builds a client for tests that make no request.
        pub(crate) fn test() -> Self {
            let key = key("s3://b", &[("AWS_SKIP_SIGNATURE", "true")], None);
            let connecting = std::pin::pin!(s3::connect(&key));
            futures::FutureExt::now_or_never(connecting)
                .unwrap()
                .unwrap()
        }
    }

    /// Returns the key of a handle on `uri` with these variables.
    pub(super) fn key(uri: &str, env: &[(&str, &str)], endpoint: Option<&str>) -> ClientKey {
        let Location::Bucket { bucket, .. } = Location::parse(uri).unwrap() else {
            panic!("{uri} is no bucket");
        };
        let all = env
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let options = StoreOptions {
            endpoint: endpoint.map(str::to_owned),
            ..StoreOptions::default()
        };
        let env = Env::choose(all, bucket.service.variables());
        ClientKey::new(&bucket, &options, &env)
    }
}
