//! Reads of boxes of tensors into memory with any strides.
//!
//! Data with the same layout in the file and in memory is read directly into place, in runs. Other data is read
//! through scratch memory in slices of the file, front to back, and copied into place.

mod geometry;
mod overlap;
mod reads;
mod scatter;
mod target;
#[cfg(test)]
mod tests;

pub use geometry::{c_strides, pieces};
pub(crate) use overlap::{ReadLimits, StoredBox};
pub(crate) use reads::BoxReads;
pub(crate) use target::BoxTarget;
