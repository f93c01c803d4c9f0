//! Reads of blocks: which are needed, from which file, and whether they are sound.

pub(crate) mod block;
pub(crate) mod boxes;
pub(crate) mod byte_reads;
pub(crate) mod free_memory;
pub(crate) mod plan;
pub(crate) mod reader;
pub(crate) mod verify;
