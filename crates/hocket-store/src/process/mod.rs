//! The resources of this process: runtime, workers, byte budget, counters, and the table that a fork resets.

pub(crate) mod budget;
pub(crate) mod caught;
pub(crate) mod counters;
pub mod execution;
pub mod log;
pub mod memory;
pub mod runtime;
pub(crate) mod table;
