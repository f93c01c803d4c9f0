//! Boxes of tensors in memory, which reads fill.

use super::geometry::{c_strides, intersect};
use super::scatter::{ScatterAxis, scatter};
use crate::manifest::tiling::TensorBox;

/// A box of a tensor in memory.
#[derive(Debug, Clone)]
pub(crate) struct BoxTarget {
    /// Address of the box's first item.
    address: usize,
    /// The box inside the tensor.
    region: TensorBox,
    /// Distance between items along each dim, in bytes.
    pub(super) strides: Vec<isize>,
    pub(super) item_bytes: u64,
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

    pub(crate) fn item_bytes(&self) -> u64 {
        self.item_bytes
    }

    pub(crate) fn region(&self) -> &TensorBox {
        &self.region
    }

    /// Returns whether the memory of a box of these sizes inside it is contiguous from `dim` on.
    pub(super) fn is_contiguous(&self, size: &[u64], dim: usize) -> bool {
        let mut expected = self.item_bytes as isize;
        (dim..size.len()).rev().all(|dim| {
            let fits = size[dim] == 1 || self.strides[dim] == expected;
            expected *= size[dim] as isize;
            fits
        })
    }

    /// Returns the address of the first item of a box inside it.
    pub(super) fn address_of(&self, start: &[u64]) -> usize {
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

    /// Copies the items of a box inside this target to `data`, in C order.
    pub(crate) fn copy_to(&self, data: &mut [u8], region: &TensorBox) {
        let item_bytes = self.item_bytes;
        let steps = c_strides(&region.size);
        assert_eq!(
            data.len() as u64,
            region.size.iter().product::<u64>() * item_bytes
        );
        assert_eq!(intersect(&self.region, region).as_ref(), Some(region));
        let axes = (0..steps.len()).map(|dim| ScatterAxis {
            size: region.size[dim],
            from: self.strides[dim],
            to: (steps[dim] * item_bytes) as isize,
        });
        let from = self.address_of(&region.start) as *const u8;
        // SAFETY: `region` is inside the target, and `data` has its size, both of which were checked.
        unsafe { scatter(from, data.as_mut_ptr(), item_bytes as usize, axes) };
    }
}
