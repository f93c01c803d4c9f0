//! Files of `torch.save`: a zip with a pickle of the structure and one member per storage.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;

use super::catalogue::{ChunkRow, ForeignCatalogue, TensorRow};
use super::flattener::{NamedView, flatten};
use super::pickle::{
    AllowedGlobals, DecodedPickle, GlobalMeaning, PickleFault, PickleNode, PickleValue, decode,
};
use super::zip::{ZipFile, ZipMember};
use crate::error::{CkptError, Result};
use crate::format::dtypes::{Dtype, TorchDtype};
use crate::manifest::{MAX_DIMS, PathStep};
use crate::place::blob::Blob;
use crate::workers::Interrupted;

/// Limit of a pickle in bytes.
const PICKLE_LIMIT: u64 = 256 << 20;

/// A tensor as the pickle describes it: a view of a storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StorageView {
    pub(crate) dtype: TorchDtype,
    pub(crate) key: String,
    pub(crate) storage_bytes: u64,
    /// In items.
    pub(crate) offset: u64,
    pub(crate) shape: Vec<u64>,
    /// In items.
    pub(crate) strides: Vec<u64>,
    /// Whether torch conjugates or negates the stored items on every read.
    pub(crate) is_lazy: bool,
}

/// Few views share storage and offset, so these two tell enough.
impl Hash for StorageView {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (&self.key, self.offset).hash(hasher);
    }
}

/// The reason why conjugated and negated views are not read, and the remedy.
pub(crate) const LAZY: &str = "a conjugated or negated view, of which the items before that are stored; call `.resolve_conj()` and \
    `.resolve_neg()` on it before it is saved";

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

/// Returns the tensor that a record rebuilds.
pub(crate) fn view(
    pickle: &DecodedPickle<'_>,
    value: PickleValue,
) -> Option<std::result::Result<StorageView, PickleFault>> {
    let Some(PickleNode::Record(record)) = pickle.node(value) else {
        return None;
    };
    let (name, arguments, _) = **record;
    if !matches!(
        name,
        GlobalMeaning::RebuildTensor | GlobalMeaning::RebuildTensorV3
    ) {
        return None;
    }
    let view = view_of(pickle, name, arguments);
    Some(
        view.ok_or_else(|| {
            PickleFault::Broken("a tensor is not made as torch makes it".to_owned())
        }),
    )
}

fn view_of(
    pickle: &DecodedPickle<'_>,
    name: GlobalMeaning,
    arguments: PickleValue,
) -> Option<StorageView> {
    let items = pickle.items(arguments)?;
    let &[storage, PickleValue::Int(offset), shape, strides, ..] = items else {
        return None;
    };
    let Some(PickleNode::Persistent(id)) = pickle.node(storage) else {
        return None;
    };
    let &[kind, class, key, _, PickleValue::Int(numel)] = pickle.items(*id)? else {
        return None;
    };
    let dtype = match (name, class, items.get(6)) {
        (
            GlobalMeaning::RebuildTensorV3,
            _,
            Some(&PickleValue::Name(GlobalMeaning::Dtype(dtype))),
        ) => dtype,
        (GlobalMeaning::RebuildTensor, PickleValue::Name(GlobalMeaning::Storage(dtype)), _) => {
            dtype
        }
        _ => return None,
    };
    let per_item = match class {
        PickleValue::Name(GlobalMeaning::Storage(dtype)) => dtype.item_bytes(),
        PickleValue::Name(GlobalMeaning::UntypedStorage) => 1,
        _ => return None,
    };
    let view = StorageView {
        dtype,
        key: pickle.text(key)?.to_owned(),
        storage_bytes: u64::try_from(numel).ok()?.checked_mul(per_item)?,
        offset: u64::try_from(offset).ok()?,
        shape: pickle.extents(shape)?,
        strides: pickle.extents(strides)?,
        is_lazy: items
            .get(if name == GlobalMeaning::RebuildTensor {
                6
            } else {
                7
            })
            .is_some_and(|&flags| is_lazy(pickle, flags)),
    };
    let is_storage = pickle.text(kind) == Some("storage");
    (is_storage && view.shape.len() == view.strides.len() && view.shape.len() <= MAX_DIMS)
        .then_some(view)
}

/// Returns whether a tensor's flags mark its items as different from the stored ones.
fn is_lazy(pickle: &DecodedPickle<'_>, flags: PickleValue) -> bool {
    let is_set = |flag| {
        !matches!(
            pickle.field(flags, flag),
            None | Some(PickleValue::Bool(false))
        )
    };
    is_set("conj") || is_set("neg")
}

impl StorageView {
    /// Returns the dtype as safetensors can store it, or the reason why the tensor cannot be represented.
    pub(crate) fn readable(&self) -> std::result::Result<Dtype, String> {
        if self.is_lazy {
            return Err(LAZY.to_owned());
        }
        self.dtype.stored().ok_or_else(|| {
            format!(
                "a tensor of torch.{}, which safetensors cannot store",
                self.dtype.name()
            )
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Returns the byte range of the items in the storage; none if it is out of bounds or overflows.
    pub(crate) fn span(&self) -> Option<Range<u64>> {
        let item = self.dtype.item_bytes();
        let mut last = self.offset;
        for (extent, stride) in self.shape.iter().zip(&self.strides) {
            last = last.checked_add(extent.checked_sub(1)?.checked_mul(*stride)?)?;
        }
        let span = self.offset.checked_mul(item)?..last.checked_add(1)?.checked_mul(item)?;
        (span.end <= self.storage_bytes).then_some(span)
    }

    /// Returns the strides if they are not C order. Strides of dims of size 1 are ignored.
    pub(crate) fn odd_strides(&self) -> Option<Vec<u64>> {
        let mut expected = 1_u64;
        let mut is_plain = true;
        for (&extent, &stride) in self.shape.iter().zip(&self.strides).rev() {
            is_plain &= extent == 1 || stride == expected;
            expected = expected.saturating_mul(extent);
        }
        (!is_plain).then(|| self.strides.clone())
    }
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
