//! The clients behind the handles, made when first needed and kept in the process's table.

use crate::env::AwsEnv;
use crate::error::{Result, StoreError};
use crate::http::Connector;
use crate::options::StoreOptions;
use crate::process::with_table;
use crate::uploads::Lister;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::HttpConnector;
use object_store::list::PaginatedListStore;
use object_store::memory::InMemory;
use object_store::multipart::MultipartStore;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};

/// The variables that a user is told to set.
const CREDENTIALS_HELP: &str = "there were no credentials in the environment when the store was opened; set `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` \
    (and `AWS_SESSION_TOKEN` for temporary ones), or `AWS_WEB_IDENTITY_TOKEN_FILE` and `AWS_ROLE_ARN`, or \
    `AWS_SKIP_SIGNATURE=true` for a public bucket; profiles and instance metadata are not asked";

/// A store that is spoken to in requests: S3, or memory standing for it.
pub(crate) struct Remote {
    pub(crate) objects: Arc<dyn ObjectStore>,
    pub(crate) multipart: Arc<dyn MultipartStore>,
    /// Listing page by page, so that one page is tried again and not all of them.
    pub(crate) pages: Option<Arc<dyn PaginatedListStore>>,
    /// What lists unfinished uploads; memory has none.
    pub(crate) uploads: Option<Lister>,
    requests: Semaphore,
}

impl Remote {
    /// Waits until one more request may be made.
    pub(crate) async fn room(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.requests.acquire().await.ok()
    }

    /// Whether requests travel: only then can they fail for a reason that passes.
    pub(crate) fn is_http(&self) -> bool {
        self.pages.is_some()
    }

    fn memory(store: Arc<InMemory>, options: &StoreOptions) -> Self {
        Self {
            objects: Arc::clone(&store) as _,
            multipart: store,
            pages: None,
            uploads: None,
            requests: Semaphore::new(options.max_requests.min(Semaphore::MAX_PERMITS)),
        }
    }
}

/// What makes two handles share a client.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct ClientKey {
    bucket: String,
    endpoint: Option<String>,
    region: Option<String>,
    max_requests: usize,
    /// Other credentials are another client.
    env: AwsEnv,
}

/// The memory store `name` of this process.
pub(crate) fn memory(name: &str, options: &StoreOptions) -> Arc<Remote> {
    let store = with_table(|table| Arc::clone(table.memories.entry(name.to_owned()).or_default()));
    Arc::new(Remote::memory(store, options))
}

/// The client of `bucket`, for the credentials in `env`.
pub(crate) fn s3(bucket: &str, options: &StoreOptions, env: &AwsEnv) -> Result<Arc<Remote>> {
    let key = ClientKey {
        bucket: bucket.to_owned(),
        endpoint: options.endpoint.clone(),
        region: options.region.clone(),
        max_requests: options.max_requests,
        env: env.clone(),
    };
    with_table(|table| {
        if let Some(remote) = table.clients.get(&key) {
            return Ok(Arc::clone(remote));
        }
        let remote = Arc::new(connect(&key)?);
        table.clients.insert(key, Arc::clone(&remote));
        Ok(remote)
    })
}

fn connect(key: &ClientKey) -> Result<Remote> {
    let env = &key.env;
    let uri = format!("s3://{}", key.bucket);
    check_credentials(&uri, env)?;
    let endpoint = (key.endpoint.as_deref())
        .or_else(|| env.get("AWS_ENDPOINT_URL_S3"))
        .or_else(|| env.get("AWS_ENDPOINT_URL"))
        .or_else(|| env.get("AWS_ENDPOINT"));
    let client = ClientOptions::new()
        .with_timeout_disabled() // each attempt has its own limit
        .with_connect_timeout(Duration::from_secs(5))
        .with_pool_idle_timeout(Duration::from_secs(30))
        .with_allow_http(endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")));
    let once = RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    };
    let mut builder = AmazonS3Builder::new()
        .with_client_options(client.clone())
        .with_retry(once)
        .with_http_connector(Connector::default())
        // One DELETE for one key: the bulk form is not known everywhere.
        .with_disable_bulk_delete(true);
    // Over TLS, and without an endpoint of one's own, the bucket is part of the host name.
    builder =
        builder.with_virtual_hosted_style_request(endpoint.is_none() && !key.bucket.contains('.'));
    for (name, value) in env.iter() {
        // Endpoints are chosen above; variables that are not the client's are somebody else's.
        if !name.starts_with("AWS_ENDPOINT")
            && let Ok(known) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>()
        {
            builder = builder.with_config(known, value);
        }
    }
    if let Some(region) = key
        .region
        .as_deref()
        .or_else(|| env.get("AWS_REGION"))
        .or_else(|| env.get("AWS_DEFAULT_REGION"))
    {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    let unusable = |error: object_store::Error| {
        StoreError::config(format!(
            "`{uri}` cannot be set up from the options and `AWS_*` variables: {error}"
        ))
    };
    let region = builder.get_config_value(&AmazonS3ConfigKey::Region);
    let store = builder
        .with_bucket_name(&key.bucket)
        .build()
        .map_err(unusable)?;
    let store = Arc::new(store);
    let uploads = Lister {
        s3: Arc::clone(&store),
        client: Connector::default().connect(&client).map_err(unusable)?,
        region: region.unwrap_or_else(|| "us-east-1".to_owned()),
    };
    Ok(Remote {
        objects: Arc::clone(&store) as _,
        multipart: Arc::clone(&store) as _,
        pages: Some(store),
        uploads: Some(uploads),
        requests: Semaphore::new(key.max_requests.min(Semaphore::MAX_PERMITS)),
    })
}

/// Refuses at once what would otherwise end in a search for an instance-metadata service.
fn check_credentials(uri: &str, env: &AwsEnv) -> Result<()> {
    let pairs = [
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
        (
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        ),
    ];
    if env.is_true("AWS_SKIP_SIGNATURE")
        || env.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI").is_some()
    {
        return Ok(());
    }
    for (first, second) in pairs {
        match (env.get(first).is_some(), env.get(second).is_some()) {
            (true, true) => return Ok(()),
            (true, false) if first == "AWS_ACCESS_KEY_ID" => {
                return Err(StoreError::config(format!(
                    "`{first}` is set and `{second}` is not; set both"
                )));
            }
            (false, true) if first == "AWS_ACCESS_KEY_ID" => {
                return Err(StoreError::config(format!(
                    "`{second}` is set and `{first}` is not; set both"
                )));
            }
            _ => {}
        }
    }
    Err(StoreError::Permission {
        uri: uri.to_owned(),
        reason: CREDENTIALS_HELP.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn key(env: &[(&str, &str)], endpoint: Option<&str>) -> ClientKey {
        ClientKey {
            bucket: "b".into(),
            endpoint: endpoint.map(str::to_owned),
            region: None,
            max_requests: 4,
            env: env
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }

    #[test]
    fn missing_credentials_are_refused_at_once_and_named() {
        let error = connect(&key(&[], None)).err().unwrap();
        assert!(matches!(&error, StoreError::Permission { .. }));
        assert!(error.to_string().contains("`AWS_ACCESS_KEY_ID`"), "{error}");
        let error = connect(&key(&[("AWS_ACCESS_KEY_ID", "a")], None))
            .err()
            .unwrap();
        assert!(
            matches!(&error, StoreError::Config { message } if message.contains("`AWS_SECRET_ACCESS_KEY`"))
        );
    }

    #[test]
    fn a_plain_endpoint_is_allowed_when_it_is_asked_for() {
        let env = [
            ("AWS_ACCESS_KEY_ID", "a"),
            ("AWS_SECRET_ACCESS_KEY", "s"),
            ("AWS_BUCKET", "other"),
            ("AWS_EC2_THING", "x"),
        ];
        let remote = connect(&key(&env, Some("http://127.0.0.1:9")))
            .ok()
            .unwrap();
        assert_eq!(remote.objects.to_string(), "AmazonS3(b)");
        assert!(connect(&key(&[("AWS_SKIP_SIGNATURE", "true")], None)).is_ok());
    }
}
