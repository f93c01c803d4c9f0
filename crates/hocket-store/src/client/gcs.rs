//! Google Cloud Storage, through its XML API.

use super::key::{ClientKey, once};
use super::lister::{UploadApi, UploadLister};
use super::remote::StoreClient;
use crate::error::{Result, StoreError};
use crate::values::settings::{check_endpoint, check_text};
use object_store::StaticCredentialProvider;
use object_store::client::HttpConnector;
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey};
use std::sync::Arc;
use url::Url;

const ADDRESS: &str = "https://storage.googleapis.com";

/// Creates the client. The first request looks up credentials: in the variables, in the application-default
/// file of `gcloud`, or from the machine's service account.
///
/// # Errors
/// `Config` if the settings are invalid.
pub(super) fn connect(key: &ClientKey) -> Result<StoreClient> {
    let emulator = key.env.get("STORAGE_EMULATOR_HOST").map(|host| {
        let scheme = if host.contains("://") { "" } else { "http://" };
        format!("{scheme}{}", host.trim_end_matches('/'))
    });
    if let Some(emulator) = &emulator {
        check_endpoint("STORAGE_EMULATOR_HOST", emulator)?;
    }
    let endpoint = key.endpoint(&[])?.or(emulator.as_deref());
    let mut builder = GoogleCloudStorageBuilder::new()
        .with_client_options(key.client_options(endpoint)?)
        .with_retry(once())
        .with_http_connector(key.connector()?);
    for (name, value) in key.env.iter() {
        if let Ok(known) = name.to_ascii_lowercase().parse::<GoogleConfigKey>() {
            // The key of an account is a document in JSON, which may have lines.
            if known != GoogleConfigKey::ServiceAccountKey {
                check_text(name, value)?;
            }
            builder = builder.with_config(known, value);
        }
    }
    if let Some(endpoint) = endpoint {
        builder = builder.with_base_url(endpoint);
    }
    // An emulator has no accounts. `object_store` signs writes even when reads are unsigned, so it gets an
    // empty token.
    let is_signed = !key.anonymous && !key.env.is_true("GOOGLE_SKIP_SIGNATURE")?;
    if !is_signed || emulator.is_some() {
        let empty_credential = GcpCredential {
            bearer: String::new(),
        };
        builder = builder
            .with_skip_signature(true)
            .with_credentials(Arc::new(StaticCredentialProvider::new(empty_credential)));
    }
    let connector = key.connector()?;
    let refused = |error| {
        key.refused("GOOGLE_*", &error, |name, value| {
            let known = name.to_ascii_lowercase().parse::<GoogleConfigKey>().ok()?;
            let alone = GoogleCloudStorageBuilder::new().with_http_connector(connector.clone());
            alone
                .with_bucket_name("b")
                .with_config(known, value)
                .build()
                .err()
        })
    };
    let address = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    if let Some(address) = &address {
        check_endpoint("GOOGLE_BASE_URL", address)?;
    }
    let store = builder.with_bucket_name(&key.bucket.name).build();
    let store = Arc::new(store.map_err(refused)?);
    let lister = UploadLister {
        dialect: UploadApi::Google {
            store: Arc::clone(&store),
            bucket_url: bucket_url(key, address.as_deref().unwrap_or(ADDRESS))?,
        },
        client: key
            .connector()?
            .connect(&key.client_options(endpoint)?)
            .map_err(refused)?,
    };
    Ok(StoreClient {
        uploads: is_signed.then_some(lister),
        address: address.unwrap_or_default(),
        ..StoreClient::service(store, key)
    })
}

fn bucket_url(key: &ClientKey, address: &str) -> Result<Url> {
    let whole = format!("{}/{}", address.trim_end_matches('/'), key.bucket.name);
    Url::parse(&whole).map_err(|error| {
        StoreError::config(format!("`{whole}` is not the address of a bucket: {error}"))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn an_emulator_needs_no_account() {
        for host in ["localhost:4443", "http://localhost:4443/"] {
            let key = ClientKey::test("gs://b", &[("STORAGE_EMULATOR_HOST", host)], None);
            let remote = connect(&key).ok().unwrap();
            assert_eq!(remote.objects.to_string(), "GoogleCloudStorage(b)");
            assert!(remote.has_generations);
        }
    }

    #[test]
    fn a_missing_credentials_file_is_named() {
        let env = [("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")];
        let error = connect(&ClientKey::test("gs://b", &env, None))
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.contains("/nowhere/key.json") && error.contains("gs://b"),
            "{error}"
        );
    }
}
