//! The tensors in a pickle: views of storages.

use std::hash::{Hash, Hasher};
use std::ops::Range;

use super::names::GlobalMeaning;
use super::tree::{DecodedPickle, PickleFault, PickleNode, PickleValue};
use crate::format::dtypes::{Dtype, TorchDtype};
use crate::manifest::MAX_DIMS;

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
