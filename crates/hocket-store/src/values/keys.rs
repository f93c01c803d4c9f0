//! The checks of keys, which name objects in a store.

use crate::error::{Result, StoreError};

/// Rejects an empty key, or one that would not name the same object on every store.
pub(crate) fn check_key(uri: &str, key: &str) -> Result<()> {
    if key.is_empty() {
        return Err(StoreError::config(format!(
            "an empty key in `{uri}`; a key names one object, such as `a/b.bin`"
        )));
    }
    check_segments(uri, key)
}

/// Rejects empty, `.` and `..` segments and control characters, in keys and prefixes alike.
pub(crate) fn check_segments(uri: &str, key: &str) -> Result<()> {
    let bad = |segment: &str| {
        segment.is_empty()
            || segment == "."
            || segment == ".."
            || segment.chars().any(char::is_control)
    };
    if !key.is_empty() && key.split('/').any(bad) {
        return Err(StoreError::config(format!(
            "{key:?} in `{uri}` is not a valid key; segments between slashes must not be empty, `.` or `..`, nor contain control characters"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

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
        fn the_check_never_panics(text in ".{0,60}") {
            let _ = check_key("s3://b", &text);
        }
    }
}
