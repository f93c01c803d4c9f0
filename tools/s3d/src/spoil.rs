//! Faulty responses.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, DATE, HeaderValue};
use http::{Response, StatusCode};
use http_body::{Body as _, Frame};
use s3s::{Body, HttpResponse, StdError};
use tokio::time::{Sleep, sleep};

use crate::rule::Kind;

/// Delay between the last byte and the break of the connection, so that the bytes sent before arrive.
const PAUSE: Duration = Duration::from_millis(20);

/// How far the clock of a [`Kind::Skewed`] response is ahead.
const SKEW: Duration = Duration::from_secs(3600);

/// The answer of a server that is no object store.
const PAGE: &str = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body></body></html>";

/// Returns the response to a request that was not executed.
pub fn refusal(kind: Kind) -> HttpResponse {
    let (status, code, message) = match kind {
        Kind::Html => return answer(StatusCode::OK, "text/html", PAGE.to_owned()),
        Kind::ErrorBody => (StatusCode::OK, "InternalError", "Please try again."),
        Kind::NoConditions => (
            StatusCode::NOT_IMPLEMENTED,
            "NotImplemented",
            "A header you provided implies functionality that is not implemented.",
        ),
        Kind::BadCondition => (
            StatusCode::BAD_REQUEST,
            "InvalidArgument",
            "Unsupported header.",
        ),
        Kind::Moved => (
            StatusCode::MOVED_PERMANENTLY,
            "PermanentRedirect",
            "The bucket must be addressed using its own endpoint.",
        ),
        Kind::Skewed => (
            StatusCode::FORBIDDEN,
            "RequestTimeTooSkewed",
            "The difference between the request time and the current time is too large.",
        ),
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
    let mut response = error(status, code, message);
    let headers = response.headers_mut();
    if kind == Kind::Moved {
        headers.insert("x-amz-bucket-region", HeaderValue::from_static("eu-west-3"));
    }
    if kind == Kind::Skewed
        && let Ok(date) = HeaderValue::from_str(&httpdate::fmt_http_date(SystemTime::now() + SKEW))
    {
        headers.insert(DATE, date);
    }
    response
}

/// Builds an error response.
pub fn error(status: StatusCode, code: &str, message: &str) -> HttpResponse {
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    );
    answer(status, "application/xml", text)
}

fn answer(status: StatusCode, kind: &'static str, text: String) -> HttpResponse {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(kind));
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
