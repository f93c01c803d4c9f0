//! The tree in a file of `torch.save` as named leaves.

use std::collections::HashSet;

use super::contents::{ForeignContents, ForeignValue, join};
use super::distributed;
use super::pickle::{
    DecodedPickle, PickleFault, PickleNode, PickleValue, StorageView, to_json, view,
};
use crate::manifest::PathStep;

/// Limit of the values of all leaves together, beyond one per byte of the pickle; text counts one value per 16
/// bytes. Only a memo that refers to one object repeatedly exceeds it.
const MORE_VALUES: usize = 1 << 18;

const DEEPEST: usize = 64;

/// Name, path and view of a tensor.
pub(super) type NamedView = (String, Vec<PathStep>, StorageView);

/// Flattens the tree of a pickle of `num_bytes` bytes: lists its values in the contents, and returns its tensors, which
/// are not listed before their storages are located.
pub(super) fn flatten(
    pickle: &DecodedPickle<'_>,
    root: &str,
    num_bytes: usize,
) -> std::result::Result<(ForeignContents, Vec<NamedView>), PickleFault> {
    let mut walk = StateFlattener {
        pickle,
        contents: ForeignContents::new("torch", root),
        names: HashSet::new(),
        tensors: Vec::new(),
        values_left: MORE_VALUES + num_bytes,
    };
    walk.visit(pickle.root, &mut Vec::new())?;
    Ok((walk.contents, walk.tensors))
}

/// A walk that flattens the tree into named leaves, as `hocket.ckpt` does with a state.
struct StateFlattener<'a, 'p> {
    pickle: &'a DecodedPickle<'p>,
    contents: ForeignContents,
    /// The names in use.
    names: HashSet<String>,
    tensors: Vec<NamedView>,
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
                        self.contents.integer_keyed.push(path.clone());
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
                self.contents.values.insert(name, leaf);
                Ok(())
            }
            Err(_) if self.values_left == 0 => {
                Err(PickleFault::Broken("its values are too many".to_owned()))
            }
            Err(fault) => {
                self.contents.opaque.insert(name, fault.reason());
                Ok(())
            }
        }
    }
}
