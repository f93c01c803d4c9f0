//! The check that boxes tile a tensor exactly, without gaps or overlaps.
//!
//! Shards result from cuts along dimensions, so the check divides the boxes in the same way: sorted along a
//! dimension, they fall into groups that no box straddles, and each group is a smaller problem. This takes O(n
//! log n) per dimension, for any number of ranks. Boxes that no straight cut divides (a pinwheel) are compared
//! pairwise, up to a limit.
//!
//! A manifest of thousands of ranks has millions of boxes, so they stay in columns.

use super::column::IntegerColumn;

/// A box of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorBox {
    pub(crate) start: Vec<u64>,
    pub(crate) size: Vec<u64>,
}

/// Boxes of a tensor as columns, each of `count` entries: one per dimension of the starts and of the sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BoxColumns<'a> {
    pub(crate) count: usize,
    pub(crate) start: &'a [Vec<u64>],
    pub(crate) size: &'a [Vec<u64>],
}

/// Limit of boxes compared pairwise: 2 million comparisons.
const MAX_PAIRWISE: usize = 2048;

/// Limit of nested cuts. A mesh needs one per dimension.
const MAX_DEPTH: usize = 128;

impl BoxColumns<'_> {
    fn start(&self, index: usize) -> Vec<u64> {
        self.start.iter().map(|column| column[index]).collect()
    }

    fn size(&self, index: usize) -> Vec<u64> {
        self.size.iter().map(|column| column[index]).collect()
    }

    /// Returns the end of a box that is inside its tensor.
    fn end(&self, dim: usize, index: usize) -> u64 {
        self.start[dim][index].saturating_add(self.size[dim][index])
    }

    fn is_inside(&self, shape: &[u64], index: usize) -> bool {
        shape.iter().enumerate().all(|(dim, extent)| {
            let end = self.start[dim][index].checked_add(self.size[dim][index]);
            end.is_some_and(|end| end <= *extent)
        })
    }
}

/// Checks that non-empty boxes tile `shape`, as [`check`] does.
pub(crate) fn check_rows<'a>(
    shape: &[u64],
    rows: impl Iterator<Item = (&'a [u64], &'a [u64])>,
) -> Result<(), String> {
    let mut start = vec![Vec::new(); shape.len()];
    let mut size = vec![Vec::new(); shape.len()];
    let mut count = 0;
    for (starts, sizes) in rows {
        for dim in 0..shape.len() {
            start[dim].push(starts[dim]);
            size[dim].push(sizes[dim]);
        }
        count += 1;
    }
    check(
        shape,
        BoxColumns {
            count,
            start: &start,
            size: &size,
        },
    )
}

/// Checks that non-empty boxes tile `shape`, as [`check`] does, without a copy of regular columns.
pub(crate) fn check_columns(
    shape: &[u64],
    count: usize,
    start: &[IntegerColumn],
    size: &[IntegerColumn],
) -> Result<(), String> {
    if is_row(shape, start, size) {
        return Ok(());
    }
    let integers = |columns: &[IntegerColumn]| {
        let columns = columns.iter().map(|column| column.iter().collect());
        columns.collect::<Vec<Vec<u64>>>()
    };
    let (start, size) = (&integers(start), &integers(size));
    check(shape, BoxColumns { count, start, size })
}

/// Returns whether boxes tile `shape` one after the other along one dim, whole along the others.
fn is_row(shape: &[u64], start: &[IntegerColumn], size: &[IntegerColumn]) -> bool {
    let is_whole = |dim: usize| start[dim].is_all(0) && size[dim].is_all(shape[dim]);
    let cut = (0..shape.len()).find(|&dim| !is_whole(dim)).unwrap_or(0);
    if shape.contains(&0) || !(cut + 1..shape.len()).all(is_whole) {
        return false;
    }
    let (Some(starts), Some(sizes)) = (start.get(cut), size.get(cut)) else {
        return false;
    };
    let end = starts
        .iter()
        .zip(sizes.iter())
        .try_fold(0_u64, |end, (start, size)| {
            let next = start.checked_add(size)?;
            (start == end && size > 0).then_some(next)
        });
    end == Some(shape[cut])
}

/// Checks that non-empty boxes tile `shape`; the error describes where they do not.
pub(crate) fn check(shape: &[u64], boxes: BoxColumns<'_>) -> Result<(), String> {
    if let Some(index) = (0..boxes.count).find(|&index| !boxes.is_inside(shape, index)) {
        return Err(format!(
            "a chunk at {:?} of size {:?} is outside the shape {shape:?}",
            boxes.start(index),
            boxes.size(index)
        ));
    }
    if shape.contains(&0) {
        return if boxes.count == 0 {
            Ok(())
        } else {
            Err("has no elements, but it has chunks".to_owned())
        };
    }
    let mut region = Region {
        boxes,
        low: vec![0; shape.len()],
        high: shape.to_vec(),
    };
    region.check(&mut (0..boxes.count).collect::<Vec<_>>(), 0)
}

/// The part of a tensor that some of its boxes have to tile.
struct Region<'a> {
    boxes: BoxColumns<'a>,
    low: Vec<u64>,
    high: Vec<u64>,
}

impl Region<'_> {
    /// Checks that the boxes with these indices, which are inside the region, tile it. After a success the region
    /// is as before.
    fn check(&mut self, indices: &mut [usize], depth: usize) -> Result<(), String> {
        match indices {
            [] => {
                return Err(format!("no chunk covers {:?} to {:?}", self.low, self.high));
            }
            [only] => return self.check_one(*only),
            _ => {}
        }
        for dim in 0..self.low.len() {
            let starts = &self.boxes.start[dim];
            if !indices.is_sorted_by_key(|&index| starts[index]) {
                indices.sort_unstable_by_key(|&index| starts[index]);
            }
            let groups = self.groups(indices, dim);
            if groups.len() < 2 {
                continue;
            }
            if depth == MAX_DEPTH {
                return Err(
                    "its chunks are nested more deeply than any mesh cuts a tensor".to_owned(),
                );
            }
            let (low, high) = (self.low[dim], self.high[dim]);
            let mut from = low;
            for (range, begin, end) in groups {
                if begin != from {
                    return Err(no_chunk_along(dim, from, begin));
                }
                (self.low[dim], self.high[dim]) = (begin, end);
                self.check(&mut indices[range], depth + 1)?;
                from = end;
            }
            (self.low[dim], self.high[dim]) = (low, high);
            return if from == high {
                Ok(())
            } else {
                Err(no_chunk_along(dim, from, high))
            };
        }
        self.check_pairwise(indices)
    }

    fn check_one(&self, index: usize) -> Result<(), String> {
        let boxes = self.boxes;
        let fills = (0..self.low.len()).all(|dim| {
            boxes.start[dim][index] == self.low[dim] && boxes.end(dim, index) == self.high[dim]
        });
        if fills {
            return Ok(());
        }
        Err(format!(
            "the chunk at {:?} of size {:?} leaves a gap in {:?} to {:?}",
            boxes.start(index),
            boxes.size(index),
            self.low,
            self.high
        ))
    }

    /// Returns the runs of sorted boxes that no straight cut along `dim` divides, each with its start and end.
    fn groups(&self, indices: &[usize], dim: usize) -> Vec<(std::ops::Range<usize>, u64, u64)> {
        let mut groups: Vec<(std::ops::Range<usize>, u64, u64)> = Vec::new();
        for (position, &index) in indices.iter().enumerate() {
            let (start, end) = (self.boxes.start[dim][index], self.boxes.end(dim, index));
            match groups.last_mut() {
                Some((range, _, last)) if start < *last => {
                    range.end = position + 1;
                    *last = end.max(*last);
                }
                _ => groups.push((position..position + 1, start, end)),
            }
        }
        groups
    }

    fn check_pairwise(&self, indices: &[usize]) -> Result<(), String> {
        if indices.len() > MAX_PAIRWISE {
            return Err(format!(
                "{} of its chunks overlap, or are cut in no way that a mesh cuts",
                indices.len()
            ));
        }
        let boxes = self.boxes;
        let dims = 0..self.low.len();
        for (position, &one) in indices.iter().enumerate() {
            for &other in &indices[position + 1..] {
                let apart = dims.clone().any(|dim| {
                    boxes.end(dim, one) <= boxes.start[dim][other]
                        || boxes.end(dim, other) <= boxes.start[dim][one]
                });
                if !apart {
                    return Err(format!(
                        "the chunks at {:?} and {:?} overlap",
                        boxes.start(one),
                        boxes.start(other)
                    ));
                }
            }
        }
        let covered: u128 = indices
            .iter()
            .map(|&index| {
                let sizes = boxes.size.iter().map(|column| u128::from(column[index]));
                sizes.product::<u128>()
            })
            .sum();
        let extents = dims.map(|dim| u128::from(self.high[dim] - self.low[dim]));
        let whole: u128 = extents.product();
        if covered == whole {
            Ok(())
        } else {
            Err(format!(
                "its chunks cover {covered} of {whole} elements between {:?} and {:?}",
                self.low, self.high
            ))
        }
    }
}

fn no_chunk_along(dim: usize, from: u64, to: u64) -> String {
    format!("no chunk covers {from} to {to} along dimension {dim}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::{IntegerColumn, TensorBox, check_columns, check_rows};
    use proptest::prelude::*;

    /// Checks boxes, each of which is on its own in memory, in both ways.
    fn check(shape: &[u64], boxes: &[TensorBox]) -> Result<(), String> {
        let rows = boxes.iter().map(|one| (&one.start[..], &one.size[..]));
        let outcome = check_rows(shape, rows);
        let columns = |of: fn(&TensorBox) -> &[u64]| -> Vec<IntegerColumn> {
            let column = |dim: usize| boxes.iter().map(|one| of(one)[dim]).collect();
            (0..shape.len()).map(column).collect()
        };
        let (start, size) = (columns(|one| &one.start), columns(|one| &one.size));
        assert_eq!(check_columns(shape, boxes.len(), &start, &size), outcome);
        outcome
    }

    fn region(start: &[u64], size: &[u64]) -> TensorBox {
        TensorBox {
            start: start.to_vec(),
            size: size.to_vec(),
        }
    }

    #[test]
    fn a_pinwheel_tiles_and_no_straight_cut_divides_it() {
        let boxes = [
            region(&[0, 0], &[1, 2]),
            region(&[0, 2], &[2, 1]),
            region(&[2, 1], &[1, 2]),
            region(&[1, 0], &[2, 1]),
            region(&[1, 1], &[1, 1]),
        ];
        assert_eq!(check(&[3, 3], &boxes), Ok(()));
        assert!(check(&[3, 3], &boxes[..4]).is_err());
    }

    #[test]
    fn a_scalar_has_one_chunk() {
        assert_eq!(check(&[], &[region(&[], &[])]), Ok(()));
        assert!(check(&[], &[]).is_err());
        assert!(check(&[], &[region(&[], &[]), region(&[], &[])]).is_err());
    }

    /// Computes the result of `check` by counting, as an independent reference.
    fn tiles_by_counting(shape: &[u64; 2], boxes: &[TensorBox]) -> bool {
        let mut counts = vec![0_u32; (shape[0] * shape[1]) as usize];
        for region in boxes {
            for row in region.start[0]..region.start[0] + region.size[0] {
                for column in region.start[1]..region.start[1] + region.size[1] {
                    if row >= shape[0] || column >= shape[1] {
                        return false;
                    }
                    counts[(row * shape[1] + column) as usize] += 1;
                }
            }
        }
        counts.iter().all(|&count| count == 1)
    }

    fn split(boxes: &mut Vec<TensorBox>, which: usize, dim: usize, at: u64) {
        let index = which % boxes.len();
        let size = boxes[index].size[dim];
        let at = at % size;
        if at == 0 {
            return;
        }
        let mut second = boxes[index].clone();
        boxes[index].size[dim] = at;
        second.start[dim] += at;
        second.size[dim] = size - at;
        boxes.push(second);
    }

    proptest! {
        #[test]
        fn the_check_agrees_with_a_counting_reference(
            rows in 1_u64..9,
            columns in 1_u64..9,
            cuts in prop::collection::vec((any::<usize>(), 0_usize..2, any::<u64>()), 0..12),
            corruption in prop::option::of((any::<usize>(), 0_usize..2, any::<bool>(), 0_u64..4)),
        ) {
            let mut boxes = vec![region(&[0, 0], &[rows, columns])];
            for (which, dim, at) in cuts {
                split(&mut boxes, which, dim, at);
            }
            if let Some((which, dim, start, value)) = corruption {
                let index = which % boxes.len();
                if start { boxes[index].start[dim] = value } else { boxes[index].size[dim] = value + 1 }
            }
            let expected = tiles_by_counting(&[rows, columns], &boxes);
            prop_assert_eq!(check(&[rows, columns], &boxes).is_ok(), expected);
        }
    }
}
