//! Buckets, and their names in URIs.

use crate::error::{Result, StoreError};
use crate::service::Service;
use crate::values::hub;

/// A bucket of a service, or its equivalent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Bucket {
    pub(crate) service: Service,
    /// Bucket (S3, OCI, GCS), container (Azure), host and port (HTTP), or kind and id of a repository
    /// (`datasets/owner/name`, Hub).
    pub(crate) name: String,
    /// The part after an `@`: the namespace (OCI), the account's host (Azure), or the revision (Hub).
    pub(crate) at: Option<String>,
}

impl Bucket {
    /// Returns the bucket's URI.
    pub(crate) fn uri(&self) -> String {
        let scheme = match (self.service, &self.at) {
            (Service::S3, _) => "s3",
            (Service::Oci, _) => "oci",
            (Service::Gcs, _) => "gs",
            (Service::Azure, None) => "az",
            (Service::Azure, Some(_)) => "abfss",
            (Service::Http, _) => "http",
            (Service::Https, _) => "https",
            (Service::Hub, _) => return hub::repository_uri(&self.name, self.at.as_deref()),
        };
        match &self.at {
            Some(at) => format!("{scheme}://{}@{at}", self.name),
            None => format!("{scheme}://{}", self.name),
        }
    }

    /// Parses the part between `://` and the next slash. Messages leave it out where it may contain a password.
    pub(super) fn parse(
        uri: &str,
        scheme: &str,
        service: Service,
        authority: &str,
    ) -> Result<Self> {
        let (name, at) = match authority.split_once('@') {
            Some((name, at)) => (name, Some(at)),
            None => (authority, None),
        };
        let expected = match service {
            Service::Oci => "oci://bucket@namespace/prefix",
            Service::Azure if scheme.starts_with("abfs") => {
                "abfss://container@account.dfs.core.windows.net/prefix"
            }
            Service::Azure => "az://container/prefix",
            Service::Gcs => "gs://bucket/prefix",
            Service::S3 => "s3://bucket/prefix",
            Service::Http | Service::Https => "https://host/path",
            Service::Hub => hub::EXPECTED,
        };
        if service.is_web() {
            if at.is_some() || uri.contains(['?', '#']) {
                return Err(StoreError::config(format!(
                    "an `{scheme}://` URI with a login, a `?query` or a `#fragment`; write `{expected}`"
                )));
            }
        } else if (at.is_some() && !matches!(service, Service::Oci | Service::Azure))
            || (authority.contains(':') && uri.contains('@'))
        {
            // The part before the `@` may be a password, possibly with a slash in it.
            return Err(StoreError::config(format!(
                "an `{scheme}://` URI with an `@`; write `{expected}`, and pass credentials in the environment"
            )));
        } else if !is_bucket_name(name) || at.is_some_and(|at| !is_bucket_name(at)) {
            return Err(StoreError::config(format!(
                "`{uri}`: `{authority}` is not a bucket name; write `{expected}` in letters, digits, `.`, `-` and `_`"
            )));
        }
        Ok(Self {
            service,
            name: name.to_owned(),
            at: at.map(str::to_owned),
        })
    }
}

fn is_bucket_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    !name.is_empty() && name.chars().all(good)
}
