//! The settings that make one client differ from another.

use super::http::ObservedConnector;
use super::proxy::{self, Proxies};
use crate::error::{Result, StoreError};
use crate::values::bucket::Bucket;
use crate::values::env::EnvSnapshot;
use crate::values::options::StoreOptions;
use crate::values::settings::check_endpoint;
use object_store::client::HttpClient;
use object_store::{Certificate, ClientOptions, RetryConfig};
use std::time::Duration;

/// AWS's variable for additional certificate authorities.
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";

/// The time for which a connection without requests is kept.
const POOL_IDLE: Duration = Duration::from_secs(30);

/// The key under which handles share a client.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct ClientKey {
    pub(super) bucket: Bucket,
    endpoint: Option<String>,
    pub(super) region: Option<String>,
    pub(super) path_style: Option<bool>,
    pub(super) anonymous: bool,
    pub(super) requester_pays: bool,
    connect_timeout: Duration,
    pub(super) max_requests: usize,
    /// Different credentials in the environment mean a different client.
    pub(super) env: EnvSnapshot,
}

impl ClientKey {
    pub(super) fn new(bucket: &Bucket, options: &StoreOptions, env: &EnvSnapshot) -> Self {
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
    ///
    /// # Errors
    /// `Config` for a value that is not the address of a service.
    pub(super) fn endpoint(&self, variables: &[&str]) -> Result<Option<&str>> {
        let option = self.endpoint.as_deref().map(|value| ("endpoint", value));
        let Some((name, value)) = option.or_else(|| self.env.first_set(variables)) else {
            return Ok(None);
        };
        check_endpoint(name, value)?;
        Ok(Some(value.trim_end_matches('/')))
    }

    /// Returns the HTTP settings of the client.
    ///
    /// # Errors
    /// `Config` for certificates that cannot be read.
    pub(super) fn client_options(&self, endpoint: Option<&str>) -> Result<ClientOptions> {
        let options = ClientOptions::new()
            .with_timeout_disabled() // each attempt has its own limit
            .with_connect_timeout(self.connect_timeout)
            .with_pool_idle_timeout(POOL_IDLE)
            .with_allow_http(endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")));
        let certificates = match self.env.get(CA_BUNDLE) {
            Some(path) => read_certificates(path)?,
            None => Vec::new(),
        };
        let with = ClientOptions::with_root_certificate;
        let options = certificates.into_iter().fold(options, with);
        Ok(proxy::exclude(options, &self.env))
    }

    /// Returns the factory of the client's HTTP client.
    ///
    /// # Errors
    /// `Config` for a proxy that cannot be used.
    pub(super) fn connector(&self) -> Result<ObservedConnector> {
        Proxies::of(&self.env).map(ObservedConnector::new)
    }

    /// Returns an HTTP client that leaves redirects to its caller, for the service at `endpoint`.
    ///
    /// # Errors
    /// `Config` for a proxy that cannot be used, or if the client cannot be set up.
    pub(super) fn client_without_redirects(&self, endpoint: &str) -> Result<HttpClient> {
        let builder = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("hocket/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(self.connect_timeout)
            .pool_idle_timeout(POOL_IDLE)
            .http1_only() // as the other stores: HTTP/2 has all parallel ranges on one connection
            .https_only(endpoint.starts_with("https://"));
        let builder = match proxy::excludes_every_host(&self.env) {
            true => builder.no_proxy(),
            false => builder,
        };
        let client = builder.build().map_err(|error| {
            let uri = self.bucket.uri();
            StoreError::config(format!("`{uri}`: no HTTP client can be set up: {error}"))
        })?;
        Ok(self.connector()?.observed(HttpClient::new(client)))
    }

    /// Returns the error of settings that the client refuses. It names the variable that the client refuses in
    /// the same words when it is set alone, as `alone` tells.
    pub(super) fn refused(
        &self,
        variables: &str,
        error: &object_store::Error,
        alone: impl Fn(&str, &str) -> Option<object_store::Error>,
    ) -> StoreError {
        let message = error.to_string();
        let is_it = |(name, value): &&(String, String)| {
            alone(name, value).is_some_and(|error| error.to_string() == message)
        };
        let settings = match self.env.iter().find(is_it) {
            Some((name, _)) => format!("with `{name}`"),
            None => format!("from the options and `{variables}` variables"),
        };
        StoreError::config(format!(
            "`{}` cannot be set up {settings}: {message}",
            self.bucket.uri()
        ))
    }
}

/// Reads the certificates in a PEM file; they are trusted in addition to the system's own.
fn read_certificates(path: &str) -> Result<Vec<Certificate>> {
    let bad = |reason: &dyn std::fmt::Display| {
        StoreError::config(format!(
            "`{CA_BUNDLE}` is `{path}`: expected a file of certificates in PEM format, but {reason}; correct \
             the path, or unset the variable to trust only the system's certificates"
        ))
    };
    let text = std::fs::read(path).map_err(|error| bad(&error))?;
    match Certificate::from_pem_bundle(&text) {
        Ok(certificates) if certificates.is_empty() => Err(bad(&"it holds no certificates")),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(bad(&error)),
    }
}

/// Returns a configuration without retries: [`retry`](crate::remote::retry) above the client does them.
pub(super) fn once() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

#[cfg(test)]
impl ClientKey {
    /// Returns the key of a handle on `uri` with these variables.
    #[allow(clippy::unwrap_used, clippy::panic)]
    pub(crate) fn test(uri: &str, env: &[(&str, &str)], endpoint: Option<&str>) -> Self {
        let crate::values::uri::StoreLocation::Bucket { bucket, .. } =
            crate::values::uri::StoreLocation::parse(uri).unwrap()
        else {
            panic!("{uri} is no bucket");
        };
        let all = env
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let options = StoreOptions {
            endpoint: endpoint.map(str::to_owned),
            ..StoreOptions::default()
        };
        let env = EnvSnapshot::choose(all, bucket.service.variables());
        Self::new(&bucket, &options, &env)
    }
}
