//! What a target and a stored box have in common, and how its bytes are read into place.

use super::geometry::{advance, c_strides, dot, offsets, runs};
use super::scatter::{ScatterAxis, scatter};
use super::target::BoxTarget;
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

/// What a target and a stored box have in common.
pub(super) struct BoxOverlap {
    file: usize,
    /// Offset of the first item in the file.
    offset: u64,
    /// Address of the first item's destination.
    address: usize,
    pub(super) item_bytes: u64,
    pub(super) num_bytes: u64,
    /// Dims along which the file stores distinct items, by descending stride: sizes, strides in the file in
    /// items, and strides of the destination in bytes.
    pub(super) sizes: Vec<u64>,
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
    pub(super) packed: Vec<u64>,
}

impl BoxOverlap {
    /// Returns none if the stored box ends beyond what 64 bits count.
    pub(super) fn new(target: &BoxTarget, stored: &StoredBox, shared: &TensorBox) -> Option<Self> {
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
    pub(super) fn direct_outer(&self, long_run: u64) -> Option<usize> {
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

    pub(super) fn read_directly(&self, num_outer: usize, reads: &mut Vec<ByteRead>) {
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
    pub(super) fn packed(mut self, limits: &ReadLimits) -> Option<Self> {
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
    pub(super) fn span_bytes(&self, size: &[u64]) -> u64 {
        let steps = size.iter().zip(&self.packed);
        (steps.map(|(size, step)| (size - 1) * step).sum::<u64>() + 1) * self.item_bytes
    }

    /// Adds the reads of a piece's runs into scratch memory.
    pub(super) fn read_piece(&self, piece: &TensorBox, scratch: usize, reads: &mut Vec<ByteRead>) {
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
    pub(super) fn place(&self, piece: &TensorBox, scratch: &[u8]) {
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
