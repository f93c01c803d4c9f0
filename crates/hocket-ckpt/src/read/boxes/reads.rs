//! The plan of a read of boxes: what is read directly into place, and what through scratch memory.

use memmap2::MmapMut;

use super::geometry::{advance, c_strides, cut, dot, intersect, offsets, runs};
use super::scatter::{ScatterAxis, scatter};
use crate::error::{CkptError, Result};
use crate::format::safetensors::CallerMemory;
use crate::manifest::tiling::TensorBox;
use crate::read::plan::ByteRead;

/// Size of the largest item in bytes.
const LARGEST_ITEM: u64 = 8;

/// Limits of a read of boxes, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadLimits {
    /// Scratch memory: as much as all boxes together, but within these two.
    pub(crate) least_scratch: u64,
    pub(crate) scratch: u64,
    /// Gaps of up to this size between two runs are read too, because another read would cost more.
    pub(crate) hole: u64,
    /// Runs of at least this size are read directly into place, one read per run.
    pub(crate) long_run: u64,
    /// Memory overhead of one read.
    pub(crate) read: u64,
}

impl ReadLimits {
    /// Returns the limits; with `reads_gaps`, those of a reader that fetches the gaps between nearby reads.
    pub(crate) fn new(reads_gaps: bool, scratch: u64) -> Self {
        Self {
            least_scratch: 1 << 20,
            scratch: scratch.max(LARGEST_ITEM),
            // A store's client merges reads across gaps of some MiB, so these gaps count as memory.
            hole: if reads_gaps { 3 << 20 } else { 16 << 10 },
            long_run: 4 << 10,
            read: 256,
        }
    }
}

/// A box of a tensor in memory.
#[derive(Debug, Clone)]
pub(crate) struct BoxTarget {
    /// Address of the box's first item.
    address: usize,
    /// The box inside the tensor.
    region: TensorBox,
    /// Distance between items along each dim, in bytes.
    strides: Vec<isize>,
    item_bytes: u64,
}

impl BoxTarget {
    /// Describes memory for a box; without strides, in C order.
    ///
    /// # Safety
    /// Every item of the box must be writable at its place, and nothing else may use it, as long as the target
    /// is in use.
    pub(crate) unsafe fn new(
        address: usize,
        region: TensorBox,
        strides: Option<Vec<isize>>,
        item_bytes: u64,
    ) -> Self {
        let strides = strides.unwrap_or_else(|| {
            let steps = c_strides(&region.size);
            steps
                .iter()
                .map(|step| (step * item_bytes) as isize)
                .collect()
        });
        Self {
            address,
            region,
            strides,
            item_bytes,
        }
    }

    pub(crate) fn region(&self) -> &TensorBox {
        &self.region
    }

    /// Returns whether the memory of a box of these sizes inside it is contiguous from `dim` on.
    fn is_contiguous(&self, size: &[u64], dim: usize) -> bool {
        let mut expected = self.item_bytes as isize;
        (dim..size.len()).rev().all(|dim| {
            let fits = size[dim] == 1 || self.strides[dim] == expected;
            expected *= size[dim] as isize;
            fits
        })
    }

    /// Returns the address of the first item of a box inside it.
    fn address_of(&self, start: &[u64]) -> usize {
        let steps = start.iter().zip(&self.region.start).zip(&self.strides);
        let distance: isize = steps
            .map(|((start, own), stride)| (start - own) as isize * stride)
            .sum();
        self.address.wrapping_add_signed(distance)
    }

    /// Copies what this target has in common with the box `region`, whose items `data` holds in C order.
    pub(crate) fn copy_from(&self, data: &[u8], region: &TensorBox) {
        let Some(shared) = intersect(&self.region, region) else {
            return;
        };
        let item_bytes = self.item_bytes;
        let steps = c_strides(&region.size);
        let first: u64 = (0..steps.len())
            .map(|dim| (shared.start[dim] - region.start[dim]) * steps[dim] * item_bytes)
            .sum();
        assert_eq!(
            data.len() as u64,
            region.size.iter().product::<u64>() * item_bytes
        );
        let axes = (0..steps.len()).map(|dim| ScatterAxis {
            size: shared.size[dim],
            from: (steps[dim] * item_bytes) as isize,
            to: self.strides[dim],
        });
        let to = self.address_of(&shared.start) as *mut u8;
        // SAFETY: `shared` is inside `data`, whose length was checked, and inside the target.
        unsafe {
            scatter(
                data.as_ptr().add(first as usize),
                to,
                item_bytes as usize,
                axes,
            )
        };
    }
}

/// A box of a tensor in a file.
#[derive(Debug, Clone)]
pub(crate) struct StoredBox {
    /// Index of the file.
    pub(crate) file: usize,
    /// Offset of its first item in the file's data.
    pub(crate) offset: u64,
    /// The box inside the tensor.
    pub(crate) region: TensorBox,
    /// Strides in items; none for C order.
    pub(crate) strides: Option<Vec<u64>>,
}

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

/// What a target and a stored box have in common.
struct BoxOverlap {
    file: usize,
    /// Offset of the first item in the file.
    offset: u64,
    /// Address of the first item's destination.
    address: usize,
    item_bytes: u64,
    num_bytes: u64,
    /// Dims along which the file stores distinct items, by descending stride: sizes, strides in the file in
    /// items, and strides of the destination in bytes.
    sizes: Vec<u64>,
    steps: Vec<u64>,
    to: Vec<isize>,
    /// Dims that repeat the same items: size, and stride of the destination in bytes.
    repeats: Vec<(u64, isize)>,
    /// Whether these dims are in the target's order, without repeats.
    is_in_order: bool,
    /// The number of leading dims whose runs are contiguous in the destination too.
    target_outer: usize,
    /// The number of dims that step between the runs that are read into scratch memory.
    num_outer: usize,
    /// Strides in scratch memory, where the runs are adjacent.
    packed: Vec<u64>,
}

impl BoxOverlap {
    /// Returns none if the stored box ends beyond what 64 bits count.
    fn new(target: &BoxTarget, stored: &StoredBox, shared: &TensorBox) -> Option<Self> {
        let c_order;
        let strides = match &stored.strides {
            Some(strides) => strides,
            None => {
                c_order = c_strides(&stored.region.size);
                &c_order
            }
        };
        if strides.len() != stored.region.size.len() {
            return None;
        }
        let item_bytes = target.item_bytes;
        let start: Vec<u64> = (shared.start.iter().zip(&stored.region.start))
            .map(|(start, own)| start - own)
            .collect();
        let first = dot(&start, strides)?.checked_mul(item_bytes)?;
        // A dim of size 1 has no stride, and one of stride 0 repeats one item: neither adds bytes to read.
        let (mut dims, mut repeats) = (Vec::new(), Vec::new());
        for (dim, &size) in shared.size.iter().enumerate() {
            if size > 1 && strides[dim] > 0 {
                dims.push(dim);
            } else if size > 1 {
                repeats.push((size, target.strides[dim]));
            }
        }
        dims.sort_by_key(|&dim| std::cmp::Reverse(strides[dim]));
        let sizes: Vec<u64> = dims.iter().map(|&dim| shared.size[dim]).collect();
        let steps: Vec<u64> = dims.iter().map(|&dim| strides[dim]).collect();
        let last: Vec<u64> = sizes.iter().map(|size| size - 1).collect();
        let reach = dot(&last, &steps)?
            .checked_add(1)?
            .checked_mul(item_bytes)?;
        let offset = stored.offset.checked_add(first)?;
        offset.checked_add(reach)?;
        let target_outer = (0..=dims.len())
            .find(|&outer| {
                let dim = dims.get(outer).copied().unwrap_or(shared.size.len());
                target.is_contiguous(&shared.size, dim)
            })
            .unwrap_or(dims.len());
        Some(Self {
            file: stored.file,
            offset,
            address: target.address_of(&shared.start),
            item_bytes,
            num_bytes: shared.size.iter().product::<u64>() * item_bytes,
            is_in_order: repeats.is_empty() && dims.is_sorted(),
            to: dims.iter().map(|&dim| target.strides[dim]).collect(),
            sizes,
            steps,
            repeats,
            target_outer,
            num_outer: 0,
            packed: Vec::new(),
        })
    }

    /// Returns the number of dims that step between runs which are contiguous in the file and in memory; none
    /// if the part is not to be read directly.
    fn direct_outer(&self, long_run: u64) -> Option<usize> {
        if !self.is_in_order {
            return None;
        }
        let (file_outer, _) = runs(&self.sizes, &self.steps, 0);
        let num_outer = file_outer.max(self.target_outer);
        let inner = &self.sizes[num_outer..];
        // Overlapping items are excluded, although their span may equal their number.
        if self.steps[num_outer..] != c_strides(inner) {
            return None;
        }
        let run_bytes = inner.iter().product::<u64>() * self.item_bytes;
        (num_outer == 0 || run_bytes >= long_run).then_some(num_outer)
    }

    fn read_directly(&self, num_outer: usize, reads: &mut Vec<ByteRead>) {
        let run_bytes = self.sizes[num_outer..].iter().product::<u64>() * self.item_bytes;
        let mut index = vec![0; num_outer];
        loop {
            let steps = index.iter().zip(&self.steps).map(|(at, step)| at * step);
            let distance: isize = (index.iter().zip(&self.to))
                .map(|(&at, to)| at as isize * to)
                .sum();
            let address = self.address.wrapping_add_signed(distance);
            reads.push(ByteRead {
                file: self.file,
                offset: self.offset + steps.sum::<u64>() * self.item_bytes,
                // SAFETY: these items of the target are adjacent, and nothing else uses them.
                memory: unsafe { CallerMemory::new(address, run_bytes as usize) },
            });
            if !advance(&mut index, &self.sizes) {
                return;
            }
        }
    }

    /// Chooses the runs that are read into scratch memory. Returns none if their sizes do not fit in 64 bits.
    fn packed(mut self, limits: &ReadLimits) -> Option<Self> {
        let (num_outer, run_items) = runs(&self.sizes, &self.steps, limits.hole / self.item_bytes);
        let row = run_items.max(limits.read / self.item_bytes);
        let mut packed: Vec<u64> = Vec::with_capacity(self.sizes.len());
        for stride in c_strides(&self.sizes[..num_outer]) {
            packed.push(stride.checked_mul(row)?);
        }
        packed.extend(&self.steps[num_outer..]);
        let last: Vec<u64> = self.sizes.iter().map(|size| size - 1).collect();
        dot(&last, &packed)?
            .checked_add(1)?
            .checked_mul(self.item_bytes)?;
        (self.num_outer, self.packed) = (num_outer, packed);
        Some(self)
    }

    /// Returns the bytes that a piece takes in scratch memory.
    fn span_bytes(&self, size: &[u64]) -> u64 {
        let steps = size.iter().zip(&self.packed);
        (steps.map(|(size, step)| (size - 1) * step).sum::<u64>() + 1) * self.item_bytes
    }

    /// Adds the reads of a piece's runs into scratch memory.
    fn read_piece(&self, piece: &TensorBox, scratch: usize, reads: &mut Vec<ByteRead>) {
        let (outer, inner) = piece.size.split_at(self.num_outer);
        let steps = inner.iter().zip(&self.steps[self.num_outer..]);
        let run_items = steps.map(|(size, step)| (size - 1) * step).sum::<u64>() + 1;
        let run_bytes = (run_items * self.item_bytes) as usize;
        let begin: u64 = (piece.start.iter().zip(&self.steps))
            .map(|(at, step)| at * step)
            .sum();
        let from = offsets(outer, &self.steps, begin);
        let to = offsets(outer, &self.packed, 0);
        reads.extend(from.into_iter().zip(to).map(|(from, to)| {
            let address = scratch + (to * self.item_bytes) as usize;
            ByteRead {
                file: self.file,
                offset: self.offset + from * self.item_bytes,
                // SAFETY: inside the piece's slice of the scratch memory; the runs do not overlap.
                memory: unsafe { CallerMemory::new(address, run_bytes) },
            }
        }));
    }

    /// Copies a piece's items from scratch memory to their places, repeated items to each.
    fn place(&self, piece: &TensorBox, scratch: &[u8]) {
        assert!(scratch.len() as u64 >= self.span_bytes(&piece.size));
        let distance: isize = (piece.start.iter().zip(&self.to))
            .map(|(&at, to)| at as isize * to)
            .sum();
        let to = self.address.wrapping_add_signed(distance) as *mut u8;
        let distinct = (0..self.sizes.len()).map(|dim| ScatterAxis {
            size: piece.size[dim],
            from: (self.packed[dim] * self.item_bytes) as isize,
            to: self.to[dim],
        });
        let repeats = self
            .repeats
            .iter()
            .map(|&(size, to)| ScatterAxis { size, from: 0, to });
        // SAFETY: the piece is inside its slice, whose length was checked, and inside the target.
        unsafe {
            scatter(
                scratch.as_ptr(),
                to,
                self.item_bytes as usize,
                distinct.chain(repeats),
            );
        }
    }
}
