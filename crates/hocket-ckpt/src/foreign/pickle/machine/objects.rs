//! Names in a pickle, and the inert records that stand in place of calls.

use std::borrow::Cow;

use super::{PickleMachine, Result, shorten};
use crate::foreign::pickle::names::{AllowedGlobals, GlobalMeaning, look_up};
use crate::foreign::pickle::tree::{PickleFault, PickleNode, PickleValue};

impl PickleMachine<'_> {
    pub(super) fn global(&mut self, module: &str, name: &str) -> Result<()> {
        match look_up(self.allowed, module, name) {
            Some(found) => self.push(PickleValue::Name(found)),
            None if self.allowed == AllowedGlobals::TorchSave => {
                let name = self.intern(format!("{}.{}", shorten(module), shorten(name)))?;
                self.push(PickleValue::Name(name))
            }
            None => Err(PickleFault::Unsafe(format!(
                "it names `{}.{}`, which is not on the list of what a checkpoint needs",
                shorten(module),
                shorten(name)
            ))),
        }
    }

    /// Returns the index of an unlisted name.
    fn intern(&mut self, name: String) -> Result<GlobalMeaning> {
        if let Some(&index) = self.indexes.get(&name) {
            return Ok(GlobalMeaning::Other(index));
        }
        let index = u32::try_from(self.names.len()).ok();
        let Some(index) = index.filter(|_| self.names.len() < self.max_nodes) else {
            return Err(PickleFault::Broken(
                "it names more classes than a file of its size may".to_owned(),
            ));
        };
        self.names.push(name.clone());
        self.indexes.insert(name, index);
        Ok(GlobalMeaning::Other(index))
    }

    /// Pushes an inert record in place of a call. Nothing is imported or called.
    pub(super) fn make(&mut self, called: PickleValue, arguments: PickleValue) -> Result<()> {
        let name = match (called, self.node(called)) {
            (PickleValue::Name(name), _) => name,
            // The result of an unlisted call is itself called, as for `functools.partial` objects.
            (_, Some(PickleNode::Record(record)))
                if matches!(record.0, GlobalMeaning::Other(_)) =>
            {
                record.0
            }
            _ => return Err(PickleFault::Unsafe("it calls what is no name".to_owned())),
        };
        let Some(PickleNode::Tuple(items)) = self.node(arguments) else {
            return Err(PickleFault::Broken(
                "the arguments of a call are no tuple".to_owned(),
            ));
        };
        let first = items.first().copied();
        match (name, first) {
            (GlobalMeaning::OrderedDict, None) => self.push_node(PickleNode::Dict(Vec::new())),
            (GlobalMeaning::OrderedDict, Some(first)) => {
                let dict = self.dict_of_pairs(first)?;
                self.push_node(PickleNode::Dict(dict))
            }
            (
                GlobalMeaning::Size
                | GlobalMeaning::RebuildParameter
                | GlobalMeaning::Tuple
                | GlobalMeaning::Set,
                Some(first),
            ) => self.push(first),
            (GlobalMeaning::Size | GlobalMeaning::Tuple, None) => self.push(arguments),
            (GlobalMeaning::Set, None) => self.push_node(PickleNode::Set(Vec::new())),
            (GlobalMeaning::DefaultDict, _) => self.push_node(PickleNode::Dict(Vec::new())),
            (GlobalMeaning::Deque, first) => {
                let items = match first.and_then(|first| self.node(first)) {
                    Some(PickleNode::List(items) | PickleNode::Tuple(items)) => items.clone(),
                    _ => Vec::new(),
                };
                // Copies of a list recalled from the memo count towards the limit.
                let left = self.values_left.checked_sub(items.len());
                self.values_left = left.ok_or_else(|| {
                    PickleFault::Broken(
                        "it holds more values than a file of its size may".to_owned(),
                    )
                })?;
                self.push_node(PickleNode::List(items))
            }
            (GlobalMeaning::Bytes, None) => self.push_node(PickleNode::Bytes(Cow::Borrowed(&[]))),
            (GlobalMeaning::Encode, Some(first)) => {
                let bytes = self.latin1(first)?;
                self.push_node(PickleNode::Bytes(Cow::Owned(bytes)))
            }
            (
                GlobalMeaning::Dtype(_)
                | GlobalMeaning::Storage(_)
                | GlobalMeaning::UntypedStorage
                | GlobalMeaning::Encode
                | GlobalMeaning::Bytes,
                _,
            ) => Err(PickleFault::Unsafe(format!(
                "it calls `{}`, which no checkpoint does",
                name.shown()
            ))),
            _ => self.push_node(PickleNode::Record(Box::new((
                name,
                arguments,
                PickleValue::None,
            )))),
        }
    }

    fn dict_of_pairs(&self, list: PickleValue) -> Result<Vec<(PickleValue, PickleValue)>> {
        let broken = || PickleFault::Broken("an OrderedDict is not made of pairs".to_owned());
        let Some(PickleNode::List(items)) = self.node(list) else {
            return Err(broken());
        };
        let pair = |&item: &PickleValue| match self.node(item) {
            Some(PickleNode::List(pair) | PickleNode::Tuple(pair)) => match pair.as_slice() {
                &[key, value] => Ok((key, value)),
                _ => Err(broken()),
            },
            _ => Err(broken()),
        };
        items.iter().map(pair).collect()
    }

    fn latin1(&mut self, value: PickleValue) -> Result<Vec<u8>> {
        let Some(&PickleNode::Text(text)) = self.node(value) else {
            return Err(PickleFault::Broken(
                "bytes are not written as text".to_owned(),
            ));
        };
        // Copies of a text recalled from the memo count towards the limit, so that a few bytes cannot expand
        // without bound.
        self.values_left = self
            .values_left
            .checked_sub(text.len() / 16)
            .ok_or_else(|| {
                PickleFault::Broken("it holds more bytes than a file of its size may".to_owned())
            })?;
        text.chars()
            .map(|char| u8::try_from(u32::from(char)).ok())
            .collect::<Option<_>>()
            .ok_or_else(|| PickleFault::Broken("bytes hold a character beyond 255".to_owned()))
    }

    pub(super) fn build(&mut self, state: PickleValue) -> Result<()> {
        match self.top() {
            Some(PickleNode::Record(record)) => {
                record.2 = state;
                Ok(())
            }
            // Attributes of a mapping or list, such as the `_metadata` of a module's state, are not part of the
            // state.
            Some(PickleNode::Dict(_) | PickleNode::List(_)) => Ok(()),
            _ => Err(PickleFault::Broken(
                "it sets attributes of what has none".to_owned(),
            )),
        }
    }
}
