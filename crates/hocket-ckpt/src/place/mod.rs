//! The place of a checkpoint: a folder on a disk or a prefix in an object store.

pub(crate) mod blob;
pub(crate) mod files;
pub(crate) mod folder;
pub(crate) mod leftovers;
pub(crate) mod location;
pub(crate) mod prefix;
pub(crate) mod remote;
