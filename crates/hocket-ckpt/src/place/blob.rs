//! One foreign file, read by byte ranges.

use std::ops::Range;
use std::sync::Arc;

use super::CheckpointPlace;
use super::files::OpenFile;
use crate::error::{CkptError, Result};
use crate::workers::Interrupted;

/// Limit of a single read, independent of the lengths that a file declares.
const LONGEST_READ: u64 = 1 << 30;

/// A file or an object, open for reading.
#[derive(Clone)]
pub(crate) struct Blob {
    uri: String,
    name: String,
    size: u64,
    /// None for bytes in memory, of which only the fetched pieces can be read.
    source: Option<Arc<dyn OpenFile>>,
    /// Pieces fetched earlier, each with its offset.
    fetched: Vec<(u64, Vec<u8>)>,
}

impl Blob {
    /// Opens `name` inside `place`; returns none if it does not exist.
    pub(crate) fn find(
        place: &CheckpointPlace,
        name: &str,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<Self>> {
        let opened = place.files().open(name, interrupted)?;
        Ok(opened.map(|(size, source)| Self {
            uri: place.uri().to_owned(),
            name: name.to_owned(),
            size,
            source: Some(source),
            fetched: Vec::new(),
        }))
    }

    /// Opens a file that must exist.
    pub(crate) fn open(
        place: &CheckpointPlace,
        name: &str,
        interrupted: Interrupted<'_>,
    ) -> Result<Self> {
        Self::find(place, name, interrupted)?.ok_or_else(|| {
            place.not_found(format!(
                "file `{name}` belongs to the checkpoint and is not there"
            ))
        })
    }

    /// Returns an empty file, as the origin of unpacked data in tests.
    #[cfg(test)]
    pub(crate) fn nowhere() -> Self {
        Self {
            uri: String::new(),
            name: "memory".to_owned(),
            size: 0,
            source: None,
            fetched: Vec::new(),
        }
    }

    /// Returns an in-memory file with bytes that were unpacked from `self`.
    pub(crate) fn unpacked(&self, bytes: Vec<u8>) -> Self {
        self.unpacked_pieces(bytes.len() as u64, vec![(0, bytes)])
    }

    /// Returns an in-memory file of which only pieces were kept. Reading outside them is an error.
    pub(crate) fn unpacked_pieces(&self, size: u64, fetched: Vec<(u64, Vec<u8>)>) -> Self {
        Self {
            uri: self.uri.clone(),
            name: self.name.clone(),
            size,
            source: None,
            fetched,
        }
    }

    /// Returns the same file with pieces that need not be fetched again.
    pub(crate) fn with_pieces(&self, fetched: Vec<(u64, Vec<u8>)>) -> Self {
        Self {
            fetched,
            ..self.clone()
        }
    }

    pub(crate) fn uri(&self) -> &str {
        &self.uri
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Reads the bytes of a range.
    pub(crate) fn read(&self, range: Range<u64>, interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
        let mut pieces = self.read_many(std::slice::from_ref(&range), interrupted)?;
        Ok(pieces.pop().unwrap_or_default())
    }

    /// Reads several small ranges; nearby ranges share a request.
    pub(crate) fn read_many(
        &self,
        ranges: &[Range<u64>],
        interrupted: Interrupted<'_>,
    ) -> Result<Vec<Vec<u8>>> {
        ranges.iter().try_for_each(|range| self.check(range))?;
        let known = |range| self.remembered(range).map(<[u8]>::to_vec);
        if let Some(known) = ranges.iter().map(known).collect() {
            return Ok(known);
        }
        match &self.source {
            Some(source) => source.read(ranges, interrupted)?.ok_or_else(|| self.gone()),
            None => {
                let unknown = ranges.iter().find(|range| self.remembered(range).is_none());
                Err(self.not_kept(unknown.unwrap_or(&(0..0))))
            }
        }
    }

    fn remembered(&self, range: &Range<u64>) -> Option<&[u8]> {
        self.fetched.iter().find_map(|(start, bytes)| {
            let from = usize::try_from(range.start.checked_sub(*start)?).ok()?;
            let to = usize::try_from(range.end.checked_sub(*start)?).ok()?;
            bytes.get(from..to)
        })
    }

    /// Builds an error about this file's bytes.
    pub(crate) fn corrupt(&self, offset: Option<u64>, reason: impl Into<String>) -> CkptError {
        CkptError::Corrupt {
            uri: self.uri.clone(),
            file: Some(self.name.clone()),
            offset,
            reason: reason.into(),
        }
    }

    fn not_kept(&self, range: &Range<u64>) -> CkptError {
        self.corrupt(
            None,
            format!(
                "a compressed item has its pickle or its directory at {}..{}, not at its ends as torch writes it",
                range.start, range.end
            ),
        )
    }

    fn gone(&self) -> CkptError {
        CkptError::NotFound {
            uri: self.uri.clone(),
            reason: format!("file `{}` vanished while it was read", self.name),
        }
    }

    fn check(&self, range: &Range<u64>) -> Result<()> {
        let is_inside = range.start <= range.end && range.end <= self.size;
        if is_inside && range.end - range.start <= LONGEST_READ {
            return Ok(());
        }
        Err(self.corrupt(
            Some(range.start),
            format!(
                "bytes {}..{} are asked for, and it has {}",
                range.start, range.end, self.size
            ),
        ))
    }
}
