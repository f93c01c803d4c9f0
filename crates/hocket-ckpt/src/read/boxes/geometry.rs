//! Geometry of boxes: intersection, strides, contiguous runs, and cuts to a size limit.

use crate::error::Result;
use crate::manifest::tiling::TensorBox;

/// Returns the strides of a C-order box, in items.
#[must_use]
pub fn c_strides(size: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; size.len()];
    for dim in (1..size.len()).rev() {
        strides[dim - 1] = size[dim].saturating_mul(strides[dim]);
    }
    strides
}

/// Returns the intersection of two boxes with the same number of dims; none if they have no item in common.
pub(crate) fn intersect(a: &TensorBox, b: &TensorBox) -> Option<TensorBox> {
    let mut shared = TensorBox {
        start: Vec::with_capacity(a.start.len()),
        size: Vec::with_capacity(a.start.len()),
    };
    for dim in 0..a.start.len() {
        let low = a.start[dim].max(b.start[dim]);
        let end = |region: &TensorBox| region.start[dim].saturating_add(region.size[dim]);
        let high = end(a).min(end(b));
        shared.start.push(low);
        shared
            .size
            .push(high.checked_sub(low).filter(|&size| size > 0)?);
    }
    Some(shared)
}

/// Returns the number of leading dims that step between contiguous runs, and the items that a run spans.
///
/// Items separated by at most `hole` items belong to one run, and so do overlapping items. Strides are
/// descending.
pub(crate) fn runs(sizes: &[u64], strides: &[u64], hole: u64) -> (usize, u64) {
    let (mut span, mut run) = (1, (sizes.len(), 1));
    for dim in (0..sizes.len()).rev() {
        let is_near = strides[dim] <= span + hole;
        span += (sizes[dim] - 1) * strides[dim];
        if is_near {
            run = (dim, span);
        }
    }
    run
}

/// Returns the start and size of boxes of at most `limit` items (but at least one) that, concatenated, are a box of
/// this size in C order.
#[must_use]
pub fn pieces(size: &[u64], limit: u64) -> Vec<(Vec<u64>, Vec<u64>)> {
    let mut found = Vec::new();
    if !size.contains(&0) {
        let mut visit = |piece: &TensorBox| {
            found.push((piece.start.clone(), piece.size.clone()));
            Ok(())
        };
        // Only `visit` fails, which does not.
        let _ = cut(size, &c_strides(size), limit, &mut visit);
    }
    found
}

/// Calls `visit` with boxes whose items span at most `limit` items (but at least one item), sorted by offset;
/// strides are descending.
///
/// # Errors
/// The first error of `visit`.
pub(crate) fn cut(
    sizes: &[u64],
    strides: &[u64],
    limit: u64,
    visit: &mut dyn FnMut(&TensorBox) -> Result<()>,
) -> Result<()> {
    let (mut span, mut dim) = (1_u64, sizes.len());
    while dim > 0 {
        let further = (sizes[dim - 1] - 1).saturating_mul(strides[dim - 1]);
        let wider = span.saturating_add(further);
        if wider > limit {
            break;
        }
        (span, dim) = (wider, dim - 1);
    }
    let mut piece = TensorBox {
        start: vec![0; sizes.len()],
        size: sizes.to_vec(),
    };
    if dim == 0 {
        return visit(&piece);
    }
    let (outer, extent) = (dim - 1, sizes[dim - 1]);
    let rows = limit.saturating_sub(span) / strides[outer].max(1) + 1;
    piece.size[..outer].fill(1);
    loop {
        for row in (0..extent).step_by(rows as usize) {
            piece.start[outer] = row;
            piece.size[outer] = rows.min(extent - row);
            visit(&piece)?;
        }
        if !advance(&mut piece.start[..outer], sizes) {
            return Ok(());
        }
    }
}

/// Moves an index to the next position in C order; returns false after the last.
pub(crate) fn advance(index: &mut [u64], sizes: &[u64]) -> bool {
    for dim in (0..index.len()).rev() {
        index[dim] += 1;
        if index[dim] < sizes[dim] {
            return true;
        }
        index[dim] = 0;
    }
    false
}

/// Returns the offset of each item of a box in C order, from `begin`.
pub(crate) fn offsets(sizes: &[u64], strides: &[u64], begin: u64) -> Vec<u64> {
    let mut all = vec![begin];
    for (&size, &stride) in sizes.iter().zip(strides) {
        let row = |&offset: &u64| (0..size).map(move |step| offset + step * stride);
        all = all.iter().flat_map(row).collect();
    }
    all
}

/// Returns the sum of `index[dim] * strides[dim]`; none if it does not fit in 64 bits.
pub(crate) fn dot(index: &[u64], strides: &[u64]) -> Option<u64> {
    index
        .iter()
        .zip(strides)
        .try_fold(0_u64, |sum, (&index, &stride)| {
            sum.checked_add(index.checked_mul(stride)?)
        })
}
