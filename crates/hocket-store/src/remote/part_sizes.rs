//! The sizes of the parts of a multipart upload.

/// Part size, as long as the number of parts does not require larger ones: every part in flight occupies memory.
/// S3 prescribes at least 5 MiB.
pub(crate) const PART_BYTES: u64 = 8 << 20;

/// Largest number of parts that S3 accepts.
pub(super) const MAX_PARTS: u64 = 10_000;

/// Largest part that all services accept, which is Azure's limit.
pub(super) const MAX_PART_BYTES: u64 = 4000 << 20;

/// Returns the size of the first part, and of all others of an upload whose size is known.
pub(super) fn first_part_bytes(size_hint: Option<u64>) -> u64 {
    let least = size_hint.unwrap_or(0).div_ceil(MAX_PARTS);
    least.clamp(PART_BYTES, MAX_PART_BYTES)
}

/// Returns the size of the parts after the first `num_parts` of an upload of unknown size. It grows so that the
/// number of parts stays within the limit.
pub(super) fn next_part_bytes(part_bytes: u64, num_parts: u64) -> u64 {
    if num_parts.is_multiple_of(MAX_PARTS / 10) {
        return (part_bytes * 2).min(MAX_PART_BYTES);
    }
    part_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_number_and_the_size_of_parts_stay_within_the_limits(size in 0..MAX_PARTS * MAX_PART_BYTES) {
            let part = first_part_bytes(Some(size));
            prop_assert!((PART_BYTES..=MAX_PART_BYTES).contains(&part));
            prop_assert!(size.div_ceil(part) <= MAX_PARTS);
        }
    }
}
