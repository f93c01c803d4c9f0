//! The HTTP client under the stores' clients: it notes what each request came to.
//!
//! `object_store` keeps the type of a failed request to itself. Whether a failure may be tried again, and
//! whether the request may have taken effect all the same, depends on the status and on whether anything was
//! sent; so both are noted here, for the task that made the request.

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

/// What the last request of a task came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The status of the answer, if one came.
    pub(crate) status: Option<u16>,
    /// Whether the request may have reached the server.
    pub(crate) sent: bool,
    /// The bytes that the answer says it has.
    pub(crate) bytes: Option<u64>,
}

tokio::task_local! {
    static SEEN: Cell<Seen>;
}

/// Runs `future` until it ends, or until no answer has begun after `first`, or until the answer that began has taken
/// longer by what `rest` says of it. Tells what its last request came to.
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

/// Makes clients that note what they see.
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

/// The status of an answer. A part of no bytes is a range that begins where the object ends: S3 says 416, Azurite 206.
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
            // Outside of `observe` nobody asks.
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
