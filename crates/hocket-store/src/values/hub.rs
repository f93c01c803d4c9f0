//! URIs of repositories on a hub of Hugging Face, as `huggingface_hub` writes them.

use crate::error::{Result, StoreError};
use crate::values::keys::check_segments;
use percent_encoding::percent_decode_str;

/// The form of a URI, for messages.
pub(crate) const EXPECTED: &str =
    "hf://datasets/owner/name@revision/path, or hf://owner/name for a model";

/// The kinds of repositories in URIs; one without a kind is a model.
const KINDS: [&str; 3] = ["datasets", "spaces", "models"];

/// A file or folder in a repository.
pub(super) struct HubPath {
    /// The repository with its kind, such as `datasets/owner/name`.
    pub(super) repository: String,
    pub(super) revision: Option<String>,
    pub(super) path: String,
}

/// Parses the part of a URI after `hf://`.
///
/// # Errors
/// `Config`; a part before an `@` that may be a password is not shown.
pub(super) fn parse(uri: &str, rest: &str) -> Result<HubPath> {
    let is_login = rest
        .split('/')
        .next()
        .is_some_and(|first| first.contains(['@', ':']));
    let shown = if is_login { "hf://…" } else { uri };
    let bad = |why: &str| StoreError::config(format!("`{shown}` {why}; write `{EXPECTED}`"));
    let (first, below) = rest.split_once('/').unwrap_or((rest, ""));
    let (kind, below) = match first {
        kind if KINDS.contains(&kind) => (kind, below),
        "buckets" | "kernels" => {
            return Err(bad(&format!(
                "is one of `{first}/`, which are not supported"
            )));
        }
        _ => ("models", rest),
    };
    let (owner, below) = below.split_once('/').unwrap_or((below, ""));
    let end = below.find(['@', '/']).unwrap_or(below.len());
    let (name, below) = below.split_at(end);
    if !(is_name(owner) && is_name(name)) {
        return Err(bad("does not name a repository by owner and name"));
    }
    let (revision, path) = match below.strip_prefix('@') {
        Some(below) => split_revision(below),
        None => ("", below),
    };
    let revision = percent_decode_str(revision).decode_utf8();
    let revision = revision.map_err(|_| bad("has a revision that is not UTF-8"))?;
    if below.starts_with('@') && (revision.is_empty() || revision.contains(char::is_control)) {
        return Err(bad("has no revision after its `@`"));
    }
    let path = path.strip_prefix('/').unwrap_or(path).trim_end_matches('/');
    check_segments(shown, path)?;
    Ok(HubPath {
        repository: format!("{kind}/{owner}/{name}"),
        revision: Some(revision.into_owned()).filter(|revision| !revision.is_empty()),
        path: path.to_owned(),
    })
}

/// Returns the URI of a repository, of which `name` has the kind.
pub(super) fn repository_uri(name: &str, revision: Option<&str>) -> String {
    let name = name.strip_prefix("models/").unwrap_or(name);
    match revision {
        Some(revision) => format!("hf://{name}@{}", written(revision)),
        None => format!("hf://{name}"),
    }
}

/// Splits the part after an `@` into revision and path. `refs/pr/1` and `refs/convert/parquet` are revisions with
/// slashes; other slashes in a revision are written as `%2F`.
fn split_revision(text: &str) -> (&str, &str) {
    let end = special(text)
        .or_else(|| text.find('/'))
        .unwrap_or(text.len());
    text.split_at(end)
}

/// Returns the length of a special reference at the start of `text`.
fn special(text: &str) -> Option<usize> {
    let (rest, is_of_name): (_, fn(char) -> bool) = match text.strip_prefix("refs/pr/") {
        Some(rest) => (rest, |c| c.is_ascii_digit()),
        None => (text.strip_prefix("refs/convert/")?, |c| {
            c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
        }),
    };
    let length = rest.find(|c| !is_of_name(c)).unwrap_or(rest.len());
    let is_whole = matches!(rest.as_bytes().get(length), None | Some(b'/'));
    (length > 0 && is_whole).then(|| text.len() - rest.len() + length)
}

fn written(revision: &str) -> String {
    if special(revision) == Some(revision.len()) {
        return revision.to_owned();
    }
    revision.replace('%', "%25").replace('/', "%2F")
}

/// Returns whether a revision is the hash of a commit, which never means another one.
pub(crate) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'))
}

fn is_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    !matches!(name, "" | "." | "..") && name.chars().all(good)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use crate::values::uri::StoreLocation;

    #[test]
    fn repositories_revisions_and_paths_are_told_apart() {
        for (uri, name, revision, path) in [
            ("hf://datasets/o/n", "datasets/o/n", None, ""),
            ("hf://o/n/a/b c#%/", "models/o/n", None, "a/b c#%"),
            ("hf://models/o/n", "models/o/n", None, ""),
            (
                "hf://datasets/o/n@v1.0/data",
                "datasets/o/n",
                Some("v1.0"),
                "data",
            ),
            (
                "hf://datasets/o/n@a%2Fb/c@d",
                "datasets/o/n",
                Some("a/b"),
                "c@d",
            ),
            (
                "hf://datasets/o/n@refs/pr/12/x",
                "datasets/o/n",
                Some("refs/pr/12"),
                "x",
            ),
            (
                "hf://o/n@refs/convert/parquet",
                "models/o/n",
                Some("refs/convert/parquet"),
                "",
            ),
            ("hf://o/n@refs/x/y", "models/o/n", Some("refs"), "x/y"),
            ("hf://o/n@100%25", "models/o/n", Some("100%"), ""),
        ] {
            let location = StoreLocation::parse(uri).unwrap();
            let StoreLocation::Bucket { bucket, prefix } = &location else {
                panic!("{uri}");
            };
            let parts = (bucket.name.as_str(), bucket.at.as_deref(), prefix.as_str());
            assert_eq!(parts, (name, revision, path), "{uri}");
            assert_eq!(StoreLocation::parse(&location.uri()).unwrap(), location);
        }
    }

    #[test]
    fn a_uri_that_names_no_repository_is_refused_without_a_login() {
        for uri in [
            "hf://",
            "hf://datasets",
            "hf://datasets/o",
            "hf://gpt2",
            "hf://gpt2/config.json@",
            "hf://buckets/o/n",
            "hf://datasets/o/../x",
            "hf://datasets/o/n@",
            "hf://datasets/o/n@/x",
            "hf://datasets/o/n/a//b",
            "hf://me:secret@o/n",
            "hf://secret@o/n",
        ] {
            let error = StoreLocation::parse(uri).expect_err(uri).to_string();
            assert!(error.contains("hf://"), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
