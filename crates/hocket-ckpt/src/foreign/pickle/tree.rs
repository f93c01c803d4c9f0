//! A decoded pickle: an arena of nodes, and access to their parts.

use std::borrow::Cow;

use super::names::GlobalMeaning;
use crate::error::CkptError;

/// The reason why a pickle was not read.
#[derive(Debug)]
pub(crate) enum PickleFault {
    /// It requires the execution of code.
    Unsafe(String),
    /// Its bytes are malformed.
    Broken(String),
    /// It is valid, but contains something that cannot be represented.
    Unfit(String),
}

impl PickleFault {
    /// Builds the error for the file at fault.
    pub(crate) fn at(self, uri: &str, file: &str) -> CkptError {
        match self {
            Self::Unsafe(reason) => CkptError::Unsafe {
                uri: uri.to_owned(),
                file: file.to_owned(),
                reason,
            },
            Self::Broken(reason) => CkptError::Corrupt {
                uri: uri.to_owned(),
                file: Some(file.to_owned()),
                offset: None,
                reason,
            },
            Self::Unfit(reason) => CkptError::Incompatible {
                uri: format!("{}/{file}", uri.trim_end_matches('/')),
                reason,
            },
        }
    }

    pub(crate) fn reason(self) -> String {
        match self {
            Self::Unsafe(reason) | Self::Broken(reason) | Self::Unfit(reason) => reason,
        }
    }
}

/// A value: stored inline if small, otherwise as an index into the arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum PickleValue {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Name(GlobalMeaning),
    Node(u32),
}

/// A node of the arena.
#[derive(Debug)]
pub(crate) enum PickleNode<'a> {
    Text(&'a str),
    Bytes(Cow<'a, [u8]>),
    /// Two's complement, little-endian, more than 8 bytes.
    Long(&'a [u8]),
    List(Vec<PickleValue>),
    Tuple(Vec<PickleValue>),
    Set(Vec<PickleValue>),
    Dict(Vec<(PickleValue, PickleValue)>),
    /// Name, arguments (a tuple), state.
    Record(Box<(GlobalMeaning, PickleValue, PickleValue)>),
    /// A reference out of the pickle: a storage.
    Persistent(PickleValue),
}

/// A decoded pickle.
#[derive(Debug)]
pub(crate) struct DecodedPickle<'a> {
    pub(super) nodes: Vec<PickleNode<'a>>,
    /// `module.name` of each unlisted name.
    pub(super) names: Vec<String>,
    pub(crate) root: PickleValue,
}

impl<'a> DecodedPickle<'a> {
    pub(crate) fn node(&self, value: PickleValue) -> Option<&PickleNode<'a>> {
        match value {
            PickleValue::Node(index) => self.nodes.get(index as usize),
            _ => None,
        }
    }

    pub(crate) fn text(&self, value: PickleValue) -> Option<&'a str> {
        match self.node(value) {
            Some(PickleNode::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns a name for error messages.
    pub(crate) fn shown(&self, name: GlobalMeaning) -> &str {
        match name {
            GlobalMeaning::Other(index) => self.names.get(index as usize).map_or("object", |it| it),
            known => known.shown(),
        }
    }

    /// Returns the arguments and the state of an object of an unlisted class.
    pub(crate) fn object(&self, value: PickleValue) -> Option<(PickleValue, PickleValue)> {
        match self.node(value) {
            Some(PickleNode::Record(record)) if matches!(record.0, GlobalMeaning::Other(_)) => {
                Some((record.1, record.2))
            }
            _ => None,
        }
    }

    /// Returns the items of a tuple or a list.
    pub(crate) fn items(&self, value: PickleValue) -> Option<&[PickleValue]> {
        match self.node(value) {
            Some(PickleNode::Tuple(items) | PickleNode::List(items)) => Some(items),
            _ => None,
        }
    }

    pub(crate) fn pairs(&self, value: PickleValue) -> Option<&[(PickleValue, PickleValue)]> {
        match self.node(value) {
            Some(PickleNode::Dict(pairs)) => Some(pairs),
            _ => None,
        }
    }

    /// Returns the arguments and the state of a record of this name.
    pub(crate) fn record(
        &self,
        value: PickleValue,
        name: GlobalMeaning,
    ) -> Option<(PickleValue, PickleValue)> {
        match self.node(value) {
            Some(PickleNode::Record(record)) if record.0 == name => Some((record.1, record.2)),
            _ => None,
        }
    }

    /// Returns an entry of a mapping with string keys.
    pub(crate) fn field(&self, dict: PickleValue, key: &str) -> Option<PickleValue> {
        let pairs = self.pairs(dict)?;
        let found = pairs.iter().rev().find(|(k, _)| self.text(*k) == Some(key));
        found.map(|(_, value)| *value)
    }

    /// Returns a tuple of non-negative numbers: a shape, strides, offsets.
    pub(crate) fn extents(&self, value: PickleValue) -> Option<Vec<u64>> {
        let extent = |item: &PickleValue| match item {
            PickleValue::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        };
        self.items(value)?.iter().map(extent).collect()
    }
}
