//! The layout of a plain safetensors file.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value, json};

use super::dtypes::Dtype;
use super::planes::PlaneRuns;
use crate::error::{CkptError, Result};

/// Alignment of the data in our files: one page, as `O_DIRECT` requires.
pub(crate) const ALIGNMENT: u64 = 4096;

/// The safetensors package rejects longer headers.
pub(crate) const HEADER_LIMIT: usize = 100_000_000;

/// Memory of the caller: an address that stays valid during an operation.
#[derive(Debug, Clone, Copy)]
pub struct CallerMemory {
    address: usize,
    bytes: usize,
}

impl CallerMemory {
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
pub struct TensorEntry {
    /// Its name in the file.
    pub name: String,
    /// Its dtype.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its bytes, in C order.
    pub memory: CallerMemory,
}

/// The layout of a file to be written: its header, and its entries in order with their offsets.
pub(crate) struct FileLayout {
    pub(crate) header: Vec<u8>,
    pub(crate) entries: Vec<(u64, TensorEntry)>,
    pub(crate) data_bytes: u64,
}

/// Compares two entries, by dtype and name, for their order in a data file: by descending item size, which aligns
/// every one of them, then by name.
#[must_use]
pub fn entry_order(a: (Dtype, &str), b: (Dtype, &str)) -> Ordering {
    let by_size = b.0.item_bytes().cmp(&a.0.item_bytes());
    by_size.then_with(|| a.1.cmp(b.1))
}

/// Orders the entries and builds the padded header.
pub(crate) fn lay_out(
    mut entries: Vec<TensorEntry>,
    metadata: &BTreeMap<String, String>,
) -> Result<FileLayout> {
    entries.sort_by(|a, b| entry_order((a.dtype, &a.name), (b.dtype, &b.name)));
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
            json!({"dtype": entry.dtype.name(), "shape": entry.shape, "data_offsets": [offset, end]}),
        );
        placed.push((offset, entry));
        offset = end;
    }
    let header = pad(&Value::Object(header))?;
    Ok(FileLayout {
        header,
        entries: placed,
        data_bytes: offset,
    })
}

fn check_entry(entry: &TensorEntry) -> Result<()> {
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
            entry.dtype.name(),
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

/// Returns a file's first bytes: the length of the header, its JSON, and spaces up to a multiple of `ALIGNMENT`.
pub(crate) fn pad(header: &Value) -> Result<Vec<u8>> {
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

impl FileLayout {
    /// Returns the runs of items of one width.
    pub(crate) fn plane_runs(&self) -> PlaneRuns {
        let entries = self.entries.iter();
        PlaneRuns::of_entries(entries.map(|(_, entry)| (entry.dtype, entry.memory.bytes() as u64)))
    }

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
        // `CallerMemory::new`.
        Some(unsafe { std::slice::from_raw_parts(address as *const u8, length) })
    }
}
