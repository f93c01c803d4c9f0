//! The `AWS_*` variables, read once for each handle.
//!
//! Another thread may change the environment at any time, and reading it at that moment is undefined in C. So it
//! is read where a handle is opened, which Python does under its lock, and never on the I/O threads.

use std::fmt;

/// The variables as they stood when a handle was opened.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct AwsEnv(Vec<(String, String)>);

impl AwsEnv {
    /// Reads them; empty ones count as unset.
    pub(crate) fn read() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        std::env::vars_os().filter_map(text).collect()
    }

    /// The value of `name`.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let index = self
            .0
            .binary_search_by(|(known, _)| known.as_str().cmp(name))
            .ok()?;
        Some(&self.0[index].1)
    }

    /// Whether `name` says yes.
    pub(crate) fn is_true(&self, name: &str) -> bool {
        let yes = |value: &str| {
            matches!(
                value.to_ascii_lowercase().as_str(),
                "1" | "true" | "yes" | "on"
            )
        };
        self.get(name).is_some_and(yes)
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &(String, String)> {
        self.0.iter()
    }
}

impl FromIterator<(String, String)> for AwsEnv {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(all: I) -> Self {
        let ours = |(name, value): &(String, String)| name.starts_with("AWS_") && !value.is_empty();
        let mut env: Vec<_> = all.into_iter().filter(ours).collect();
        env.sort();
        Self(env)
    }
}

impl fmt::Debug for AwsEnv {
    /// Names only: values are secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set()
            .entries(self.0.iter().map(|(name, _)| name))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn only_set_variables_of_aws_count_and_no_value_is_shown() {
        let all = [
            ("AWS_B", "2"),
            ("AWS_A", "TRUE"),
            ("HOME", "x"),
            ("AWS_EMPTY", ""),
        ];
        let env: AwsEnv = all
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        assert_eq!(
            (env.get("AWS_B"), env.get("HOME"), env.get("AWS_EMPTY")),
            (Some("2"), None, None)
        );
        assert!(env.is_true("AWS_A") && !env.is_true("AWS_B"));
        assert_eq!(format!("{env:?}"), r#"{"AWS_A", "AWS_B"}"#);
    }
}
