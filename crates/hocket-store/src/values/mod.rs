//! The plain values of a store: URI, options, environment variables, versions and byte ranges.

pub(crate) mod bucket;
pub(crate) mod env;
pub(crate) mod handle;
pub(crate) mod hub;
pub(crate) mod keys;
pub(crate) mod meta;
pub(crate) mod options;
pub(crate) mod pin;
pub(crate) mod ranges;
pub(crate) mod settings;
pub(crate) mod uri;
