//! Google's XML API as a dialect of S3's: the same paths, bodies and multipart uploads, with conditions on
//! generations.
//!
//! A generation is a number that changes with the object. Here it is derived from the ETag, so that a condition
//! on it can be checked like one on the ETag, under the store's lock.

use http::header::{AUTHORIZATION, ETAG, HeaderMap, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use http::{Request, StatusCode};
use s3s::HttpResponse;

use crate::operation::Target;
use crate::spoil::error;
use crate::store::Store;

const CONDITION: &str = "x-goog-if-generation-match";
const GENERATION: &str = "x-goog-generation";

/// Converts a request from Google's dialect to S3's. Tokens are not checked.
///
/// # Errors
/// The response, if the condition is already violated.
pub fn to_s3<B>(store: &Store, request: &mut Request<B>) -> Result<(), Box<HttpResponse>> {
    let target = Target::of(request);
    let bucket = (request.uri().path().split('/').nth(1))
        .unwrap_or("")
        .to_owned();
    let headers = request.headers_mut();
    headers.remove(AUTHORIZATION);
    let Some(condition) = headers.remove(CONDITION) else {
        return Ok(());
    };
    if condition == "0" {
        headers.insert(IF_NONE_MATCH, HeaderValue::from_static("*"));
        return Ok(());
    }
    let present = store.object(&bucket, &target.key).ok();
    let etag = present
        .filter(|object| condition == generation(&object.etag).as_str())
        .and_then(|object| HeaderValue::from_str(&format!("\"{}\"", object.etag)).ok());
    match etag {
        Some(etag) => {
            headers.insert(IF_MATCH, etag);
            Ok(())
        }
        None => Err(Box::new(error(
            StatusCode::PRECONDITION_FAILED,
            "PreconditionFailed",
            "At least one of the pre-conditions you specified did not hold.",
        ))),
    }
}

/// Adds the object's generation to the headers of a response.
pub fn add_generation(headers: &mut HeaderMap) {
    let etag = headers.get(ETAG).and_then(|etag| etag.to_str().ok());
    let value = etag.and_then(|etag| HeaderValue::from_str(&generation(etag)).ok());
    if let Some(value) = value {
        headers.insert(GENERATION, value);
    }
}

fn generation(etag: &str) -> String {
    let digits: String = etag
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(15)
        .collect();
    u64::from_str_radix(&digits, 16)
        .unwrap_or_default()
        .max(1)
        .to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn a_generation_is_a_number_above_zero_and_the_etags_own() {
        let mut headers = HeaderMap::new();
        headers.insert(ETAG, HeaderValue::from_static("\"00ff\""));
        add_generation(&mut headers);
        assert_eq!(headers[GENERATION], "255");
        assert_eq!(generation(""), "1");
        assert_ne!(generation("aa-2"), generation("ab-2"));
    }
}
