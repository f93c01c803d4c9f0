//! S3 and S3-compatible services, including Oracle's object storage.

use super::key::{ClientKey, once};
use super::lister::{UploadApi, UploadLister};
use super::remote::StoreClient;
use super::shared_config::{self, SharedConfig};
use crate::client::credentials::{self, KeyProvider, NoKeysReason};
use crate::error::{Result, StoreError};
use crate::service::Service;
use crate::values::env::EnvSnapshot;
use crate::values::settings::{
    check_address, check_endpoint, check_path, check_region, check_text, check_token_file,
};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::HttpConnector;
use std::sync::Arc;
use std::time::Duration;

/// The variables that may hold an endpoint; the first that is set wins. boto3 knows the first two.
const ENDPOINTS: [&str; 4] = [
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "S3_ENDPOINT_URL",
    "AWS_ENDPOINT",
];
const NUM_ENDPOINTS_OF_BOTO3: usize = 2;

/// The variables named in a message when there are no credentials.
const CREDENTIALS_HELP: &str = "no credentials; set `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` \
    (and `AWS_SESSION_TOKEN` for temporary ones), or `AWS_WEB_IDENTITY_TOKEN_FILE` and `AWS_ROLE_ARN`, or \
    `AWS_SKIP_SIGNATURE=true` for a public bucket, or a profile that boto3 can read";

/// The time limit for an EC2 instance's metadata service to return keys. The service responds in milliseconds;
/// on other machines its address may not respond at all.
const METADATA_PATIENCE: Duration = Duration::from_secs(5);

/// The variables with the address of that service, boto3's own first.
const METADATA_ENDPOINTS: [&str; 2] =
    ["AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_METADATA_ENDPOINT"];

/// The source of the keys.
#[derive(Debug, PartialEq)]
enum KeySource {
    Anonymous,
    /// Variables, read by `object_store` itself.
    Environment,
    /// Python's boto3, which renews the keys of this profile.
    Profile(String),
    /// The metadata service of an EC2 instance, queried by `object_store` because boto3 is not installed.
    Instance,
}

impl KeySource {
    fn of(key: &ClientKey) -> Result<Self> {
        let env = &key.env;
        if key.anonymous || env.is_true("AWS_SKIP_SIGNATURE")? {
            return Ok(Self::Anonymous);
        }
        let set = |name| env.get(name).is_some();
        match (set("AWS_ACCESS_KEY_ID"), set("AWS_SECRET_ACCESS_KEY")) {
            (true, true) => return Ok(Self::Environment),
            (true, false) => return Err(half("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")),
            (false, true) => return Err(half("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")),
            (false, false) => {}
        }
        let profile = env.get("AWS_PROFILE").unwrap_or_default();
        let is_container = set("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
            || (set("AWS_CONTAINER_CREDENTIALS_FULL_URI")
                && set("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"));
        let is_web = set("AWS_WEB_IDENTITY_TOKEN_FILE") && set("AWS_ROLE_ARN");
        if !profile.is_empty() || !(is_container || is_web) {
            return Ok(Self::Profile(profile.to_owned()));
        }
        check_key_service(env)?;
        Ok(Self::Environment)
    }

    /// Returns the source to use in place of boto3's default chain if boto3 is not installed. The other links of
    /// the chain need boto3.
    fn without_boto3(&self, key: &ClientKey, missing: &NoKeysReason) -> Result<Option<Self>> {
        let is_default = *self == Self::Profile(String::new());
        let is_off = key.env.is_true("AWS_EC2_METADATA_DISABLED")?;
        let is_container = (key.env.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")).is_some();
        let is_it = missing.is_provider_missing && is_default && !is_off && !is_container;
        Ok(is_it.then_some(Self::Instance))
    }
}

/// Checks the variables about a service that gives out keys, which are read where no keys are set.
fn check_key_service(env: &EnvSnapshot) -> Result<()> {
    type Check = fn(&str, &str) -> Result<()>;
    let checks: [(&str, Check); 5] = [
        ("AWS_ENDPOINT_URL_STS", check_address),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", check_address),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", check_path),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", |name, path| {
            check_token_file(name, path, false)
        }),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", |name, path| {
            check_token_file(name, path, true)
        }),
    ];
    checks
        .into_iter()
        .try_for_each(|(name, check)| env.get(name).map_or(Ok(()), |value| check(name, value)))
}

fn half(there: &str, missing: &str) -> StoreError {
    StoreError::config(format!("`{there}` is set but `{missing}` is not; set both"))
}

/// Creates the client once keys are available.
///
/// # Errors
/// `Permission` if there are no keys; `Config` if the settings are invalid.
pub(super) async fn connect(key: &ClientKey) -> Result<StoreClient> {
    let env = &key.env;
    let mut source = KeySource::of(key)?;
    let shared = match key.bucket.service {
        Service::S3 => shared_config::read(env)?,
        _ => SharedConfig::default(),
    };
    let refused = |reason: &str| StoreError::Permission {
        uri: key.bucket.uri(),
        reason: format!("{CREDENTIALS_HELP}: {reason}"),
    };
    let mut without_boto3 = String::new();
    if let KeySource::Profile(profile) = &source {
        match credentials::keys(profile).await {
            Ok(_) => {}
            Err(missing) => {
                let other = source.without_boto3(key, &missing)?;
                source = other.ok_or_else(|| refused(&missing.reason))?;
                without_boto3 = missing.reason;
            }
        }
    }
    let region = (key.region.as_deref().map(|region| ("region", region)))
        .or_else(|| env.first_set(&["AWS_REGION", "AWS_DEFAULT_REGION", "OCI_REGION"]))
        .or_else(|| shared.region.as_deref().map(|region| ("region", region)));
    let region = match region {
        Some((name, region)) => {
            check_region(name, region)?;
            Some(region)
        }
        None => None,
    };
    let is_ignored = shared.ignores_endpoints;
    let variables = &ENDPOINTS[if is_ignored {
        NUM_ENDPOINTS_OF_BOTO3
    } else {
        0
    }..];
    let in_profile = (shared.endpoint.as_deref()).map(|endpoint| endpoint.trim_end_matches('/'));
    if let Some(endpoint) = in_profile {
        check_endpoint("endpoint_url", endpoint)?;
    }
    let given = key.endpoint(variables)?.or(in_profile);
    let oracle = match (key.bucket.service, given) {
        (Service::Oci, None) => Some(oracle_endpoint(key, region)?),
        _ => None,
    };
    let endpoint = given.or(oracle.as_deref());
    let mut builder = AmazonS3Builder::new()
        .with_client_options(key.client_options(endpoint)?)
        .with_retry(once())
        .with_http_connector(key.connector()?)
        // Deletes use one DELETE request per key, because some services lack bulk deletes.
        .with_disable_bulk_delete(true);
    for (name, value) in env.iter() {
        // Endpoints are resolved above; names that `object_store` does not know belong to other programs.
        if !ENDPOINTS.contains(&name.as_str())
            && let Ok(known) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>()
        {
            if !name.ends_with("_FILE") {
                check_text(name, value)?;
            }
            builder = builder.with_config(known, value);
        }
    }
    let is_virtual_hosted = env.is_true("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")?;
    // The bucket goes into the host name only if it is a single label: wildcard certificates cover one level.
    let in_path = key.path_style.unwrap_or_else(|| {
        !is_virtual_hosted && (endpoint.is_some() || key.bucket.name.contains('.'))
    });
    builder = builder.with_virtual_hosted_style_request(!in_path);
    if let Some(endpoint) = endpoint {
        builder = builder.with_endpoint(if in_path {
            endpoint.to_owned()
        } else {
            endpoint.replacen("://", &format!("://{}.", key.bucket.name), 1)
        });
    }
    if let Some(region) = region {
        builder = builder.with_region(region);
    }
    let is_paid_by_requester = is_paid_by_requester(key)?;
    if is_paid_by_requester {
        builder = builder.with_request_payer(true);
    }
    let is_signed = source != KeySource::Anonymous;
    let is_instance = source == KeySource::Instance;
    let mut provided = None;
    builder = match source {
        KeySource::Anonymous => builder.with_skip_signature(true),
        KeySource::Environment => builder,
        KeySource::Instance => match env.first_set(&METADATA_ENDPOINTS) {
            Some((name, service)) => {
                check_endpoint(name, service)?;
                builder.with_metadata_endpoint(service.trim_end_matches('/'))
            }
            None => builder,
        },
        KeySource::Profile(profile) => {
            provided = Some(profile.clone());
            builder.with_credentials(Arc::new(KeyProvider { profile }))
        }
    };
    let connector = key.connector()?;
    let invalid = |error| {
        key.refused("AWS_*", &error, |name, value| {
            let known = name
                .to_ascii_lowercase()
                .parse::<AmazonS3ConfigKey>()
                .ok()?;
            let alone = AmazonS3Builder::new().with_http_connector(connector.clone());
            let alone = alone.with_bucket_name("b").with_region("r");
            alone.with_config(known, value).build().err()
        })
    };
    // Set last, because `AWS_BUCKET` in the environment would override it.
    let store = builder.with_bucket_name(&key.bucket.name).build();
    let store = Arc::new(store.map_err(invalid)?);
    if is_instance {
        // Fetches the first keys here, so that the error on a machine without a role names what to install.
        let asked = store.credentials().get_credential();
        let answer = tokio::time::timeout(METADATA_PATIENCE, asked).await;
        let is_given = answer.is_ok_and(|answer| answer.is_ok());
        is_given.then_some(()).ok_or_else(|| {
            refused(&format!(
                "{without_boto3}; without boto3 only the role of an EC2 instance can be used, and the instance's metadata service returned no keys"
            ))
        })?;
    }
    let region = region.unwrap_or("us-east-1").to_owned();
    let lister = UploadLister {
        dialect: UploadApi::S3 {
            store: Arc::clone(&store),
            region: region.clone(),
            requester_pays: is_paid_by_requester,
        },
        client: key
            .connector()?
            .connect(&key.client_options(endpoint)?)
            .map_err(invalid)?,
    };
    Ok(StoreClient {
        uploads: is_signed.then_some(lister),
        profile: provided,
        address: endpoint.unwrap_or_default().to_owned(),
        region: Some(region),
        ..StoreClient::service(store, key)
    })
}

fn oracle_endpoint(key: &ClientKey, region: Option<&str>) -> Result<String> {
    match (&key.bucket.at, region) {
        (Some(namespace), Some(region)) => Ok(format!(
            "https://{namespace}.compat.objectstorage.{region}.oraclecloud.com"
        )),
        _ => Err(StoreError::config(format!(
            "`{}` has no known endpoint: write `oci://bucket@namespace/prefix` and set `region` or `OCI_REGION`, or give \
             `endpoint` or `AWS_ENDPOINT_URL`",
            key.bucket.uri()
        ))),
    }
}

/// Returns whether the requester pays, by the option, S3's own variable, or mosaicml-streaming's list of buckets.
fn is_paid_by_requester(key: &ClientKey) -> Result<bool> {
    let is_listed = (key.env.get("MOSAICML_STREAMING_AWS_REQUESTER_PAYS"))
        .is_some_and(|list| list.split(',').any(|name| name.trim() == key.bucket.name));
    let is_in_environment = key.env.get("AWS_REQUEST_PAYER") == Some("requester");
    Ok(key.requester_pays
        || is_listed
        || is_in_environment
        || key.env.is_true("AWS_REQUEST_PAYER")?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "s")];

    fn connected(key: ClientKey) -> Result<StoreClient> {
        futures::FutureExt::now_or_never(async move { connect(&key).await }).unwrap()
    }

    #[test]
    fn half_a_pair_of_keys_fails_at_once_and_the_other_half_is_named() {
        let error = connected(ClientKey::test("s3://b", &KEYS[..1], None))
            .err()
            .unwrap();
        assert!(
            matches!(&error, StoreError::Config { message } if message.contains("`AWS_SECRET_ACCESS_KEY`"))
        );
    }

    #[test]
    fn keys_are_read_from_variables_and_then_from_a_profile() {
        let web = [
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/dev/null"),
            ("AWS_ROLE_ARN", "r"),
        ];
        let profile = [("AWS_PROFILE", "p")];
        for (env, source) in [
            (vec![], KeySource::Profile(String::new())),
            (profile.to_vec(), KeySource::Profile("p".into())),
            ([&KEYS[..], &profile].concat(), KeySource::Environment),
            (web.to_vec(), KeySource::Environment),
            (
                [web, [profile[0], profile[0]]].concat(),
                KeySource::Profile("p".into()),
            ),
            (vec![("AWS_SKIP_SIGNATURE", "true")], KeySource::Anonymous),
        ] {
            assert_eq!(
                KeySource::of(&ClientKey::test("s3://b", &env, None)).unwrap(),
                source,
                "{env:?}"
            );
        }
    }

    #[test]
    fn an_http_endpoint_is_allowed_if_it_is_given() {
        let env = [
            &KEYS[..],
            &[("AWS_BUCKET", "other"), ("AWS_EC2_THING", "x")],
        ]
        .concat();
        let remote = connected(ClientKey::test("s3://b", &env, Some("http://127.0.0.1:9")))
            .ok()
            .unwrap();
        assert_eq!(remote.objects.to_string(), "AmazonS3(b)");
    }

    #[test]
    fn the_error_names_a_bundle_without_certificates() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        let connect = || {
            let bundle = [("AWS_CA_BUNDLE", path.to_str().unwrap())];
            connected(ClientKey::test(
                "s3://b",
                &[&KEYS[..], &bundle].concat(),
                None,
            ))
        };
        for content in [
            None,
            Some("nothing of the kind"),
            Some("-----BEGIN CERTIFICATE-----"),
        ] {
            if let Some(content) = content {
                std::fs::write(&path, content).unwrap();
            }
            let error = connect().err().unwrap();
            assert!(matches!(&error, StoreError::Config { .. }), "{error}");
            assert!(error.to_string().contains("ca.pem"), "{error}");
        }
    }

    #[test]
    fn requester_pays_applies_to_the_listed_buckets() {
        let env = [("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", "x, b")];
        for (uri, is_paid) in [("s3://b", true), ("s3://c", false)] {
            let key = ClientKey::test(uri, &env, None);
            assert_eq!(is_paid_by_requester(&key).unwrap(), is_paid);
        }
    }

    #[test]
    fn oracles_endpoint_is_built_from_namespace_and_region() {
        let env = [&KEYS[..], &[("OCI_REGION", "eu-x-1")]].concat();
        let known = ClientKey::test("oci://b@space", &env, None);
        let expected = "https://space.compat.objectstorage.eu-x-1.oraclecloud.com";
        assert_eq!(oracle_endpoint(&known, Some("eu-x-1")).unwrap(), expected);
        assert!(connected(known.clone()).is_ok());
        let error = connected(ClientKey::test("oci://b", &KEYS, None))
            .err()
            .unwrap();
        assert!(
            error.to_string().contains("oci://bucket@namespace"),
            "{error}"
        );
    }
}
