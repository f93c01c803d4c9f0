//! Pickles as data: an opcode machine of our own over a short list of names.
//!
//! Nothing is imported and nothing is called. A name outside the list is refused by name; what is inside becomes an
//! inert record that the formats look into.

mod machine;
mod names;
mod value;

use std::borrow::Cow;

pub(crate) use names::{Allowed, DTYPES, Name};
pub(crate) use value::to_json;

use crate::error::CkptError;

/// Why a pickle was not read.
#[derive(Debug)]
pub(crate) enum Fault {
    /// It asks for more than data.
    Unsafe(String),
    /// Its bytes make no sense.
    Broken(String),
    /// It is sound, and holds what has no form here.
    Unfit(String),
}

impl Fault {
    /// The error for the file at fault.
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

/// A value: small ones themselves, the others by their place in the arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Name(Name),
    Node(u32),
}

/// What stands in the arena.
#[derive(Debug)]
pub(crate) enum Node<'a> {
    Text(&'a str),
    Bytes(Cow<'a, [u8]>),
    /// Two's complement, little endian, more than 8 bytes.
    Long(&'a [u8]),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Set(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    /// Name, arguments (a tuple), state.
    Record(Box<(Name, Value, Value)>),
    /// What stands outside the pickle: a storage.
    Persistent(Value),
}

/// A pickle that was read.
#[derive(Debug)]
pub(crate) struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    pub(crate) root: Value,
}

/// Reads a pickle.
pub(crate) fn decode(input: &[u8], allowed: Allowed) -> Result<Pickle<'_>, Fault> {
    machine::run(input, allowed)
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

    /// The items of a tuple or a list.
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

    /// Arguments and state of a record of this name.
    pub(crate) fn record(&self, value: Value, name: Name) -> Option<(Value, Value)> {
        match self.node(value) {
            Some(Node::Record(record)) if record.0 == name => Some((record.1, record.2)),
            _ => None,
        }
    }

    /// An entry of a mapping with text keys.
    pub(crate) fn field(&self, dict: Value, key: &str) -> Option<Value> {
        let pairs = self.pairs(dict)?;
        let found = pairs.iter().rev().find(|(k, _)| self.text(*k) == Some(key));
        found.map(|(_, value)| *value)
    }

    /// A tuple of numbers that are not negative: a shape, strides, offsets.
    pub(crate) fn extents(&self, value: Value) -> Option<Vec<u64>> {
        let extent = |item: &Value| match item {
            Value::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        };
        self.items(value)?.iter().map(extent).collect()
    }
}

/// Any bytes, for tests: whatever they are, they are read or refused.
#[cfg(test)]
mod tests;
