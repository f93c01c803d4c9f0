//! Faulty responses.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body::{Body as _, Frame};
use s3s::{Body, HttpResponse, StdError};
use tokio::time::{Sleep, sleep};

use crate::rule::Kind;

/// Delay between the last byte and the break of the connection, so that the bytes sent before arrive.
const PAUSE: Duration = Duration::from_millis(20);

/// Returns the error response for a request that was not executed.
pub fn refusal(kind: Kind) -> HttpResponse {
    let (status, code, message) = match kind {
        Kind::SlowDown => (
            StatusCode::SERVICE_UNAVAILABLE,
            "SlowDown",
            "Please reduce your request rate.",
        ),
        Kind::Conflict => (
            StatusCode::CONFLICT,
            "ConditionalRequestConflict",
            "The conditional request cannot succeed due to a conflicting operation against this resource.",
        ),
        _ => (
            StatusCode::INTERNAL_SERVER_ERROR,
            "InternalError",
            "We encountered an internal error.",
        ),
    };
    error(status, code, message)
}

/// Builds an error response.
pub fn error(status: StatusCode, code: &str, message: &str) -> HttpResponse {
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    );
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    response
}

/// Truncates a body to half of the declared length of its response. Returns none for an empty body.
pub fn shorten(response: HttpResponse) -> Option<HttpResponse> {
    let (mut head, body) = response.into_parts();
    let declared = head
        .headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    let length: u64 = declared
        .or_else(|| body.size_hint().exact())
        .filter(|length| *length > 0)?;
    head.headers
        .insert(CONTENT_LENGTH, HeaderValue::from(length));
    let body = ShortBody {
        inner: body,
        left: length / 2,
        pause: None,
    };
    Some(Response::from_parts(head, Body::http_body_unsync(body)))
}

struct ShortBody {
    inner: Body,
    left: u64,
    pause: Option<Pin<Box<Sleep>>>,
}

impl http_body::Body for ShortBody {
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        let this = &mut *self;
        if this.left > 0
            && let Some(frame) = ready!(Pin::new(&mut this.inner).poll_frame(context))
        {
            let mut bytes = frame?.into_data().unwrap_or_default();
            bytes.truncate(usize::try_from(this.left).unwrap_or(usize::MAX));
            this.left -= bytes.len() as u64;
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        let pause = this.pause.get_or_insert_with(|| Box::pin(sleep(PAUSE)));
        ready!(pause.as_mut().poll(context));
        Poll::Ready(Some(Err(io::Error::other("short, as asked").into())))
    }
}
