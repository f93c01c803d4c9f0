//! The bytes of a data file, plain or compressed, and what the manifest records of them.

pub(crate) mod compress;
pub(crate) mod written;
