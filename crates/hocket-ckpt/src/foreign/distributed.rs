//! Distributed tensors in files of `torch.save`: each rank's file holds its own part.

use super::contents::join;
use super::pickle::{DecodedPickle, GlobalMeaning, PickleFault, PickleNode, PickleValue};
use crate::manifest::PathStep;

const REMEDY: &str = "so that one file is not the whole. Save the gathered state \
    (`torch.distributed.checkpoint.state_dict.get_model_state_dict` with \
    `StateDictOptions(full_state_dict=True)`), or save with `torch.distributed.checkpoint`";

/// Returns the local tensor of a `DTensor` that is whole on every rank; none if `value` is no distributed tensor.
///
/// # Errors
/// `Unfit` if the file holds a part of a tensor. `path` leads to it, and `shape_of` returns the shape of a plain
/// tensor.
pub(super) fn whole(
    pickle: &DecodedPickle<'_>,
    value: PickleValue,
    path: &[PathStep],
    shape_of: impl Fn(PickleValue) -> Option<Vec<u64>>,
) -> Result<Option<PickleValue>, PickleFault> {
    let Some((arguments, _)) = pickle.object(value) else {
        return Ok(None);
    };
    // The arguments of `_rebuild_from_type_v2`: function, class, its arguments, state.
    let Some(&[_, PickleValue::Name(class), inner, state]) = pickle.items(arguments) else {
        return Ok(None);
    };
    let class = pickle.shown(class);
    if !class.starts_with("torch.distributed.") {
        return Ok(None);
    }
    let kind = class.rsplit('.').next().unwrap_or(class);
    if !matches!(kind, "DTensor" | "ShardedTensor") {
        return Ok(None);
    }
    // The arguments of `_rebuild_wrapper_subclass`: class, dtype, shape and further ones.
    let shape = match pickle.items(inner) {
        Some(&[_, _, shape, ..]) => pickle.extents(shape),
        _ => None,
    };
    let local = attribute(pickle, state, "_local_tensor");
    let part = local.and_then(shape_of);
    if part.is_some() && part == shape && !is_partial(pickle, state) {
        return Ok(local);
    }
    let shown = |shape: Option<Vec<u64>>| match shape {
        Some(shape) => format!("shape {shape:?}"),
        None => "a shape that is not in the file".to_owned(),
    };
    Err(PickleFault::Unfit(format!(
        "`{}` is a {kind} of {} of which this file holds one rank's part, {}, {REMEDY}",
        join(path),
        shown(shape),
        shown(part),
    )))
}

/// Returns whether a `DTensor` is a sum over ranks that was not yet made.
fn is_partial(pickle: &DecodedPickle<'_>, state: PickleValue) -> bool {
    let spec = attribute(pickle, state, "_spec").and_then(|spec| pickle.object(spec));
    let placements = spec.and_then(|(_, state)| attribute(pickle, state, "placements"));
    let placements = placements.and_then(|placements| pickle.items(placements));
    placements.unwrap_or_default().iter().any(|&placement| {
        matches!(pickle.node(placement), Some(PickleNode::Record(record))
            if matches!(record.0, GlobalMeaning::Other(_)) && pickle.shown(record.0).contains("Partial"))
    })
}

/// Returns an attribute of an object's state: a mapping, or with `__slots__` a pair of mappings.
fn attribute(pickle: &DecodedPickle<'_>, state: PickleValue, name: &str) -> Option<PickleValue> {
    let found = |part: &PickleValue| pickle.field(*part, name);
    found(&state).or_else(|| pickle.items(state)?.iter().find_map(found))
}
