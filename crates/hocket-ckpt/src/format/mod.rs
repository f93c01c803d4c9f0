//! The safetensors format, digests and names, below every other room.

pub(crate) mod digest;
pub(crate) mod dtypes;
pub(crate) mod json_pairs;
pub(crate) mod names;
pub(crate) mod planes;
pub(crate) mod safetensors;
