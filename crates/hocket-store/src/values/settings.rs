//! Checks of settings from options and variables, where they are read.
//!
//! The client below panics on most values that it cannot put into a request.

use crate::error::{Result, StoreError};
use http::Uri;
use http::uri::PathAndQuery;
use url::Url;

/// Checks the address of a store: a web URL without a query. `name` is the option or variable that holds it.
///
/// # Errors
/// [`StoreError::Config`], with the value unless it may contain a password.
pub(crate) fn check_endpoint(name: &str, value: &str) -> Result<()> {
    if value.contains(['?', '#', '@']) {
        return Err(no_address(name, value));
    }
    check_address(name, value)
}

/// Checks the address of another service: a web URL.
///
/// # Errors
/// [`StoreError::Config`], with the value unless it may contain a password.
pub(crate) fn check_address(name: &str, value: &str) -> Result<()> {
    let has_scheme = value.starts_with("http://") || value.starts_with("https://");
    // Both parsers of the client.
    let has_host = Url::parse(value).is_ok_and(|url| url.has_host());
    let is_plain = value.chars().all(|c| c.is_ascii_graphic());
    if has_scheme && has_host && is_plain && value.parse::<Uri>().is_ok() {
        return Ok(());
    }
    Err(no_address(name, value))
}

fn no_address(name: &str, value: &str) -> StoreError {
    let (shown, remedy) = match value.contains('@') {
        true => (
            "…".into(),
            "an address without a login, such as `http://127.0.0.1:9000`".into(),
        ),
        false if !value.contains(":/") && Url::parse(&format!("http://{value}")).is_ok() => (
            format!("{value:?}"),
            format!("`http://{0}` or `https://{0}`", value.trim()),
        ),
        false => (
            format!("{value:?}"),
            "an address such as `http://127.0.0.1:9000`".to_owned(),
        ),
    };
    StoreError::config(format!("`{name}` is {shown}; expected {remedy}"))
}

/// Checks the part of an address behind its host.
///
/// # Errors
/// [`StoreError::Config`].
pub(crate) fn check_path(name: &str, value: &str) -> Result<()> {
    if value.starts_with('/') && value.parse::<PathAndQuery>().is_ok() {
        return Ok(());
    }
    Err(StoreError::config(format!(
        "`{name}` is {value:?}; expected the path of an address, such as `/v2/credentials`"
    )))
}

/// Checks the name of a region, which may become a part of a host's name.
///
/// # Errors
/// [`StoreError::Config`].
pub(crate) fn check_region(name: &str, value: &str) -> Result<()> {
    let is_of_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if value.chars().all(is_of_host) {
        return Ok(());
    }
    Err(StoreError::config(format!(
        "`{name}` is {value:?}; expected the name of a region, such as `us-east-1`: letters, digits, `-`, `_` and `.`"
    )))
}

/// Checks that the file with a token can be read whose path a setting holds, and that a header can carry the token
/// if one has to.
///
/// # Errors
/// [`StoreError::Config`], with the path.
pub(crate) fn check_token_file(name: &str, path: &str, is_for_header: bool) -> Result<()> {
    let refused = |reason: &dyn std::fmt::Display| {
        StoreError::config(format!(
            "`{name}` is {path:?}; expected the path of a file with a token, but {reason}"
        ))
    };
    let token = std::fs::read_to_string(path).map_err(|error| refused(&error))?;
    if is_for_header && token.contains(|c: char| c.is_control()) {
        return Err(refused(
            &"it has a line break or another control character; write the token alone",
        ));
    }
    Ok(())
}

/// Checks a value that requests carry in their headers or URLs. The message does not repeat it, because it may
/// be a key.
///
/// # Errors
/// [`StoreError::Config`], naming the first character that a request cannot carry, and its place.
pub(crate) fn check_text(name: &str, value: &str) -> Result<()> {
    let is_text = |c: &char| c.is_ascii_graphic() || *c == ' ';
    let Some((index, other)) = value.chars().enumerate().find(|(_, c)| !is_text(c)) else {
        return Ok(());
    };
    Err(StoreError::config(format!(
        "`{name}` has {} as character {} of {}; expected printable ASCII characters only, as a key or name has: set it again \
         without that character",
        if other == '\n' || other == '\r' {
            "a line break".to_owned()
        } else {
            format!("{other:?}")
        },
        index + 1,
        value.chars().count(),
    )))
}
