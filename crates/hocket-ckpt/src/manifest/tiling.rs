//! The check that boxes tile a tensor exactly, without gaps or overlaps.
//!
//! Shards result from cuts along dimensions, so the check divides the boxes in the same way: sorted along a
//! dimension, they fall into groups that no box straddles, and each group is a smaller problem. This takes O(n
//! log n) per dimension, for any number of ranks. Boxes that no straight cut divides (a pinwheel) are compared
//! pairwise, up to a limit.

/// A box of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorBox {
    pub(crate) start: Vec<u64>,
    pub(crate) size: Vec<u64>,
}

/// Limit of boxes compared pairwise: 2 million comparisons.
const MAX_PAIRWISE: usize = 2048;

/// Limit of nested cuts. A mesh needs one per dimension.
const MAX_DEPTH: usize = 128;

impl TensorBox {
    fn end(&self, dim: usize) -> Option<u64> {
        self.start[dim].checked_add(self.size[dim])
    }
}

/// Checks that non-empty boxes tile `shape`; the error describes where they do not.
pub(crate) fn check(shape: &[u64], boxes: &mut [TensorBox]) -> Result<(), String> {
    for region in boxes.iter() {
        let inside =
            (0..shape.len()).all(|dim| region.end(dim).is_some_and(|end| end <= shape[dim]));
        if !inside {
            return Err(format!(
                "a chunk at {:?} of size {:?} is outside the shape {shape:?}",
                region.start, region.size
            ));
        }
    }
    if shape.contains(&0) {
        return if boxes.is_empty() {
            Ok(())
        } else {
            Err("has no elements, but it has chunks".to_owned())
        };
    }
    cut(&vec![0; shape.len()], shape, boxes, 0)
}

/// Checks that boxes inside `low..high` tile it.
fn cut(low: &[u64], high: &[u64], boxes: &mut [TensorBox], depth: usize) -> Result<(), String> {
    if boxes.is_empty() {
        return Err(format!("no chunk covers {low:?} to {high:?}"));
    }
    if boxes.len() == 1 {
        return match &boxes[0] {
            only if only.start == low
                && (0..low.len()).all(|dim| only.end(dim) == Some(high[dim])) =>
            {
                Ok(())
            }
            only => Err(format!(
                "the chunk at {:?} of size {:?} leaves a gap in {low:?} to {high:?}",
                only.start, only.size
            )),
        };
    }
    for dim in 0..low.len() {
        boxes.sort_unstable_by_key(|region| region.start[dim]);
        let groups = groups(boxes, dim);
        if groups.len() < 2 {
            continue;
        }
        if depth == MAX_DEPTH {
            return Err("its chunks are nested more deeply than any mesh cuts a tensor".to_owned());
        }
        let mut from = low[dim];
        for (range, begin, end) in groups {
            if begin != from {
                return Err(format!(
                    "no chunk covers {from} to {begin} along dimension {dim}"
                ));
            }
            let (mut inner_low, mut inner_high) = (low.to_vec(), high.to_vec());
            (inner_low[dim], inner_high[dim]) = (begin, end);
            cut(&inner_low, &inner_high, &mut boxes[range], depth + 1)?;
            from = end;
        }
        return if from == high[dim] {
            Ok(())
        } else {
            Err(format!(
                "no chunk covers {from} to {} along dimension {dim}",
                high[dim]
            ))
        };
    }
    pairwise(low, high, boxes)
}

/// Returns the runs of sorted boxes that no straight cut along `dim` divides, each with its start and end.
fn groups(boxes: &[TensorBox], dim: usize) -> Vec<(std::ops::Range<usize>, u64, u64)> {
    let mut groups: Vec<(std::ops::Range<usize>, u64, u64)> = Vec::new();
    for (index, region) in boxes.iter().enumerate() {
        let end = region.start[dim].saturating_add(region.size[dim]);
        match groups.last_mut() {
            Some((range, _, last)) if region.start[dim] < *last => {
                range.end = index + 1;
                *last = end.max(*last);
            }
            _ => groups.push((index..index + 1, region.start[dim], end)),
        }
    }
    groups
}

fn pairwise(low: &[u64], high: &[u64], boxes: &[TensorBox]) -> Result<(), String> {
    if boxes.len() > MAX_PAIRWISE {
        return Err(format!(
            "{} of its chunks overlap, or are cut in no way that a mesh cuts",
            boxes.len()
        ));
    }
    for (index, one) in boxes.iter().enumerate() {
        for other in &boxes[index + 1..] {
            let apart = (0..low.len()).any(|dim| {
                one.start[dim] + one.size[dim] <= other.start[dim]
                    || other.start[dim] + other.size[dim] <= one.start[dim]
            });
            if !apart {
                return Err(format!(
                    "the chunks at {:?} and {:?} overlap",
                    one.start, other.start
                ));
            }
        }
    }
    let volume = |sizes: &mut dyn Iterator<Item = u64>| sizes.map(u128::from).product::<u128>();
    let covered: u128 = boxes
        .iter()
        .map(|region| volume(&mut region.size.iter().copied()))
        .sum();
    let whole = volume(&mut low.iter().zip(high).map(|(low, high)| high - low));
    if covered == whole {
        Ok(())
    } else {
        Err(format!(
            "its chunks cover {covered} of {whole} elements between {low:?} and {high:?}"
        ))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use proptest::prelude::*;

    fn region(start: &[u64], size: &[u64]) -> TensorBox {
        TensorBox {
            start: start.to_vec(),
            size: size.to_vec(),
        }
    }

    #[test]
    fn a_pinwheel_tiles_and_no_straight_cut_divides_it() {
        let mut boxes = [
            region(&[0, 0], &[1, 2]),
            region(&[0, 2], &[2, 1]),
            region(&[2, 1], &[1, 2]),
            region(&[1, 0], &[2, 1]),
            region(&[1, 1], &[1, 1]),
        ];
        assert_eq!(check(&[3, 3], &mut boxes), Ok(()));
        assert!(check(&[3, 3], &mut boxes[..4]).is_err());
    }

    #[test]
    fn a_scalar_has_one_chunk() {
        assert_eq!(check(&[], &mut [region(&[], &[])]), Ok(()));
        assert!(check(&[], &mut []).is_err());
        assert!(check(&[], &mut [region(&[], &[]), region(&[], &[])]).is_err());
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
            prop_assert_eq!(check(&[rows, columns], &mut boxes).is_ok(), expected);
        }
    }
}
