//! Saves: data files, files written in pieces, the reports of ranks, and the commit.

pub(crate) mod commit;
pub(crate) mod existing;
pub(crate) mod file;
pub(crate) mod join;
pub(crate) mod report;
pub(crate) mod shard_plan;
pub(crate) mod stream;
