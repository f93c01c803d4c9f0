//! Pagination of a bucket's keys, grouped by a delimiter.

use std::ops::Bound;

use crate::journal::{Bucket, Object};

/// The parameters of a listing.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// The prefix of the listed keys.
    pub prefix: String,
    /// The delimiter: keys that contain it after the prefix are grouped into one entry, which ends with it.
    pub delimiter: Option<String>,
    /// The entry after which the page starts: the last of the previous page, or the client's starting point.
    pub after: Option<String>,
    /// Limit of the number of entries.
    pub limit: usize,
}

/// One entry.
#[derive(Debug, PartialEq)]
pub enum Entry<'a> {
    /// A key and its object.
    Object(&'a str, &'a Object),
    /// The common prefix of the keys in a group.
    Group(String),
}

impl Entry<'_> {
    /// Returns the name after which the next page starts.
    pub fn name(&self) -> &str {
        match self {
            Self::Object(key, _) => key,
            Self::Group(prefix) => prefix,
        }
    }
}

/// Returns the entries for `query`, ordered by their UTF-8 bytes, and whether more follow.
pub fn page<'a>(bucket: &'a Bucket, query: &Query) -> (Vec<Entry<'a>>, bool) {
    let mut entries: Vec<Entry<'_>> = Vec::new();
    let after = query.after.as_deref().unwrap_or("");
    let start = if after > query.prefix.as_str() {
        Bound::Excluded(after)
    } else {
        Bound::Included(query.prefix.as_str())
    };
    for (key, object) in bucket.range::<str, _>((start, Bound::Unbounded)) {
        let Some(rest) = key.strip_prefix(&query.prefix) else {
            break;
        };
        if query.after.as_deref() == Some(key) {
            continue;
        }
        let group = query
            .delimiter
            .as_deref()
            .filter(|delimiter| !delimiter.is_empty())
            .and_then(|delimiter| {
                let end = rest.find(delimiter)? + delimiter.len();
                Some(format!("{}{}", query.prefix, &rest[..end]))
            });
        let is_seen = |group: &String| {
            query.after.as_ref() == Some(group)
                || matches!(entries.last(), Some(Entry::Group(last)) if last == group)
        };
        if group.as_ref().is_some_and(is_seen) {
            continue;
        }
        if entries.len() == query.limit {
            return (entries, query.limit > 0);
        }
        entries.push(group.map_or(Entry::Object(key, object), Entry::Group));
    }
    (entries, false)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    fn names(keys: &[&str], query: Query) -> Vec<Vec<String>> {
        let bucket: Bucket = keys
            .iter()
            .map(|key| (key.to_string(), Object::default()))
            .collect();
        let mut pages = Vec::new();
        let mut query = query;
        loop {
            let (entries, is_cut) = page(&bucket, &query);
            pages.push(
                entries
                    .iter()
                    .map(|entry| entry.name().to_owned())
                    .collect::<Vec<_>>(),
            );
            if !is_cut {
                return pages;
            }
            query.after = pages.last().unwrap().last().cloned();
        }
    }

    #[test]
    fn pages_cover_every_entry_once() {
        let keys = ["a", "a/1", "a/2", "a/2/x", "a0", "b/", "b/1", "c"];
        for limit in 1..10 {
            let flat = names(
                &keys,
                Query {
                    limit,
                    ..Query::default()
                },
            );
            assert_eq!(flat.concat(), keys);
            let query = Query {
                limit,
                delimiter: Some("/".into()),
                ..Query::default()
            };
            assert_eq!(
                names(&keys, query.clone()).concat(),
                ["a", "a/", "a0", "b/", "c"]
            );
            let query = Query {
                prefix: "a/".into(),
                ..query
            };
            assert_eq!(names(&keys, query).concat(), ["a/1", "a/2", "a/2/"]);
        }
        assert_eq!(
            names(
                &keys,
                Query {
                    limit: 9,
                    prefix: "a".into(),
                    after: Some("a/1".into()),
                    delimiter: None
                }
            )
            .concat(),
            ["a/2", "a/2/x", "a0"]
        );
        assert!(
            names(
                &keys,
                Query {
                    limit: 0,
                    ..Query::default()
                }
            )
            .concat()
            .is_empty()
        );
    }
}
