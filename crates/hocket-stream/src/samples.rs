//! A shard's samples in the making, and the values that are stored as they lie in memory.

use std::sync::Arc;

use hocket_store::direct::PAGE_BYTES;

use crate::buffers::{Buffer, Buffers};

/// Samples one behind the other, in memory that earlier shards of the same writer left.
#[derive(Debug, Default)]
pub struct Samples {
    pub(crate) data: Buffer,
    /// Where each ends in `data`.
    pub(crate) ends: Vec<usize>,
    pub(crate) pool: Arc<Buffers>,
}

impl Samples {
    /// None yet, with room for a file of so many `bytes`, and some for the sample that no longer fits.
    pub fn with_capacity(bytes: usize) -> Self {
        let pool = Arc::<Buffers>::default();
        Self {
            data: pool.take(bytes + bytes / 8 + 2 * PAGE_BYTES),
            ends: Vec::new(),
            pool,
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Adds the sample that `fill` appends, and says how many bytes it has; adds nothing where `fill` says
    /// `None`.
    pub fn push(&mut self, fill: impl FnOnce(&mut Vec<u8>) -> Option<()>) -> Option<usize> {
        let start = self.data.len();
        if fill(&mut self.data).is_none() {
            self.data.truncate(start);
            return None;
        }
        self.ends.push(self.data.len());
        Some(self.data.len() - start)
    }

    /// Takes all samples but the last `keep`, which become the first of the next shard.
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

/// What kind of number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An integer from 0.
    Unsigned,
    /// An integer.
    Signed,
    /// A binary float.
    Float,
}

/// A number's kind and width, as NumPy names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number {
    /// What kind of number.
    pub kind: Kind,
    /// Its width: 1, 2, 4 or 8.
    pub bytes: usize,
}

impl Number {
    /// The number that NumPy calls `name`, such as `uint16`.
    pub fn parse(name: &str) -> Option<Self> {
        let (kind, bits) = match name {
            _ if name.starts_with("uint") => (Kind::Unsigned, name.strip_prefix("uint")?),
            _ if name.starts_with("int") => (Kind::Signed, name.strip_prefix("int")?),
            _ => (Kind::Float, name.strip_prefix("float")?),
        };
        let bytes = match (kind, bits) {
            (Kind::Unsigned | Kind::Signed, "8") => 1,
            (_, "16") => 2,
            (_, "32") => 4,
            (_, "64") => 8,
            _ => return None,
        };
        Some(Self { kind, bytes })
    }

    /// The byte by which an array without a type of its own says this one.
    pub fn id(self) -> u8 {
        let kind = match self.kind {
            Kind::Unsigned => 0,
            Kind::Signed => 1,
            Kind::Float => 2,
        };
        8 * self.bytes as u8 + kind
    }

    /// Appends an integer, unless this number does not hold it.
    pub fn append_int(self, value: i128, out: &mut Vec<u8>) -> Option<()> {
        let bits = 8 * self.bytes as u32;
        let range = match self.kind {
            Kind::Unsigned => 0..1i128 << bits,
            Kind::Signed => -(1i128 << (bits - 1))..1i128 << (bits - 1),
            Kind::Float => return None,
        };
        let all = value.to_le_bytes();
        out.extend_from_slice(all.get(..self.bytes).filter(|_| range.contains(&value))?);
        Some(())
    }

    /// Appends a float, unless this number does not hold it; it may lose digits.
    pub fn append_float(self, value: f64, out: &mut Vec<u8>) -> Option<()> {
        match (self.kind, self.bytes) {
            (Kind::Float, 8) => out.extend_from_slice(&value.to_le_bytes()),
            (Kind::Float, 4) if !value.is_finite() || value.abs() <= f64::from(f32::MAX) => {
                out.extend_from_slice(&(value as f32).to_le_bytes());
            }
            _ => return None,
        }
        Some(())
    }
}

/// How a column's values are stored, where that is how they lie in memory on a little-endian machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// A text's UTF-8.
    Text,
    /// One number.
    Number(Number),
    /// An array's values in C order; of any type or any shape, it says them first.
    Array {
        /// Of what, if all arrays are of one type.
        number: Option<Number>,
        /// The shape, if all arrays have one.
        shape: Option<Vec<usize>>,
    },
    /// In another way: only bytes that are encoded already can be copied.
    Otherwise,
}

impl Stored {
    /// How the encoding that an index calls `name` stores its values.
    pub fn parse(name: &str) -> Self {
        let mut parts = name.splitn(3, ':');
        let (kind, number, shape) = (parts.next(), parts.next(), parts.next());
        match (kind, number) {
            (Some("str"), None) => Self::Text,
            (Some("int"), None) => Self::Number(Number {
                kind: Kind::Signed,
                bytes: 8,
            }),
            (Some("ndarray"), _) => {
                let number = number.map(Number::parse);
                let shape = shape.map(|text| text.split(',').map(|dim| dim.parse().ok()).collect());
                match (number, shape) {
                    (Some(None), _) | (_, Some(None)) => Self::Otherwise,
                    (number, shape) => Self::Array {
                        number: number.flatten(),
                        shape: shape.flatten(),
                    },
                }
            }
            (Some(other), None) => Number::parse(other).map_or(Self::Otherwise, Self::Number),
            _ => Self::Otherwise,
        }
    }
}

/// Appends what stands before the values of an array of any shape: the number of dims and the width in which
/// they are written, then each of them. Nothing for a shape that cannot be said so.
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
    fn a_sample_that_is_kept_begins_the_next_shard() {
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
    fn encodings_are_known_by_their_names() {
        let number = Number::parse("uint16").unwrap();
        assert_eq!(
            (number.kind, number.bytes, number.id()),
            (Kind::Unsigned, 2, 16)
        );
        assert_eq!(Number::parse("float64").unwrap().id(), 66);
        assert_eq!(Number::parse("float8"), None);
        assert_eq!(Stored::parse("uint16"), Stored::Number(number));
        let shape = Some(vec![2, 3]);
        let number = Some(number);
        assert_eq!(
            Stored::parse("ndarray:uint16:2,3"),
            Stored::Array { number, shape }
        );
        let (number, shape) = (None, None);
        assert_eq!(Stored::parse("ndarray"), Stored::Array { number, shape });
        for other in ["bytes", "json", "int:8", "ndarray:bool", "ndarray:int8:x"] {
            assert_eq!(Stored::parse(other), Stored::Otherwise, "{other}");
        }
    }

    #[test]
    fn numbers_are_held_or_refused() {
        let mut out = Vec::new();
        let byte = Number::parse("int8").unwrap();
        assert_eq!(byte.append_int(-128, &mut out), Some(()));
        assert_eq!(byte.append_int(128, &mut out), None);
        let most = Number::parse("uint64").unwrap();
        assert_eq!(most.append_int(u64::MAX.into(), &mut out), Some(()));
        assert_eq!(most.append_int(-1, &mut out), None);
        let half = Number::parse("float32").unwrap();
        assert_eq!(half.append_float(1e39, &mut out), None);
        assert_eq!(half.append_float(f64::INFINITY, &mut out), Some(()));
        assert_eq!(out[..9], [128, 255, 255, 255, 255, 255, 255, 255, 255]);
        assert_eq!(out[9..], f32::INFINITY.to_le_bytes());
    }

    #[test]
    fn shapes_are_as_wide_as_their_widest_dim() {
        let mut out = Vec::new();
        append_shape(&[3], &mut out).unwrap();
        append_shape(&[1, 256], &mut out).unwrap();
        assert_eq!(out, [4, 3, 9, 1, 0, 0, 1]);
        assert_eq!(append_shape(&[], &mut out), None);
        assert_eq!(append_shape(&[2, 0], &mut out), None);
    }
}
