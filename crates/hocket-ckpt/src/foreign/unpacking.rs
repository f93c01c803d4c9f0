//! Compressed items, unpacked front to back: however large they are, some MiB of them are in memory.

use std::ops::Range;

use zstd::stream::raw::{Decoder, Operation};

use super::blob::Blob;
use super::dcp_items::{TensorItem, find};
use crate::error::{CkptError, Result};
use crate::pace::Interrupted;
use crate::place::Place;
use crate::safetensors::{Dtype, Memory};

/// Fetched at a time, and kept of an item's beginning and of its end, where its pickle and its directory are.
const PIECE_BYTES: u64 = 1 << 20;

/// What a tensor's item has beside the tensor is shorter.
const ZIP_BYTES: u64 = 1 << 20;

/// What an item unpacks to, from its beginning on.
pub(crate) struct Stream {
    blob: Blob,
    /// What was not fetched yet.
    packed: Range<u64>,
    input: Vec<u8>,
    used: usize,
    decoder: Decoder<'static>,
    /// Whether what was unpacked so far is whole frames.
    is_whole: bool,
    position: u64,
}

impl Stream {
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

    /// Bytes that were unpacked so far.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Unpacks some bytes; 0 at the end.
    pub(crate) fn next(&mut self, out: &mut [u8], interrupted: Interrupted<'_>) -> Result<usize> {
        loop {
            let input = self.input.get(self.used..).unwrap_or_default();
            let status = self.decoder.run_on_buffers(input, out).map_err(|error| {
                self.blob
                    .corrupt(None, format!("an item is no zstd: {error}"))
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
            let count = self.next(out, interrupted)?;
            if count == 0 {
                return Err(self.blob.corrupt(None, "a compressed item ends too early"));
            }
            out = out.get_mut(count..).unwrap_or_default();
        }
        Ok(())
    }

    /// Unpacks up to a position, and hands what is passed over to `see`.
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

/// The two ends of what an item unpacks to, as a file of which nothing else can be read.
///
/// # Errors
/// `Corrupt` where it is no zstd, or unpacks to more than `limit` bytes.
pub(crate) fn ends(
    blob: &Blob,
    packed: Range<u64>,
    limit: u64,
    interrupted: Interrupted<'_>,
) -> Result<Blob> {
    let kept = PIECE_BYTES as usize;
    let mut stream = Stream::open(blob, packed)?;
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

/// The tensor inside a compressed item, in ranges of its bytes. Those that ascend take one pass, others begin anew.
pub struct Unpacker {
    blob: Blob,
    packed: Range<u64>,
    /// Where the tensor's first item is in what the item unpacks to, and where its last one ends.
    span: Range<u64>,
    strides: Option<Vec<u64>>,
    stream: Option<Stream>,
}

impl Unpacker {
    /// Finds the tensor inside an item, which takes a pass over all of it.
    ///
    /// # Errors
    /// `Corrupt` where the item does not hold what `.metadata` says, and what the disk or the store says.
    pub fn open(
        place: &Place,
        path: &str,
        item: &TensorItem,
        interrupted: Interrupted<'_>,
    ) -> Result<Self> {
        let blob = Blob::open(place, path, interrupted)?;
        let dtype = Dtype::parse(&item.dtype).and_then(|dtype| dtype.num_bytes(&item.shape));
        let Some(expected) = dtype else {
            return Err(CkptError::Invalid(format!("`{}` is no dtype", item.dtype)));
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
        })
    }

    /// Bytes of the tensor, with what its strides leave between items.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        self.span.end - self.span.start
    }

    /// Its strides in items, where they are not those of C order.
    #[must_use]
    pub fn strides(&self) -> Option<&[u64]> {
        self.strides.as_deref()
    }

    /// Reads ranges of the tensor's bytes, each given by where it begins.
    ///
    /// # Errors
    /// `Invalid` for a range outside of it, `Corrupt` for what is no zstd, and what the disk or the store says.
    pub fn read(&mut self, reads: Vec<(u64, Memory)>, interrupted: Interrupted<'_>) -> Result<()> {
        for (offset, memory) in reads {
            let begin = self.span.start.saturating_add(offset);
            if begin.saturating_add(memory.bytes() as u64) > self.span.end {
                return Err(CkptError::Invalid(format!(
                    "{} bytes at {offset} of a tensor of {} bytes",
                    memory.bytes(),
                    self.num_bytes()
                )));
            }
            let mut stream = match self.stream.take().filter(|it| it.position() <= begin) {
                Some(stream) => stream,
                None => Stream::open(&self.blob, self.packed.clone())?,
            };
            stream.pass(begin, |_| (), interrupted)?;
            // SAFETY: the only slice of this memory; it is gone when the next one is made.
            let out = unsafe { memory.slice_mut(0, memory.bytes()) };
            stream.fill(out, interrupted)?;
            self.stream = Some(stream);
        }
        Ok(())
    }
}
