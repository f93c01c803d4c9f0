//! The HTTP client below the stores' clients, which records the outcome of each request.
//!
//! `object_store` does not expose the type of a failed request. Whether a failure can be retried, and whether
//! the request may have taken effect anyway, depends on the status and on whether anything was sent; both are
//! recorded here for the task that made the request.

use http::StatusCode;
use http::header::CONTENT_LENGTH;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::time::Duration;
use tokio::time::error::Elapsed;
use tokio::time::timeout;

/// The outcome of a task's last request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The status of the response, if one arrived.
    pub(crate) status: Option<u16>,
    /// Whether the request may have reached the server.
    pub(crate) sent: bool,
    /// The length that the response declares.
    pub(crate) bytes: Option<u64>,
}

tokio::task_local! {
    static SEEN: Cell<Seen>;
}

/// Runs `future` with two limits: the response must begin within `first`, and once begun must end within the
/// extra time that `rest` computes for it. Also returns the outcome of the last request.
pub(crate) async fn observe<T>(
    first: Duration,
    rest: impl FnOnce(Seen) -> Duration,
    future: impl Future<Output = T>,
) -> (Result<T, Elapsed>, Seen) {
    SEEN.scope(Cell::default(), async {
        let mut future = pin!(future);
        let mut outcome = timeout(first, &mut future).await;
        let seen = SEEN.with(Cell::get);
        if outcome.is_err() && seen.status.is_some() {
            outcome = timeout(rest(seen), future).await;
        }
        (outcome, SEEN.with(Cell::get))
    })
    .await
}

/// A factory of clients that record their outcomes.
#[derive(Debug, Default)]
pub(crate) struct Connector(ReqwestConnector);

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        self.0
            .connect(options)
            .map(|inner| HttpClient::new(Noting { inner }))
    }
}

#[derive(Debug)]
struct Noting {
    inner: HttpClient,
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

fn content_length(answer: &HttpResponse) -> Option<u64> {
    let length = answer.headers().get(CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

#[async_trait::async_trait]
impl HttpService for Noting {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let note = |seen: Seen| {
            // Outside of `observe` the outcome is not needed.
            let _ = SEEN.try_with(|cell| cell.set(seen));
        };
        note(Seen {
            sent: true,
            ..Seen::default()
        });
        let answer = self.inner.execute(request).await;
        match &answer {
            Ok(response) => note(Seen {
                status: Some(meaning(response)),
                sent: true,
                bytes: content_length(response),
            }),
            Err(error) => note(Seen {
                sent: error.kind() != HttpErrorKind::Connect,
                ..Seen::default()
            }),
        }
        answer
    }
}
