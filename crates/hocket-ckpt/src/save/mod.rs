//! Saves: data files, files written in pieces, and the commit.

pub(crate) mod commit;
pub(crate) mod existing;
pub(crate) mod file;
pub(crate) mod stream;
