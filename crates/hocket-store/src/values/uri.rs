//! Parsing and normalizing URIs and paths.

use crate::error::{Result, StoreError};
use crate::service::Service;
use crate::values::bucket::Bucket;
use crate::values::hub;
use crate::values::keys::check_segments;
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use std::path::{Path, PathBuf};
use url::Url;

/// The ASCII characters that are percent-encoded in the path of a web URL, in addition to all non-ASCII ones.
const ENCODED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'%')
    .add(b'?')
    .add(b'#')
    .add(b'"')
    .add(b'<')
    .add(b'>')
    .add(b'`')
    .add(b'{')
    .add(b'}');

/// The location of a store. Prefixes have no slash at either end and are not percent-encoded, like keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreLocation {
    /// An absolute directory.
    Local { root: PathBuf },
    /// A store in this process's memory.
    Memory { name: String, prefix: String },
    /// A bucket and a prefix in it.
    Bucket { bucket: Bucket, prefix: String },
}

/// Returns a URI that is safe to show in messages: the part before an `@`, which may be a password, is left
/// out.
fn shown(uri: &str, scheme: &str) -> String {
    if uri.contains('@') {
        format!("{scheme}://…")
    } else {
        uri.to_owned()
    }
}

/// Percent-decodes the path of a web URL.
fn decoded(uri: &str, path: &str) -> Result<String> {
    let text = percent_decode_str(path).decode_utf8();
    match text {
        Ok(text) if !path.to_ascii_lowercase().contains("%2f") => Ok(text.into_owned()),
        _ => Err(StoreError::config(format!(
            "`{uri}`: expected percent-encoded UTF-8, with `/` between folders in place of `%2F`"
        ))),
    }
}

impl StoreLocation {
    /// Parses `s3://bucket/prefix` and the other schemes, `memory://name/prefix`, `file:///dir` or a path.
    pub(crate) fn parse(uri: &str) -> Result<Self> {
        let Some((scheme, rest)) = uri.split_once("://") else {
            return Self::path(uri);
        };
        if scheme == "file" {
            return Self::file_url(uri);
        }
        if scheme == "hf" {
            let found = hub::parse(uri, rest)?;
            let bucket = Bucket {
                service: Service::Hub,
                name: found.repository,
                at: found.revision,
            };
            return Ok(Self::Bucket {
                bucket,
                prefix: found.path,
            });
        }
        let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        let service = Service::of(scheme);
        if service.is_none() && scheme != "memory" {
            let uri = shown(uri, scheme);
            return Err(StoreError::config(format!(
                "`{uri}` has the unknown scheme `{scheme}`; supported are `s3://`, `gs://`, `az://`, `abfss://`, `oci://`, \
                 `https://` and `hf://` (to read), `file:///dir`, `memory://name` and plain paths"
            )));
        }
        if name.is_empty() {
            let what = if service.is_none() { "name" } else { "bucket" };
            return Err(StoreError::config(format!(
                "`{uri}` does not name a {what}; write `{scheme}://{what}/prefix`"
            )));
        }
        let bucket = service
            .map(|service| Bucket::parse(uri, scheme, service, name))
            .transpose()?;
        let prefix = match service {
            Some(service) if service.is_web() => decoded(uri, prefix)?,
            _ => prefix.to_owned(),
        };
        check_segments(uri, &prefix)?;
        Ok(match bucket {
            Some(bucket) => Self::Bucket { bucket, prefix },
            None => Self::Memory {
                name: name.to_owned(),
                prefix,
            },
        })
    }

    /// Parses a path. A leading `~/` is the user's home folder.
    fn path(uri: &str) -> Result<Self> {
        if let Some((scheme, rest)) = uri.split_once(":/")
            && is_scheme(scheme)
        {
            let shown_uri = shown(uri, scheme);
            // The path of a `file` URI is absolute, so that a third slash follows the two.
            let root = if scheme == "file" { "/" } else { "" };
            let whole = shown(&format!("{scheme}://{root}{rest}"), scheme);
            return Err(StoreError::config(format!(
                "`{shown_uri}` has one slash after `{scheme}:`, as `pathlib.Path` leaves it, and is no URI; pass the \
                 text `{whole}`, or `./{shown_uri}` for a local folder of that name"
            )));
        }
        let Some(below) = uri.strip_prefix('~') else {
            return Self::local(Path::new(uri), uri);
        };
        let home = std::env::home_dir().filter(|home| home.is_absolute());
        match (below.trim_start_matches('/'), home) {
            (below_home, Some(home)) if below.is_empty() || below.starts_with('/') => {
                Self::local(&home.join(below_home), uri)
            }
            _ => Err(StoreError::config(format!(
                "`{uri}`: only `~/` is expanded, for a user with a home folder; write that folder out, or `./{uri}` \
                 for a local folder of that name"
            ))),
        }
    }

    fn file_url(uri: &str) -> Result<Self> {
        let bad = || {
            StoreError::config(format!(
                "`{uri}` names no local directory; write `file:///dir` with three slashes, in UTF-8, with `%3F` \
                 for `?` and `%23` for `#`"
            ))
        };
        let path = Url::parse(uri)
            .ok()
            .filter(|url| url.query().is_none() && url.fragment().is_none())
            .and_then(|url| url.to_file_path().ok())
            .filter(|path| path.to_str().is_some())
            .ok_or_else(bad)?;
        Self::local(&path, uri)
    }

    fn local(path: &Path, uri: &str) -> Result<Self> {
        if uri.is_empty() || uri.contains('\0') {
            return Err(StoreError::config(format!(
                "{uri:?} is not a path; write a directory or a URI such as `s3://bucket/prefix`"
            )));
        }
        let root = std::path::absolute(path)
            .map_err(|error| StoreError::config(format!("`{uri}`: {error}")))?;
        Ok(Self::Local {
            root: root.components().collect(),
        })
    }

    /// Returns the normalized URI, without a trailing slash.
    pub(crate) fn uri(&self) -> String {
        let whole = match self {
            Self::Local { root } => return root.to_string_lossy().into_owned(),
            Self::Memory { name, .. } => format!("memory://{name}"),
            Self::Bucket { bucket, .. } => bucket.uri(),
        };
        match self.prefix() {
            "" => whole,
            prefix if matches!(self, Self::Bucket { bucket, .. } if bucket.service.is_web()) => {
                format!("{whole}/{}", utf8_percent_encode(prefix, ENCODED))
            }
            prefix => format!("{whole}/{prefix}"),
        }
    }

    /// Returns the prefix inside bucket or memory; empty for directories.
    pub(crate) fn prefix(&self) -> &str {
        match self {
            Self::Local { .. } => "",
            Self::Memory { prefix, .. } | Self::Bucket { prefix, .. } => prefix,
        }
    }

    /// Returns whether the location is of one commit of a repository, which never changes.
    pub(crate) fn is_pinned(&self) -> bool {
        let Self::Bucket { bucket, .. } = self else {
            return false;
        };
        let revision = bucket
            .at
            .as_deref()
            .filter(|_| bucket.service == Service::Hub);
        revision.is_some_and(hub::is_commit)
    }

    /// Returns the URI with another revision of the repository; none for stores without revisions.
    pub(crate) fn with_revision(&self, revision: &str) -> Option<String> {
        let Self::Bucket { bucket, prefix } = self else {
            return None;
        };
        let pinned = Bucket {
            at: Some(revision.to_owned()),
            ..bucket.clone()
        };
        (bucket.service == Service::Hub).then(|| {
            let prefix = prefix.clone();
            Self::Bucket {
                bucket: pinned,
                prefix,
            }
            .uri()
        })
    }

    /// Returns `key` below the prefix.
    pub(crate) fn full_key(&self, key: &str) -> String {
        match (self.prefix(), key) {
            ("", key) => key.to_owned(),
            (prefix, "") => prefix.to_owned(),
            (prefix, key) => format!("{prefix}/{key}"),
        }
    }

    /// Rejects an operation that the store does not support.
    ///
    /// # Errors
    /// [`StoreError::Config`], naming the operation and an alternative.
    pub(crate) fn check_verb(&self, verb: &str) -> Result<()> {
        let refusal = match self {
            Self::Bucket { bucket, .. } => bucket.service.refusal(verb),
            Self::Local { .. } | Self::Memory { .. } => None,
        };
        refusal.map_or(Ok(()), |reason| {
            Err(StoreError::config(format!(
                "`{}` cannot {verb}: {reason}; use an `s3://`, `gs://` or `az://` URI, or a local folder",
                self.uri()
            )))
        })
    }
}

/// Returns whether `text` has the form of a URI's scheme; a single letter is a drive of Windows.
fn is_scheme(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    text.len() > 1 && text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(good)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_form_of_uri_is_parsed() {
        let s3 = StoreLocation::parse("s3://b/p/q/").unwrap();
        let bucket = Bucket {
            service: Service::S3,
            name: "b".into(),
            at: None,
        };
        assert_eq!(
            s3,
            StoreLocation::Bucket {
                bucket,
                prefix: "p/q".into()
            }
        );
        for (uri, normal) in [
            ("gs://b/p/", "gs://b/p"),
            ("azure://c", "az://c"),
            (
                "abfs://c@a.dfs.core.windows.net/p",
                "abfss://c@a.dfs.core.windows.net/p",
            ),
            ("oci://b@space/p", "oci://b@space/p"),
            ("http://h:81/p/", "http://h:81/p"),
            ("https://h/a b/ä%/%7e", "https://h/a%20b/%C3%A4%25/~"),
        ] {
            assert_eq!(StoreLocation::parse(uri).unwrap().uri(), normal);
        }
        assert_eq!(s3.full_key("k"), "p/q/k");
        assert_eq!(StoreLocation::parse("s3://b").unwrap().full_key("k"), "k");
        assert_eq!(StoreLocation::parse("/a//b/./c/").unwrap().uri(), "/a/b/c");
        assert_eq!(
            StoreLocation::parse("file:///a%20b%25%3f/%C3%A4")
                .unwrap()
                .uri(),
            "/a b%?/ä"
        );
        assert_eq!(
            StoreLocation::parse("memory://m/x").unwrap().uri(),
            "memory://m/x"
        );
        let web = StoreLocation::parse("https://h/a%20b%25/%3F%C3%A4%2520").unwrap();
        assert_eq!(web.prefix(), "a b%/?ä%20");
        assert_eq!(web.uri(), "https://h/a%20b%25/%3F%C3%A4%2520");
        let relative = StoreLocation::parse("rel/dir").unwrap().uri();
        assert!(
            relative.starts_with('/') && relative.ends_with("/rel/dir"),
            "{relative}"
        );
    }

    #[test]
    fn a_home_folder_is_expanded_at_the_start_only() {
        let home = std::env::home_dir().unwrap();
        let uri = |text: &str| StoreLocation::parse(text).unwrap().uri();
        assert_eq!(uri("~"), uri(home.to_str().unwrap()));
        assert_eq!(uri("~/a"), uri(home.join("a").to_str().unwrap()));
        assert_eq!(uri("~//a"), uri("~/a"));
        assert_eq!(uri("/a/~/b"), "/a/~/b");
        assert!(uri("./~/b").ends_with("/~/b") && uri("a~").ends_with("/a~"));
    }

    #[test]
    fn one_slash_after_a_scheme_is_an_error_with_both_ways_out() {
        for uri in [
            "s3:/b/run",
            "gs:/b",
            "file:/a/b",
            "memory:/m",
            "https:/h/p",
            "dbfs:/a",
            "s3a:/b",
        ] {
            let error = StoreLocation::parse(uri).expect_err(uri).to_string();
            let slashes = if uri.starts_with("file") {
                ":///"
            } else {
                "://"
            };
            let whole = uri.replacen(":/", slashes, 1);
            assert!(
                error.contains(&format!("`{whole}`")) && error.contains(&format!("`./{uri}`")),
                "{error}"
            );
        }
        for path in ["./s3:/b", "/s3:/b", "c:/b", "a b:/c", "s3:", "12:/00"] {
            assert!(
                matches!(StoreLocation::parse(path), Ok(StoreLocation::Local { .. })),
                "{path}"
            );
        }
        let secret = StoreLocation::parse("s3:/key:secret@b")
            .expect_err("login")
            .to_string();
        assert!(!secret.contains("secret"), "{secret}");
    }

    #[test]
    fn an_invalid_uri_is_an_error_with_the_value() {
        for uri in [
            "",
            "ftp://b/p",
            "~nobody-of-that-name/p",
            "az://",
            "s3://",
            "s3:///p",
            "s3://b//p",
            "s3://b/../c",
            "s3://b u/p",
            "file://host/p",
            "file:///p?q",
            "file:///p#q",
            "file:///%FF",
            "memory://",
            "https://h/%FF",
            "https://h/a%2Fb",
            "https://h/a/%2e%2E",
            "https://h/a%00",
        ] {
            let error = StoreLocation::parse(uri).expect_err(uri);
            assert!(
                matches!(&error, StoreError::Config { message } if message.contains(uri)),
                "{error}"
            );
        }
    }

    #[test]
    fn a_uri_with_a_login_or_signature_is_an_error_that_does_not_show_it() {
        for uri in [
            "https://me:secret@h/p",
            "https://h/p?sig=secret",
            "http://h/#secret",
            "s3://key:secret@bucket/p",
            "s3://key:secret/more@bucket/p",
            "s3://secret@bucket/p",
            "oci://key:secret@bucket/p",
            "gs://secret@c/p",
            "sftp://user:secret@host/p",
        ] {
            let error = StoreLocation::parse(uri).expect_err(uri).to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn plain_http_is_read_only() {
        let error = StoreLocation::parse("https://h/p")
            .unwrap()
            .check_verb("list");
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("`https://h/p` cannot list")
        );
        assert!(
            StoreLocation::parse("gs://b")
                .unwrap()
                .check_verb("list")
                .is_ok()
        );
    }

    proptest! {
        #[test]
        fn a_written_uri_reads_back_the_same(scheme in "s3|gs|az|oci|memory", name in "[a-z0-9][a-z0-9.-]{0,20}", parts in prop::collection::vec("[a-zA-Z0-9 %#=_-]{1,8}", 0..4)) {
            let location = StoreLocation::parse(&format!("{scheme}://{name}/{}", parts.join("/"))).unwrap();
            prop_assert_eq!(location.prefix(), parts.join("/"));
            prop_assert_eq!(StoreLocation::parse(&location.uri()).unwrap(), location);
        }

        #[test]
        fn a_web_address_reads_back_the_same(prefix in "[a-zA-Z0-9 %äß\"{}&+=@:]{1,8}(/[2Ff%?#]{1,6}){0,3}") {
            let encoded = utf8_percent_encode(&prefix, percent_encoding::NON_ALPHANUMERIC).to_string().replace("%2F", "/");
            let location = StoreLocation::parse(&format!("https://h/{encoded}")).unwrap();
            prop_assert_eq!(location.prefix(), prefix);
            prop_assert_eq!(StoreLocation::parse(&location.uri()).unwrap(), location);
        }

        #[test]
        fn the_parser_never_panics(text in ".{0,60}") {
            let _ = StoreLocation::parse(&text);
        }
    }
}
