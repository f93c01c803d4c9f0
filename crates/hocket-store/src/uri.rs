//! What a URI or a path names, and which keys are good.

use crate::error::{Result, StoreError};
use std::path::{Path, PathBuf};
use url::Url;

/// Where a store is. Prefixes have no slash at either end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Location {
    /// A directory, absolute.
    Local { root: PathBuf },
    /// A store in this process's memory.
    Memory { name: String, prefix: String },
    /// A bucket, and a prefix in it.
    S3 { bucket: String, prefix: String },
}

impl Location {
    /// Reads `s3://bucket/prefix`, `memory://name/prefix`, `file:///dir` or a path.
    pub(crate) fn parse(uri: &str) -> Result<Self> {
        let Some((scheme, rest)) = uri.split_once("://") else {
            return Self::local(Path::new(uri), uri);
        };
        let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        match scheme {
            "file" => Self::file_url(uri),
            "memory" | "s3" => {
                if name.is_empty() {
                    let what = if scheme == "s3" { "bucket" } else { "name" };
                    return Err(StoreError::config(format!(
                        "`{uri}` names no {what}; write `{scheme}://{what}/prefix`"
                    )));
                }
                check_segments(uri, prefix)?;
                let prefix = prefix.to_owned();
                if scheme == "s3" {
                    check_bucket(uri, name)?;
                    Ok(Self::S3 {
                        bucket: name.to_owned(),
                        prefix,
                    })
                } else {
                    Ok(Self::Memory {
                        name: name.to_owned(),
                        prefix,
                    })
                }
            }
            _ => Err(StoreError::config(format!(
                "`{uri}` has the scheme `{scheme}`; known are `s3://bucket/prefix`, `file:///dir`, `memory://name` and plain paths"
            ))),
        }
    }

    fn file_url(uri: &str) -> Result<Self> {
        let bad = || {
            StoreError::config(format!(
                "`{uri}` names no local directory; write `file:///dir` with three slashes"
            ))
        };
        let path = Url::parse(uri)
            .ok()
            .and_then(|url| url.to_file_path().ok())
            .ok_or_else(bad)?;
        Self::local(&path, uri)
    }

    fn local(path: &Path, uri: &str) -> Result<Self> {
        if uri.is_empty() || uri.contains('\0') {
            return Err(StoreError::config(format!(
                "{uri:?} is no path; write a directory or a URI such as `s3://bucket/prefix`"
            )));
        }
        let root = std::path::absolute(path)
            .map_err(|error| StoreError::config(format!("`{uri}`: {error}")))?;
        Ok(Self::Local {
            root: root.components().collect(),
        })
    }

    /// The URI in its one normal form, without a slash at the end.
    pub(crate) fn uri(&self) -> String {
        let join = |scheme: &str, name: &str, prefix: &str| match prefix {
            "" => format!("{scheme}://{name}"),
            _ => format!("{scheme}://{name}/{prefix}"),
        };
        match self {
            Self::Local { root } => root.to_string_lossy().into_owned(),
            Self::Memory { name, prefix } => join("memory", name, prefix),
            Self::S3 { bucket, prefix } => join("s3", bucket, prefix),
        }
    }

    /// The prefix inside bucket or memory; empty for directories.
    pub(crate) fn prefix(&self) -> &str {
        match self {
            Self::Local { .. } => "",
            Self::Memory { prefix, .. } | Self::S3 { prefix, .. } => prefix,
        }
    }

    /// `key` below the prefix.
    pub(crate) fn full_key(&self, key: &str) -> String {
        match (self.prefix(), key) {
            ("", key) => key.to_owned(),
            (prefix, "") => prefix.to_owned(),
            (prefix, key) => format!("{prefix}/{key}"),
        }
    }
}

/// Refuses a key that is empty or that would not name the same object everywhere.
pub(crate) fn check_key(uri: &str, key: &str) -> Result<()> {
    if key.is_empty() {
        return Err(StoreError::config(format!(
            "an empty key in `{uri}`; a key names one object, such as `a/b.bin`"
        )));
    }
    check_segments(uri, key)
}

/// Refuses empty, `.` and `..` segments and control characters, in keys and prefixes alike.
pub(crate) fn check_segments(uri: &str, key: &str) -> Result<()> {
    let bad = |segment: &str| {
        segment.is_empty()
            || segment == "."
            || segment == ".."
            || segment.chars().any(char::is_control)
    };
    if !key.is_empty() && key.split('/').any(bad) {
        return Err(StoreError::config(format!(
            "{key:?} in `{uri}` is no key; segments between slashes must not be empty, `.` or `..`, nor hold control characters"
        )));
    }
    Ok(())
}

fn check_bucket(uri: &str, bucket: &str) -> Result<()> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if bucket.chars().all(good) {
        return Ok(());
    }
    Err(StoreError::config(format!(
        "`{uri}`: `{bucket}` is no bucket name; letters, digits, `.`, `-` and `_` are allowed"
    )))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_form_of_uri_is_read() {
        let s3 = Location::parse("s3://b/p/q/").unwrap();
        assert_eq!(
            s3,
            Location::S3 {
                bucket: "b".into(),
                prefix: "p/q".into()
            }
        );
        assert_eq!(s3.full_key("k"), "p/q/k");
        assert_eq!(Location::parse("s3://b").unwrap().full_key("k"), "k");
        assert_eq!(Location::parse("/a//b/./c/").unwrap().uri(), "/a/b/c");
        assert_eq!(Location::parse("file:///a%20b").unwrap().uri(), "/a b");
        assert_eq!(
            Location::parse("memory://m/x").unwrap().uri(),
            "memory://m/x"
        );
        let relative = Location::parse("rel/dir").unwrap().uri();
        assert!(
            relative.starts_with('/') && relative.ends_with("/rel/dir"),
            "{relative}"
        );
    }

    #[test]
    fn what_is_no_uri_is_refused_with_the_value() {
        for uri in [
            "",
            "gs://b/p",
            "s3://",
            "s3:///p",
            "s3://b//p",
            "s3://b/../c",
            "s3://b u/p",
            "file://host/p",
            "memory://",
        ] {
            let error = Location::parse(uri).expect_err(uri);
            assert!(
                matches!(&error, StoreError::Config { message } if message.contains(uri)),
                "{error}"
            );
        }
    }

    #[test]
    fn a_key_stays_inside_the_store() {
        for key in ["", "/a", "a/", "a//b", "../a", "a/./b", "a\nb"] {
            assert!(check_key("s3://b", key).is_err(), "{key:?}");
        }
        for key in ["a", "a/b", "..a", "ä/é €", "a#1", "100%", "x~"] {
            check_key("s3://b", key).unwrap();
        }
    }

    proptest! {
        #[test]
        fn a_written_uri_reads_back_the_same(scheme in "s3|memory", name in "[a-z0-9][a-z0-9.-]{0,20}", parts in prop::collection::vec("[a-zA-Z0-9 %#=_-]{1,8}", 0..4)) {
            let location = Location::parse(&format!("{scheme}://{name}/{}", parts.join("/"))).unwrap();
            prop_assert_eq!(location.prefix(), parts.join("/"));
            prop_assert_eq!(Location::parse(&location.uri()).unwrap(), location);
        }

        #[test]
        fn no_text_makes_the_parser_fall(text in ".{0,60}") {
            let _ = Location::parse(&text);
            let _ = check_key("s3://b", &text);
        }
    }
}
