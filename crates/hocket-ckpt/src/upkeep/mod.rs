//! Upkeep of the checkpoints under a prefix: list, remove, collect garbage.

pub(crate) mod gc;
pub(crate) mod list;
pub(crate) mod remove;
