//! XXH3-128 in canonical form, and blocks.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Bytes of a block, the unit of digest and of reading.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// Bytes of one digest.
pub(crate) const DIGEST_BYTES: usize = 16;

/// A digest in canonical (big endian) form.
pub(crate) type Digest = [u8; DIGEST_BYTES];

/// XXH3-128 with seed 0, canonical: 16 bytes, big endian.
#[must_use]
pub fn xxh3_128(bytes: &[u8]) -> [u8; DIGEST_BYTES] {
    xxhash_rust::xxh3::xxh3_128(bytes).to_be_bytes()
}

/// Lower-case hexadecimal of a digest.
pub(crate) fn hex(digest: &Digest) -> String {
    format!("{:032x}", u128::from_be_bytes(*digest))
}

pub(crate) fn to_base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

pub(crate) fn from_base64(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

/// Blocks of so much data.
pub(crate) fn num_blocks(data_bytes: u64) -> u64 {
    data_bytes.div_ceil(BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_form_is_the_published_one() {
        // From xxHash's own sanity checks: XXH3-128 of nothing, seed 0.
        assert_eq!(hex(&xxh3_128(b"")), "99aa06d3014798d86001c324468d497f");
    }
}
