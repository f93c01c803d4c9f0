//! Foreign checkpoints: torch's `torch.save` and distributed checkpoints, safetensors.
//!
//! A source is recognized by its files, listed as a [`Catalogue`], and read by byte ranges. Nothing in a file
//! is ever executed, and every length in it is checked against the actual size before use.

mod catalogue;
mod crc;
mod dcp;
mod dcp_items;
mod distributed;
#[cfg(test)]
mod fuzz;
mod huggingface;
mod pickle;
mod torch_file;
mod torch_sharded;
mod unpacking;
mod unsupported;
mod zip;

pub use catalogue::Catalogue;
pub use crc::{BadMember, verify_zips};
pub(crate) use dcp_items::{Located, TensorItem, locate};
pub use huggingface::lax_rules;
pub(crate) use unpacking::ItemUnpacker;

use crate::place::blob::Blob;
use huggingface::INDEX_SUFFIX;

use crate::error::{CkptError, Result};
use crate::place::CheckpointPlace;
use crate::workers::Interrupted;

/// Suffixes of `torch.save` files, in the order in which a folder is searched.
const TORCH_SUFFIXES: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];

const EXPECTED: &str = "expected a checkpoint: a folder with `checkpoint.json.zst` in it (Hocket's), with `.metadata` (torch's \
    distributed ones), with `*.safetensors.index.json` or one `.safetensors` file, or a file of `torch.save`. \
    `hocket-ckpt ls` lists the checkpoints of a folder";

/// Recognizes and lists a foreign checkpoint.
///
/// # Errors
/// `NotFound` if no known format is found, `Unsafe` if a pickle requires the execution of code, `Corrupt` if a
/// rule of the format is violated, and errors of the disk or the store.
pub fn catalogue(uri: &str, interrupted: Interrupted<'_>) -> Result<Catalogue> {
    if let Some((root, name)) = split(uri)
        && let Some(blob) = Blob::find(&CheckpointPlace::open(root)?, name, interrupted)?
    {
        return file(root, &blob, interrupted);
    }
    let place = CheckpointPlace::open(uri)?;
    let Some(listing) = place.files().level(interrupted)? else {
        return Err(place.not_found(format!("there is no such file or folder; {EXPECTED}")));
    };
    let names: Vec<String> = listing.objects.into_iter().map(|one| one.key).collect();
    let has = |name: &str| names.iter().any(|one| one == name);
    if has(dcp::METADATA_NAME) {
        return dcp::catalogue(&place, interrupted);
    }
    let ending = |suffix: &str| {
        names
            .iter()
            .filter(|name| name.ends_with(suffix))
            .collect::<Vec<_>>()
    };
    // transformers also prefers the single file; an index beside it belongs to an earlier, larger save.
    let single = "model.safetensors";
    let indices = ending(INDEX_SUFFIX);
    let preferred = format!("model{INDEX_SUFFIX}");
    let index = indices
        .iter()
        .find(|name| ***name == preferred)
        .or(indices.first());
    if let Some(index) = index.filter(|_| !has(single)) {
        return huggingface::sharded(
            &place,
            &Blob::open(&place, index, interrupted)?,
            interrupted,
        );
    }
    let bin_index = ending(torch_sharded::INDEX_SUFFIX).first().copied();
    if let Some(index) =
        bin_index.filter(|_| ending(".safetensors").is_empty() && !has("pytorch_model.bin"))
    {
        return torch_sharded::catalogue(
            &place,
            &Blob::open(&place, index, interrupted)?,
            interrupted,
        );
    }
    let mut found: Vec<&str> = if has(single) {
        vec![single]
    } else {
        let files = ending(".safetensors");
        files.into_iter().map(String::as_str).collect()
    };
    let is_torch = found.is_empty();
    if is_torch {
        let torch = TORCH_SUFFIXES.iter().flat_map(|suffix| ending(suffix));
        found = torch.map(String::as_str).collect();
        // transformers' trainer saves the state of the optimizer and its arguments beside it.
        let model = found
            .iter()
            .copied()
            .find(|name| *name == "pytorch_model.bin");
        found = model.map_or(found, |model| vec![model]);
        if found.is_empty() {
            found = ending(".pt2").into_iter().map(String::as_str).collect();
        }
    }
    if found.len() > 1
        && !is_torch
        && let Some(catalogue) = huggingface::scattered(&place, &found, interrupted)?
    {
        return Ok(catalogue);
    }
    let unsupported = unsupported::folder(&names, &listing.dirs);
    match (found.as_slice(), unsupported) {
        ([] | [_, _, ..], Some(reason)) => Err(CkptError::Incompatible {
            uri: uri.to_owned(),
            reason: reason.to_owned(),
        }),
        ([one], _) => file(uri, &Blob::open(&place, one, interrupted)?, interrupted),
        ([], _) if names.is_empty() && listing.dirs.is_empty() => {
            Err(place.not_found(format!("this folder is empty; {EXPECTED}")))
        }
        ([], _) => Err(place.not_found(format!("this is not a checkpoint; {EXPECTED}"))),
        (several, _) => Err(place.not_found(format!(
            "expected a checkpoint: {} files could be meant, without an index that says how they belong together; name one, such as `{}`",
            several.len(),
            several.first().unwrap_or(&"")
        ))),
    }
}

/// Lists one file; its first bytes determine the format.
fn file(root: &str, blob: &Blob, interrupted: Interrupted<'_>) -> Result<Catalogue> {
    if blob.name().ends_with(INDEX_SUFFIX) {
        return huggingface::sharded(&CheckpointPlace::open(root)?, blob, interrupted);
    }
    if blob.name().ends_with(torch_sharded::INDEX_SUFFIX) {
        return torch_sharded::catalogue(&CheckpointPlace::open(root)?, blob, interrupted);
    }
    let start = blob.read(0..blob.size().min(unsupported::START_BYTES), interrupted)?;
    if let Some(reason) = unsupported::file(blob.name(), &start) {
        return Err(CkptError::Incompatible {
            uri: format!("{}/{}", root.trim_end_matches('/'), blob.name()),
            reason: reason.to_owned(),
        });
    }
    match start.as_slice() {
        [b'P', b'K', 3 | 5, ..] => torch_file::catalogue(root, blob, interrupted),
        _ if blob.name().ends_with(".safetensors") => huggingface::single(root, blob, interrupted),
        [_, _, _, _, _, 0, 0, 0, b'{' | b' ', ..] => huggingface::single(root, blob, interrupted),
        _ => Err(CheckpointPlace::open(root)?.not_found(format!(
            "`{}` has an unknown format; {EXPECTED}",
            blob.name()
        ))),
    }
}

/// Splits a URI into the folder and the last component.
fn split(uri: &str) -> Option<(&str, &str)> {
    let uri = uri.trim_end_matches('/');
    match uri.rsplit_once('/') {
        Some(("", name)) => Some(("/", name)),
        // The bucket itself is not a file.
        Some((root, name)) if !root.ends_with(":/") && !name.is_empty() => Some((root, name)),
        Some(_) => None,
        None if uri.is_empty() || uri == "." || uri == ".." => None,
        None => Some((".", uri)),
    }
}

/// Returns the CRC-32 of a zip, continued from `value`.
#[must_use]
pub fn crc32(bytes: &[u8], value: u32) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(value);
    hasher.update(bytes);
    hasher.finalize()
}
