//! The layout of a plain safetensors file.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value, json};

use crate::error::{CkptError, Result};

/// Alignment of the data in our files: one page, as `O_DIRECT` requires.
pub(crate) const ALIGNMENT: u64 = 4096;

/// The safetensors package rejects longer headers.
pub(crate) const HEADER_LIMIT: usize = 100_000_000;

/// A dtype, by its safetensors name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dtype {
    name: &'static str,
    item_bytes: u64,
}

const DTYPES: [Dtype; 19] = [
    Dtype {
        name: "BOOL",
        item_bytes: 1,
    },
    Dtype {
        name: "U8",
        item_bytes: 1,
    },
    Dtype {
        name: "I8",
        item_bytes: 1,
    },
    Dtype {
        name: "F8_E4M3",
        item_bytes: 1,
    },
    Dtype {
        name: "F8_E5M2",
        item_bytes: 1,
    },
    Dtype {
        name: "F8_E4M3FNUZ",
        item_bytes: 1,
    },
    Dtype {
        name: "F8_E5M2FNUZ",
        item_bytes: 1,
    },
    Dtype {
        name: "F8_E8M0",
        item_bytes: 1,
    },
    Dtype {
        name: "I16",
        item_bytes: 2,
    },
    Dtype {
        name: "U16",
        item_bytes: 2,
    },
    Dtype {
        name: "F16",
        item_bytes: 2,
    },
    Dtype {
        name: "BF16",
        item_bytes: 2,
    },
    Dtype {
        name: "I32",
        item_bytes: 4,
    },
    Dtype {
        name: "U32",
        item_bytes: 4,
    },
    Dtype {
        name: "F32",
        item_bytes: 4,
    },
    Dtype {
        name: "I64",
        item_bytes: 8,
    },
    Dtype {
        name: "U64",
        item_bytes: 8,
    },
    Dtype {
        name: "F64",
        item_bytes: 8,
    },
    Dtype {
        name: "C64",
        item_bytes: 8,
    },
];

impl Dtype {
    /// Returns the dtype of this name, if it exists.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        DTYPES.into_iter().find(|dtype| dtype.name == name)
    }

    /// Returns the safetensors name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns the size of an item in bytes.
    #[must_use]
    pub fn item_bytes(self) -> u64 {
        self.item_bytes
    }

    /// Returns the size in bytes of a tensor of this shape; none if it does not fit in 64 bits.
    #[must_use]
    pub fn num_bytes(self, shape: &[u64]) -> Option<u64> {
        // A dim of size 0 makes the tensor empty, whatever the other dims.
        if shape.contains(&0) {
            return Some(0);
        }
        shape
            .iter()
            .try_fold(self.item_bytes, |bytes, &extent| bytes.checked_mul(extent))
    }
}

/// Memory of the caller: an address that stays valid during an operation.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    address: usize,
    bytes: usize,
}

impl Memory {
    /// Wraps the caller's memory.
    ///
    /// # Safety
    /// `address..address + bytes` must be readable (and writable, if it is a destination), and nothing else may
    /// write it, until the operation that takes it returns.
    #[must_use]
    pub unsafe fn new(address: usize, bytes: usize) -> Self {
        Self { address, bytes }
    }

    /// Returns all of the memory for reading.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the caller's memory, readable and not written by others, as guaranteed to `new`.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }

    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }

    /// Returns a part of the memory for writing.
    ///
    /// # Safety
    /// The caller must not hold two overlapping slices at the same time.
    #[allow(
        clippy::mut_from_ref,
        reason = "the memory is not ours; `new` says who may touch it"
    )]
    pub(crate) unsafe fn slice_mut(&self, offset: usize, bytes: usize) -> &mut [u8] {
        assert!(
            offset
                .checked_add(bytes)
                .is_some_and(|end| end <= self.bytes)
        );
        // SAFETY: inside the caller's memory, by the assertion and the guarantee given to `new`; exclusive, by
        // this function's own contract.
        unsafe { std::slice::from_raw_parts_mut((self.address + offset) as *mut u8, bytes) }
    }
}

/// A tensor or chunk to write.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its name in the file.
    pub name: String,
    /// Its dtype.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its bytes, in C order.
    pub memory: Memory,
}

/// The layout of a file to be written: its header, and its entries in order with their offsets.
pub(crate) struct Layout {
    pub(crate) header: Vec<u8>,
    pub(crate) entries: Vec<(u64, Entry)>,
    pub(crate) data_bytes: u64,
}

/// Orders the entries (by descending item size, then name) and builds the padded header.
pub(crate) fn lay_out(
    mut entries: Vec<Entry>,
    metadata: &BTreeMap<String, String>,
) -> Result<Layout> {
    entries.sort_by(|a, b| {
        b.dtype
            .item_bytes
            .cmp(&a.dtype.item_bytes)
            .then_with(|| a.name.cmp(&b.name))
    });
    let mut names = HashSet::with_capacity(entries.len());
    let mut header = Map::with_capacity(entries.len() + 1);
    header.insert("__metadata__".to_owned(), json!(metadata));
    let mut placed = Vec::with_capacity(entries.len());
    let mut offset = 0_u64;
    for entry in entries {
        check_entry(&entry)?;
        if !names.insert(entry.name.clone()) {
            return Err(CkptError::Invalid(format!(
                "two entries are called `{}`",
                entry.name
            )));
        }
        let end = offset + entry.memory.bytes() as u64;
        header.insert(
            entry.name.clone(),
            json!({"dtype": entry.dtype.name, "shape": entry.shape, "data_offsets": [offset, end]}),
        );
        placed.push((offset, entry));
        offset = end;
    }
    let header = pad(&Value::Object(header))?;
    Ok(Layout {
        header,
        entries: placed,
        data_bytes: offset,
    })
}

fn check_entry(entry: &Entry) -> Result<()> {
    if entry.name.is_empty() || entry.name == "__metadata__" {
        return Err(CkptError::Invalid(format!(
            "`{}` is no name for an entry",
            entry.name
        )));
    }
    let expected = entry.dtype.num_bytes(&entry.shape);
    if expected != Some(entry.memory.bytes() as u64) {
        return Err(CkptError::Invalid(format!(
            "entry `{}`: {} of shape {:?} has {expected:?} bytes, {} were given",
            entry.name,
            entry.dtype.name,
            entry.shape,
            entry.memory.bytes(),
        )));
    }
    if entry.memory.bytes() > 0 && entry.memory.address == 0 {
        return Err(CkptError::Invalid(format!(
            "entry `{}` has the address 0",
            entry.name
        )));
    }
    Ok(())
}

/// Returns the header: length, JSON, and spaces up to a multiple of `ALIGNMENT`.
fn pad(header: &Value) -> Result<Vec<u8>> {
    let json = header.to_string().into_bytes();
    let total = (json.len() + 8).next_multiple_of(ALIGNMENT as usize);
    if total > HEADER_LIMIT {
        return Err(CkptError::Invalid(format!(
            "a header of {total} bytes is more than safetensors readers take ({HEADER_LIMIT}); write fewer tensors a file"
        )));
    }
    let mut bytes = Vec::with_capacity(total);
    bytes.extend_from_slice(&((total - 8) as u64).to_le_bytes());
    bytes.extend_from_slice(&json);
    bytes.resize(total, b' ');
    Ok(bytes)
}

impl Layout {
    /// Fills `buffer` with the data at `offset`.
    pub(crate) fn fill(&self, offset: u64, buffer: &mut [u8]) {
        let mut rest = buffer;
        for piece in self.pieces(offset, rest.len()) {
            let (part, behind) = rest.split_at_mut(piece.len());
            part.copy_from_slice(piece);
            rest = behind;
        }
    }

    /// Appends `length` bytes of the data at `offset`.
    pub(crate) fn append(&self, offset: u64, length: usize, target: &mut Vec<u8>) {
        for piece in self.pieces(offset, length) {
            target.extend_from_slice(piece);
        }
    }

    /// Returns `length` bytes of the data at `offset`, as one slice per entry.
    fn pieces(&self, offset: u64, length: usize) -> impl Iterator<Item = &[u8]> {
        let end = offset + length as u64;
        let first = self
            .entries
            .partition_point(|(start, entry)| start + (entry.memory.bytes() as u64) <= offset);
        let entries = self.entries.iter().skip(first);
        let inside = entries.take_while(move |(start, _)| *start < end);
        inside.map(move |(start, entry)| {
            let bytes = entry.memory.as_slice();
            let from = offset.saturating_sub(*start) as usize;
            let to = ((end - start) as usize).min(bytes.len());
            &bytes[from..to]
        })
    }

    /// Returns the data at `offset` if it is contiguous in the caller's memory.
    pub(crate) fn run(&self, offset: u64, length: usize) -> Option<&[u8]> {
        let first = self
            .entries
            .partition_point(|(start, entry)| start + (entry.memory.bytes() as u64) <= offset);
        let mut entries = self.entries.get(first..)?.iter();
        let (start, entry) = entries.next()?;
        let inside = (offset - start) as usize;
        let address = entry.memory.address + inside;
        let mut found = entry.memory.bytes() - inside;
        while found < length {
            let (_, entry) = entries.next()?;
            // The address of an entry without bytes is irrelevant.
            if entry.memory.bytes() > 0 && entry.memory.address != address + found {
                return None;
            }
            found += entry.memory.bytes();
        }
        // SAFETY: consecutive entries without a gap, each readable and not written by others, as guaranteed to
        // `Memory::new`.
        Some(unsafe { std::slice::from_raw_parts(address as *const u8, length) })
    }
}
