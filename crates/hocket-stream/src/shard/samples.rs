//! The samples of an unfinished shard, and encodings whose stored form equals the memory layout.

use std::sync::Arc;

use hocket_store::durable::PAGE_BYTES;

use crate::shard::buffers::{Buffer, BufferPool};

/// Concatenated samples, in memory reused from earlier shards of the same writer.
#[derive(Debug, Default)]
pub struct Samples {
    pub(crate) data: Buffer,
    /// The end of each sample in `data`.
    pub(crate) ends: Vec<usize>,
    pub(crate) pool: Arc<BufferPool>,
}

impl Samples {
    /// Creates an empty list with capacity for a file of `bytes`, and some for the sample that no longer fits.
    pub fn with_capacity(bytes: usize) -> Self {
        let pool = Arc::<BufferPool>::default();
        Self {
            data: pool.take(bytes + bytes / 8 + 2 * PAGE_BYTES),
            ends: Vec::new(),
            pool,
        }
    }

    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Adds the sample that `fill` appends, and returns its size in bytes; adds nothing if `fill` returns none.
    pub fn push(&mut self, fill: impl FnOnce(&mut Vec<u8>) -> Option<()>) -> Option<usize> {
        let start = self.data.len();
        if fill(&mut self.data).is_none() {
            self.data.truncate(start);
            return None;
        }
        self.ends.push(self.data.len());
        Some(self.data.len() - start)
    }

    /// Takes all samples except the last `keep`, which become the first of the next shard.
    pub fn take(&mut self, keep: usize) -> Self {
        let count = self.ends.len().saturating_sub(keep);
        let edge = match count.checked_sub(1) {
            Some(last) => self.ends.get(last).copied().unwrap_or_default(),
            None => 0,
        };
        let mut data = self.pool.take(self.data.capacity());
        data.extend_from_slice(self.data.get(edge..).unwrap_or_default());
        let kept = self.ends.split_off(count);
        let next = Self {
            data,
            ends: kept.into_iter().map(|end| end - edge).collect(),
            pool: self.pool.clone(),
        };
        let mut taken = std::mem::replace(self, next);
        taken.data.truncate(edge);
        taken
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for Samples {
    fn from_iter<T: IntoIterator<Item = S>>(samples: T) -> Self {
        let mut all = Self::default();
        for sample in samples {
            all.data.extend_from_slice(sample.as_ref());
            all.ends.push(all.data.len());
        }
        all
    }
}

/// The kind of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberKind {
    /// An unsigned integer.
    Unsigned,
    /// A signed integer.
    Signed,
    /// A floating-point number.
    Float,
}

/// A number's kind and width, as in NumPy's dtype names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberType {
    /// The kind of the number.
    pub kind: NumberKind,
    /// The width in bytes: 1, 2, 4 or 8.
    pub bytes: usize,
}

impl NumberType {
    /// Parses NumPy's name of a dtype, such as `uint16`.
    pub fn parse(name: &str) -> Option<Self> {
        let (kind, bits) = match name {
            _ if name.starts_with("uint") => (NumberKind::Unsigned, name.strip_prefix("uint")?),
            _ if name.starts_with("int") => (NumberKind::Signed, name.strip_prefix("int")?),
            _ => (NumberKind::Float, name.strip_prefix("float")?),
        };
        let bytes = match (kind, bits) {
            (NumberKind::Unsigned | NumberKind::Signed, "8") => 1,
            (_, "16") => 2,
            (_, "32") => 4,
            (_, "64") => 8,
            _ => return None,
        };
        Some(Self { kind, bytes })
    }

    /// Returns the byte that identifies this dtype in an array column without a fixed dtype.
    pub fn id(self) -> u8 {
        let kind = match self.kind {
            NumberKind::Unsigned => 0,
            NumberKind::Signed => 1,
            NumberKind::Float => 2,
        };
        8 * self.bytes as u8 + kind
    }

    /// Appends an integer; returns none if it is out of range.
    pub fn append_int(self, value: i128, out: &mut Vec<u8>) -> Option<()> {
        let bits = 8 * self.bytes as u32;
        let range = match self.kind {
            NumberKind::Unsigned => 0..1i128 << bits,
            NumberKind::Signed => -(1i128 << (bits - 1))..1i128 << (bits - 1),
            NumberKind::Float => return None,
        };
        let all = value.to_le_bytes();
        out.extend_from_slice(all.get(..self.bytes).filter(|_| range.contains(&value))?);
        Some(())
    }

    /// Appends a float, with a possible loss of precision; returns none if it is out of range.
    pub fn append_float(self, value: f64, out: &mut Vec<u8>) -> Option<()> {
        match (self.kind, self.bytes) {
            (NumberKind::Float, 8) => out.extend_from_slice(&value.to_le_bytes()),
            (NumberKind::Float, 4) if !value.is_finite() || value.abs() <= f64::from(f32::MAX) => {
                out.extend_from_slice(&(value as f32).to_le_bytes());
            }
            _ => return None,
        }
        Some(())
    }
}

/// The first bytes of JPEG and PNG files.
const IMAGE_MAGICS: [&[u8]; 2] = [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"];

/// The stored form of a column's values, if it equals their memory layout on a little-endian machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredForm {
    /// Bytes as they are.
    Bytes,
    /// The UTF-8 bytes of a text.
    Text,
    /// The file of an image.
    Image,
    /// One number.
    Number(NumberType),
    /// An array's values in C order, preceded by dtype and shape where the column does not fix them.
    Array {
        /// The dtype, if the column fixes it.
        number: Option<NumberType>,
        /// The shape, if the column fixes it.
        shape: Option<Vec<usize>>,
    },
    /// Any other form.
    Otherwise,
}

impl StoredForm {
    /// Returns the stored form of an encoding, by its name in the index.
    pub fn parse(name: &str) -> Self {
        let mut parts = name.splitn(3, ':');
        let (kind, number, shape) = (parts.next(), parts.next(), parts.next());
        match (kind, number) {
            (Some("bytes"), None) => Self::Bytes,
            (Some("str"), None) => Self::Text,
            (Some("jpeg" | "png"), None) => Self::Image,
            (Some("int"), None) => Self::Number(NumberType {
                kind: NumberKind::Signed,
                bytes: 8,
            }),
            (Some("ndarray"), _) => {
                let number = number.map(NumberType::parse);
                let shape = shape.map(|text| text.split(',').map(|dim| dim.parse().ok()).collect());
                match (number, shape) {
                    (Some(None), _) | (_, Some(None)) => Self::Otherwise,
                    (number, shape) => Self::Array {
                        number: number.flatten(),
                        shape: shape.flatten(),
                    },
                }
            }
            (Some(other), None) => NumberType::parse(other).map_or(Self::Otherwise, Self::Number),
            _ => Self::Otherwise,
        }
    }

    /// Returns whether bytes are certainly a value that is encoded already. The width is the caller's to check.
    pub fn is_encoded(&self, bytes: &[u8]) -> bool {
        match self {
            Self::Bytes | Self::Number(_) | Self::Array { shape: Some(_), .. } => true,
            Self::Text => std::str::from_utf8(bytes).is_ok(),
            Self::Image => IMAGE_MAGICS.iter().any(|magic| bytes.starts_with(magic)),
            Self::Array { shape: None, .. } | Self::Otherwise => false,
        }
    }
}

/// Appends the shape that precedes the values of an array without a fixed shape: the number of dims and the
/// width of their encoding, then each dim. Returns none if the shape cannot be represented.
pub fn append_shape(shape: &[usize], out: &mut Vec<u8>) -> Option<()> {
    let most = *shape.iter().max()?;
    let size_id = (0..3).find(|id| most >> (8 << id) == 0).unwrap_or(3);
    if shape.len() > 63 || shape.contains(&0) {
        return None;
    }
    out.push((shape.len() << 2 | size_id) as u8);
    for dim in shape {
        out.extend_from_slice(dim.to_le_bytes().get(..1 << size_id)?);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn taking_samples_keeps_the_others_and_a_failed_push_adds_nothing() {
        let mut samples = Samples::default();
        for part in ["ab", "", "cde"] {
            let added = samples.push(|out| {
                out.extend_from_slice(part.as_bytes());
                Some(())
            });
            assert_eq!(added, Some(part.len()));
        }
        let refused = samples.push(|out| {
            out.extend_from_slice(b"half");
            None
        });
        assert_eq!(refused, None);
        let taken = samples.take(1);
        assert_eq!(
            (&taken.data[..], &taken.ends[..]),
            (&b"ab"[..], &[2, 2][..])
        );
        assert_eq!(
            (&samples.data[..], &samples.ends[..]),
            (&b"cde"[..], &[3][..])
        );
        assert!(samples.take(5).is_empty());
        assert_eq!(samples.take(0).data[..], *b"cde");
        assert!(samples.is_empty());
    }

    #[test]
    fn encodings_are_parsed_by_name() {
        let number = NumberType::parse("uint16").unwrap();
        assert_eq!(
            (number.kind, number.bytes, number.id()),
            (NumberKind::Unsigned, 2, 16)
        );
        assert_eq!(NumberType::parse("float64").unwrap().id(), 66);
        assert_eq!(NumberType::parse("float8"), None);
        assert_eq!(StoredForm::parse("uint16"), StoredForm::Number(number));
        let shape = Some(vec![2, 3]);
        let number = Some(number);
        assert_eq!(
            StoredForm::parse("ndarray:uint16:2,3"),
            StoredForm::Array { number, shape }
        );
        let (number, shape) = (None, None);
        assert_eq!(
            StoredForm::parse("ndarray"),
            StoredForm::Array { number, shape }
        );
        for other in [
            "list[jpeg]",
            "json",
            "int:8",
            "ndarray:bool",
            "ndarray:int8:x",
        ] {
            assert_eq!(StoredForm::parse(other), StoredForm::Otherwise, "{other}");
        }
    }

    #[test]
    fn bytes_are_taken_as_encoded_only_where_their_form_is_certain() {
        for (name, bytes) in [
            ("bytes", &b"\xff"[..]),
            ("str", "\u{e9}".as_bytes()),
            ("uint8", b"\xff"),
            ("ndarray:uint8:2", b"\xff\xff"),
            ("jpeg", b"\xff\xd8\xff\xe0"),
            ("png", b"\x89PNG\r\n\x1a\n"),
        ] {
            assert!(StoredForm::parse(name).is_encoded(bytes), "{name}");
        }
        for name in [
            "str",
            "json",
            "ndarray",
            "ndarray:uint8",
            "jpeg",
            "png",
            "pil",
            "pkl",
        ] {
            assert!(!StoredForm::parse(name).is_encoded(b"\xff"), "{name}");
        }
    }

    #[test]
    fn numbers_that_fit_are_stored_and_others_are_an_error() {
        let mut out = Vec::new();
        let byte = NumberType::parse("int8").unwrap();
        assert_eq!(byte.append_int(-128, &mut out), Some(()));
        assert_eq!(byte.append_int(128, &mut out), None);
        let most = NumberType::parse("uint64").unwrap();
        assert_eq!(most.append_int(u64::MAX.into(), &mut out), Some(()));
        assert_eq!(most.append_int(-1, &mut out), None);
        let half = NumberType::parse("float32").unwrap();
        assert_eq!(half.append_float(1e39, &mut out), None);
        assert_eq!(half.append_float(f64::INFINITY, &mut out), Some(()));
        assert_eq!(out[..9], [128, 255, 255, 255, 255, 255, 255, 255, 255]);
        assert_eq!(out[9..], f32::INFINITY.to_le_bytes());
    }

    #[test]
    fn shapes_use_the_width_of_their_largest_dim() {
        let mut out = Vec::new();
        append_shape(&[3], &mut out).unwrap();
        append_shape(&[1, 256], &mut out).unwrap();
        assert_eq!(out, [4, 3, 9, 1, 0, 0, 1]);
        assert_eq!(append_shape(&[], &mut out), None);
        assert_eq!(append_shape(&[2, 0], &mut out), None);
    }
}
