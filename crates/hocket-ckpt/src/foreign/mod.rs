//! Checkpoints that others wrote: torch's `torch.save` and distributed checkpoints, safetensors.
//!
//! A source is recognised by what stands there, listed as a [`Catalogue`], and read by byte ranges. Nothing in a file is
//! ever executed, and no length in it is believed before it is compared with what is there.

pub(crate) mod blob;
mod catalogue;
mod crc;
mod dcp;
mod dcp_items;
#[cfg(test)]
mod fuzz;
mod huggingface;
mod pickle;
mod torch_file;
mod unpacking;
mod zip;

pub use catalogue::Catalogue;
pub use crc::{BadMember, verify_zips};
pub use dcp_items::{Located, TensorItem, locate};
pub use huggingface::lax_rules;
pub use unpacking::Unpacker;

use blob::Blob;
use huggingface::INDEX_SUFFIX;

use crate::error::{CkptError, Result};
use crate::pace::Interrupted;
use crate::place::{Kind, Place};
use crate::remote;

/// Files of `torch.save`, in the order in which a folder is searched for one.
const TORCH_SUFFIXES: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];

const EXPECTED: &str = "expected a checkpoint: a folder with `checkpoint.json.zst` in it (Hocket's), with `.metadata` (torch's \
    distributed ones), with `*.safetensors.index.json` or one `.safetensors` file, or a file of `torch.save`. \
    `hocket-ckpt ls` lists the checkpoints of a folder";

/// Recognises and lists a checkpoint that is not ours.
///
/// # Errors
/// `NotFound` where there is nothing that is known, `Unsafe` where a pickle asks for more than data, `Corrupt` where a
/// rule of the format does not hold, and what the disk or the store says.
pub fn catalogue(uri: &str, interrupted: Interrupted<'_>) -> Result<Catalogue> {
    if let Some((root, name)) = split(uri)
        && let Some(blob) = Blob::find(&Place::open(root)?, name, interrupted)?
    {
        return file(root, &blob, interrupted);
    }
    let place = Place::open(uri)?;
    let names = names(&place, interrupted)?;
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
    // transformers looks for the single file first, too: an index beside it is of an earlier, larger save.
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
    let mut found: Vec<&str> = if has(single) {
        vec![single]
    } else {
        let files = ending(".safetensors");
        files.into_iter().map(String::as_str).collect()
    };
    if found.is_empty() {
        let torch = TORCH_SUFFIXES.iter().flat_map(|suffix| ending(suffix));
        found = torch.map(String::as_str).collect();
    }
    if found.len() > 1
        && let Some(catalogue) = huggingface::scattered(&place, &found, interrupted)?
    {
        return Ok(catalogue);
    }
    match found.as_slice() {
        [one] => file(uri, &Blob::open(&place, one, interrupted)?, interrupted),
        [] => Err(place.not_found(EXPECTED)),
        several => Err(place.not_found(format!(
            "expected a checkpoint: {} files could be meant, without an index that says how they belong together; name one, such as `{}`",
            several.len(),
            several.first().unwrap_or(&"")
        ))),
    }
}

/// Lists one file by how it begins.
fn file(root: &str, blob: &Blob, interrupted: Interrupted<'_>) -> Result<Catalogue> {
    if blob.name().ends_with(INDEX_SUFFIX) {
        return huggingface::sharded(&Place::open(root)?, blob, interrupted);
    }
    let start = blob.read(0..blob.size().min(16), interrupted)?;
    match start.as_slice() {
        [b'P', b'K', 3 | 5, ..] => torch_file::catalogue(root, blob, interrupted),
        [0x80, 2, 0x8a, 10, 0x6c, 0xfc, ..] => Err(CkptError::Incompatible {
            uri: format!("{}/{}", root.trim_end_matches('/'), blob.name()),
            reason: "it is in the form that torch.save had before torch 1.6, without a zip; load and save it once \
                     with torch"
                .to_owned(),
        }),
        _ if blob.name().ends_with(".safetensors") => huggingface::single(root, blob, interrupted),
        [_, _, _, _, _, 0, 0, 0, b'{' | b' ', ..] => huggingface::single(root, blob, interrupted),
        _ => Err(Place::open(root)?.not_found(format!("`{}` is of no known format; {EXPECTED}", blob.name()))),
    }
}

/// The folder and the name of a URI's last step.
fn split(uri: &str) -> Option<(&str, &str)> {
    let uri = uri.trim_end_matches('/');
    match uri.rsplit_once('/') {
        Some(("", name)) => Some(("/", name)),
        // The bucket itself is no file.
        Some((root, name)) if !root.ends_with(":/") && !name.is_empty() => Some((root, name)),
        Some(_) => None,
        None if uri.is_empty() || uri == "." || uri == ".." => None,
        None => Some((".", uri)),
    }
}

/// Names of the files directly under a place.
fn names(place: &Place, interrupted: Interrupted<'_>) -> Result<Vec<String>> {
    let store = match place.kind() {
        Kind::Local(root) if !root.is_dir() => return Err(place.not_found(EXPECTED)),
        Kind::Local(_) => {
            hocket_store::Store::open(place.uri(), hocket_store::StoreOptions::default())?
        }
        Kind::Remote(store) => store.clone(),
    };
    let listing = remote::wait(async move { Ok(store.list_dirs("").await?) }, interrupted)?;
    Ok(listing
        .objects
        .into_iter()
        .map(|object| object.key)
        .collect())
}

/// CRC-32 as zip has it, carried on from `value`.
#[must_use]
pub fn crc32(bytes: &[u8], value: u32) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(value);
    hasher.update(bytes);
    hasher.finalize()
}
