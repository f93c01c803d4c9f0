//! Repositories of a hub of Hugging Face, read-only.
//!
//! | module | contents |
//! |---|---|
//! | `repository` | requests to the hub: the commit of a revision, files, redirects |
//! | `objects` | the repository as a store: files in ranges, folders page by page |
//! | `response` | their headers: redirects, sizes, entity tags |
//! | `token` | the token of the user, as `huggingface_hub` finds it |
//! | `refusal` | the errors of a hub's own codes |

mod objects;
pub(crate) mod refusal;
pub(crate) mod repository;
mod response;
mod token;

use repository::HubRepository;

use super::key::ClientKey;
use super::remote::StoreClient;
use crate::error::{Result, StoreError};
use std::sync::Arc;
use token::Token;
use url::Url;

const ADDRESS: &str = "https://huggingface.co";

/// Creates the client.
///
/// # Errors
/// `Config` for an invalid endpoint or token, `Permission` if the environment forbids requests to a hub.
pub(super) fn connect(key: &ClientKey) -> Result<StoreClient> {
    for name in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
        if key.env.is_true(name)? {
            return Err(StoreError::Permission {
                uri: key.bucket.uri(),
                reason: format!("`{name}` is set, so that no request is made to a hub; unset it"),
            });
        }
    }
    let endpoint = key.endpoint(&["HF_ENDPOINT"])?.unwrap_or(ADDRESS);
    let address = Url::parse(endpoint)
        .map_err(|error| StoreError::config(format!("`HF_ENDPOINT` is `{endpoint}`: {error}")))?;
    let repository = Arc::new(HubRepository::new(
        key.client_without_redirects(endpoint)?,
        address,
        &key.bucket,
        Token::new(&key.env, key.anonymous)?,
    ));
    Ok(StoreClient {
        pages: Some(Arc::clone(&repository) as _),
        address: endpoint.to_owned(),
        repository: Some(Arc::clone(&repository)),
        ..StoreClient::reader(repository, key)
    })
}
