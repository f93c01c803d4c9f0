//! XXH3-128 digests in canonical form, and the block size.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Size of a block in bytes, the unit of digests and reads.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// Size of a digest in bytes.
pub(crate) const DIGEST_BYTES: usize = 16;

/// A digest in canonical (big-endian) form.
pub(crate) type Digest = [u8; DIGEST_BYTES];

/// Returns the XXH3-128 digest with seed 0 in canonical form: 16 bytes, big-endian.
#[must_use]
pub fn xxh3_128(bytes: &[u8]) -> [u8; DIGEST_BYTES] {
    xxhash_rust::xxh3::xxh3_128(bytes).to_be_bytes()
}

/// Returns a digest in lower-case hexadecimal.
pub(crate) fn hex(digest: &Digest) -> String {
    format!("{:032x}", u128::from_be_bytes(*digest))
}

pub(crate) fn to_base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

pub(crate) fn from_base64(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

/// Returns the number of blocks of `data_bytes`.
pub(crate) fn num_blocks(data_bytes: u64) -> u64 {
    data_bytes.div_ceil(BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_form_is_the_published_one() {
        // From xxHash's own sanity checks: XXH3-128 of empty input, seed 0.
        assert_eq!(hex(&xxh3_128(b"")), "99aa06d3014798d86001c324468d497f");
    }
}
