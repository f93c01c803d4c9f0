//! Requests to a hub: the commit of a revision, listings, and files.
//!
//! All reads of one client are of one commit, that of the revision at the first request. A large file is a redirect
//! to a storage by a signed address, which gets no token. The address is kept for a while, so that further ranges
//! take one request each.

use super::response::{FileVersion, redirect};
use super::token::Token;
use crate::client::http::ERROR_CODE;
use crate::error::StoreError;
use crate::values::bucket::Bucket;
use crate::values::hub::is_commit;
use http::header::{ACCEPT_ENCODING, AUTHORIZATION, RANGE};
use http::{Method, Request, StatusCode};
use object_store::client::{HttpClient, HttpRequestBody, HttpResponse};
use object_store::{Error, GetRange, Result};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::OnceCell;
use url::Url;

pub(super) const STORE: &str = "hub";
const MOST_REDIRECTS: usize = 5;
/// The time for which the address of a file in a storage is used again. Their signatures last for an hour.
const LINK_LIFE: Duration = Duration::from_secs(300);
const MOST_LINKS: usize = 4096;
/// The characters that are percent-encoded in a segment of a path.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// The client of one repository.
#[derive(Debug)]
pub(crate) struct HubRepository {
    client: HttpClient,
    endpoint: Url,
    /// Kind and id, such as `datasets/owner/name`.
    pub(super) name: String,
    revision: String,
    token: Token,
    commit: OnceCell<String>,
    links: Mutex<HashMap<String, Link>>,
}

/// The address of a file in a storage.
#[derive(Debug, Clone)]
struct Link {
    url: Url,
    version: FileVersion,
    until: Instant,
}

#[derive(Deserialize)]
struct Revision {
    sha: String,
}

impl HubRepository {
    pub(super) fn new(client: HttpClient, endpoint: Url, bucket: &Bucket, token: Token) -> Self {
        Self {
            client,
            endpoint,
            name: bucket.name.clone(),
            revision: bucket.at.clone().unwrap_or_else(|| "main".to_owned()),
            token,
            commit: OnceCell::new(),
            links: Mutex::default(),
        }
    }

    /// Returns the revision of the URI.
    pub(super) fn revision(&self) -> &str {
        &self.revision
    }

    /// Returns the address of the repository's page.
    pub(super) fn page(&self) -> Url {
        let name = self.name.strip_prefix("models/").unwrap_or(&self.name);
        self.url(&[name])
    }

    /// Returns whether requests carry a token.
    pub(super) fn has_token(&self) -> bool {
        self.token.is_known()
    }

    /// Returns whether a host is the hub, and not a storage.
    pub(super) fn is_own(&self, authority: Option<&str>) -> bool {
        authority.is_none_or(|host| host == self.endpoint.authority())
    }

    /// Asks the hub for the commit that the revision is now.
    pub(crate) async fn current_commit(&self) -> Result<String> {
        if is_commit(&self.revision) {
            return Ok(self.revision.clone());
        }
        let revision = encoded(&self.revision);
        let url = self.url(&["api", &self.name, "revision", &revision]);
        let answer = self
            .follow(Method::GET, url, None, &mut FileVersion::default())
            .await?;
        let (body, url) = (
            answer.0.into_body().bytes().await.map_err(failed)?,
            answer.1,
        );
        let found: Revision = parsed(&body, &url)?;
        if !is_commit(&found.sha) {
            return Err(failed(StoreError::io(
                url.as_str(),
                format!(
                    "the hub names the commit {:?}, expected 40 hexadecimal digits; check `HF_ENDPOINT`",
                    found.sha
                ),
            )));
        }
        Ok(found.sha)
    }

    /// Returns the commit that this client reads.
    pub(super) async fn commit(&self) -> Result<&str> {
        let commit = self
            .commit
            .get_or_try_init(|| self.current_commit())
            .await?;
        Ok(commit)
    }

    pub(super) fn url(&self, parts: &[&str]) -> Url {
        let mut url = self.endpoint.clone();
        let base = url.path().trim_end_matches('/').to_owned();
        let path = parts.iter().filter(|part| !part.is_empty());
        url.set_path(&path.fold(base, |path, part| format!("{path}/{part}")));
        url
    }

    /// Makes a request, and follows redirects until a response that is none. The hub alone gets the token.
    pub(super) async fn follow(
        &self,
        method: Method,
        mut url: Url,
        range: Option<&GetRange>,
        version: &mut FileVersion,
    ) -> Result<(HttpResponse, Url)> {
        for _ in 0..=MOST_REDIRECTS {
            let answer = self.send(method.clone(), &url, range).await?;
            let Some(next) = redirect(&answer, &url) else {
                return self.checked(answer, &url).map(|answer| (answer, url));
            };
            version.note_link(&answer);
            // A signed address is for GET only, and the redirect has told what a HEAD is made for.
            let is_told = version.etag.is_some() && version.size.is_some();
            if method == Method::HEAD && is_told && next.origin() != self.endpoint.origin() {
                return Ok((answer, url));
            }
            url = next;
        }
        Err(failed(StoreError::io(
            self.page(),
            format!("more than {MOST_REDIRECTS} redirects; check `HF_ENDPOINT` and the proxy"),
        )))
    }

    async fn send(
        &self,
        method: Method,
        url: &Url,
        range: Option<&GetRange>,
    ) -> Result<HttpResponse> {
        let mut request = Request::builder()
            .method(method)
            .uri(url.as_str())
            .header(ACCEPT_ENCODING, "identity");
        if let Some(range) = range {
            request = request.header(RANGE, range.to_string());
        }
        if url.origin() == self.endpoint.origin()
            && let Some(token) = self.token.get()
        {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(HttpRequestBody::empty()).map_err(failed)?;
        self.client.execute(request).await.map_err(failed)
    }

    /// Returns a successful response, or the error of its status. The message leaves out the query, which may be
    /// a signature.
    fn checked(&self, answer: HttpResponse, url: &Url) -> Result<HttpResponse> {
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        if matches!(status.as_u16(), 401 | 403) && url.origin() == self.endpoint.origin() {
            self.token.note_refusal();
        }
        let path = url.path().to_owned();
        let reason = format!("HTTP {status} from {}", url.host_str().unwrap_or_default());
        if status.is_redirection() {
            let reason = format!("{reason}, without an address; check `HF_ENDPOINT` and the proxy");
            return Err(failed(StoreError::io(self.page(), reason)));
        }
        // A hub's own 404 has a code. Without one, another server's would be taken for that of an empty folder.
        let is_api = url.path().contains("/api/") && url.origin() == self.endpoint.origin();
        if status == StatusCode::NOT_FOUND && is_api && !answer.headers().contains_key(ERROR_CODE) {
            let reason = format!("{reason}, which is no response of a hub; check `HF_ENDPOINT`");
            return Err(failed(StoreError::io(self.page(), reason)));
        }
        let source = reason.into();
        Err(match status.as_u16() {
            401 => Error::Unauthenticated { path, source },
            403 => Error::PermissionDenied { path, source },
            404 => Error::NotFound { path, source },
            412 => Error::Precondition { path, source },
            _ => Error::Generic {
                store: STORE,
                source,
            },
        })
    }

    /// Requests a file, at its kept address in a storage if there is one.
    pub(super) async fn file(
        &self,
        key: &str,
        method: Method,
        range: Option<&GetRange>,
    ) -> Result<(HttpResponse, FileVersion)> {
        if let Some(link) = self.link(key).filter(|_| method == Method::GET) {
            let answer = self.send(method.clone(), &link.url, range).await?;
            // Another status is a signature that has expired: the hub gives out a new one.
            if !matches!(answer.status().as_u16(), 300..=404 | 410) {
                return Ok((self.checked(answer, &link.url)?, link.version));
            }
            self.links().remove(key);
        }
        let commit = self.commit().await?;
        let name = self.name.strip_prefix("models/").unwrap_or(&self.name);
        let url = self.url(&[name, "resolve", commit, &encoded_path(key)]);
        let mut version = FileVersion::default();
        let (answer, url) = self.follow(method, url, range, &mut version).await?;
        if answer.status().is_success() {
            version.note_file(&answer);
        }
        if url.origin() != self.endpoint.origin() {
            self.keep_link(key, url, &version);
        }
        Ok((answer, version))
    }

    fn links(&self) -> std::sync::MutexGuard<'_, HashMap<String, Link>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn link(&self, key: &str) -> Option<Link> {
        let link = self.links().get(key).cloned();
        link.filter(|link| link.until > Instant::now())
    }

    fn keep_link(&self, key: &str, url: Url, version: &FileVersion) {
        let mut links = self.links();
        if links.len() >= MOST_LINKS {
            links.clear();
        }
        let (version, until) = (version.clone(), Instant::now() + LINK_LIFE);
        links.insert(
            key.to_owned(),
            Link {
                url,
                version,
                until,
            },
        );
    }
}

impl std::fmt::Display for HubRepository {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HubRepository({}@{})", self.name, self.revision)
    }
}

pub(super) fn parsed<T: for<'a> Deserialize<'a>>(body: &[u8], url: &Url) -> Result<T> {
    serde_json::from_slice(body).map_err(|error| {
        failed(StoreError::io(
            url.origin().ascii_serialization(),
            format!("the response is not that of a hub ({error}); check `HF_ENDPOINT`"),
        ))
    })
}

fn encoded(segment: &str) -> String {
    utf8_percent_encode(segment, SEGMENT).to_string()
}

pub(super) fn encoded_path(path: &str) -> String {
    path.split('/').map(encoded).collect::<Vec<_>>().join("/")
}

pub(super) fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic {
        store: STORE,
        source: error.into(),
    }
}
