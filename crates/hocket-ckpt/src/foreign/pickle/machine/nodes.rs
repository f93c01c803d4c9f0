//! The nodes of a pickle: how they begin, grow, and are found again by the memo.

use std::borrow::Cow;

use super::{PickleMachine, Result};
use crate::foreign::pickle::names::GlobalMeaning;
use crate::foreign::pickle::tree::{PickleFault, PickleNode, PickleValue};

impl<'a> PickleMachine<'a> {
    pub(super) fn node(&self, value: PickleValue) -> Option<&PickleNode<'a>> {
        match value {
            PickleValue::Node(index) => self.nodes.get(index as usize),
            _ => None,
        }
    }

    /// Returns the node on top of the stack.
    pub(super) fn top(&mut self) -> Option<&mut PickleNode<'a>> {
        match self.stack.last() {
            Some(&PickleValue::Node(index)) => self.nodes.get_mut(index as usize),
            _ => None,
        }
    }

    pub(super) fn extend(&mut self, items: Vec<PickleValue>) -> Result<()> {
        match self.top() {
            // The first items move without spare capacity: a file may contain a million lists of one item.
            Some(PickleNode::List(list) | PickleNode::Set(list)) if list.is_empty() => {
                *list = items;
                Ok(())
            }
            Some(PickleNode::List(list) | PickleNode::Set(list)) => {
                list.extend(items);
                Ok(())
            }
            // A subclass of `list` is read as a list.
            Some(node @ PickleNode::Record(_)) if is_other(node) => {
                *node = PickleNode::List(items);
                Ok(())
            }
            _ => Err(PickleFault::Broken(
                "it appends to an object that is not a list".to_owned(),
            )),
        }
    }

    pub(super) fn extend_dict(&mut self, items: Vec<(PickleValue, PickleValue)>) -> Result<()> {
        match self.top() {
            Some(PickleNode::Dict(dict)) => {
                dict.extend(items);
                Ok(())
            }
            // A subclass of `dict` is read as a mapping.
            Some(node @ PickleNode::Record(_)) if is_other(node) => {
                *node = PickleNode::Dict(items);
                Ok(())
            }
            _ => Err(PickleFault::Broken(
                "it sets items of an object that is not a mapping".to_owned(),
            )),
        }
    }

    pub(super) fn text(&mut self, length: u64) -> Result<()> {
        let at = self.at;
        let bytes = self.take(length)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => self.push_node(PickleNode::Text(text)),
            Err(error) => Err(match bytes.get(error.valid_up_to()..) {
                Some([0xed, 0xa0..=0xbf, ..]) => PickleFault::Unfit(format!(
                    "the text at byte {at} holds a surrogate, half a character: save it without"
                )),
                _ => PickleFault::Broken(format!("the text at byte {at} is not valid UTF-8")),
            }),
        }
    }

    pub(super) fn bytes(&mut self, length: u64) -> Result<()> {
        let bytes = self.take(length)?;
        self.push_node(PickleNode::Bytes(Cow::Borrowed(bytes)))
    }

    /// Reads a two's complement number of any length; generator states need at most 16 bytes.
    pub(super) fn long(&mut self, length: u64) -> Result<()> {
        let bytes = self.take(length)?;
        if bytes.len() > 17 {
            return Err(PickleFault::Broken(format!(
                "an integer has {length} bytes; expected at most 17"
            )));
        }
        let is_negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
        if bytes.len() > 8 {
            return self.push_node(PickleNode::Long(bytes));
        }
        let start = if is_negative { -1_i64 } else { 0 };
        let number = bytes
            .iter()
            .rev()
            .fold(start, |number, &byte| number << 8 | i64::from(byte));
        self.push(PickleValue::Int(number))
    }

    pub(super) fn recall(&mut self, index: u64) -> Result<()> {
        match self.memo.get(index) {
            Some(value) => self.push(value),
            None => Err(PickleFault::Broken(format!(
                "memo {index} was never written"
            ))),
        }
    }

    pub(super) fn remember(&mut self, index: u64) -> Result<()> {
        let top = self.stack.last().copied();
        let Some(value) = top.filter(|_| self.memo.len() < self.max_nodes) else {
            return Err(PickleFault::Broken(
                "its memo holds nothing, or more than a file of its size may".to_owned(),
            ));
        };
        self.memo.insert(index, value);
        Ok(())
    }
}

/// Returns whether a node is an object of an unlisted class.
fn is_other(node: &PickleNode<'_>) -> bool {
    matches!(node, PickleNode::Record(record) if matches!(record.0, GlobalMeaning::Other(_)))
}
