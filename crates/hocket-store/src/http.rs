//! The HTTP client under the S3 client: it notes what each request came to.
//!
//! `object_store` keeps the type of a failed request to itself. Whether a failure may be tried again, and
//! whether the request may have taken effect all the same, depends on the status and on whether anything was
//! sent; so both are noted here, for the task that made the request.

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use std::cell::Cell;
use std::future::Future;

/// What the last request of a task came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The status of the answer, if one came.
    pub(crate) status: Option<u16>,
    /// Whether the request may have reached the server.
    pub(crate) sent: bool,
}

tokio::task_local! {
    static SEEN: Cell<Seen>;
}

/// Runs `future` and tells what its last request came to, also when `future` is dropped half-way.
pub(crate) async fn observe<T>(seen: &mut Seen, future: impl Future<Output = T>) -> T {
    SEEN.scope(Cell::default(), async {
        let value = future.await;
        *seen = SEEN.with(Cell::get);
        value
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

#[async_trait::async_trait]
impl HttpService for Noting {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let note = |seen: Seen| {
            // Outside of `observe` nobody asks.
            let _ = SEEN.try_with(|cell| cell.set(seen));
        };
        note(Seen {
            status: None,
            sent: true,
        });
        let answer = self.inner.execute(request).await;
        match &answer {
            Ok(response) => note(Seen {
                status: Some(response.status().as_u16()),
                sent: true,
            }),
            Err(error) => note(Seen {
                status: None,
                sent: error.kind() != HttpErrorKind::Connect,
            }),
        }
        answer
    }
}
