//! The dtypes of safetensors.

/// A dtype, by its safetensors name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dtype {
    name: &'static str,
    item_bytes: u64,
}

/// Every dtype of safetensors with the size of its items in bytes.
const DTYPES: [(&str, u64); 19] = [
    ("BOOL", 1),
    ("U8", 1),
    ("I8", 1),
    ("F8_E4M3", 1),
    ("F8_E5M2", 1),
    ("F8_E4M3FNUZ", 1),
    ("F8_E5M2FNUZ", 1),
    ("F8_E8M0", 1),
    ("I16", 2),
    ("U16", 2),
    ("F16", 2),
    ("BF16", 2),
    ("I32", 4),
    ("U32", 4),
    ("F32", 4),
    ("I64", 8),
    ("U64", 8),
    ("F64", 8),
    ("C64", 8),
];

impl Dtype {
    /// Returns the dtype of this name, if it exists.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let found = DTYPES.into_iter().find(|(known, _)| *known == name);
        found.map(|(name, item_bytes)| Self { name, item_bytes })
    }

    /// Returns the safetensors name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns the size of an item in bytes.
    #[must_use]
    pub fn item_bytes(self) -> u64 {
        self.item_bytes
    }

    /// Returns the size in bytes of a tensor of this shape; none if it does not fit in 64 bits.
    #[must_use]
    pub fn num_bytes(self, shape: &[u64]) -> Option<u64> {
        // A dim of size 0 makes the tensor empty, whatever the other dims.
        if shape.contains(&0) {
            return Some(0);
        }
        shape
            .iter()
            .try_fold(self.item_bytes, |bytes, &extent| bytes.checked_mul(extent))
    }
}
