//! The environment variables of stores, read once per handle.
//!
//! Another thread may change the environment at any time, and a concurrent read is undefined behaviour in C.
//! The variables are therefore read when a handle is opened, which Python does under its lock, and never on the
//! I/O threads.

use crate::error::{Result, StoreError};
use std::fmt;

/// The proxy variables, which apply to every service; a different proxy needs a different client.
const PROXIES: [&str; 4] = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"];

/// A snapshot of the variables, taken when a handle is opened.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct EnvSnapshot(Vec<(String, String)>);

impl EnvSnapshot {
    /// Reads the variables that start with one of `prefixes`, and the proxies. Empty values count as unset.
    ///
    /// # Errors
    /// `Config` for a value that is not UTF-8. Only the home folder may be such a value; it counts as unset.
    pub(crate) fn read(prefixes: &[&str]) -> Result<Self> {
        let mut all = Vec::new();
        for (name, value) in std::env::vars_os() {
            let Ok(name) = name.into_string() else {
                continue;
            };
            match value.into_string() {
                Ok(value) => all.push((name, value)),
                Err(_) if name != "HOME" && is_ours(&name, prefixes) => {
                    return Err(StoreError::config(format!(
                        "`{name}` is not UTF-8; expected text, as an address, a key or a name is: set it again, or unset it"
                    )));
                }
                Err(_) => {}
            }
        }
        Ok(Self::choose(all.into_iter(), prefixes))
    }

    pub(crate) fn choose(all: impl Iterator<Item = (String, String)>, prefixes: &[&str]) -> Self {
        let is_set =
            |(name, value): &(String, String)| !value.is_empty() && is_ours(name, prefixes);
        let mut env: Vec<_> = all.filter(is_set).collect();
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
        self.first_set(names).map(|(_, value)| value)
    }

    /// Returns the first of `names` that is set, with its value.
    pub(crate) fn first_set<'n>(&self, names: &[&'n str]) -> Option<(&'n str, &str)> {
        names.iter().find_map(|&name| Some((name, self.get(name)?)))
    }

    /// Returns whether `name` is set to a true value.
    ///
    /// # Errors
    /// `Config` for a value that is neither true nor false.
    pub(crate) fn is_true(&self, name: &str) -> Result<bool> {
        let value = self.get(name).unwrap_or("false");
        match value.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" | "t" | "y" => Ok(true),
            "0" | "false" | "no" | "off" | "f" | "n" => Ok(false),
            _ => Err(StoreError::config(format!(
                "`{name}` is {value:?}; expected `true` or `false`"
            ))),
        }
    }

    /// Iterates over all variables.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &(String, String)> {
        self.0.iter()
    }
}

/// Returns whether a variable is a proxy, or its name starts with one of `prefixes`.
fn is_ours(name: &str, prefixes: &[&str]) -> bool {
    PROXIES.contains(&name.to_ascii_uppercase().as_str())
        || prefixes.iter().any(|prefix| name.starts_with(prefix))
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
        assert!(env.is_true("AWS_A").unwrap() && !env.is_true("AWS_X").unwrap());
        let error = env.is_true("AWS_B").unwrap_err().to_string();
        assert!(error.contains("`AWS_B` is \"2\""), "{error}");
        assert_eq!(format!("{env:?}"), r#"{"AWS_A", "AWS_B", "https_proxy"}"#);
    }
}
