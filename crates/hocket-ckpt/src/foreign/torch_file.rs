//! Files of `torch.save`: a zip with a pickle of the structure and one member per storage.

use std::collections::HashMap;
use std::ops::Range;

use super::contents::{ChunkRow, ForeignContents, TensorRow};
use super::flattener::{NamedView, flatten};
use super::pickle::{AllowedGlobals, PickleFault, StorageView, decode};
use super::zip::{ZipFile, ZipMember};
use crate::error::{CkptError, Result};
use crate::manifest::PathStep;
use crate::place::blob::Blob;
use crate::workers::Interrupted;

/// Limit of a pickle in bytes.
const PICKLE_LIMIT: u64 = 256 << 20;

/// Reads the pickle of a zip after checking its byte order.
pub(crate) fn read_pickle(
    blob: &Blob,
    zip: &ZipFile,
    interrupted: Interrupted<'_>,
) -> Result<(Vec<u8>, String)> {
    let Some((member, prefix)) = zip.pickle() else {
        return Err(blob.corrupt(
            None,
            "it is a zip without `data.pkl`, so `torch.save` did not write it",
        ));
    };
    if let Some(order) = zip.member(&format!("{prefix}/byteorder")) {
        let order = zip.read(blob, order, 16, interrupted)?;
        if order != b"little" {
            return Err(CkptError::Incompatible {
                uri: blob.uri().to_owned(),
                reason: format!(
                    "`{}` was written on a machine with another byte order",
                    blob.name()
                ),
            });
        }
    }
    let bytes = zip.read(blob, member, PICKLE_LIMIT, interrupted)?;
    Ok((bytes, prefix.to_owned()))
}

/// Lists a `torch.save` file.
pub(crate) fn contents(
    root: &str,
    blob: &Blob,
    interrupted: Interrupted<'_>,
) -> Result<ForeignContents> {
    let zip = ZipFile::open(blob, 0..blob.size(), interrupted)?;
    let (bytes, prefix) = read_pickle(blob, &zip, interrupted)?;
    let fault = |fault: PickleFault| fault.at(root, blob.name());
    let pickle = decode(&bytes, AllowedGlobals::TorchSave).map_err(fault)?;
    let (mut contents, tensors) = flatten(&pickle, root, bytes.len()).map_err(fault)?;
    contents.files.push((blob.name().to_owned(), blob.size()));
    let storages = locate_storages(blob, &zip, &prefix, &tensors, interrupted)?;
    contents.tensors.reserve(tensors.len());
    let mut first: HashMap<StorageView, String> = HashMap::new();
    for ((name, path, view), storage) in tensors.into_iter().zip(storages.of_tensor) {
        let storage = &storages.found[storage];
        add(&mut contents, storage, &mut first, blob, name, path, view)?;
    }
    Ok(contents)
}

fn add(
    contents: &mut ForeignContents,
    storage: &Storage,
    first: &mut HashMap<StorageView, String>,
    blob: &Blob,
    name: String,
    path: Vec<PathStep>,
    view: StorageView,
) -> Result<()> {
    let dtype = match view.readable() {
        Ok(dtype) => dtype,
        Err(reason) => {
            contents.opaque.insert(name, reason);
            return Ok(());
        }
    };
    let may_repeat = storage.num_views > 1 && !view.is_empty();
    let mut row = TensorRow {
        dtype,
        shape: view.shape.clone(),
        path,
        same_as: if may_repeat {
            first.get(&view).cloned()
        } else {
            None
        },
        chunks: Vec::new(),
    };
    if !view.is_empty() && row.same_as.is_none() {
        let bytes = &storage.bytes;
        let span = view.span();
        let Some(span) = span.filter(|span| span.end <= bytes.end - bytes.start) else {
            return Err(blob.corrupt(
                None,
                format!(
                    "tensor `{name}` of shape {:?} does not fit into its storage `{}`",
                    view.shape, view.key
                ),
            ));
        };
        row.chunks.push(ChunkRow {
            file: 0,
            offset: bytes.start + span.start,
            length: span.end - span.start,
            start: vec![0; view.shape.len()],
            size: view.shape.clone(),
            strides: view.odd_strides(),
            wrapped: None,
        });
        if may_repeat {
            first.insert(view, name.clone());
        }
    }
    contents.tensors.insert(name, row);
    Ok(())
}

/// A storage that tensors use.
struct Storage {
    /// Its bytes in the file.
    bytes: Range<u64>,
    /// How many tensors use it; only one used by several may hold the same tensor twice.
    num_views: usize,
}

/// The storages of a file, and which of them each tensor uses.
struct Storages {
    found: Vec<Storage>,
    of_tensor: Vec<usize>,
}

/// Locates each storage in the file and checks it against its zip member.
fn locate_storages(
    blob: &Blob,
    zip: &ZipFile,
    prefix: &str,
    tensors: &[NamedView],
    interrupted: Interrupted<'_>,
) -> Result<Storages> {
    let by_key = zip.members.iter().filter_map(|member| {
        let name = member.name.strip_prefix(prefix)?;
        Some((name.strip_prefix("/data/")?, member))
    });
    let by_key: HashMap<&str, &ZipMember> = by_key.collect();
    let mut members: Vec<&ZipMember> = Vec::new();
    let mut num_views: Vec<usize> = Vec::new();
    let mut number_of: HashMap<&str, usize> = HashMap::with_capacity(tensors.len());
    let mut of_tensor: Vec<usize> = Vec::with_capacity(tensors.len());
    for (name, _, view) in tensors {
        match by_key.get(view.key.as_str()) {
            Some(member) if member.size == view.storage_bytes => {
                let number = *number_of.entry(&view.key).or_insert(members.len());
                if number == members.len() {
                    members.push(member);
                    num_views.push(0);
                }
                num_views[number] += 1;
                of_tensor.push(number);
            }
            Some(member) => {
                return Err(blob.corrupt(
                    None,
                    format!(
                        "storage `{}` of tensor `{name}` has {} bytes, its pickle says {}",
                        view.key, member.size, view.storage_bytes
                    ),
                ));
            }
            None => {
                return Err(blob.corrupt(
                    None,
                    format!(
                        "storage `{}` of tensor `{name}` is not in the file",
                        view.key
                    ),
                ));
            }
        }
    }
    let places = zip.locate(blob, &members, interrupted)?;
    let found = places.into_iter().zip(num_views);
    let found = found.map(|(bytes, num_views)| Storage { bytes, num_views });
    Ok(Storages {
        found: found.collect(),
        of_tensor,
    })
}
