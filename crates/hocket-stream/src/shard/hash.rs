//! The digests that an index may contain, by their names there.

use blake2::{Blake2b512, Blake2s256};
use md5::Md5;
use sha1::Sha1;
use sha2::{Digest, Sha224, Sha256, Sha384, Sha512};
use sha3::{Sha3_224, Sha3_256, Sha3_384, Sha3_512};
use xxhash_rust::{xxh3, xxh32, xxh64};

use crate::error::{Result, StreamError};

/// A hash function of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// xxHash, 32 bits.
    Xxh32,
    /// xxHash, 64 bits.
    Xxh64,
    /// XXH3, 64 bits.
    Xxh3_64,
    /// XXH3, 128 bits (`xxh3_128` and its other name `xxh128`).
    Xxh3_128,
    /// MD5.
    Md5,
    /// SHA-1.
    Sha1,
    /// SHA-224.
    Sha224,
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
    /// SHA3-224.
    Sha3_224,
    /// SHA3-256.
    Sha3_256,
    /// SHA3-384.
    Sha3_384,
    /// SHA3-512.
    Sha3_512,
    /// BLAKE2b, 512 bits.
    Blake2b,
    /// BLAKE2s, 256 bits.
    Blake2s,
}

/// Every supported name, fastest first; a reader chooses in this order.
pub const NAMES: [(&str, Algorithm); 17] = [
    ("xxh3_64", Algorithm::Xxh3_64),
    ("xxh3_128", Algorithm::Xxh3_128),
    ("xxh128", Algorithm::Xxh3_128),
    ("xxh64", Algorithm::Xxh64),
    ("xxh32", Algorithm::Xxh32),
    ("sha1", Algorithm::Sha1),
    ("sha256", Algorithm::Sha256),
    ("sha224", Algorithm::Sha224),
    ("blake2b", Algorithm::Blake2b),
    ("sha512", Algorithm::Sha512),
    ("sha384", Algorithm::Sha384),
    ("md5", Algorithm::Md5),
    ("blake2s", Algorithm::Blake2s),
    ("sha3_224", Algorithm::Sha3_224),
    ("sha3_256", Algorithm::Sha3_256),
    ("sha3_384", Algorithm::Sha3_384),
    ("sha3_512", Algorithm::Sha3_512),
];

impl Algorithm {
    /// Parses the name of an algorithm.
    ///
    /// # Errors
    /// [`StreamError::Config`] for an unknown name, listing the supported ones.
    pub fn parse(name: &str) -> Result<Self> {
        NAMES
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, algorithm)| *algorithm)
            .ok_or_else(|| {
                let known: Vec<String> = NAMES
                    .iter()
                    .map(|(known, _)| format!("`{known}`"))
                    .collect();
                StreamError::config(format!(
                    "hash `{name}` is not supported: expected one of {}",
                    known.join(", ")
                ))
            })
    }

    /// Returns the digest of `bytes` as the index writes it: lower-case hexadecimal, most significant byte
    /// first.
    pub fn hex(self, bytes: &[u8]) -> String {
        match self {
            Self::Xxh32 => format!("{:08x}", xxh32::xxh32(bytes, 0)),
            Self::Xxh64 => format!("{:016x}", xxh64::xxh64(bytes, 0)),
            Self::Xxh3_64 => format!("{:016x}", xxh3::xxh3_64(bytes)),
            Self::Xxh3_128 => format!("{:032x}", xxh3::xxh3_128(bytes)),
            Self::Md5 => digest::<Md5>(bytes),
            Self::Sha1 => digest::<Sha1>(bytes),
            Self::Sha224 => digest::<Sha224>(bytes),
            Self::Sha256 => digest::<Sha256>(bytes),
            Self::Sha384 => digest::<Sha384>(bytes),
            Self::Sha512 => digest::<Sha512>(bytes),
            Self::Sha3_224 => digest::<Sha3_224>(bytes),
            Self::Sha3_256 => digest::<Sha3_256>(bytes),
            Self::Sha3_384 => digest::<Sha3_384>(bytes),
            Self::Sha3_512 => digest::<Sha3_512>(bytes),
            Self::Blake2b => digest::<Blake2b512>(bytes),
            Self::Blake2s => digest::<Blake2s256>(bytes),
        }
    }
}

fn digest<D: Digest>(bytes: &[u8]) -> String {
    D::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn digests_equal_the_published_ones() {
        // Digests of the empty input and of "abc", from the algorithms' specifications.
        assert_eq!(
            Algorithm::Md5.hex(b"abc"),
            "900150983cd24fb0d6963f7d28e17f72"
        );
        assert_eq!(
            Algorithm::Sha1.hex(b"abc"),
            "a9993e364706816aba3e25717850c26c9cd0d89d"
        );
        assert!(
            Algorithm::Sha256
                .hex(b"abc")
                .starts_with("ba7816bf8f01cfea")
        );
        assert_eq!(Algorithm::Xxh32.hex(b""), "02cc5d05");
        assert_eq!(Algorithm::Xxh64.hex(b""), "ef46db3751d8e999");
        assert_eq!(Algorithm::Xxh3_64.hex(b""), "2d06800538d394c2");
        assert_eq!(
            Algorithm::Xxh3_128.hex(b""),
            "99aa06d3014798d86001c324468d497f"
        );
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let message = Algorithm::parse("crc32").unwrap_err().to_string();
        assert!(
            message.contains("`crc32`") && message.contains("`xxh3_64`"),
            "{message}"
        );
    }
}
