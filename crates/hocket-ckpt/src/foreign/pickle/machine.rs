//! The opcode interpreter: a stack of plain values over an arena of nodes, without recursion or calls.

mod input;
mod memo;
mod nodes;
mod objects;

use std::collections::HashMap;

use super::names::AllowedGlobals;
use super::tree::{DecodedPickle, PickleFault, PickleNode, PickleValue};
use memo::PickleMemo;

type Result<T> = std::result::Result<T, PickleFault>;

/// Reads one pickle.
pub(super) fn run(input: &[u8], allowed: AllowedGlobals) -> Result<DecodedPickle<'_>> {
    let mut machine = PickleMachine {
        input,
        at: 0,
        allowed,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: PickleMemo::default(),
        nodes: Vec::new(),
        names: Vec::new(),
        indexes: HashMap::new(),
        // Real pickles use about ten bytes per node and three per value; the limit prevents a small file from
        // filling memory.
        max_nodes: (1 << 20) + input.len() / 4,
        values_left: (1 << 20) + input.len() / 2,
    };
    loop {
        let opcode = machine.byte()?;
        if opcode == b'.' {
            break;
        }
        machine.step(opcode)?;
    }
    let root = machine.pop()?;
    Ok(DecodedPickle {
        nodes: machine.nodes,
        names: machine.names,
        root,
    })
}

struct PickleMachine<'a> {
    input: &'a [u8],
    at: usize,
    allowed: AllowedGlobals,
    stack: Vec<PickleValue>,
    /// Marked heights of the stack.
    marks: Vec<usize>,
    memo: PickleMemo,
    nodes: Vec<PickleNode<'a>>,
    /// Unlisted names, without duplicates; `indexes` maps them to their positions.
    names: Vec<String>,
    indexes: HashMap<String, u32>,
    max_nodes: usize,
    values_left: usize,
}

impl<'a> PickleMachine<'a> {
    fn step(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            0x80 => self.protocol(),
            0x95 => self.take(8).map(|_| ()), // FRAME: its length is only a hint
            b'N' => self.push(PickleValue::None),
            0x88 => self.push(PickleValue::Bool(true)),
            0x89 => self.push(PickleValue::Bool(false)),
            b'K' => self.number(1).and_then(|it| self.push_unsigned(it)),
            b'M' => self.number(2).and_then(|it| self.push_unsigned(it)),
            b'J' => {
                let number = self.number(4)? as u32 as i32;
                self.push(PickleValue::Int(number.into()))
            }
            0x8a => self.number(1).and_then(|length| self.long(length)),
            0x8b => self.number(4).and_then(|length| self.long(length)),
            b'I' => {
                let text = self.line()?;
                let value = match text {
                    "00" => Some(PickleValue::Bool(false)),
                    "01" => Some(PickleValue::Bool(true)),
                    number => number.parse().ok().map(PickleValue::Int),
                };
                self.push(value.ok_or_else(|| not_a_number(text))?)
            }
            b'L' => {
                let text = self.line()?;
                let number = text.strip_suffix('L').unwrap_or(text).parse();
                self.push(PickleValue::Int(number.map_err(|_| not_a_number(text))?))
            }
            b'G' => {
                let bytes = self.take(8)?;
                let bits = bytes
                    .iter()
                    .fold(0, |bits, &byte| bits << 8 | u64::from(byte));
                self.push(PickleValue::Float(f64::from_bits(bits)))
            }
            0x8c => self.number(1).and_then(|length| self.text(length)),
            b'X' => self.number(4).and_then(|length| self.text(length)),
            0x8d => self.number(8).and_then(|length| self.text(length)),
            b'C' => self.number(1).and_then(|length| self.bytes(length)),
            b'B' => self.number(4).and_then(|length| self.bytes(length)),
            0x8e | 0x96 => self.number(8).and_then(|length| self.bytes(length)),
            b']' => self.push_node(PickleNode::List(Vec::new())),
            b'}' => self.push_node(PickleNode::Dict(Vec::new())),
            b')' => self.push_node(PickleNode::Tuple(Vec::new())),
            0x8f => self.push_node(PickleNode::Set(Vec::new())),
            0x85..=0x87 => self.tuple_of(usize::from(opcode - 0x84)),
            b't' => {
                let items = self.pop_to_mark()?;
                self.push_node(PickleNode::Tuple(items))
            }
            b'l' => {
                let items = self.pop_to_mark()?;
                self.push_node(PickleNode::List(items))
            }
            b'd' => {
                let items = self.pop_to_mark()?;
                self.push_node(PickleNode::Dict(pairs(&items)?))
            }
            0x91 => {
                let items = self.pop_to_mark()?;
                self.push_node(PickleNode::Set(items))
            }
            b'(' => {
                self.spend()?;
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'0' => self.pop().map(|_| ()),
            b'1' => self.pop_to_mark().map(|_| ()),
            b'a' => {
                let item = self.pop()?;
                self.extend(vec![item])
            }
            b'e' | 0x90 => {
                let items = self.pop_to_mark()?;
                self.extend(items)
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.extend_dict(vec![(key, value)])
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.extend_dict(pairs(&items)?)
            }
            _ => self.step_name(opcode),
        }
    }

    /// Executes an opcode of the memo, of names, or of objects built from names.
    fn step_name(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            b'h' => self.number(1).and_then(|index| self.recall(index)),
            b'j' => self.number(4).and_then(|index| self.recall(index)),
            b'q' => self.number(1).and_then(|index| self.remember(index)),
            b'r' => self.number(4).and_then(|index| self.remember(index)),
            0x94 => self.remember(self.memo.len() as u64),
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module, name)
            }
            0x93 => {
                let (name, module) = (self.pop_text()?, self.pop_text()?);
                self.global(module, name)
            }
            b'R' | 0x81 => {
                let (arguments, name) = (self.pop()?, self.pop()?);
                self.make(name, arguments)
            }
            b'b' => {
                let state = self.pop()?;
                self.build(state)
            }
            b'Q' if self.allowed == AllowedGlobals::TorchSave => {
                let id = self.pop()?;
                self.push_node(PickleNode::Persistent(id))
            }
            b'V' | b'S' | b'F' | b'g' | b'p' if self.allowed == AllowedGlobals::TorchSave => {
                Err(PickleFault::Unfit(
                    "its pickle has protocol 0, in which references to the data of tensors are text, so that torch cannot \
                     load it either: save it again without `pickle_protocol=0`"
                        .to_owned(),
                ))
            }
            b'Q' | b'P' => Err(PickleFault::Unsafe(
                "it holds a persistent id, which is not allowed here".to_owned(),
            )),
            b'i' | b'o' => Err(PickleFault::Unsafe(
                "it makes an instance with an opcode of Python 2 (INST, OBJ)".to_owned(),
            )),
            0x82..=0x84 => Err(PickleFault::Unsafe(
                "it uses the extension registry (EXT1, EXT2, EXT4)".to_owned(),
            )),
            0x92 => {
                // The keyword arguments are ignored, because the object is left out as a whole.
                let (_, arguments, name) = (self.pop()?, self.pop()?, self.pop()?);
                self.make(name, arguments)
            }
            _ => Err(PickleFault::Broken(format!(
                "opcode 0x{opcode:02x} at byte {} is none that torch writes",
                self.at.saturating_sub(1)
            ))),
        }
    }

    fn protocol(&mut self) -> Result<()> {
        match self.byte()? {
            0..=5 => Ok(()),
            other => Err(PickleFault::Broken(format!(
                "it is a pickle of protocol {other}; expected at most 5"
            ))),
        }
    }

    fn spend(&mut self) -> Result<()> {
        match self.values_left.checked_sub(1) {
            Some(left) => {
                self.values_left = left;
                Ok(())
            }
            None => Err(PickleFault::Broken(
                "it holds more values than a file of its size may".to_owned(),
            )),
        }
    }

    fn push(&mut self, value: PickleValue) -> Result<()> {
        self.spend()?;
        // A pickler hands over lists and dicts a thousand items at a time; only a tuple's items wait here together.
        if self.stack.len() >= self.max_nodes {
            return Err(PickleFault::Broken(
                "more of its values wait on the stack than a file of its size may have".to_owned(),
            ));
        }
        self.stack.push(value);
        Ok(())
    }

    fn push_unsigned(&mut self, number: u64) -> Result<()> {
        self.push(PickleValue::Int(number as i64))
    }

    fn push_node(&mut self, node: PickleNode<'a>) -> Result<()> {
        let index = u32::try_from(self.nodes.len()).ok();
        let Some(index) = index.filter(|_| self.nodes.len() < self.max_nodes) else {
            return Err(PickleFault::Broken(
                "it holds more objects than a file of its size may".to_owned(),
            ));
        };
        self.nodes.push(node);
        self.push(PickleValue::Node(index))
    }

    fn pop(&mut self) -> Result<PickleValue> {
        if self.marks.last() == Some(&self.stack.len()) {
            return Err(PickleFault::Broken(
                "a value is missing before a mark".to_owned(),
            ));
        }
        self.stack
            .pop()
            .ok_or_else(|| PickleFault::Broken("a value is missing on its stack".to_owned()))
    }

    fn pop_to_mark(&mut self) -> Result<Vec<PickleValue>> {
        let mark = self.marks.pop();
        match mark {
            Some(mark) if mark <= self.stack.len() => Ok(self.stack.split_off(mark)),
            _ => Err(PickleFault::Broken(
                "a mark is missing on its stack".to_owned(),
            )),
        }
    }

    fn pop_text(&mut self) -> Result<&'a str> {
        let value = self.pop()?;
        match self.node(value) {
            Some(PickleNode::Text(text)) => Ok(text),
            _ => Err(PickleFault::Broken("a name is no text".to_owned())),
        }
    }

    fn tuple_of(&mut self, count: usize) -> Result<()> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let from = self.stack.len().checked_sub(count);
        let Some(from) = from.filter(|&from| from >= floor) else {
            return Err(PickleFault::Broken(
                "a value is missing on its stack".to_owned(),
            ));
        };
        let items = self.stack.split_off(from);
        self.push_node(PickleNode::Tuple(items))
    }
}

/// Builds the error for the text of an integer.
fn not_a_number(text: &str) -> PickleFault {
    PickleFault::Broken(format!(
        "`{}` is no integer of at most 64 bits",
        shorten(text).escape_debug()
    ))
}

fn pairs(items: &[PickleValue]) -> Result<Vec<(PickleValue, PickleValue)>> {
    let chunks = items.chunks_exact(2);
    if !chunks.remainder().is_empty() {
        return Err(PickleFault::Broken(
            "a mapping has a key without a value".to_owned(),
        ));
    }
    Ok(chunks
        .filter_map(|pair| match pair {
            &[key, value] => Some((key, value)),
            _ => None,
        })
        .collect())
}

/// Truncates a possibly hostile name for messages.
fn shorten(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}
