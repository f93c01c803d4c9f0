//! The table of dtypes, with their names in safetensors and in torch. Everything else asks it.

use serde::{Serialize, Serializer};

struct DtypeNames {
    /// The name in safetensors, if it can store the dtype.
    safetensors: Option<&'static str>,
    torch: &'static str,
    /// The name of torch's typed storage, if there is one.
    storage: Option<&'static str>,
    item_bytes: u64,
}

const fn names(
    safetensors: Option<&'static str>,
    torch: &'static str,
    storage: Option<&'static str>,
    item_bytes: u64,
) -> DtypeNames {
    DtypeNames {
        safetensors,
        torch,
        storage,
        item_bytes,
    }
}

static DTYPES: [DtypeNames; 24] = [
    names(Some("F32"), "float32", Some("FloatStorage"), 4),
    names(Some("F64"), "float64", Some("DoubleStorage"), 8),
    names(Some("F16"), "float16", Some("HalfStorage"), 2),
    names(Some("BF16"), "bfloat16", Some("BFloat16Storage"), 2),
    names(Some("I64"), "int64", Some("LongStorage"), 8),
    names(Some("I32"), "int32", Some("IntStorage"), 4),
    names(Some("I16"), "int16", Some("ShortStorage"), 2),
    names(Some("I8"), "int8", Some("CharStorage"), 1),
    names(Some("U8"), "uint8", Some("ByteStorage"), 1),
    names(Some("BOOL"), "bool", Some("BoolStorage"), 1),
    names(Some("C64"), "complex64", Some("ComplexFloatStorage"), 8),
    names(None, "complex128", Some("ComplexDoubleStorage"), 16),
    names(Some("U16"), "uint16", None, 2),
    names(Some("U32"), "uint32", None, 4),
    names(Some("U64"), "uint64", None, 8),
    names(Some("F8_E4M3"), "float8_e4m3fn", None, 1),
    names(Some("F8_E5M2"), "float8_e5m2", None, 1),
    names(Some("F8_E4M3FNUZ"), "float8_e4m3fnuz", None, 1),
    names(Some("F8_E5M2FNUZ"), "float8_e5m2fnuz", None, 1),
    names(Some("F8_E8M0"), "float8_e8m0fnu", None, 1),
    names(None, "float4_e2m1fn_x2", None, 1),
    names(None, "complex32", None, 4),
    names(None, "quint8", Some("QUInt8Storage"), 1),
    names(None, "qint8", Some("QInt8Storage"), 1),
];

/// Dtypes with a fractional number of bytes per item, and their bits: valid in safetensors, and not supported here.
const FRACTIONAL: [(&str, u64); 3] = [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)];

/// A dtype that safetensors can store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtype(TorchDtype, &'static str);

/// A dtype of torch, by its row in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TorchDtype(u8);

impl Dtype {
    /// Returns the dtype of this safetensors name, if it exists.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        TorchDtype::find(|dtype| dtype.safetensors == Some(name))?.stored()
    }

    /// Returns the safetensors name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.1
    }

    /// Returns the size of an item in bytes.
    #[must_use]
    pub fn item_bytes(self) -> u64 {
        self.0.item_bytes()
    }

    /// Returns the size in bytes of the floating numbers in an item; 1 for other dtypes.
    #[must_use]
    pub(crate) fn plane_bytes(self) -> u64 {
        match self.name() {
            "F64" => 8,
            "F32" | "C64" => 4,
            "F16" | "BF16" => 2,
            _ => 1,
        }
    }

    /// Returns the size in bytes of a tensor of this shape; none if it does not fit in 64 bits.
    #[must_use]
    pub fn num_bytes(self, shape: &[u64]) -> Option<u64> {
        // A dim of size 0 makes the tensor empty, whatever the other dims.
        if shape.contains(&0) {
            return Some(0);
        }
        shape.iter().try_fold(self.item_bytes(), |bytes, &extent| {
            bytes.checked_mul(extent)
        })
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl TorchDtype {
    fn find(is_it: impl Fn(&DtypeNames) -> bool) -> Option<Self> {
        let row = DTYPES.iter().position(is_it)?;
        u8::try_from(row).ok().map(Self)
    }

    /// Returns the dtype that torch calls `torch.name`, if it exists.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Self::find(|dtype| dtype.torch == name)
    }

    /// Returns the dtype of the items in a typed storage.
    pub(crate) fn of_storage(name: &str) -> Option<Self> {
        Self::find(|dtype| dtype.storage == Some(name))
    }

    fn names(self) -> &'static DtypeNames {
        &DTYPES[usize::from(self.0)]
    }

    /// Returns the name without `torch.`.
    pub(crate) fn name(self) -> &'static str {
        self.names().torch
    }

    pub(crate) fn item_bytes(self) -> u64 {
        self.names().item_bytes
    }

    /// Returns the dtype as safetensors can store it, if it can.
    pub(crate) fn stored(self) -> Option<Dtype> {
        self.names().safetensors.map(|name| Dtype(self, name))
    }
}

/// Returns the bits of an item of a dtype that safetensors defines and that is not supported; none for others.
pub(crate) fn fractional_bits(name: &str) -> Option<u64> {
    let found = FRACTIONAL.iter().find(|(known, _)| *known == name);
    found.map(|(_, bits)| *bits)
}
