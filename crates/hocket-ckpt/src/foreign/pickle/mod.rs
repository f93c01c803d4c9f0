//! Pickles as data: an opcode interpreter with a short list of known names.
//!
//! Nothing is imported or called. Known names become inert records that the formats interpret. An unlisted name
//! is rejected in the `.metadata` of a distributed checkpoint. In a file of `torch.save` it becomes an opaque
//! record, so that one object of a user's class does not make the tensors beside it unreadable.

mod machine;
mod names;
mod storage_view;
mod tree;
mod value;

pub(crate) use names::{AllowedGlobals, GlobalMeaning};
pub(crate) use storage_view::{LAZY, StorageView, view};
pub(crate) use tree::{DecodedPickle, PickleFault, PickleNode, PickleValue};
pub(crate) use value::to_json;

/// Reads a pickle.
pub(crate) fn decode(
    input: &[u8],
    allowed: AllowedGlobals,
) -> Result<DecodedPickle<'_>, PickleFault> {
    machine::run(input, allowed)
}

/// Reads arbitrary bytes, for tests: any input must be read or rejected.
#[cfg(test)]
mod tests;
