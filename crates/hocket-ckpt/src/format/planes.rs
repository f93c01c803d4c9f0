//! Byte planes: a reversible order of the bytes of a block in which zstd finds more to compress.
//!
//! The first bytes of all items of a run come first, then all second bytes, and so on. In weights of a floating
//! dtype the bytes with sign and exponent repeat, and those of the mantissa do not; in planes of their own, only
//! the latter are stored as they are.
//!
//! A data file is divided into runs of items of one width. Its blocks are transformed one by one, so that a block
//! can be read without its neighbours: each piece of a run in a block is transformed on its own. Bytes at the end
//! of a piece that are no whole item stay at its end.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize;

use super::dtypes::Dtype;

/// Widths of an item in bytes. Items of width 1 stay as they are.
const WIDTHS: [u64; 4] = [1, 2, 4, 8];

/// The runs of a data file, as the manifest lists them: width of an item, and bytes of the run.
pub(crate) type RunPairs = Vec<(u64, u64)>;

/// The runs of a data file by their ends in its data, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlaneRuns {
    /// Width of an item, and end of the run.
    runs: Vec<(u64, u64)>,
}

/// The direction of a transform.
#[derive(Clone, Copy)]
enum Direction {
    ToPlanes,
    ToItems,
}

impl PlaneRuns {
    /// Returns the runs of a file that holds tensors of these dtypes and sizes in bytes, one after the other.
    pub(crate) fn of_entries(entries: impl IntoIterator<Item = (Dtype, u64)>) -> Self {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut end = 0;
        for (dtype, bytes) in entries {
            end += bytes;
            match runs.last_mut() {
                _ if bytes == 0 => {}
                Some((width, last)) if *width == dtype.plane_bytes() => *last = end,
                _ => runs.push((dtype.plane_bytes(), end)),
            }
        }
        Self { runs }
    }

    /// Returns the runs of a file with this safetensors header, length and padding included; none if it is no
    /// header of a file whose tensors fill its data without a gap.
    pub(crate) fn of_header(header: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Entry<'a> {
            dtype: &'a str,
            data_offsets: (u64, u64),
        }
        let json: BTreeMap<&str, &serde_json::value::RawValue> =
            serde_json::from_slice(header.get(8..)?).ok()?;
        let mut entries = Vec::with_capacity(json.len());
        for (name, entry) in json {
            if name != "__metadata__" {
                let entry: Entry<'_> = serde_json::from_str(entry.get()).ok()?;
                let (from, to) = entry.data_offsets;
                entries.push((from, to, Dtype::parse(entry.dtype)?));
            }
        }
        entries.sort_unstable_by_key(|(from, to, _)| (*from, *to));
        let mut end = 0;
        for (from, to, _) in &entries {
            if *from != end || to < from {
                return None;
            }
            end = *to;
        }
        let sizes = entries.iter().map(|(from, to, dtype)| (*dtype, to - from));
        Some(Self::of_entries(sizes))
    }

    /// Decodes the manifest's runs of a file with `data_bytes` of data; the error names the violated rule.
    pub(crate) fn of_pairs(pairs: &[(u64, u64)], data_bytes: u64) -> Result<Self, String> {
        let mut runs = Vec::with_capacity(pairs.len());
        let mut end = 0_u64;
        for &(width, bytes) in pairs {
            if !WIDTHS.contains(&width) {
                return Err(format!(
                    "`planes` has items of {width} bytes, expected one of {WIDTHS:?}"
                ));
            }
            if bytes == 0 || bytes % width != 0 {
                return Err(format!(
                    "`planes` has a run of {bytes} bytes with items of {width}"
                ));
            }
            end = end.saturating_add(bytes);
            runs.push((width, end));
        }
        if end != data_bytes {
            return Err(format!(
                "`planes` covers {end} bytes, the data has {data_bytes}"
            ));
        }
        Ok(Self { runs })
    }

    /// Returns the runs as the manifest lists them; none if no item has several bytes, which changes nothing.
    pub(crate) fn to_pairs(&self) -> Option<RunPairs> {
        let has_planes = self.runs.iter().any(|(width, _)| *width > 1);
        has_planes.then(|| {
            let starts = std::iter::once(0).chain(self.runs.iter().map(|(_, end)| *end));
            let both = self.runs.iter().zip(starts);
            both.map(|((width, end), start)| (*width, end - start))
                .collect()
        })
    }

    /// Transforms bytes that start at `offset` in the file's data; `planes` has the length of `items`.
    pub(crate) fn split(&self, offset: u64, items: &[u8], planes: &mut [u8]) {
        self.apply(offset, items, planes, Direction::ToPlanes);
    }

    /// Reverts [`PlaneRuns::split`].
    pub(crate) fn join(&self, offset: u64, planes: &[u8], items: &mut [u8]) {
        self.apply(offset, planes, items, Direction::ToItems);
    }

    fn apply(&self, offset: u64, source: &[u8], target: &mut [u8], direction: Direction) {
        for (width, range) in self.pieces(offset, source.len()) {
            transform(width, &source[range.clone()], &mut target[range], direction);
        }
    }

    /// Returns the pieces of runs in `length` bytes from `offset` on: width, and range in these bytes.
    fn pieces(&self, offset: u64, length: usize) -> impl Iterator<Item = (u64, Range<usize>)> {
        let end = offset + length as u64;
        let first = self.runs.partition_point(|(_, end)| *end <= offset);
        let mut from = offset;
        self.runs[first..]
            .iter()
            .map_while(move |(width, run_end)| {
                let to = end.min(*run_end);
                let range = (from - offset) as usize..(to - offset) as usize;
                from = to;
                (!range.is_empty()).then_some((*width, range))
            })
    }
}

fn transform(width: u64, source: &[u8], target: &mut [u8], direction: Direction) {
    match (width, direction) {
        (2, Direction::ToPlanes) => to_planes::<2>(source, target),
        (4, Direction::ToPlanes) => to_planes::<4>(source, target),
        (8, Direction::ToPlanes) => to_planes::<8>(source, target),
        (2, Direction::ToItems) => to_items::<2>(source, target),
        (4, Direction::ToItems) => to_items::<4>(source, target),
        (8, Direction::ToItems) => to_items::<8>(source, target),
        _ => target.copy_from_slice(source),
    }
}

/// Number of bytes that are transformed together, few enough for the intermediate planes to stay in the fastest
/// cache.
const GROUP_BYTES: usize = 4096;

/// Splits bytes into those at even and those at odd positions. Compilers turn this loop into vector instructions,
/// unlike one over items of four or eight bytes, which are therefore split in two or three rounds.
fn split_pairs(pairs: &[u8], even: &mut [u8], odd: &mut [u8]) {
    let (pairs, _) = pairs.as_chunks::<2>();
    for ((pair, even), odd) in pairs.iter().zip(even).zip(odd) {
        let both = u16::from_le_bytes(*pair);
        *even = both as u8;
        *odd = (both >> 8) as u8;
    }
}

/// Reverts [`split_pairs`].
fn join_pairs(even: &[u8], odd: &[u8], pairs: &mut [u8]) {
    let (pairs, _) = pairs.as_chunks_mut::<2>();
    for ((pair, even), odd) in pairs.iter_mut().zip(even).zip(odd) {
        *pair = (u16::from(*even) | u16::from(*odd) << 8).to_le_bytes();
    }
}

fn to_planes<const WIDTH: usize>(source: &[u8], target: &mut [u8]) {
    let count = source.len() / WIDTH;
    let (items, rest) = source.split_at(count * WIDTH);
    let (planes, end) = target.split_at_mut(count * WIDTH);
    end.copy_from_slice(rest);
    let mut scratch = [[0_u8; GROUP_BYTES]; 2];
    let mut at = 0;
    for group in items.chunks(GROUP_BYTES) {
        let per_plane = group.len() / WIDTH;
        let [one, other] = &mut scratch;
        let (mut from, mut to) = (&mut one[..group.len()], &mut other[..group.len()]);
        from.copy_from_slice(group);
        let mut parts = 1;
        while parts < WIDTH {
            let length = group.len() / parts;
            for part in 0..parts {
                // This part holds the bytes whose index in the group is `part` modulo `parts`.
                let (even, odd) = to.split_at_mut((part + parts) * length / 2);
                split_pairs(
                    &from[part * length..][..length],
                    &mut even[part * length / 2..][..length / 2],
                    &mut odd[..length / 2],
                );
            }
            std::mem::swap(&mut from, &mut to);
            parts *= 2;
        }
        for byte in 0..WIDTH {
            planes[byte * count + at..][..per_plane]
                .copy_from_slice(&from[byte * per_plane..][..per_plane]);
        }
        at += per_plane;
    }
}

fn to_items<const WIDTH: usize>(source: &[u8], target: &mut [u8]) {
    let count = source.len() / WIDTH;
    let (planes, rest) = source.split_at(count * WIDTH);
    let (items, end) = target.split_at_mut(count * WIDTH);
    end.copy_from_slice(rest);
    let mut scratch = [[0_u8; GROUP_BYTES]; 2];
    let mut at = 0;
    for group in items.chunks_mut(GROUP_BYTES) {
        let per_plane = group.len() / WIDTH;
        let [one, other] = &mut scratch;
        let (mut from, mut to) = (&mut one[..group.len()], &mut other[..group.len()]);
        for byte in 0..WIDTH {
            from[byte * per_plane..][..per_plane]
                .copy_from_slice(&planes[byte * count + at..][..per_plane]);
        }
        let mut parts = WIDTH;
        while parts > 1 {
            parts /= 2;
            let length = group.len() / parts;
            for part in 0..parts {
                join_pairs(
                    &from[part * length / 2..][..length / 2],
                    &from[(part + parts) * length / 2..][..length / 2],
                    &mut to[part * length..][..length],
                );
            }
            std::mem::swap(&mut from, &mut to);
        }
        group.copy_from_slice(from);
        at += per_plane;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    /// Transforms a piece item by item, as an independent reference.
    fn planes_by_index(width: usize, items: &[u8]) -> Vec<u8> {
        let whole = items.len() / width * width;
        let bytes = (0..width).flat_map(|byte| items[..whole].iter().skip(byte).step_by(width));
        bytes.chain(&items[whole..]).copied().collect()
    }

    fn dtype() -> impl Strategy<Value = Dtype> {
        let names = vec![
            "F64", "C64", "I64", "F32", "I32", "BF16", "F16", "U16", "F8_E5M2", "BOOL",
        ];
        prop::sample::select(names).prop_map(|name| Dtype::parse(name).unwrap())
    }

    fn noise(length: usize) -> Vec<u8> {
        (0..length as u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect()
    }

    proptest! {
        /// Every bit pattern, those of NaNs with a payload included, every length, and the end of a group.
        #[test]
        fn items_return_and_planes_are_those_of_the_reference(
            mut items in prop::collection::vec(any::<u8>(), 0..70),
            more in prop::sample::select(vec![0, GROUP_BYTES - 8, 2 * GROUP_BYTES]),
        ) {
            items.extend(noise(more));
            for width in WIDTHS {
                let mut planes = vec![0; items.len()];
                let mut back = vec![0; items.len()];
                transform(width, &items, &mut planes, Direction::ToPlanes);
                prop_assert_eq!(&planes, &planes_by_index(width as usize, &items));
                transform(width, &planes, &mut back, Direction::ToItems);
                prop_assert_eq!(&back, &items);
            }
        }

        /// Blocks begin and end inside runs; each is reverted on its own, and the manifest's form is the same.
        #[test]
        fn blocks_of_mixed_tensors_return(
            entries in prop::collection::vec((dtype(), 0_u64..40), 0..9),
            block in 1_usize..200,
        ) {
            let entries = entries.into_iter().map(|(dtype, items)| (dtype, items * dtype.item_bytes()));
            let entries: Vec<(Dtype, u64)> = entries.collect();
            let runs = PlaneRuns::of_entries(entries.clone());
            let data = noise(entries.iter().map(|(_, bytes)| *bytes as usize).sum());
            for (number, items) in data.chunks(block).enumerate() {
                let mut planes = vec![0; items.len()];
                let mut back = vec![0; items.len()];
                runs.split((number * block) as u64, items, &mut planes);
                runs.join((number * block) as u64, &planes, &mut back);
                prop_assert_eq!(&back, items);
            }
            let has_floats = entries.iter().any(|(dtype, bytes)| dtype.plane_bytes() > 1 && *bytes > 0);
            let pairs = runs.to_pairs();
            prop_assert_eq!(pairs.is_some(), has_floats);
            if let Some(pairs) = pairs {
                prop_assert_eq!(PlaneRuns::of_pairs(&pairs, data.len() as u64), Ok(runs));
            }
        }
    }

    #[test]
    fn a_header_gives_the_runs_of_its_entries_in_their_order() {
        let json = br#"{"__metadata__":{"a":"b"},"z":{"dtype":"BF16","shape":[2],"data_offsets":[12,16]},
            "i":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"e":{"dtype":"F32","shape":[0],"data_offsets":[8,8]},
            "f":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}   "#;
        let header = [&(json.len() as u64).to_le_bytes()[..], json].concat();
        let pairs = PlaneRuns::of_header(&header).unwrap().to_pairs();
        assert_eq!(pairs, Some(vec![(1, 8), (4, 4), (2, 4)]));
        assert_eq!(PlaneRuns::of_header(b"12345678{"), None);
        let gap = br#"12345678{"f":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
        assert_eq!(PlaneRuns::of_header(gap), None);
    }

    #[test]
    fn runs_that_break_a_rule_are_refused() {
        for (pairs, word) in [
            (&[(3, 9)][..], "items of 3 bytes"),
            (&[(2, 3)], "run of 3 bytes"),
            (&[(2, 0)], "run of 0 bytes"),
            (&[(2, 4)], "covers 4 bytes"),
            (&[(2, u64::MAX - 1), (4, 16)], "covers"),
        ] {
            let refused = PlaneRuns::of_pairs(pairs, 12).unwrap_err();
            assert!(refused.contains(word), "{refused}");
        }
    }
}
