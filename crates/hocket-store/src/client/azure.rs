//! Azure Blob Storage.

use super::key::{ClientKey, once};
use super::remote::StoreClient;
use crate::error::{Result, StoreError};
use crate::values::settings::{check_address, check_endpoint, check_text, check_token_file};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use std::sync::Arc;

/// Variable names that Azure's own tools and mosaicml-streaming read, in addition to those of `object_store`.
const ALIASES: [(&str, AzureConfigKey); 6] = [
    ("AZURE_STORAGE_ACCOUNT", AzureConfigKey::AccountName),
    ("AZURE_ACCOUNT_NAME", AzureConfigKey::AccountName),
    ("AZURE_STORAGE_KEY", AzureConfigKey::AccessKey),
    ("AZURE_ACCOUNT_ACCESS_KEY", AzureConfigKey::AccessKey),
    ("AZURE_STORAGE_SAS_TOKEN", AzureConfigKey::SasKey),
    ("AZURE_STORAGE_BLOB_ENDPOINT", AzureConfigKey::Endpoint),
];

/// The variables with the address of a service that gives out tokens.
const KEY_SERVICES: [&str; 5] = [
    "AZURE_AUTHORITY_HOST",
    "AZURE_STORAGE_AUTHORITY_HOST",
    "AZURE_MSI_ENDPOINT",
    "AZURE_IDENTITY_ENDPOINT",
    "AZURE_FABRIC_TOKEN_SERVICE_URL",
];

/// The settings that the client takes in place of a token from a file.
const BEFORE_TOKEN_FILE: [AzureConfigKey; 4] = [
    AzureConfigKey::AccessKey,
    AzureConfigKey::Token,
    AzureConfigKey::SasKey,
    AzureConfigKey::ClientSecret,
];

/// Creates the client. The account comes from the URI, or else from the variables.
///
/// # Errors
/// `Config` if no account is named or the settings are invalid.
pub(super) fn connect(key: &ClientKey) -> Result<StoreClient> {
    let mut settings: Vec<(AzureConfigKey, String)> = Vec::new();
    for (name, value) in key.env.iter() {
        let of_name = of_variable(name, value)?;
        if of_name.is_empty() {
            continue;
        }
        settings.extend(of_name);
        if !name.ends_with("_FILE") {
            check_text(name, value)?;
        }
        if KEY_SERVICES.contains(&name.as_str()) {
            check_address(name, value)?;
        }
    }
    // An account in the URI implies an address; the `endpoint` option overrides it.
    if let Some(host) = &key.bucket.at {
        let account = host.split('.').next().unwrap_or(host);
        settings.push((AzureConfigKey::AccountName, account.to_owned()));
        let address = format!("https://{}", host.replacen(".dfs.", ".blob.", 1));
        settings.push((AzureConfigKey::Endpoint, address));
    }
    if let Some(endpoint) = key.endpoint(&[])? {
        settings.push((AzureConfigKey::Endpoint, endpoint.to_owned()));
    }
    let find = |wanted| {
        let last = settings.iter().rev().find(|(name, _)| *name == wanted);
        last.map(|(_, value)| value.as_str())
    };
    if find(AzureConfigKey::AccountName).is_none() && find(AzureConfigKey::UseEmulator).is_none() {
        return Err(StoreError::config(format!(
            "`{}` does not name a storage account; set `AZURE_STORAGE_ACCOUNT_NAME`, or write \
             `abfss://{}@account.dfs.core.windows.net/prefix`",
            key.bucket.uri(),
            key.bucket.name
        )));
    }
    if let Some(endpoint) = find(AzureConfigKey::Endpoint) {
        check_endpoint("AZURE_STORAGE_ENDPOINT", endpoint)?;
    }
    if let Some(path) = find(AzureConfigKey::FederatedTokenFile)
        && BEFORE_TOKEN_FILE
            .into_iter()
            .all(|name| find(name).is_none())
    {
        check_token_file("AZURE_FEDERATED_TOKEN_FILE", path, false)?;
    }
    let [account, endpoint] = [AzureConfigKey::AccountName, AzureConfigKey::Endpoint].map(find);
    let address = [account, endpoint].map(Option::unwrap_or_default).join(" ");
    let mut builder = MicrosoftAzureBuilder::new()
        .with_client_options(key.client_options(find(AzureConfigKey::Endpoint))?)
        .with_retry(once())
        .with_http_connector(key.connector()?);
    for (name, value) in settings {
        builder = builder.with_config(name, value);
    }
    if key.anonymous {
        builder = builder.with_config(AzureConfigKey::SkipSignature, "true");
    }
    let store = builder
        .with_container_name(&key.bucket.name)
        .build()
        .map_err(|error| {
            key.refused("AZURE_*", &error, |name, value| {
                refused_alone(key, name, value)
            })
        })?;
    Ok(StoreClient {
        address,
        ..StoreClient::service(Arc::new(store), key)
    })
}

/// Returns the settings that a variable makes; none for a variable of another program.
fn of_variable(name: &str, value: &str) -> Result<Vec<(AzureConfigKey, String)>> {
    if name == "AZURE_STORAGE_CONNECTION_STRING" {
        return connection_string(value);
    }
    let alias = ALIASES.iter().find(|(alias, _)| *alias == name);
    let known = match alias {
        Some((_, known)) => Some(*known),
        None => name.to_ascii_lowercase().parse().ok(),
    };
    Ok(known
        .map(|known| (known, value.to_owned()))
        .into_iter()
        .collect())
}

/// Returns the error of the client's builder for one variable alone.
fn refused_alone(key: &ClientKey, name: &str, value: &str) -> Option<object_store::Error> {
    let connector = key.connector().ok()?;
    let mut builder = MicrosoftAzureBuilder::new()
        .with_http_connector(connector)
        .with_account("a")
        .with_container_name("c");
    for (known, value) in of_variable(name, value).ok()? {
        builder = builder.with_config(known, value);
    }
    builder.build().err()
}

/// Parses a connection string into the settings for endpoint and account.
fn connection_string(text: &str) -> Result<Vec<(AzureConfigKey, String)>> {
    let mut settings = Vec::new();
    let (mut scheme, mut suffix) = ("https", "core.windows.net");
    for pair in text.split(';').filter(|pair| !pair.trim().is_empty()) {
        // The value may be a key, so the message does not repeat it.
        let (name, value) = pair.split_once('=').ok_or_else(|| {
            StoreError::config(
                "`AZURE_STORAGE_CONNECTION_STRING` has a part without `=`; write `AccountName=…;AccountKey=…`",
            )
        })?;
        let known = match name.trim() {
            "AccountName" => AzureConfigKey::AccountName,
            "AccountKey" => AzureConfigKey::AccessKey,
            "SharedAccessSignature" => AzureConfigKey::SasKey,
            "BlobEndpoint" => AzureConfigKey::Endpoint,
            "DefaultEndpointsProtocol" => {
                scheme = value;
                continue;
            }
            "EndpointSuffix" => {
                suffix = value;
                continue;
            }
            _ => continue,
        };
        settings.push((known, value.trim_end_matches('/').to_owned()));
    }
    let find = |wanted| settings.iter().find(|(name, _)| *name == wanted);
    if find(AzureConfigKey::Endpoint).is_none()
        && let Some((_, account)) = find(AzureConfigKey::AccountName)
    {
        let address = format!("{scheme}://{account}.blob.{suffix}");
        settings.push((AzureConfigKey::Endpoint, address));
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn a_missing_account_is_named() {
        let error = connect(&ClientKey::test("az://c", &[], None))
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("`AZURE_STORAGE_ACCOUNT_NAME`"), "{error}");
        for variable in [
            "AZURE_STORAGE_ACCOUNT_NAME",
            "AZURE_STORAGE_ACCOUNT",
            "AZURE_ACCOUNT_NAME",
        ] {
            let env = [(variable, "acc"), ("AZURE_STORAGE_KEY", "a2V5")];
            let remote = connect(&ClientKey::test("az://c", &env, None))
                .ok()
                .unwrap();
            let text = remote.objects.to_string();
            assert!(
                text.contains("account: acc") && text.contains("container: c"),
                "{text}"
            );
        }
        let uri = "abfss://c@acc.dfs.core.windows.net/p";
        let remote = connect(&ClientKey::test(
            uri,
            &[("AZURE_STORAGE_KEY", "a2V5")],
            None,
        ))
        .ok()
        .unwrap();
        assert!(remote.objects.to_string().contains("account: acc"));
    }

    #[test]
    fn a_connection_string_sets_account_key_and_endpoint() {
        let settings =
            connection_string("DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5==;")
                .unwrap();
        assert_eq!(
            settings,
            [
                (AzureConfigKey::AccountName, "a".to_owned()),
                (AzureConfigKey::AccessKey, "a2V5==".to_owned()),
                (
                    AzureConfigKey::Endpoint,
                    "http://a.blob.core.windows.net".to_owned()
                ),
            ]
        );
        let error = connection_string("AccountName=a;secret")
            .unwrap_err()
            .to_string();
        assert!(!error.contains("secret"), "{error}");
    }
}
