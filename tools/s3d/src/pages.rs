//! S3's responses to listings, for both versions of the operation.

use s3s::dto::*;
use s3s::{S3Result, s3_error};

use crate::listing::{Entry, Query, page};
use crate::objects;
use crate::store::Store;

const MOST_KEYS: i32 = 1000;

/// A page, in the fields that both versions share.
pub struct Listed {
    /// Number of entries on this page.
    pub count: Option<i32>,
    /// Objects.
    pub contents: Option<Vec<Object>>,
    /// Groups.
    pub common_prefixes: Option<Vec<CommonPrefix>>,
    /// The prefix of the request, encoded.
    pub prefix: Option<String>,
    /// The delimiter of the request, encoded.
    pub delimiter: Option<String>,
    /// Limit of the number of entries.
    pub max_keys: Option<i32>,
    /// Whether more follow.
    pub is_truncated: Option<bool>,
    /// The last entry, encoded.
    pub last: Option<String>,
    /// The last entry.
    pub raw_last: Option<String>,
}

/// Returns the query for `input`, starting after `after`.
pub fn query(input: &ListObjectsV2Input, after: Option<String>) -> Query {
    Query {
        prefix: input.prefix.clone().unwrap_or_default(),
        delimiter: input.delimiter.clone(),
        after,
        limit: usize::try_from(max_keys(input)).unwrap_or_default(),
    }
}

fn max_keys(input: &ListObjectsV2Input) -> i32 {
    input.max_keys.unwrap_or(MOST_KEYS).clamp(0, MOST_KEYS)
}

/// Returns the page for `query`.
///
/// # Errors
/// `NoSuchBucket`.
pub fn list(store: &Store, input: &ListObjectsV2Input, query: &Query) -> S3Result<Listed> {
    let encode = encoder(input.encoding_type.as_ref());
    store.read(&input.bucket, |objects| {
        let (entries, is_truncated) = page(objects, query);
        let raw_last = entries.last().map(|entry| entry.name().to_owned());
        let (mut contents, mut groups) = (Vec::new(), Vec::new());
        let count = i32::try_from(entries.len()).ok();
        for entry in entries {
            match entry {
                Entry::Group(prefix) => groups.push(CommonPrefix {
                    prefix: Some(encode(&prefix)),
                }),
                Entry::Object(key, object) => contents.push(Object {
                    key: Some(encode(key)),
                    size: i64::try_from(object.size).ok(),
                    e_tag: Some(ETag::Strong(object.etag.clone())),
                    last_modified: Some(objects::timestamp(object.modified_ms)),
                    ..Default::default()
                }),
            }
        }
        Ok(Listed {
            count,
            contents: Some(contents),
            common_prefixes: Some(groups),
            prefix: input.prefix.as_deref().map(&encode),
            delimiter: input.delimiter.as_deref().map(&encode),
            max_keys: Some(max_keys(input)),
            is_truncated: Some(is_truncated),
            last: raw_last.as_deref().map(&encode),
            raw_last,
        })
    })
}

/// Returns the encoder of keys in a response: percent-encoding if the client requested it, because XML cannot
/// represent every key.
pub fn encoder(encoding: Option<&EncodingType>) -> impl Fn(&str) -> String + use<> {
    let is_url = encoding.is_some_and(|encoding| encoding.as_str() == EncodingType::URL);
    move |text| {
        if !is_url {
            return text.to_owned();
        }
        let mut encoded = String::with_capacity(text.len());
        for byte in text.bytes() {
            if byte.is_ascii_alphanumeric() || b"-_.~/*".contains(&byte) {
                encoded.push(char::from(byte));
            } else {
                encoded.push_str(&format!("%{byte:02X}"));
            }
        }
        encoded
    }
}

/// Returns the key of a continuation token.
///
/// # Errors
/// `InvalidArgument` for a token that this server did not issue.
pub fn parse_token(token: &str) -> S3Result<String> {
    let bytes = token.as_bytes().chunks(2).map(|pair| {
        let digits = std::str::from_utf8(pair)
            .ok()
            .filter(|digits| digits.len() == 2)?;
        u8::from_str_radix(digits, 16).ok()
    });
    let key = bytes
        .collect::<Option<Vec<u8>>>()
        .and_then(|bytes| String::from_utf8(bytes).ok());
    key.ok_or_else(|| {
        s3_error!(
            InvalidArgument,
            "the continuation token is none of this server's"
        )
    })
}
