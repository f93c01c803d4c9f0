//! Foreign checkpoints: torch's `torch.save` and distributed checkpoints, safetensors.
//!
//! A source is recognized by its files, listed as a [`ForeignContents`], and read by byte ranges. Nothing in a file
//! is ever executed, and every length in it is checked against the actual size before use.

mod contents;
mod crc;
mod dcp;
mod dcp_items;
mod distributed;
mod flattener;
#[cfg(test)]
mod fuzz;
mod huggingface;
mod pickle;
mod safetensors_header;
mod torch_file;
mod torch_sharded;
mod unpacking;
mod unsupported;
mod zip;

pub(crate) use contents::{ChunkRow, TensorRow};
pub use contents::{ChunkWrapping, ForeignContents, ForeignValue};
pub use crc::{BadMember, verify_zips};
pub(crate) use dcp_items::{Located, TensorItem, locate};
pub use huggingface::lax_rules;
pub(crate) use unpacking::ItemUnpacker;

use crate::place::blob::Blob;
use huggingface::INDEX_SUFFIX;

use crate::error::{CkptError, Result};
use crate::place::CheckpointPlace;
use crate::workers::Interrupted;

/// The names of a whole model in a folder of transformers.
const SINGLE_SAFETENSORS: &str = "model.safetensors";
const SINGLE_TORCH: &str = "pytorch_model.bin";

const SAFETENSORS_SUFFIX: &str = ".safetensors";

/// Suffixes of `torch.save` files, in the order in which a folder is searched.
pub const TORCH_SUFFIXES: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];

const EXPECTED: &str = "expected a checkpoint: a folder with `checkpoint.json.zst` in it (Hocket's), with `.metadata` (torch's \
    distributed ones), with `*.safetensors.index.json` or one `.safetensors` file, or a file of `torch.save`. \
    `hocket-ckpt ls` lists the checkpoints of a folder";

/// A format whose checkpoints begin with one file that its name tells: the metadata or an index of the others.
struct IndexedFormat {
    /// Returns that file among the files of a folder.
    pick: fn(&[String]) -> Option<&str>,
    /// Returns whether a file can be named instead of its folder.
    is_named: fn(&str) -> bool,
    /// Lists the checkpoint.
    list: fn(&CheckpointPlace, &Blob, Interrupted<'_>) -> Result<ForeignContents>,
}

/// The formats with such a file, in the order in which a folder is searched. A checkpoint of another format is a
/// single file, whose first bytes tell the format.
const INDEXED: [IndexedFormat; 3] = [
    IndexedFormat {
        pick: |names| with(names, dcp::METADATA_NAME),
        is_named: |_| false,
        list: dcp::contents,
    },
    IndexedFormat {
        pick: pick_index,
        is_named: |name| name.ends_with(INDEX_SUFFIX),
        list: huggingface::sharded,
    },
    IndexedFormat {
        pick: pick_torch_index,
        is_named: |name| name.ends_with(torch_sharded::INDEX_SUFFIX),
        list: torch_sharded::contents,
    },
];

/// Recognizes and lists a foreign checkpoint.
///
/// # Errors
/// `NotFound` if no known format is found, `Unsafe` if a pickle requires the execution of code, `Corrupt` if a
/// rule of the format is violated, and errors of the disk or the store.
pub fn contents(uri: &str, interrupted: Interrupted<'_>) -> Result<ForeignContents> {
    let place = CheckpointPlace::open(uri)?;
    if let Some((root, name)) = split(uri).filter(|_| !place.is_whole()) {
        let place = CheckpointPlace::open(root)?;
        if let Some(blob) = Blob::find(&place, name, interrupted)? {
            return list_file(&place, &blob, interrupted);
        }
    }
    let Some(listing) = place.files().level(interrupted)? else {
        return Err(place.not_found(format!("there is no such file or folder; {EXPECTED}")));
    };
    let names: Vec<String> = listing.objects.into_iter().map(|one| one.key).collect();
    for format in INDEXED {
        if let Some(name) = (format.pick)(&names) {
            let blob = Blob::open(&place, name, interrupted)?;
            return (format.list)(&place, &blob, interrupted);
        }
    }
    let found = single_files(&names);
    if let [one] = found.as_slice() {
        return list_file(&place, &Blob::open(&place, one, interrupted)?, interrupted);
    }
    if found
        .first()
        .is_some_and(|name| name.ends_with(SAFETENSORS_SUFFIX))
        && let Some(contents) = huggingface::scattered(&place, &found, interrupted)?
    {
        return Ok(contents);
    }
    if let Some(reason) = unsupported::folder(&names, &listing.dirs) {
        return Err(CkptError::Incompatible {
            uri: uri.to_owned(),
            reason: reason.to_owned(),
        });
    }
    Err(place.not_found(match found.first() {
        None if names.is_empty() && listing.dirs.is_empty() => {
            format!("this folder is empty; {EXPECTED}")
        }
        None => format!("this is not a checkpoint; {EXPECTED}"),
        Some(first) => format!(
            "expected a checkpoint: {} files could be meant, without an index that says how they belong together; name one, such as `{first}`",
            found.len(),
        ),
    }))
}

/// Returns the name if a folder has it.
fn with<'a>(names: &'a [String], name: &str) -> Option<&'a str> {
    names.iter().map(String::as_str).find(|one| *one == name)
}

/// Returns the names with a suffix.
fn ending<'a>(names: &'a [String], suffix: &str) -> Vec<&'a str> {
    let names = names.iter().map(String::as_str);
    names.filter(|name| name.ends_with(suffix)).collect()
}

fn pick_index(names: &[String]) -> Option<&str> {
    // transformers also prefers the single file; an index beside it belongs to an earlier, larger save.
    if with(names, SINGLE_SAFETENSORS).is_some() {
        return None;
    }
    with(names, &format!("model{INDEX_SUFFIX}"))
        .or_else(|| ending(names, INDEX_SUFFIX).first().copied())
}

fn pick_torch_index(names: &[String]) -> Option<&str> {
    let has_whole = with(names, SINGLE_TORCH).is_some();
    if has_whole || !ending(names, SAFETENSORS_SUFFIX).is_empty() {
        return None;
    }
    ending(names, torch_sharded::INDEX_SUFFIX).first().copied()
}

/// Returns the files of a folder each of which could be its checkpoint.
fn single_files(names: &[String]) -> Vec<&str> {
    if let Some(single) = with(names, SINGLE_SAFETENSORS) {
        return vec![single];
    }
    let found = ending(names, SAFETENSORS_SUFFIX);
    if !found.is_empty() {
        return found;
    }
    // transformers' trainer saves the state of the optimizer and its arguments beside it.
    if let Some(model) = with(names, SINGLE_TORCH) {
        return vec![model];
    }
    let torch = TORCH_SUFFIXES
        .iter()
        .flat_map(|suffix| ending(names, suffix));
    let found: Vec<&str> = torch.collect();
    if found.is_empty() {
        return ending(names, ".pt2");
    }
    found
}

/// Lists one file: an index, or a file whose first bytes tell the format.
fn list_file(
    place: &CheckpointPlace,
    blob: &Blob,
    interrupted: Interrupted<'_>,
) -> Result<ForeignContents> {
    if let Some(format) = INDEXED.iter().find(|format| (format.is_named)(blob.name())) {
        return (format.list)(place, blob, interrupted);
    }
    let start = blob.read(0..blob.size().min(unsupported::START_BYTES), interrupted)?;
    if let Some(reason) = unsupported::file(blob.name(), &start) {
        return Err(CkptError::Incompatible {
            uri: format!("{}/{}", place.uri().trim_end_matches('/'), blob.name()),
            reason: reason.to_owned(),
        });
    }
    match start.as_slice() {
        [b'P', b'K', 3 | 5, ..] => torch_file::contents(place.uri(), blob, interrupted),
        _ if blob.name().ends_with(SAFETENSORS_SUFFIX) => {
            huggingface::single(place.uri(), blob, interrupted)
        }
        [_, _, _, _, _, 0, 0, 0, b'{' | b' ', ..] => {
            huggingface::single(place.uri(), blob, interrupted)
        }
        _ => Err(place.not_found(format!(
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
