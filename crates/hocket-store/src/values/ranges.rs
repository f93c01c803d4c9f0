//! Arithmetic on byte ranges: splits an object into parts, coalesces nearby ranges into one request.

use std::ops::Range;

/// Largest gap between ranges that share a request; reading it costs less than another round trip.
pub(crate) const COALESCE_GAP_BYTES: u64 = 256 << 10;

/// Splits `range` into consecutive pieces of `part_bytes`; the last may be shorter. Returns none for an empty
/// range.
pub(crate) fn split(range: Range<u64>, part_bytes: u64) -> Vec<Range<u64>> {
    let step = part_bytes.max(1);
    let mut parts = Vec::new();
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start.saturating_add(step));
        parts.push(start..end);
        start = end;
    }
    parts
}

/// Returns the fewest ranges, in ascending order, that cover `ranges` when gaps of up to `gap` bytes are read
/// as well. Every non-empty input range lies within exactly one of them.
pub(crate) fn coalesce(ranges: &[Range<u64>], gap: u64) -> Vec<Range<u64>> {
    let mut sorted: Vec<Range<u64>> = ranges
        .iter()
        .filter(|range| range.start < range.end)
        .cloned()
        .collect();
    sorted.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in sorted {
        match joined.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(gap) => {
                last.end = last.end.max(range.end)
            }
            _ => joined.push(range),
        }
    }
    joined
}

/// Returns the index of the range in `cover` (ascending, disjoint) that contains `range`.
pub(crate) fn covering(cover: &[Range<u64>], range: &Range<u64>) -> Option<usize> {
    let index = cover
        .partition_point(|whole| whole.start <= range.start)
        .checked_sub(1)?;
    (range.end <= cover[index].end).then_some(index)
}

#[cfg(test)]
mod tests {
    #![allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::single_range_in_vec_init
    )]

    use super::*;
    use proptest::prelude::*;

    fn some_range() -> impl Strategy<Value = Range<u64>> {
        (0u64..5_000, 0u64..700).prop_map(|(start, length)| start..start + length)
    }

    proptest! {
        #[test]
        fn parts_cover_the_range_once_and_in_order(range in some_range(), part_bytes in 1u64..900) {
            let parts = split(range.clone(), part_bytes);
            let mut at = range.start;
            for part in &parts {
                prop_assert_eq!(part.start, at);
                prop_assert!(part.end > part.start && part.end - part.start <= part_bytes);
                at = part.end;
            }
            prop_assert_eq!(at, range.end.max(range.start));
            prop_assert_eq!(parts.len() as u64, (range.end - range.start).div_ceil(part_bytes));
        }

        #[test]
        fn every_range_lies_in_one_joined_range(ranges in prop::collection::vec(some_range(), 0..40), gap in 0u64..300) {
            let joined = coalesce(&ranges, gap);
            for pair in joined.windows(2) {
                prop_assert!(pair[0].end + gap < pair[1].start, "{:?} should have been joined", pair);
            }
            for range in ranges.iter().filter(|range| !range.is_empty()) {
                let whole = &joined[covering(&joined, range).expect("covered")];
                prop_assert!(whole.start <= range.start && range.end <= whole.end);
            }
            let asked: u64 = joined.iter().map(|range| range.end - range.start).sum();
            let wanted: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            prop_assert!(asked <= wanted + gap * ranges.len() as u64);
        }
    }

    #[test]
    fn an_empty_range_needs_no_request() {
        assert!(split(5..5, 10).is_empty());
        assert!(coalesce(&[3..3], 10).is_empty());
    }

    #[test]
    fn ranges_up_to_the_largest_integer_do_not_overflow() {
        assert_eq!(split(u64::MAX - 3..u64::MAX, 2).len(), 2);
        assert_eq!(coalesce(&[0..1, u64::MAX - 1..u64::MAX], u64::MAX).len(), 1);
    }
}
