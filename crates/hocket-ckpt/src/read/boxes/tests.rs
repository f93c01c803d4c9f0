//! Reads of boxes from chunks with any strides, compared with single items.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::geometry::{advance, c_strides, cut, dot, intersect, runs};
use super::overlap::{ReadLimits, StoredBox};
use super::reads::BoxReads;
use super::scatter::{ScatterAxis, scatter};
use super::target::BoxTarget;
use crate::manifest::tiling::TensorBox;
use crate::read::plan::ByteRead;

fn region(start: &[u64], size: &[u64]) -> TensorBox {
    TensorBox {
        start: start.to_vec(),
        size: size.to_vec(),
    }
}

/// Executes reads on files in memory, and returns their addresses.
fn execute(files: &[Vec<u8>], reads: &[ByteRead]) -> Vec<std::ops::Range<usize>> {
    let mut written: Vec<std::ops::Range<usize>> = Vec::new();
    for read in reads {
        let bytes = read.memory.bytes();
        let from = read.offset as usize;
        // SAFETY: the memory of a target or of scratch memory, of which there is no other slice.
        let to = unsafe { read.memory.slice_mut(0, bytes) };
        to.copy_from_slice(&files[read.file][from..from + bytes]);
        let address = to.as_ptr() as usize;
        written.push(address..address + bytes);
    }
    written.sort_by_key(|range| range.start);
    let overlaps = written.windows(2).any(|pair| pair[0].end > pair[1].start);
    assert!(!overlaps, "destinations overlap");
    written
}

/// Visits every index of a box.
fn for_each(size: &[u64], mut visit: impl FnMut(&[u64])) {
    if size.contains(&0) {
        return;
    }
    let mut index = vec![0; size.len()];
    loop {
        visit(&index);
        if !advance(&mut index, size) {
            return;
        }
    }
}

#[test]
fn overlapping_items_may_span_as_many_bytes_as_there_are_items() {
    let files = [(0..9).collect::<Vec<u8>>()];
    let mut target = [0_u8; 9];
    let whole = region(&[0, 0], &[3, 3]);
    // SAFETY: an array of this size, used by nothing else.
    let memory = unsafe { BoxTarget::new(target.as_mut_ptr() as usize, whole.clone(), None, 1) };
    let mut plan = BoxReads::new(ReadLimits::new(false, 1 << 20));
    let stored = StoredBox {
        file: 0,
        offset: 0,
        region: whole,
        strides: Some(vec![2, 2]),
    };
    plan.add(&memory, &stored).unwrap();
    plan.run(&mut |reads| {
        execute(&files, reads);
        Ok(())
    })
    .unwrap();
    assert_eq!(target, [0, 2, 4, 2, 4, 6, 4, 6, 8]);
}

#[test]
fn strides_that_64_bits_cannot_hold_are_refused() {
    let whole = region(&[0, 0], &[3, 3]);
    let mut target = [0_u8; 9];
    // SAFETY: an array of this size, used by nothing else.
    let memory = unsafe { BoxTarget::new(target.as_mut_ptr() as usize, whole.clone(), None, 1) };
    let mut plan = BoxReads::new(ReadLimits::new(false, 1 << 20));
    let stored = StoredBox {
        file: 0,
        offset: 9,
        region: whole,
        strides: Some(vec![u64::MAX / 2, 1]),
    };
    assert!(plan.add(&memory, &stored).is_err());
}

#[test]
fn runs_join_across_holes_and_overlaps() {
    assert_eq!(runs(&[4, 5], &[5, 1], 0), (0, 20));
    assert_eq!(runs(&[4, 5], &[8, 1], 0), (1, 5));
    assert_eq!(runs(&[4, 5], &[8, 1], 3), (0, 29));
    assert_eq!(runs(&[4, 5], &[2, 1], 0), (0, 11));
    assert_eq!(runs(&[], &[], 0), (0, 1));
}

/// A chunk as drawn: its size along dim 0, strides and the bytes before it.
#[derive(Debug, Clone)]
struct Drawn {
    strides: Vec<u64>,
    before: u64,
}

/// Draws strides: those of a view of a larger array, with its dims in any order, or any, with overlaps.
fn strides(shape: Vec<u64>) -> impl Strategy<Value = Vec<u64>> {
    let dims = shape.len();
    let any = proptest::collection::vec(0_u64..40, dims);
    let order = Just((0..dims).collect::<Vec<usize>>()).prop_shuffle();
    let gaps = proptest::collection::vec(
        prop_oneof![2 => Just(0_u64), 1 => Just(1), 1 => Just(7)],
        dims,
    );
    let view = (order, gaps, 1_u64..4).prop_map(move |(order, gaps, first)| {
        let (mut strides, mut step) = (vec![0; shape.len()], first);
        for dim in order {
            strides[dim] = step;
            step *= shape[dim] + gaps[dim];
        }
        strides
    });
    prop_oneof![any, view]
}

/// Draws a shape, where dim 0 is divided, the chunks, and a box.
fn case() -> impl Strategy<Value = (Vec<u64>, u64, Vec<Drawn>, TensorBox, Vec<usize>)> {
    proptest::collection::vec(1_u64..7, 0..5)
        .prop_flat_map(|shape| {
            let first = shape.first().copied().unwrap_or(1);
            (Just(shape), 0..first)
        })
        .prop_flat_map(|(shape, middle)| {
            let mut chunks = Vec::new();
            for rows in [middle, shape.first().copied().unwrap_or(1) - middle] {
                let mut size = shape.clone();
                if let Some(first) = size.first_mut() {
                    *first = rows;
                }
                chunks.push(
                    (strides(size), 0_u64..10)
                        .prop_map(|(strides, before)| Drawn { strides, before }),
                );
            }
            let bounds: Vec<_> = shape.iter().map(|&size| (0..size, 1..=size)).collect();
            let sizes = shape.clone();
            let inside = bounds.prop_map(move |bounds| TensorBox {
                start: bounds.iter().map(|(start, _)| *start).collect(),
                size: (bounds.iter().zip(&sizes))
                    .map(|((start, size), extent)| *size.min(&(extent - start)))
                    .collect(),
            });
            let order = Just((0..shape.len()).collect::<Vec<usize>>()).prop_shuffle();
            (Just(shape), Just(middle), chunks, inside, order)
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 3000 }))]

    /// Fills a box of memory with any order of its dims, slice by slice, from files in memory.
    #[test]
    fn any_part_of_any_strided_chunks_is_read(
        (shape, middle, chunks, wanted, order) in case(),
        item_bytes in prop_oneof![Just(1_u64), Just(4), Just(8), Just(2)],
        (least, scratch, hole, long_run, read) in (8_u64..300, 8_u64..300, 8_u64..300, 8_u64..300, 0_u64..40),
        gap in 0_u64..3,
    ) {
        let (mut files, mut stored) = (Vec::new(), Vec::new());
        for (number, drawn) in chunks.iter().enumerate() {
            let mut own = region(&vec![0; shape.len()], &shape);
            if let Some(first) = own.size.first_mut() {
                (own.start[0], *first) = if number == 0 { (0, middle) } else { (middle, *first - middle) };
            } else if number == 0 {
                continue;
            }
            if own.size.contains(&0) {
                continue;
            }
            let last: Vec<u64> = own.size.iter().map(|size| size - 1).collect();
            let span = dot(&last, &drawn.strides).unwrap() + 1;
            let bytes = (drawn.before + span * item_bytes) as usize;
            files.push((0..bytes).map(|at| (at * 167 + number * 31 + at / 251) as u8).collect::<Vec<u8>>());
            stored.push(StoredBox {
                file: files.len() - 1,
                offset: drawn.before,
                region: own,
                strides: Some(drawn.strides.clone()),
            });
        }
        // The destination: dims in the drawn order, with a gap between rows.
        let (mut to, mut step) = (vec![0_isize; shape.len()], item_bytes as isize);
        for &dim in order.iter().rev() {
            to[dim] = step;
            step *= (wanted.size[dim] + gap) as isize;
        }
        let mut memory = vec![99_u8; step as usize];
        let address = memory.as_mut_ptr() as usize;
        // SAFETY: memory of this size, used by nothing else.
        let target = unsafe { BoxTarget::new(address, wanted.clone(), Some(to.clone()), item_bytes) };
        let limits = ReadLimits { least_scratch: least, scratch: scratch.max(least), hole, long_run, read };
        let mut plan = BoxReads::new(limits);
        for one in &stored {
            plan.add(&target, one).unwrap();
        }
        let own = address..address + memory.len();
        let mut most = 0;
        plan.run(&mut |reads| {
            let written = execute(&files, reads);
            let scratch = written.iter().filter(|range| !own.contains(&range.start));
            most = most.max(scratch.map(|range| range.end - range.start).sum());
            Ok(())
        }).unwrap();
        let whole = shape.iter().product::<u64>() * item_bytes;
        prop_assert!(most as u64 <= least.max(whole).min(limits.scratch));
        let mut expected = vec![99_u8; memory.len()];
        for_each(&wanted.size, |index| {
            let place: Vec<u64> = index.iter().zip(&wanted.start).map(|(at, start)| at + start).collect();
            let one = stored.iter().find(|one| intersect(&one.region, &region(&place, &vec![1; place.len()])).is_some());
            let one = one.unwrap();
            let inside: Vec<u64> = place.iter().zip(&one.region.start).map(|(at, start)| at - start).collect();
            let from = one.offset + dot(&inside, one.strides.as_ref().unwrap()).unwrap() * item_bytes;
            let at: isize = index.iter().zip(&to).map(|(&at, to)| at as isize * to).sum();
            let item = &files[one.file][from as usize..(from + item_bytes) as usize];
            expected[at as usize..at as usize + item.len()].copy_from_slice(item);
        });
        prop_assert_eq!(memory, expected);
    }

    /// Copies of any size and order of dims, in tiles or not, move each item to its place.
    #[test]
    fn any_copy_moves_each_item(
        sizes in prop_oneof![
            proptest::collection::vec(1_u64..6, 0..5).boxed(),
            proptest::collection::vec(1_u64..150, 2).boxed(),
            (1_u64..4, 10_u64..90, 10_u64..90).prop_map(|(a, b, c)| vec![a, b, c]).boxed(),
        ],
        orders in (any::<u64>(), any::<u64>()),
        item_bytes in prop_oneof![Just(1_usize), Just(2), Just(4), Just(8), Just(3), Just(16)],
        (gap, is_repeated) in (0_usize..2, any::<bool>()),
    ) {
        // Strides of arrays whose dims are in the orders that the seeds sort them into.
        let strides = |seed: u64| {
            let mut dims: Vec<usize> = (0..sizes.len()).collect();
            dims.sort_by_key(|&dim| (dim as u64 + 1).wrapping_mul(seed | 1));
            let (mut strides, mut step) = (vec![0; sizes.len()], item_bytes);
            for dim in dims {
                strides[dim] = step;
                step *= sizes[dim] as usize + gap;
            }
            (strides, step)
        };
        let ((mut from, length), (to, space)) = (strides(orders.0), strides(orders.1));
        if let Some(first) = from.first_mut().filter(|_| is_repeated) {
            *first = 0;
        }
        let source: Vec<u8> = (0..length).map(|at| (at * 31 + at / 256) as u8).collect();
        let (mut target, mut expected) = (vec![7_u8; space], vec![7_u8; space]);
        let axes = (0..sizes.len()).map(|dim| ScatterAxis {
            size: sizes[dim],
            from: from[dim] as isize,
            to: to[dim] as isize,
        });
        // SAFETY: both arrays are as large as their strides reach.
        unsafe { scatter(source.as_ptr(), target.as_mut_ptr(), item_bytes, axes) };
        for_each(&sizes, |index| {
            let reach = |strides: &[usize]| -> usize {
                index.iter().zip(strides).map(|(&at, stride)| at as usize * stride).sum()
            };
            let (read, written) = (reach(&from), reach(&to));
            expected[written..written + item_bytes].copy_from_slice(&source[read..read + item_bytes]);
        });
        prop_assert!(target == expected);
    }

    /// The pieces of a box follow each other in C order and keep to the limit.
    #[test]
    fn pieces_cover_a_box_once(sizes in proptest::collection::vec(1_u64..6, 0..4), limit in 1_u64..50) {
        let strides = c_strides(&sizes);
        let mut next = 0;
        cut(&sizes, &strides, limit, &mut |piece| {
            assert_eq!(dot(&piece.start, &strides), Some(next));
            let items = piece.size.iter().product::<u64>();
            assert!(items <= limit);
            next += items;
            Ok(())
        }).unwrap();
        prop_assert_eq!(next, sizes.iter().product::<u64>());
    }
}
