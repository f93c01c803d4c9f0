//! Files of `torch.save`: a zip with a pickle of the structure and one member per storage.

use std::collections::HashMap;
use std::ops::Range;

use super::catalogue::{ChunkRow, ForeignCatalogue, TensorRow};
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
pub(crate) fn catalogue(
    root: &str,
    blob: &Blob,
    interrupted: Interrupted<'_>,
) -> Result<ForeignCatalogue> {
    let zip = ZipFile::open(blob, 0..blob.size(), interrupted)?;
    let (bytes, prefix) = read_pickle(blob, &zip, interrupted)?;
    let fault = |fault: PickleFault| fault.at(root, blob.name());
    let pickle = decode(&bytes, AllowedGlobals::TorchSave).map_err(fault)?;
    let (mut catalogue, tensors) = flatten(&pickle, root, bytes.len()).map_err(fault)?;
    catalogue.files.push((blob.name().to_owned(), blob.size()));
    let storages = locate_storages(blob, &zip, &prefix, &tensors, interrupted)?;
    let mut first: HashMap<StorageView, String> = HashMap::with_capacity(tensors.len());
    for (name, path, view) in tensors {
        add(
            &mut catalogue,
            &storages,
            &mut first,
            blob,
            name,
            path,
            view,
        )?;
    }
    Ok(catalogue)
}

fn add(
    catalogue: &mut ForeignCatalogue,
    storages: &HashMap<String, Range<u64>>,
    first: &mut HashMap<StorageView, String>,
    blob: &Blob,
    name: String,
    path: Vec<PathStep>,
    view: StorageView,
) -> Result<()> {
    let dtype = match view.readable() {
        Ok(dtype) => dtype,
        Err(reason) => {
            catalogue.opaque.insert(name, reason);
            return Ok(());
        }
    };
    let mut row = TensorRow {
        dtype,
        shape: view.shape.clone(),
        path,
        same_as: first.get(&view).cloned(),
        chunks: Vec::new(),
    };
    if !view.is_empty() && row.same_as.is_none() {
        let location = view.span().zip(storages.get(&view.key));
        let inside = location.filter(|(span, storage)| span.end <= storage.end - storage.start);
        let Some((span, storage)) = inside else {
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
            offset: storage.start + span.start,
            length: span.end - span.start,
            start: vec![0; view.shape.len()],
            size: view.shape.clone(),
            strides: view.odd_strides(),
            wrapped: None,
        });
    }
    if !view.is_empty() && row.same_as.is_none() {
        first.insert(view, name.clone());
    }
    catalogue.tensors.insert(name, row);
    Ok(())
}

/// Locates each storage in the file and checks it against its zip member.
fn locate_storages(
    blob: &Blob,
    zip: &ZipFile,
    prefix: &str,
    tensors: &[NamedView],
    interrupted: Interrupted<'_>,
) -> Result<HashMap<String, Range<u64>>> {
    let by_key = zip.members.iter().filter_map(|member| {
        let name = member.name.strip_prefix(prefix)?;
        Some((name.strip_prefix("/data/")?, member))
    });
    let by_key: HashMap<&str, &ZipMember> = by_key.collect();
    let mut wanted: HashMap<&str, &ZipMember> = HashMap::new();
    for (name, _, view) in tensors {
        match by_key.get(view.key.as_str()) {
            Some(member) if member.size == view.storage_bytes => {
                wanted.insert(&view.key, member);
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
    let (keys, members): (Vec<&str>, Vec<&ZipMember>) = wanted.into_iter().unzip();
    let places = zip.locate(blob, &members, interrupted)?;
    Ok(keys.into_iter().map(str::to_owned).zip(places).collect())
}
