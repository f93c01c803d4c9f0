//! Which chunks overlap a box or a block.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]
use proptest::prelude::*;

use super::*;

/// Returns chunks of one file from their boxes in two dims.
fn matrix(tiles: &[[u64; 4]]) -> StoredChunks {
    let column = |at: usize| tiles.iter().map(|tile| tile[at]).collect::<IntegerColumn>();
    let columns = ManifestChunks {
        file: tiles.iter().map(|_| 0).collect(),
        offset: (0..tiles.len() as u64).collect(),
        length: tiles.iter().map(|_| 1).collect(),
        start: vec![column(0), column(1)],
        size: vec![column(2), column(3)],
    };
    StoredChunks::new(columns, Vec::new())
}

fn tensor(name: &str, owner: usize, chunks: Vec<(u64, u64, u64)>) -> StoredTensor {
    let mut columns = ManifestChunks::empty(1);
    for (number, (file, offset, length)) in chunks.into_iter().enumerate() {
        columns.file.push(file);
        columns.offset.push(offset);
        columns.length.push(length);
        columns.start[0].push(number as u64);
        columns.size[0].push(length);
    }
    StoredTensor {
        name: name.into(),
        dtype: Dtype::parse("U8").unwrap(),
        shape: vec![1],
        path: Vec::new(),
        owner,
        chunks: StoredChunks::new(columns, Vec::new()),
        data: None,
    }
}

fn is_owner(aliases: &[Option<String>], number: usize) -> bool {
    aliases.get(number).is_some_and(Option::is_none)
}

proptest! {
    /// The chunks of tilings of a matrix, sorted or not, few or many, that overlap a box are found.
    #[test]
    fn the_chunks_near_a_box_are_those_that_overlap_it(
        heights in proptest::collection::vec(1_u64..4, 1..40),
        columns in 1_u64..4,
        order in any::<Option<u64>>(),
        corner in (0_u64..80, 0_u64..4, 1_u64..20, 1_u64..4),
    ) {
        let (mut tiles, mut top) = (Vec::new(), 0);
        for height in heights {
            tiles.extend((0..columns).map(|column| [top, column, height, 1]));
            top += height;
        }
        if let Some(seed) = order {
            tiles.sort_by_key(|tile| (tile[0] * 7 + tile[1]).wrapping_mul(seed | 1));
        }
        let (row, column, rows, wide) = corner;
        let region = TensorBox { start: vec![row, column], size: vec![rows, wide] };
        let chunks = matrix(&tiles);
        let overlaps = |&chunk: &usize| {
            let [top, left, height, width] = tiles[chunk];
            top < row + rows && top + height > row && left < column + wide && left + width > column
        };
        let expected: Vec<usize> = (0..tiles.len()).filter(overlaps).collect();
        prop_assert_eq!(chunks.near(&region), expected);
    }

    /// The tensors in a block are those whose chunks overlap it; an alias has the chunks of its owner.
    #[test]
    fn the_tensors_in_a_block_are_found(
        drawn in proptest::collection::vec(
            (
                proptest::collection::vec(
                    (0_u64..2, prop_oneof![Just(1), Just(9), Just(BLOCK_BYTES - 9), Just(3 * BLOCK_BYTES)],
                     prop_oneof![Just(0), Just(1), Just(BLOCK_BYTES)]),
                    0..3,
                ),
                proptest::option::of(0_usize..8),
            ),
            0..8,
        ),
    ) {
        let (mut ends, mut tensors, mut aliases) = ([0_u64; 2], Vec::new(), Vec::new());
        for (number, (chunks, alias)) in drawn.into_iter().enumerate() {
            let alias = alias.filter(|&other| other < number && is_owner(&aliases, other));
            let mut own = Vec::new();
            for (file, length, gap) in chunks {
                let offset = ends[file as usize] + gap;
                if alias.is_none() {
                    ends[file as usize] = offset + length;
                    own.push((file, offset, length));
                }
            }
            tensors.push(tensor(&format!("t{number}"), number, own));
            aliases.push(alias.map(|other| format!("t{other}")));
        }
        let stored = StoredTensors::new(tensors, aliases);
        for (file, end) in ends.into_iter().enumerate() {
            for block in (0..=end / BLOCK_BYTES + 1).map(|number| Some(number * BLOCK_BYTES)).chain([None]) {
                let mut expected = Vec::new();
                for one in stored.iter() {
                    let owner = &stored.tensors[one.owner];
                    let columns = &owner.chunks.columns;
                    for chunk in 0..owner.chunks.len() {
                        let start = columns.offset.at(chunk);
                        let end = start + columns.length.at(chunk);
                        let is_inside = block.is_none_or(|at| start < at + BLOCK_BYTES && end > at);
                        if columns.file.at(chunk) == file as u64 && is_inside {
                            let is_whole = columns.size[0].at(chunk) == 1;
                            let name = if is_whole { owner.name().to_owned() } else { format!("{}@{chunk}", owner.name()) };
                            expected.push((one.name(), name));
                        }
                    }
                }
                prop_assert_eq!(stored.in_block(file, block, None), expected);
            }
        }
        prop_assert!(stored.in_block(2, None, None).is_empty());
    }
}
