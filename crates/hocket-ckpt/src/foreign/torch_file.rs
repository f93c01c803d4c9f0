//! Files of `torch.save`: a zip with a pickle of the structure and one member per storage.

use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::ops::Range;

use super::catalogue::{ChunkRow, ForeignCatalogue, ForeignValue, TensorRow, join};
use super::distributed;
use super::pickle::{
    AllowedGlobals, DecodedPickle, GlobalMeaning, PickleFault, PickleNode, PickleValue, decode,
    to_json,
};
use super::zip::{ZipFile, ZipMember};
use crate::error::{CkptError, Result};
use crate::format::dtypes::{Dtype, TorchDtype};
use crate::manifest::{MAX_DIMS, PathStep};
use crate::place::blob::Blob;
use crate::workers::Interrupted;

/// Limit of a pickle in bytes.
const PICKLE_LIMIT: u64 = 256 << 20;

/// Limit of the values of all leaves together, beyond one per byte of the pickle; text counts one value per 16
/// bytes. Only a memo that refers to one object repeatedly exceeds it.
const MORE_VALUES: usize = 1 << 18;

const DEEPEST: usize = 64;

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
    let mut walk = StateFlattener {
        pickle: &pickle,
        catalogue: ForeignCatalogue::new("torch", root),
        names: HashSet::new(),
        tensors: Vec::new(),
        values_left: MORE_VALUES + bytes.len(),
    };
    walk.visit(pickle.root, &mut Vec::new()).map_err(fault)?;
    let StateFlattener {
        mut catalogue,
        tensors,
        ..
    } = walk;
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
    tensors: &[(String, Vec<PathStep>, StorageView)],
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

/// A walk that flattens the tree into named leaves, as `hocket.ckpt` does with a state.
struct StateFlattener<'a, 'p> {
    pickle: &'a DecodedPickle<'p>,
    catalogue: ForeignCatalogue,
    /// The names in use.
    names: HashSet<String>,
    /// The tensors, which are not listed before their storages are located.
    tensors: Vec<(String, Vec<PathStep>, StorageView)>,
    values_left: usize,
}

impl StateFlattener<'_, '_> {
    fn spend(&mut self) -> std::result::Result<(), PickleFault> {
        self.values_left = self.values_left.checked_sub(1).ok_or_else(|| {
            PickleFault::Broken("it holds too many values: one is named again and again".to_owned())
        })?;
        Ok(())
    }

    fn visit(
        &mut self,
        value: PickleValue,
        path: &mut Vec<PathStep>,
    ) -> std::result::Result<(), PickleFault> {
        if path.len() > DEEPEST {
            return Err(PickleFault::Unfit(format!(
                "it is nested more than {DEEPEST} deep, or holds itself"
            )));
        }
        self.spend()?;
        if let Some(view) = view(self.pickle, value) {
            let view = view?;
            return self.add_tensor(path, view);
        }
        let shape_of = |local| Some(view(self.pickle, local)?.ok()?.shape);
        if let Some(whole) = distributed::whole(self.pickle, value, path, shape_of)? {
            return self.visit(whole, path);
        }
        let pickle = self.pickle;
        match pickle.node(value) {
            Some(PickleNode::Dict(pairs)) if !pairs.is_empty() => {
                if let Some(keys) = self.keys(pairs) {
                    if keys.iter().all(|key| matches!(key, PathStep::Position(_))) {
                        self.catalogue.integer_keyed.push(path.clone());
                    }
                    for (key, &(_, child)) in keys.into_iter().zip(pairs) {
                        path.push(key);
                        self.visit(child, path)?;
                        path.pop();
                    }
                    return Ok(());
                }
            }
            Some(PickleNode::List(items)) if !items.iter().all(|&item| self.is_scalar(item)) => {
                return self.visit_items(items, path);
            }
            Some(PickleNode::Tuple(items))
                if items.iter().any(|&item| self.holds_tensor(item, 0)) =>
            {
                return self.visit_items(items, path);
            }
            _ => {}
        }
        match pickle.object(value) {
            Some((arguments, state)) => self.visit_object(value, arguments, state, path),
            None => self.add_value(path, value),
        }
    }

    /// Visits an object of an unlisted class: its tensors are read, the object itself is reported as left out.
    ///
    /// A pickled module is read under the names of its `state_dict()`. For any other object, the attributes are
    /// read if they contain tensors, and otherwise the constructor's arguments.
    fn visit_object(
        &mut self,
        value: PickleValue,
        arguments: PickleValue,
        state: PickleValue,
        path: &mut Vec<PathStep>,
    ) -> std::result::Result<(), PickleFault> {
        // With `__slots__` the state is a pair: the attributes, and those in slots.
        let attributes = match self.pickle.items(state) {
            Some(&[attributes, slots]) => [attributes, slots],
            _ => [state, PickleValue::None],
        };
        if self.is_module(state) {
            self.visit_module(state, path)?;
        } else if self.holds_tensor(state, 0) {
            for part in attributes {
                if self
                    .pickle
                    .pairs(part)
                    .is_some_and(|pairs| !pairs.is_empty())
                {
                    self.visit(part, path)?;
                }
            }
        } else if self.holds_tensor(arguments, 0) {
            self.visit(arguments, path)?;
        }
        let is_taken = match path.as_slice() {
            [] => self.names.contains("value"),
            path => self.names.contains(&join(path)),
        };
        if is_taken {
            return Ok(()); // another tensor already has the object's name
        }
        self.add_value(path, value)
    }

    fn is_module(&self, state: PickleValue) -> bool {
        let is_mapping = |key| {
            let part = self.pickle.field(state, key);
            part.is_some_and(|part| self.pickle.pairs(part).is_some())
        };
        is_mapping("_parameters") && is_mapping("_modules")
    }

    /// Visits the parameters, persistent buffers and submodules of a pickled module, in the order of
    /// `state_dict()`.
    fn visit_module(
        &mut self,
        state: PickleValue,
        path: &mut Vec<PathStep>,
    ) -> std::result::Result<(), PickleFault> {
        let pickle = self.pickle;
        let non_persistent = pickle.field(state, "_non_persistent_buffers_set");
        let non_persistent: &[PickleValue] =
            match non_persistent.and_then(|names| pickle.node(names)) {
                Some(PickleNode::Set(names) | PickleNode::List(names)) => names,
                _ => &[],
            };
        let is_non_persistent = |name: &str| {
            non_persistent
                .iter()
                .any(|&it| pickle.text(it) == Some(name))
        };
        for kind in ["_parameters", "_buffers", "_modules"] {
            let parts = pickle.field(state, kind).and_then(|it| pickle.pairs(it));
            for &(name, part) in parts.unwrap_or_default() {
                self.spend()?;
                let Some(name) = pickle.text(name) else {
                    continue;
                };
                if part == PickleValue::None || (kind == "_buffers" && is_non_persistent(name)) {
                    continue;
                }
                path.push(PathStep::Key(name.to_owned()));
                match pickle.object(part) {
                    Some((_, state)) if self.is_module(state) && path.len() <= DEEPEST => {
                        self.visit_module(state, path)?;
                    }
                    _ => self.visit(part, path)?,
                }
                path.pop();
            }
        }
        Ok(())
    }

    fn visit_items(
        &mut self,
        items: &[PickleValue],
        path: &mut Vec<PathStep>,
    ) -> std::result::Result<(), PickleFault> {
        for (position, &item) in items.iter().enumerate() {
            path.push(PathStep::Position(position as i64));
            self.visit(item, path)?;
            path.pop();
        }
        Ok(())
    }

    /// Returns the keys of a mapping to flatten: strings, or integers if the mapping contains tensors.
    fn keys(&mut self, pairs: &[(PickleValue, PickleValue)]) -> Option<Vec<PathStep>> {
        let keys: Vec<PathStep> = pairs
            .iter()
            .map(|&(key, _)| match key {
                PickleValue::Int(number) => Some(PathStep::Position(number)),
                key => self
                    .pickle
                    .text(key)
                    .map(|text| PathStep::Key(text.to_owned())),
            })
            .collect::<Option<_>>()?;
        let is_text = keys.iter().all(|key| matches!(key, PathStep::Key(_)));
        let is_taken = is_text || pairs.iter().any(|&(_, child)| self.holds_tensor(child, 0));
        is_taken.then_some(keys)
    }

    fn is_scalar(&self, value: PickleValue) -> bool {
        !matches!(
            self.pickle.node(value),
            Some(
                PickleNode::List(_)
                    | PickleNode::Tuple(_)
                    | PickleNode::Dict(_)
                    | PickleNode::Record(_)
                    | PickleNode::Persistent(_)
            )
        )
    }

    /// Returns whether a tensor is found within a few levels below. Each node visited counts towards the limit.
    fn holds_tensor(&mut self, value: PickleValue, depth: usize) -> bool {
        const NEAR: usize = 4;
        const FIRST: usize = 16;
        self.values_left = self.values_left.saturating_sub(1);
        if view(self.pickle, value).is_some() {
            return true;
        }
        if depth >= NEAR || self.values_left == 0 {
            return false;
        }
        let below: Vec<PickleValue> = match self.pickle.node(value) {
            Some(PickleNode::List(items) | PickleNode::Tuple(items)) => {
                items.iter().take(FIRST).copied().collect()
            }
            Some(PickleNode::Dict(pairs)) => {
                pairs.iter().take(FIRST).map(|&(_, item)| item).collect()
            }
            _ => match self.pickle.object(value) {
                Some((_, state)) if self.is_module(state) => return true,
                Some((arguments, state)) => vec![arguments, state],
                None => return false,
            },
        };
        below
            .into_iter()
            .any(|item| self.holds_tensor(item, depth + 1))
    }

    /// Returns path and name of a leaf; a leaf at the root of the file is named `value`. Long paths count
    /// towards the limit, because every leaf stores its own.
    fn name(
        &mut self,
        path: &[PathStep],
    ) -> std::result::Result<(Vec<PathStep>, String), PickleFault> {
        self.values_left = self.values_left.saturating_sub(path.len() / 4);
        let path = match path {
            [] => vec![PathStep::Key("value".to_owned())],
            path => path.to_vec(),
        };
        let name = join(&path);
        if !self.names.insert(name.clone()) {
            return Err(PickleFault::Unfit(format!(
                "two places of it have the name `{name}`, such as keys `a` and `b` one in the other and a key `a.b`, or \
                 1 and `1`; rename one of them and save it again"
            )));
        }
        Ok((path, name))
    }

    fn add_tensor(
        &mut self,
        path: &[PathStep],
        view: StorageView,
    ) -> std::result::Result<(), PickleFault> {
        let (path, name) = self.name(path)?;
        self.tensors.push((name, path, view));
        Ok(())
    }

    fn add_value(
        &mut self,
        path: &[PathStep],
        value: PickleValue,
    ) -> std::result::Result<(), PickleFault> {
        let (path, name) = self.name(path)?;
        match to_json(self.pickle, value, &mut self.values_left) {
            Ok(json) => {
                let leaf = ForeignValue { path, value: json };
                self.catalogue.values.insert(name, leaf);
                Ok(())
            }
            Err(_) if self.values_left == 0 => {
                Err(PickleFault::Broken("its values are too many".to_owned()))
            }
            Err(fault) => {
                self.catalogue.opaque.insert(name, fault.reason());
                Ok(())
            }
        }
    }
}
