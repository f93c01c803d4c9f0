//! The environment variables of stores, read once per handle.
//!
//! Another thread may change the environment at any time, and a concurrent read is undefined behaviour in C.
//! The variables are therefore read when a handle is opened, which Python does under its lock, and never on the
//! I/O threads.

use std::fmt;

/// The proxy variables, which apply to every service; a different proxy needs a different client.
const PROXIES: [&str; 4] = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"];

/// A snapshot of the variables, taken when a handle is opened.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct EnvSnapshot(Vec<(String, String)>);

impl EnvSnapshot {
    /// Reads the variables that start with one of `prefixes`, and the proxies. Empty values count as unset.
    pub(crate) fn read(prefixes: &[&str]) -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self::choose(std::env::vars_os().filter_map(text), prefixes)
    }

    pub(crate) fn choose(all: impl Iterator<Item = (String, String)>, prefixes: &[&str]) -> Self {
        let ours = |(name, value): &(String, String)| {
            let is_proxy = PROXIES.contains(&name.to_ascii_uppercase().as_str());
            !value.is_empty()
                && (is_proxy || prefixes.iter().any(|prefix| name.starts_with(prefix)))
        };
        let mut env: Vec<_> = all.filter(ours).collect();
        env.sort();
        Self(env)
    }

    /// Returns the value of `name`.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let index = self
            .0
            .binary_search_by(|(known, _)| known.as_str().cmp(name))
            .ok()?;
        self.0.get(index).map(|(_, value)| value.as_str())
    }

    /// Returns the value of the first of `names` that is set.
    pub(crate) fn first(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.get(name))
    }

    /// Returns whether `name` is set to a true value.
    pub(crate) fn is_true(&self, name: &str) -> bool {
        let yes = |value: &str| {
            matches!(
                value.to_ascii_lowercase().as_str(),
                "1" | "true" | "yes" | "on"
            )
        };
        self.get(name).is_some_and(yes)
    }

    /// Iterates over all variables.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &(String, String)> {
        self.0.iter()
    }
}

impl fmt::Debug for EnvSnapshot {
    /// Shows names only, because values may be secrets.
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
    fn only_set_variables_of_the_service_are_read_and_no_value_is_shown() {
        let all = [
            ("AWS_B", "2"),
            ("AWS_A", "TRUE"),
            ("HOME", "x"),
            ("AWS_EMPTY", ""),
            ("https_proxy", "http://p"),
        ];
        let all = all.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let env = EnvSnapshot::choose(all.into_iter(), &["AWS_"]);
        assert_eq!(
            (env.get("AWS_B"), env.get("HOME"), env.get("AWS_EMPTY")),
            (Some("2"), None, None)
        );
        assert_eq!(env.first(&["AWS_X", "AWS_B", "AWS_A"]), Some("2"));
        assert!(env.is_true("AWS_A") && !env.is_true("AWS_B"));
        assert_eq!(format!("{env:?}"), r#"{"AWS_A", "AWS_B", "https_proxy"}"#);
    }
}
