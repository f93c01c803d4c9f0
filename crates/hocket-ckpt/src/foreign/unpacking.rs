//! Streaming decompression of compressed items, with a few MiB in memory whatever their size.

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use zstd::stream::raw::{Decoder, Operation};

use super::dcp_items::{TensorItem, find};
use crate::error::{CkptError, Result};
use crate::manifest::tiling::TensorBox;
use crate::place::CheckpointPlace;
use crate::place::blob::Blob;
use crate::read::boxes::{BoxReads, BoxTarget, ReadLimits, StoredBox};
use crate::read::plan::ByteRead;
use crate::workers::Interrupted;

/// Bytes fetched at a time. Also the bytes kept of an item's beginning and end, which contain its pickle and
/// directory.
const PIECE_BYTES: u64 = 1 << 20;

/// Limit of the bytes in a tensor's item in addition to the tensor.
const ZIP_BYTES: u64 = 1 << 20;

/// A decompression stream over an item.
pub(crate) struct ItemStream {
    blob: Blob,
    /// The range that is still to be fetched.
    packed: Range<u64>,
    input: Vec<u8>,
    used: usize,
    decoder: Decoder<'static>,
    /// Whether the data unpacked so far ends at a frame boundary.
    is_whole: bool,
    position: u64,
}

impl ItemStream {
    pub(crate) fn open(blob: &Blob, packed: Range<u64>) -> Result<Self> {
        let decoder = Decoder::new();
        Ok(Self {
            blob: blob.clone(),
            packed,
            input: Vec::new(),
            used: 0,
            decoder: decoder.map_err(|error| CkptError::process(format!("zstd: {error}")))?,
            is_whole: false,
            position: 0,
        })
    }

    /// Returns the number of bytes unpacked so far.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Unpacks some bytes; returns 0 at the end.
    pub(crate) fn next(&mut self, out: &mut [u8], interrupted: Interrupted<'_>) -> Result<usize> {
        loop {
            let input = self.input.get(self.used..).unwrap_or_default();
            let status = self.decoder.run_on_buffers(input, out).map_err(|error| {
                self.blob.corrupt(
                    None,
                    format!("an item cannot be decompressed by zstd: {error}"),
                )
            })?;
            self.used += status.bytes_read;
            if status.bytes_read + status.bytes_written > 0 {
                self.is_whole = status.remaining == 0;
            }
            if status.bytes_written > 0 {
                self.position += status.bytes_written as u64;
                return Ok(status.bytes_written);
            }
            if self.used < self.input.len() {
                continue;
            }
            if self.packed.is_empty() {
                let end = || self.blob.corrupt(None, "a compressed item is cut short");
                return if self.is_whole { Ok(0) } else { Err(end()) };
            }
            if interrupted() {
                return Err(CkptError::Interrupted);
            }
            let end = self.packed.end.min(self.packed.start + PIECE_BYTES);
            self.input = self.blob.read(self.packed.start..end, interrupted)?;
            self.used = 0;
            self.packed.start = end;
        }
    }

    /// Unpacks exactly as many bytes as `out` has.
    pub(crate) fn fill(&mut self, mut out: &mut [u8], interrupted: Interrupted<'_>) -> Result<()> {
        while !out.is_empty() {
            // A little input may unpack to much output.
            if interrupted() {
                return Err(CkptError::Interrupted);
            }
            let wanted = out.len().min(PIECE_BYTES as usize);
            let piece = out.get_mut(..wanted).unwrap_or_default();
            let count = self.next(piece, interrupted)?;
            if count == 0 {
                return Err(self.blob.corrupt(None, "a compressed item ends too early"));
            }
            out = out.get_mut(count..).unwrap_or_default();
        }
        Ok(())
    }

    /// Unpacks up to a position and passes the skipped bytes to `see`.
    pub(crate) fn pass(
        &mut self,
        until: u64,
        mut see: impl FnMut(&[u8]),
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let mut buffer = vec![0_u8; PIECE_BYTES.min(until.saturating_sub(self.position)) as usize];
        while self.position < until {
            let wanted = (until - self.position).min(PIECE_BYTES) as usize;
            let out = buffer.get_mut(..wanted).unwrap_or_default();
            self.fill(out, interrupted)?;
            see(out);
        }
        Ok(())
    }
}

/// Returns the two ends of an unpacked item as a file; reading anywhere else in it is an error.
///
/// # Errors
/// `Corrupt` if it is not zstd or unpacks to more than `limit` bytes.
pub(crate) fn ends(
    blob: &Blob,
    packed: Range<u64>,
    limit: u64,
    interrupted: Interrupted<'_>,
) -> Result<Blob> {
    let kept = PIECE_BYTES as usize;
    let mut stream = ItemStream::open(blob, packed)?;
    let (mut head, mut tail): (Vec<u8>, Vec<u8>) = (Vec::new(), Vec::new());
    let mut buffer = vec![0_u8; kept];
    loop {
        let count = stream.next(&mut buffer, interrupted)?;
        let bytes = buffer.get(..count).unwrap_or_default();
        if stream.position() > limit {
            return Err(blob.corrupt(None, format!("an item unpacks to more than {limit} bytes")));
        }
        if count == 0 {
            break;
        }
        head.extend(bytes.iter().take(kept - head.len()));
        tail.extend(bytes);
        tail.drain(..tail.len().saturating_sub(kept));
    }
    let size = stream.position();
    let tail_start = size - tail.len() as u64;
    Ok(blob.unpacked_pieces(size, vec![(0, head), (tail_start, tail)]))
}

/// A reader of byte ranges of the tensor inside a compressed item. Ascending ranges share one pass; a range
/// before the current position starts another.
pub(crate) struct ItemUnpacker {
    blob: Blob,
    packed: Range<u64>,
    /// Byte range of the tensor in the unpacked item, from its first item to the end of its last.
    span: Range<u64>,
    strides: Option<Vec<u64>>,
    stream: Option<ItemStream>,
    /// The tensor, once it was unpacked into a temporary file.
    spilled: Option<File>,
}

impl ItemUnpacker {
    /// Finds the tensor inside an item, with one pass over all of it.
    ///
    /// # Errors
    /// `Corrupt` if the item does not match `.metadata`, and errors of the disk or the store.
    pub(crate) fn open(
        place: &CheckpointPlace,
        path: &str,
        item: &TensorItem,
        interrupted: Interrupted<'_>,
    ) -> Result<Self> {
        let blob = Blob::open(place, path, interrupted)?;
        let Some(expected) = item.dtype.num_bytes(&item.shape) else {
            return Err(blob.corrupt(
                Some(item.offset),
                format!(
                    "an item of shape {:?} is larger than memory can be",
                    item.shape
                ),
            ));
        };
        let packed = item.offset..item.offset.saturating_add(item.length);
        let limit = expected.saturating_add(ZIP_BYTES);
        let unpacked = ends(&blob, packed.clone(), limit, interrupted)?;
        let inside = TensorItem {
            offset: 0,
            length: unpacked.size(),
            ..item.clone()
        };
        let (start, strides, bytes) = find(&unpacked, &inside, interrupted)?;
        Ok(Self {
            blob,
            packed,
            span: start..start + bytes,
            strides,
            stream: None,
            spilled: None,
        })
    }

    /// Returns the bytes of the tensor, including gaps that its strides leave between items.
    fn num_bytes(&self) -> u64 {
        self.span.end - self.span.start
    }

    /// Reads the part of a target that the item stores as the box `region` of its tensor.
    ///
    /// # Errors
    /// As for `read`, and `TempFile`.
    pub(crate) fn fill(
        &mut self,
        target: &BoxTarget,
        region: TensorBox,
        limits: ReadLimits,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let stored = StoredBox {
            file: 0,
            offset: 0,
            region,
            strides: self.strides.clone(),
        };
        let mut plan = BoxReads::new(limits);
        plan.add(target, &stored)?;
        if self.strides.is_some() && self.spilled.is_none() {
            // The parts of an item that is not in C order are scattered, and read in any order.
            self.spilled = Some(self.spill(interrupted)?);
        }
        plan.run(&mut |reads| self.read(reads, interrupted))
    }

    /// Unpacks the tensor in one pass into a temporary file without a name, which is freed when it is closed.
    fn spill(&mut self, interrupted: Interrupted<'_>) -> Result<File> {
        let bytes = self.num_bytes();
        let failed = |error| CkptError::TempFile {
            bytes,
            folder: std::env::temp_dir(),
            error,
        };
        let mut file = tempfile::tempfile().map_err(failed)?;
        let mut stream = ItemStream::open(&self.blob, self.packed.clone())?;
        stream.pass(self.span.start, |_| (), interrupted)?;
        let mut buffer = vec![0_u8; PIECE_BYTES.min(bytes) as usize];
        while stream.position() < self.span.end {
            let rest = (self.span.end - stream.position()).min(PIECE_BYTES);
            let piece = buffer.get_mut(..rest as usize).unwrap_or_default();
            stream.fill(piece, interrupted)?;
            file.write_all(piece).map_err(failed)?;
        }
        Ok(file)
    }

    /// Reads ranges of the tensor's bytes.
    ///
    /// # Errors
    /// `Invalid` for a range out of bounds, `Corrupt` for data that is not zstd, and errors of the disk or the
    /// store.
    fn read(&mut self, reads: &[ByteRead], interrupted: Interrupted<'_>) -> Result<()> {
        for &ByteRead { offset, memory, .. } in reads {
            let begin = self.span.start.saturating_add(offset);
            if begin.saturating_add(memory.bytes() as u64) > self.span.end {
                return Err(CkptError::Invalid(format!(
                    "{} bytes at {offset} of a tensor of {} bytes",
                    memory.bytes(),
                    self.num_bytes()
                )));
            }
            // SAFETY: the only slice of this memory; it is dropped before the next one is made.
            let out = unsafe { memory.slice_mut(0, memory.bytes()) };
            if let Some(file) = &self.spilled {
                file.read_exact_at(out, offset).map_err(|error| {
                    CkptError::io(&std::env::temp_dir(), "read a file of", &error)
                })?;
                continue;
            }
            let mut stream = match self.stream.take().filter(|it| it.position() <= begin) {
                Some(stream) => stream,
                None => ItemStream::open(&self.blob, self.packed.clone())?,
            };
            stream.pass(begin, |_| (), interrupted)?;
            stream.fill(out, interrupted)?;
            self.stream = Some(stream);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_small_item_that_unpacks_to_much_can_be_interrupted() {
        let packed = zstd::encode_all(vec![0_u8; 64 << 20].as_slice(), 1).unwrap();
        let size = packed.len() as u64;
        assert!(size < PIECE_BYTES);
        let blob = Blob::nowhere().unpacked(packed);
        let looks = AtomicUsize::new(0);
        let interrupted = || looks.fetch_add(1, Ordering::Relaxed) > 3;
        let mut stream = ItemStream::open(&blob, 0..size).unwrap();
        let passed = stream.pass(64 << 20, |_| (), &interrupted);
        assert!(matches!(passed, Err(CkptError::Interrupted)), "{passed:?}");
        assert!(stream.position() < 16 << 20);
    }
}
