//! The environment's variables about stores, read once for each handle.
//!
//! Another thread may change the environment at any time, and reading it at that moment is undefined in C. So it
//! is read where a handle is opened, which Python does under its lock, and never on the I/O threads.

use std::fmt;

/// Variables of every service: a client that was made with another proxy is another client.
const PROXIES: [&str; 4] = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"];

/// The variables as they stood when a handle was opened.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Env(Vec<(String, String)>);

impl Env {
    /// Reads those that begin with one of `prefixes`, and the proxies; empty ones count as unset.
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

    /// The value of `name`.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let index = self
            .0
            .binary_search_by(|(known, _)| known.as_str().cmp(name))
            .ok()?;
        self.0.get(index).map(|(_, value)| value.as_str())
    }

    /// The value of the first of `names` that is set.
    pub(crate) fn first(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.get(name))
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

impl fmt::Debug for Env {
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
    fn only_set_variables_of_the_service_count_and_no_value_is_shown() {
        let all = [
            ("AWS_B", "2"),
            ("AWS_A", "TRUE"),
            ("HOME", "x"),
            ("AWS_EMPTY", ""),
            ("https_proxy", "http://p"),
        ];
        let all = all.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let env = Env::choose(all.into_iter(), &["AWS_"]);
        assert_eq!(
            (env.get("AWS_B"), env.get("HOME"), env.get("AWS_EMPTY")),
            (Some("2"), None, None)
        );
        assert_eq!(env.first(&["AWS_X", "AWS_B", "AWS_A"]), Some("2"));
        assert!(env.is_true("AWS_A") && !env.is_true("AWS_B"));
        assert_eq!(format!("{env:?}"), r#"{"AWS_A", "AWS_B", "https_proxy"}"#);
    }
}
