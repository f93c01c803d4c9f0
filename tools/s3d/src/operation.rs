//! The S3 operation of a request, derived from its request line alone, because faults apply before a signature
//! is checked.

use http::header::{IF_MATCH, IF_NONE_MATCH};
use http::{Method, Request};

/// An operation and its target.
#[derive(Debug, Default, PartialEq)]
pub struct Target {
    /// S3's name of the operation, such as `"GetObject"`.
    pub operation: &'static str,
    /// The decoded key; for a listing, its prefix.
    pub key: String,
    /// Whether it is a PUT with `If-Match` or `If-None-Match`.
    pub is_conditional: bool,
}

impl Target {
    /// Parses a path-style request: `/bucket/key?query`.
    pub fn of<B>(request: &Request<B>) -> Self {
        let path = request.uri().path().trim_start_matches('/');
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let query: Vec<(&str, &str)> = request
            .uri()
            .query()
            .unwrap_or("")
            .split('&')
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
            .collect();
        let find = |name: &str| {
            query
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| *value)
        };
        let has = |name: &str| find(name).is_some();
        let is_copy = request.headers().contains_key("x-amz-copy-source");
        let is_conditional = request.method() == Method::PUT
            && (request.headers().contains_key(IF_MATCH)
                || request.headers().contains_key(IF_NONE_MATCH));
        let operation = match (request.method(), bucket, key) {
            (_, "", _) => "ListBuckets",
            (method, _, "") => bucket_operation(method, has),
            (method, _, _) => object_operation(method, has, is_copy),
        };
        let key = if key.is_empty() {
            find("prefix").unwrap_or("")
        } else {
            key
        };
        Self {
            operation,
            key: decode(key),
            is_conditional,
        }
    }

    /// Returns whether a successful response has a body of more than a few bytes.
    pub fn answers_with_a_body(&self) -> bool {
        self.operation == "GetObject" || self.operation.starts_with("List")
    }
}

fn bucket_operation(method: &Method, has: impl Fn(&str) -> bool) -> &'static str {
    match *method {
        Method::PUT => "CreateBucket",
        Method::DELETE => "DeleteBucket",
        Method::HEAD => "HeadBucket",
        Method::POST if has("delete") => "DeleteObjects",
        Method::GET if has("uploads") => "ListMultipartUploads",
        Method::GET if has("location") => "GetBucketLocation",
        Method::GET if has("list-type") => "ListObjectsV2",
        Method::GET => "ListObjects",
        _ => "Other",
    }
}

fn object_operation(method: &Method, has: impl Fn(&str) -> bool, is_copy: bool) -> &'static str {
    match *method {
        Method::GET if has("uploadId") => "ListParts",
        Method::GET => "GetObject",
        Method::HEAD => "HeadObject",
        Method::PUT if has("uploadId") => "UploadPart",
        Method::PUT if is_copy => "CopyObject",
        Method::PUT => "PutObject",
        Method::POST if has("uploads") => "CreateMultipartUpload",
        Method::POST if has("uploadId") => "CompleteMultipartUpload",
        Method::DELETE if has("uploadId") => "AbortMultipartUpload",
        Method::DELETE => "DeleteObject",
        _ => "Other",
    }
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let coded = tail
            .get(..2)
            .and_then(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
        match (byte, coded) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn operations_are_told_apart() {
        for (method, uri, operation, key) in [
            ("GET", "/", "ListBuckets", ""),
            (
                "GET",
                "/b?list-type=2&prefix=a%2Fb&delimiter=%2F",
                "ListObjectsV2",
                "a/b",
            ),
            ("GET", "/b/", "ListObjects", ""),
            ("HEAD", "/b", "HeadBucket", ""),
            ("POST", "/b?delete", "DeleteObjects", ""),
            ("GET", "/b/a%20b/%C3%BC", "GetObject", "a b/ü"),
            ("PUT", "/b/k", "PutObject", "k"),
            ("PUT", "/b/k?partNumber=1&uploadId=x", "UploadPart", "k"),
            ("POST", "/b/k?uploads", "CreateMultipartUpload", "k"),
            ("POST", "/b/k?uploadId=x", "CompleteMultipartUpload", "k"),
            ("DELETE", "/b/k?uploadId=x", "AbortMultipartUpload", "k"),
            ("PATCH", "/b/100%", "Other", "100%"),
        ] {
            let request = Request::builder().method(method).uri(uri).body(()).unwrap();
            assert_eq!(
                Target::of(&request),
                Target {
                    operation,
                    key: key.into(),
                    is_conditional: false
                },
                "{method} {uri}"
            );
        }
    }
}
