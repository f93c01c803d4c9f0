//! Failed attempts of a request: which may succeed when repeated, and the messages of those that may not.

use crate::client::http::{LastRequest, element};
use crate::client::{StoreClient, hub};
use crate::error::StoreError;
use std::error::Error as _;
use std::time::{SystemTime, UNIX_EPOCH};

/// The reason given when a web server ignores the `Range` header.
const RANGE_IGNORED: &str = "the server ignored the `Range` header of a GET and answered HTTP 200 with the whole object: \
     expected HTTP 206 with the requested range, because objects are read in parts; use a server that supports range \
     requests, such as nginx, Apache or an object store, or copy the object to a local folder";

/// A failed attempt.
#[derive(Debug)]
pub(crate) enum FailedAttempt {
    /// A retry cannot succeed.
    Final(StoreError),
    /// The condition of the request was not met (412).
    Precondition,
    /// The range lies outside the object (416).
    Range(String),
    /// A transient failure. `landed`: the request may have taken effect although its response is missing.
    Again { reason: String, landed: bool },
}

/// Classifies a failure of the client.
pub(super) fn classify(
    uri: &str,
    error: &object_store::Error,
    seen: &LastRequest,
    remote: &StoreClient,
) -> FailedAttempt {
    use object_store::Error;
    if let Error::Generic { source, .. } = error
        && let Some(own) = source.downcast_ref::<StoreError>()
    {
        return FailedAttempt::Final(own.clone());
    }
    if let Some(repository) = &remote.repository
        && let Some(error) = hub::refusal::refused(uri, repository, seen)
    {
        return FailedAttempt::Final(error);
    }
    let uri = uri.to_owned();
    let is_http = remote.is_http();
    if let Some(error) = other_region(&uri, error, seen, remote) {
        return FailedAttempt::Final(error);
    }
    // A conflict between two concurrent conditional writes. A violated condition is a 412, or on Azure a 409
    // with `AlreadyExists`.
    if seen.status == Some(409) && !error.to_string().contains("AlreadyExists") {
        return FailedAttempt::Again {
            reason: describe(error, seen),
            landed: false,
        };
    }
    match error {
        Error::NotFound { .. } => FailedAttempt::Final(StoreError::NotFound { uri }),
        Error::AlreadyExists { .. } => FailedAttempt::Final(StoreError::Exists { uri }),
        Error::Precondition { .. } | Error::NotModified { .. } => FailedAttempt::Precondition,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            FailedAttempt::Final(refused(uri, error, seen, remote))
        }
        Error::NotSupported { .. } if seen.status == Some(200) => {
            FailedAttempt::Final(StoreError::io(uri, RANGE_IGNORED))
        }
        Error::InvalidPath { .. } | Error::NotSupported { .. } | Error::NotImplemented { .. } => {
            FailedAttempt::Final(StoreError::io(uri, error.to_string()))
        }
        // The memory store's remaining errors are all invalid ranges.
        _ if !is_http => FailedAttempt::Range(describe(error, seen)),
        _ => match seen.status {
            _ if seen.is_foreign => {
                FailedAttempt::Final(StoreError::io(uri, describe(error, seen)))
            }
            // Errors of a listing come without a type.
            Some(404) => FailedAttempt::Final(StoreError::NotFound { uri }),
            Some(400) if describe(error, seen).contains("Token") => {
                // S3 reports `ExpiredToken` and `InvalidToken` as bad requests.
                FailedAttempt::Final(refused(uri, error, seen, remote))
            }
            Some(401 | 403) => FailedAttempt::Final(refused(uri, error, seen, remote)),
            Some(416) => {
                FailedAttempt::Range("the range starts beyond the end of the object".to_owned())
            }
            // The store rejected the request before executing it.
            Some(429 | 503) => FailedAttempt::Again {
                reason: describe(error, seen),
                landed: false,
            },
            // The store lacks the operation or one of its headers.
            Some(501) => FailedAttempt::Final(StoreError::io(uri, describe(error, seen))),
            Some(408 | 500..) | Some(200..300) => FailedAttempt::Again {
                reason: describe(error, seen),
                landed: true,
            },
            Some(_) => FailedAttempt::Final(StoreError::io(uri, describe(error, seen))),
            None => FailedAttempt::Again {
                reason: describe(error, seen),
                landed: seen.sent,
            },
        },
    }
}

/// Builds the error of a store that rejects the credentials.
fn refused(
    uri: String,
    error: &object_store::Error,
    seen: &LastRequest,
    remote: &StoreClient,
) -> StoreError {
    let message = describe(error, seen);
    let remedy = skew(&message, seen).unwrap_or_else(|| remote.credentials_help.to_owned());
    StoreError::Permission {
        uri,
        reason: format!("{message}; {remedy}"),
    }
}

/// The difference of clocks from which on stores reject signatures.
const MOST_SKEW_S: u64 = 15 * 60;

/// Names the difference between this machine's clock and the store's if it explains a rejected signature. The
/// response to a HEAD has no code, only the store's time.
fn skew(message: &str, seen: &LastRequest) -> Option<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs() as i64;
    let ahead_s = seen.time_s.map_or(0, |time_s| now - time_s);
    let is_far = ahead_s.unsigned_abs() >= MOST_SKEW_S;
    if !is_far && !message.contains("RequestTimeTooSkewed") {
        return None;
    }
    let difference = match ahead_s {
        _ if !is_far => "differs from the store's".to_owned(),
        1.. => format!("is {ahead_s} s ahead of the store's"),
        _ => format!("is {} s behind the store's", -ahead_s),
    };
    Some(format!(
        "this machine's clock {difference}, which makes its signatures invalid: set the clock, for example by NTP"
    ))
}

/// Builds the error of a bucket that is in another region than the requests are made for.
fn other_region(
    uri: &str,
    error: &object_store::Error,
    seen: &LastRequest,
    remote: &StoreClient,
) -> Option<StoreError> {
    let status = seen.status?;
    let is_redirect = (300..400).contains(&status) && status != 304;
    let named = || element(&error.to_string(), "Region");
    let region = match status {
        _ if is_redirect => seen.region.clone().or_else(named),
        400 if remote.region.is_some() => {
            let region = seen.region.clone().or_else(named);
            Some(region.filter(|region| Some(region) != remote.region.as_ref())?)
        }
        _ => return None,
    };
    let asked = remote.region.as_deref().unwrap_or("(none)");
    Some(StoreError::config(match region {
        Some(region) => format!(
            "`{uri}`: HTTP {status}, the bucket is in the region `{region}`, and the request was made for `{asked}`; set \
             `AWS_REGION={region}`, or give the option `region`"
        ),
        None => format!(
            "`{uri}`: HTTP {status}, the store redirects to another address and does not name it; check the endpoint \
             and the region (`{asked}`)"
        ),
    }))
}

/// Describes a failure in one line: the cause, and the proxy between this machine and the store.
pub(super) fn describe(error: &object_store::Error, seen: &LastRequest) -> String {
    let cause = describe_cause(error, seen);
    match &seen.proxy {
        Some(proxy) => format!("{cause}; the request went through {proxy}"),
        None => cause,
    }
}

/// Describes a failure's cause: the status with the store's own code and message, or else the innermost cause.
pub(super) fn describe_cause(error: &object_store::Error, seen: &LastRequest) -> String {
    let text = error.to_string();
    if let Some(status) = seen.status
        && !(200..300).contains(&status)
    {
        let message = [element(&text, "Code"), element(&text, "Message")]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(": ");
        return if message.is_empty() {
            format!("HTTP {status}")
        } else {
            format!("HTTP {status}, {message}")
        };
    }
    let mut causes = Vec::new();
    let mut cause = error.source();
    while let Some(error) = cause {
        causes.push(error.to_string());
        cause = error.source();
    }
    let last = causes.pop().unwrap_or(text);
    last.chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn generic() -> object_store::Error {
        let source = "<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>";
        object_store::Error::Generic {
            store: "S3",
            source: source.into(),
        }
    }

    fn seen(status: u16) -> LastRequest {
        LastRequest {
            status: Some(status),
            sent: true,
            ..LastRequest::default()
        }
    }

    #[test]
    fn failures_are_retried_according_to_their_class() {
        for (status, again, landed) in [
            (500, true, true),
            (502, true, true),
            (503, true, false),
            (429, true, false),
            (408, true, true),
            (400, false, false),
            (501, false, false),
        ] {
            match classify("s3://b/k", &generic(), &seen(status), &StoreClient::test()) {
                FailedAttempt::Again {
                    landed: may,
                    reason,
                } => {
                    assert!(again, "{status}");
                    assert_eq!(may, landed, "{status}");
                    assert_eq!(
                        reason,
                        format!("HTTP {status}, SlowDown: Reduce your rate.")
                    );
                }
                fault => assert!(!again, "{status}: {fault:?}"),
            }
        }
    }

    #[test]
    fn a_request_may_have_taken_effect_unless_its_connection_was_refused() {
        for sent in [false, true] {
            let fault = classify(
                "s3://b/k",
                &generic(),
                &LastRequest {
                    sent,
                    ..LastRequest::default()
                },
                &StoreClient::test(),
            );
            assert!(matches!(fault, FailedAttempt::Again { landed, .. } if landed == sent));
        }
    }
}
