//! A decoded pickle: an arena of nodes, and access to their parts.

use std::borrow::Cow;

use super::names::Name;
use crate::error::CkptError;

/// The reason why a pickle was not read.
#[derive(Debug)]
pub(crate) enum Fault {
    /// It requires the execution of code.
    Unsafe(String),
    /// Its bytes are malformed.
    Broken(String),
    /// It is valid, but contains something that cannot be represented.
    Unfit(String),
}

impl Fault {
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
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Name(Name),
    Node(u32),
}

/// A node of the arena.
#[derive(Debug)]
pub(crate) enum Node<'a> {
    Text(&'a str),
    Bytes(Cow<'a, [u8]>),
    /// Two's complement, little-endian, more than 8 bytes.
    Long(&'a [u8]),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Set(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    /// Name, arguments (a tuple), state.
    Record(Box<(Name, Value, Value)>),
    /// A reference out of the pickle: a storage.
    Persistent(Value),
}

/// A decoded pickle.
#[derive(Debug)]
pub(crate) struct Pickle<'a> {
    pub(super) nodes: Vec<Node<'a>>,
    /// `module.name` of each unlisted name.
    pub(super) names: Vec<String>,
    pub(crate) root: Value,
}

impl<'a> Pickle<'a> {
    pub(crate) fn node(&self, value: Value) -> Option<&Node<'a>> {
        match value {
            Value::Node(index) => self.nodes.get(index as usize),
            _ => None,
        }
    }

    pub(crate) fn text(&self, value: Value) -> Option<&'a str> {
        match self.node(value) {
            Some(Node::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns a name for error messages.
    pub(crate) fn shown(&self, name: Name) -> &str {
        match name {
            Name::Other(index) => self.names.get(index as usize).map_or("object", |it| it),
            known => known.shown(),
        }
    }

    /// Returns the arguments and the state of an object of an unlisted class.
    pub(crate) fn object(&self, value: Value) -> Option<(Value, Value)> {
        match self.node(value) {
            Some(Node::Record(record)) if matches!(record.0, Name::Other(_)) => {
                Some((record.1, record.2))
            }
            _ => None,
        }
    }

    /// Returns the items of a tuple or a list.
    pub(crate) fn items(&self, value: Value) -> Option<&[Value]> {
        match self.node(value) {
            Some(Node::Tuple(items) | Node::List(items)) => Some(items),
            _ => None,
        }
    }

    pub(crate) fn pairs(&self, value: Value) -> Option<&[(Value, Value)]> {
        match self.node(value) {
            Some(Node::Dict(pairs)) => Some(pairs),
            _ => None,
        }
    }

    /// Returns the arguments and the state of a record of this name.
    pub(crate) fn record(&self, value: Value, name: Name) -> Option<(Value, Value)> {
        match self.node(value) {
            Some(Node::Record(record)) if record.0 == name => Some((record.1, record.2)),
            _ => None,
        }
    }

    /// Returns an entry of a mapping with string keys.
    pub(crate) fn field(&self, dict: Value, key: &str) -> Option<Value> {
        let pairs = self.pairs(dict)?;
        let found = pairs.iter().rev().find(|(k, _)| self.text(*k) == Some(key));
        found.map(|(_, value)| *value)
    }

    /// Returns a tuple of non-negative numbers: a shape, strides, offsets.
    pub(crate) fn extents(&self, value: Value) -> Option<Vec<u64>> {
        let extent = |item: &Value| match item {
            Value::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        };
        self.items(value)?.iter().map(extent).collect()
    }
}
