//! Plain HTTP servers, read-only.

use super::key::{ClientKey, once};
use super::remote::StoreClient;
use crate::error::Result;
use object_store::http::HttpBuilder;
use std::sync::Arc;

/// Creates the client.
///
/// # Errors
/// `Config` for an invalid host.
pub(super) fn connect(key: &ClientKey) -> Result<StoreClient> {
    let origin = key.bucket.uri();
    let store = HttpBuilder::new()
        .with_url(&origin)
        .with_client_options(key.client_options(Some(&origin))?)
        .with_retry(once())
        .with_http_connector(key.connector()?)
        .build()
        .map_err(|error| key.refused("HTTP_PROXY", &error, |_, _| None))?;
    Ok(StoreClient::reader(Arc::new(store), key))
}
