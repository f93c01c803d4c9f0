//! The plan of a read of boxes: what is read directly into place, and what through scratch memory.

use memmap2::MmapMut;

use super::geometry::{cut, intersect};
use super::overlap::{BoxOverlap, ReadLimits, StoredBox};
use super::target::BoxTarget;
use crate::error::{CkptError, Result};
use crate::manifest::tiling::TensorBox;
use crate::read::plan::ByteRead;

/// The reads that fill targets.
pub(crate) struct BoxReads {
    limits: ReadLimits,
    direct: Vec<ByteRead>,
    scattered: Vec<BoxOverlap>,
    num_bytes: u64,
}

/// Executes reads.
pub(crate) type Execute<'a> = &'a mut dyn FnMut(&[ByteRead]) -> Result<()>;

impl BoxReads {
    pub(crate) fn new(limits: ReadLimits) -> Self {
        Self {
            limits,
            direct: Vec::new(),
            scattered: Vec::new(),
            num_bytes: 0,
        }
    }

    /// Plans the reads of what a target and a stored box have in common.
    ///
    /// # Errors
    /// `Invalid` if the stored box ends beyond what 64 bits count.
    pub(crate) fn add(&mut self, target: &BoxTarget, stored: &StoredBox) -> Result<()> {
        if let Some(shared) = intersect(target.region(), &stored.region) {
            let reach =
                BoxOverlap::new(target, stored, &shared).and_then(|part| self.add_part(part));
            reach.ok_or_else(|| {
                CkptError::Invalid(format!(
                    "a stored box of shape {:?} with strides {:?} fits into no file",
                    stored.region.size, stored.strides
                ))
            })?;
        }
        Ok(())
    }

    fn add_part(&mut self, part: BoxOverlap) -> Option<()> {
        self.num_bytes += part.num_bytes;
        match part.direct_outer(self.limits.long_run) {
            Some(num_outer) => part.read_directly(num_outer, &mut self.direct),
            None => self.scattered.push(part.packed(&self.limits)?),
        }
        Some(())
    }

    /// Fills the targets; `execute` is called once or several times.
    ///
    /// # Errors
    /// The first error of `execute`; contents of the targets are then undefined.
    pub(crate) fn run(self, execute: Execute<'_>) -> Result<()> {
        let limit = self
            .num_bytes
            .max(self.limits.least_scratch)
            .min(self.limits.scratch);
        let mut batch = ReadBatch {
            scratch: pages(if self.scattered.is_empty() {
                0
            } else {
                limit as usize
            })?,
            used: 0,
            reads: self.direct,
            slices: Vec::new(),
        };
        for part in &self.scattered {
            let mut is_first = true;
            let items = (limit / part.item_bytes).max(1);
            cut(&part.sizes, &part.packed, items, &mut |piece| {
                // Two slices of one part may be so far apart that the store fetches more than both.
                if !is_first || batch.used as u64 + part.span_bytes(&piece.size) > limit {
                    batch.execute(execute)?;
                }
                is_first = false;
                batch.add(part, piece);
                Ok(())
            })?;
        }
        if !batch.reads.is_empty() {
            batch.execute(execute)?;
        }
        Ok(())
    }
}

/// Reads that are executed together, and the slices of scratch memory that they fill.
struct ReadBatch<'a> {
    scratch: MmapMut,
    used: usize,
    reads: Vec<ByteRead>,
    slices: Vec<(&'a BoxOverlap, TensorBox, usize)>,
}

impl<'a> ReadBatch<'a> {
    fn add(&mut self, part: &'a BoxOverlap, piece: &TensorBox) {
        let num_bytes = part.span_bytes(&piece.size) as usize;
        let scratch = self.scratch.get_mut(self.used..self.used + num_bytes);
        let address = scratch.map_or(0, |scratch| scratch.as_mut_ptr() as usize);
        assert_ne!(address, 0, "a slice is larger than the scratch memory");
        part.read_piece(piece, address, &mut self.reads);
        self.slices.push((part, piece.clone(), self.used));
        // Keeps the items of the next slice aligned.
        self.used = (self.used + num_bytes).next_multiple_of(64);
    }

    fn execute(&mut self, execute: Execute<'_>) -> Result<()> {
        execute(&self.reads)?;
        for (part, piece, used) in &self.slices {
            part.place(piece, &self.scratch[*used..]);
        }
        self.reads.clear();
        self.slices.clear();
        self.used = 0;
        Ok(())
    }
}

/// Allocates scratch memory.
fn pages(bytes: usize) -> Result<MmapMut> {
    let pages = MmapMut::map_anon(bytes)
        .map_err(|error| CkptError::process(format!("{bytes} bytes of memory: {error}")))?;
    // Fewer page faults; without huge pages the memory works too.
    #[cfg(target_os = "linux")]
    let _ = pages.advise(memmap2::Advice::HugePage);
    Ok(pages)
}
