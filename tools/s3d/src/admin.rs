//! The admin endpoint, for faults and counts while the server runs: `GET /_s3d/stats`, `POST /_s3d/faults`,
//! `POST /_s3d/reset`.
//!
//! It requires no signature, because the server is only reachable from loopback.

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use s3s::{Body, HttpResponse};

use crate::faults::{Faults, Settings};

const LARGEST: usize = 1 << 20;

/// Answers a request for `/_s3d/{what}`.
pub async fn handle(faults: &Faults, what: &str, request: Request<Incoming>) -> HttpResponse {
    let done = match (request.method(), what) {
        (&Method::GET, "stats") => Ok(()),
        (&Method::POST, "reset") => {
            faults.reset();
            Ok(())
        }
        (&Method::POST, "faults") => set(faults, request).await,
        _ => Err("expected GET /_s3d/stats, POST /_s3d/faults or POST /_s3d/reset".to_owned()),
    };
    let (status, kind, text) = match done
        .and_then(|()| serde_json::to_string(&faults.stats()).map_err(|error| error.to_string()))
    {
        Ok(text) => (StatusCode::OK, "application/json", text),
        Err(text) => (StatusCode::BAD_REQUEST, "text/plain; charset=utf-8", text),
    };
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

async fn set(faults: &Faults, request: Request<Incoming>) -> Result<(), String> {
    let body = Limited::new(request.into_body(), LARGEST)
        .collect()
        .await
        .map_err(|error| error.to_string())?;
    let settings: Settings =
        serde_json::from_slice(&body.to_bytes()).map_err(|error| error.to_string())?;
    faults.set(settings)
}
