//! The HTTP client below the stores' clients, which records the outcome of each request.
//!
//! `object_store` does not expose the type of a failed request. Whether a failure can be retried, and whether
//! the request may have taken effect anyway, depends on the status and on whether anything was sent; both are
//! recorded here for the task that made the request.

use super::proxy::Proxies;
use chrono::DateTime;
use http::header::{CONTENT_LENGTH, DATE, RETRY_AFTER};
use http::{Method, StatusCode};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::time::{Duration, SystemTime};
use tokio::time::error::Elapsed;
use tokio::time::timeout;

/// The outcome of a task's last request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LastRequest {
    /// The status of the response, if one arrived.
    pub(crate) status: Option<u16>,
    /// Whether the request may have reached the server.
    pub(crate) sent: bool,
    /// The length that the response declares.
    pub(crate) bytes: Option<u64>,
    /// The region of the bucket, if the response names it.
    pub(crate) region: Option<String>,
    /// The store's time in seconds since 1970.
    pub(crate) time_s: Option<i64>,
    /// Whether the response to a listing was something else, such as a web page.
    pub(crate) is_foreign: bool,
    /// The proxy that the request went through.
    pub(crate) proxy: Option<String>,
    /// Host and port that the request was sent to.
    pub(crate) authority: Option<String>,
    /// The pause before the next request that the response asks for.
    pub(crate) pause: Option<Duration>,
    /// The code of a hub's error, and its message.
    pub(crate) error_code: Option<String>,
    pub(crate) error_message: Option<String>,
}

tokio::task_local! {
    static SEEN: RefCell<LastRequest>;
}

/// Runs `future` with two limits: the response must begin within `first`, and once begun must end within the
/// extra time that `rest` computes for it. Also returns the outcome of the last request.
pub(crate) async fn observe<T>(
    first: Duration,
    rest: impl FnOnce(&LastRequest) -> Duration,
    future: impl Future<Output = T>,
) -> (Result<T, Elapsed>, LastRequest) {
    SEEN.scope(RefCell::default(), async {
        let mut future = pin!(future);
        let mut outcome = timeout(first, &mut future).await;
        let seen = SEEN.with(|seen| seen.borrow().clone());
        if outcome.is_err() && seen.status.is_some() {
            outcome = timeout(rest(&seen), future).await;
        }
        (outcome, SEEN.with(RefCell::take))
    })
    .await
}

/// A factory of clients that record their outcomes.
#[derive(Debug, Clone)]
pub(crate) struct ObservedConnector(Proxies);

impl ObservedConnector {
    pub(super) fn new(proxies: Proxies) -> Self {
        Self(proxies)
    }
}

impl ObservedConnector {
    /// Returns a client that records the outcomes of `inner`.
    pub(super) fn observed(&self, inner: HttpClient) -> HttpClient {
        let proxies = self.0.clone();
        HttpClient::new(OutcomeRecorder { inner, proxies })
    }
}

impl HttpConnector for ObservedConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(self.observed(inner))
    }
}

#[derive(Debug)]
struct OutcomeRecorder {
    inner: HttpClient,
    proxies: Proxies,
}

/// Returns the status of a response. A partial response of zero bytes is a range that starts at the object's
/// end, for which S3 returns 416 and Azurite 206.
fn meaning(answer: &HttpResponse) -> u16 {
    match answer.status() {
        StatusCode::PARTIAL_CONTENT if content_length(answer) == Some(0) => {
            StatusCode::RANGE_NOT_SATISFIABLE.as_u16()
        }
        status => status.as_u16(),
    }
}

/// Returns the pause that the response to one request too many asks for: `Retry-After` (RFC 9110, 10.2.3), or the
/// time until the quota is renewed (`RateLimit`, draft-ietf-httpapi-ratelimit-headers), as hubs send it.
fn asked_pause(answer: &HttpResponse) -> Option<Duration> {
    if !matches!(answer.status().as_u16(), 429 | 503) {
        return None;
    }
    let after = header(answer, RETRY_AFTER.as_str()).map(str::trim);
    let seconds = after.and_then(|text| text.parse().ok());
    let until = || {
        let time = DateTime::parse_from_rfc2822(after?).ok()?;
        let left =
            time.signed_duration_since(chrono::DateTime::<chrono::Utc>::from(SystemTime::now()));
        u64::try_from(left.num_seconds()).ok()
    };
    let renewed = || {
        let quota = header(answer, "ratelimit")?;
        let mut parts = quota.split(';').map(str::trim);
        parts.find_map(|part| part.strip_prefix("t=")?.parse().ok())
    };
    let seconds: u64 = seconds.or_else(until).or_else(renewed)?;
    Some(Duration::from_secs(seconds.min(MOST_PAUSE_S)))
}

/// The header with the code of a hub's error.
pub(crate) const ERROR_CODE: &str = "x-error-code";

/// The longest pause that is taken as it is; a longer one ends the retries in any case.
const MOST_PAUSE_S: u64 = 1_000_000;

fn content_length(answer: &HttpResponse) -> Option<u64> {
    header(answer, CONTENT_LENGTH.as_str())?.parse().ok()
}

fn header<'a>(answer: &'a HttpResponse, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}

/// Returns the root element of the response that a request for a listing expects.
fn listing_root(request: &HttpRequest) -> Option<&'static str> {
    let query = request.uri().query().unwrap_or_default();
    let has = |pair: &str| query.split('&').any(|part| part == pair);
    match *request.method() {
        Method::GET if has("list-type=2") => Some("ListBucketResult"),
        Method::GET if has("uploads") || has("uploads=") => Some("ListMultipartUploadsResult"),
        Method::GET if has("comp=list") => Some("EnumerationResults"),
        _ => None,
    }
}

/// Checks that a successful response to a listing is one: any other document would count as an empty listing.
async fn check_root(answer: HttpResponse, root: &str) -> Result<HttpResponse, NotAListing> {
    let (head, body) = answer.into_parts();
    let body = body.bytes().await.map_err(NotAListing::Lost)?;
    let text = String::from_utf8_lossy(body.get(..LONGEST_START).unwrap_or(&body));
    let found = root_element(&text);
    if found.as_deref() == Some(root) {
        return Ok(HttpResponse::from_parts(head, body.into()));
    }
    if found.as_deref() == Some("Error") {
        let parts = [element(&text, "Code"), element(&text, "Message")];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        return Err(NotAListing::Error(parts.join(": ")));
    }
    let start: String = text.trim_start().chars().take(60).collect();
    Err(NotAListing::Foreign(format!(
        "the response to a listing starts with `{}`: expected an XML document with the root element `{root}`; a web page \
         means that the endpoint is not that of the object store, or that a proxy or a login page responds in its place",
        start.replace(['\r', '\n'], " ")
    )))
}

/// The bytes of a response that are searched for its root element or its error.
const LONGEST_START: usize = 4096;

/// The reason why the response to a listing is none.
#[derive(Debug, thiserror::Error)]
enum NotAListing {
    #[error(transparent)]
    Lost(HttpError),
    #[error("HTTP 200 with an error: {0}")]
    Error(String),
    #[error("{0}")]
    Foreign(String),
}

/// Returns the local name of the first element of an XML document.
fn root_element(text: &str) -> Option<String> {
    let mut rest = text.trim_start_matches('\u{feff}').trim_start();
    // Skips the declaration, comments and the document type.
    while rest.starts_with("<?") || rest.starts_with("<!") {
        let end = if rest.starts_with("<!--") { "-->" } else { ">" };
        rest = rest.split_once(end)?.1.trim_start();
    }
    let name = rest.strip_prefix('<')?;
    let name = name.split([' ', '\t', '\r', '\n', '>', '/']).next()?;
    let local = name.rsplit(':').next()?;
    Some(local.to_owned())
}

/// Returns the text of the first element `tag`.
pub(crate) fn element(text: &str, tag: &str) -> Option<String> {
    let (_, rest) = text.split_once(&format!("<{tag}>"))?;
    let (value, _) = rest.split_once(&format!("</{tag}>"))?;
    Some(value.to_owned())
}

#[async_trait::async_trait]
impl HttpService for OutcomeRecorder {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let note = |seen: LastRequest| {
            // Outside of `observe` the outcome is not needed.
            let _ = SEEN.try_with(|cell| cell.replace(seen));
        };
        note(LastRequest {
            sent: true,
            ..LastRequest::default()
        });
        let root = listing_root(&request);
        let authority = request.uri().authority().map(ToString::to_string);
        let proxy = self.proxies.describe(request.uri());
        let response = match self.inner.execute(request).await {
            Ok(response) => response,
            Err(error) => {
                note(LastRequest {
                    sent: error.kind() != HttpErrorKind::Connect,
                    proxy,
                    authority,
                    ..LastRequest::default()
                });
                return Err(error);
            }
        };
        let time = header(&response, DATE.as_str());
        let time = time.and_then(|time| DateTime::parse_from_rfc2822(time).ok());
        let mut seen = LastRequest {
            status: Some(meaning(&response)),
            sent: true,
            bytes: content_length(&response),
            region: header(&response, "x-amz-bucket-region").map(str::to_owned),
            time_s: time.map(|time| time.timestamp()),
            is_foreign: false,
            proxy,
            authority,
            pause: asked_pause(&response),
            error_code: header(&response, ERROR_CODE).map(str::to_owned),
            error_message: header(&response, "x-error-message").map(str::to_owned),
        };
        note(seen.clone());
        let Some(root) = root.filter(|_| response.status().is_success()) else {
            return Ok(response);
        };
        check_root(response, root).await.map_err(|reason| {
            if let NotAListing::Lost(error) = reason {
                return error;
            }
            seen.is_foreign = matches!(reason, NotAListing::Foreign(_));
            note(seen);
            HttpError::new(HttpErrorKind::Decode, reason)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn the_root_element_is_found_behind_declarations_comments_and_prefixes() {
        for (text, root) in [
            ("<ListBucketResult/>", Some("ListBucketResult")),
            (
                "\u{feff}<?xml version=\"1.0\"?>\n<!-- <a> -->\n<s3:ListBucketResult xmlns:s3=\"x\">",
                Some("ListBucketResult"),
            ),
            ("<!DOCTYPE html><html lang=\"en\">", Some("html")),
            ("{\"ok\": true}", None),
            ("", None),
            ("<!-- <ListBucketResult>", None),
        ] {
            assert_eq!(root_element(text).as_deref(), root, "{text}");
        }
    }
}
