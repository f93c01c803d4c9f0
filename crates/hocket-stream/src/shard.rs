//! One MDS shard: where each sample and each column of it lies, with nothing taken on trust.
//!
//! ```text
//! 0            u32 n
//! 4            u32 offset[n + 1]     from the start of the file; the last is the file's size
//! 4 + 4(n+1)   JSON that no reader needs, up to offset[0]
//! offset[i]    u32 size of each variable column, then the columns' bytes in their order
//! ```

use std::sync::Arc;

use crate::error::{Result, StreamError};
use crate::schema::Schema;

/// The bytes of a shard, however they are held.
pub type ShardBytes = Box<dyn AsRef<[u8]> + Send + Sync>;

/// A shard whose table of offsets has been checked as a whole.
pub struct Shard {
    name: String,
    origin: String,
    bytes: ShardBytes,
    schema: Arc<Schema>,
    samples: u32,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Shard")
            .field("name", &self.name)
            .field("samples", &self.samples)
            .finish()
    }
}

impl Shard {
    /// Takes the bytes of shard `name`, read from `origin`, and checks count and offsets.
    ///
    /// # Errors
    /// [`StreamError::ShardCorrupt`] where the table does not fit the file or the index.
    pub fn open(
        name: &str,
        origin: &str,
        bytes: ShardBytes,
        schema: Arc<Schema>,
        samples: u32,
    ) -> Result<Self> {
        let shard = Self {
            name: name.into(),
            origin: origin.into(),
            bytes,
            schema,
            samples,
        };
        shard.check()?;
        Ok(shard)
    }

    /// How many samples it holds.
    pub fn samples(&self) -> u32 {
        self.samples
    }

    /// Its columns.
    pub fn schema(&self) -> &Arc<Schema> {
        &self.schema
    }

    /// Hands each column's bytes of sample `number` to `take(column number, bytes)`.
    ///
    /// # Errors
    /// [`StreamError::ShardCorrupt`] where the sizes do not add up to the sample's extent;
    /// [`StreamError::Config`] for a number past the end.
    pub fn sample<'a>(&'a self, number: u32, mut take: impl FnMut(usize, &'a [u8])) -> Result<()> {
        if number >= self.samples {
            return Err(StreamError::config(format!(
                "sample {number} of shard `{}`: expected a number below {}",
                self.name, self.samples
            )));
        }
        let (Some(begin), Some(end)) = (self.offset(number), self.offset(number + 1)) else {
            return Err(self.corrupt("a whole table of offsets", "a shorter one"));
        };
        let Some(sample) = self.bytes().get(begin..end) else {
            return Err(self.corrupt(
                &format!("sample {number} inside the file"),
                &format!("{begin}..{end}"),
            ));
        };
        let header = 4 * self.schema.num_variable();
        let Some((mut sizes, mut rest)) = sample.split_at_checked(header) else {
            return Err(self.sample_corrupt(number, sample.len()));
        };
        for (place, column) in self.schema.columns.iter().enumerate() {
            let size = match column.width {
                Some(width) => width as usize,
                None => {
                    let Some((size, others)) = sizes.split_first_chunk::<4>() else {
                        return Err(self.sample_corrupt(number, sample.len()));
                    };
                    sizes = others;
                    u32::from_le_bytes(*size) as usize
                }
            };
            let Some((value, others)) = rest.split_at_checked(size) else {
                return Err(self.sample_corrupt(number, sample.len()));
            };
            rest = others;
            take(place, value);
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err(self.sample_corrupt(number, sample.len()))
        }
    }

    fn bytes(&self) -> &[u8] {
        (*self.bytes).as_ref()
    }

    fn offset(&self, number: u32) -> Option<usize> {
        let at = 4 + 4 * number as usize;
        let word = self.bytes().get(at..at + 4)?;
        Some(u32::from_le_bytes(word.try_into().ok()?) as usize)
    }

    fn check(&self) -> Result<()> {
        let bytes = self.bytes();
        let Some((count, table)) = bytes.split_first_chunk::<4>() else {
            return Err(self.corrupt("at least 4 bytes", &format!("{}", bytes.len())));
        };
        let count = u32::from_le_bytes(*count);
        if count != self.samples {
            return Err(self.corrupt(
                &format!("{} samples", self.samples),
                &format!("a count of {count}"),
            ));
        }
        let words = count as usize + 1;
        let Some(table) = table.get(..4 * words) else {
            return Err(self.corrupt(
                &format!("a table of {words} offsets"),
                &format!("{} bytes in all", bytes.len()),
            ));
        };
        let mut before = 4 + 4 * words;
        for (number, word) in table.chunks_exact(4).enumerate() {
            let offset = word
                .iter()
                .rev()
                .fold(0usize, |value, &byte| (value << 8) | usize::from(byte));
            if offset < before || offset > bytes.len() {
                return Err(self.corrupt(
                    &format!("offset {number} between {before} and {}", bytes.len()),
                    &format!("{offset}"),
                ));
            }
            before = offset;
        }
        if before != bytes.len() {
            return Err(self.corrupt(
                &format!("a last offset of {}", bytes.len()),
                &format!("{before}"),
            ));
        }
        Ok(())
    }

    fn sample_corrupt(&self, number: u32, extent: usize) -> StreamError {
        self.corrupt(
            &format!("columns that fill sample {number}"),
            &format!("sizes that do not add up to its {extent} bytes"),
        )
    }

    fn corrupt(&self, expected: &str, actual: &str) -> StreamError {
        StreamError::ShardCorrupt {
            shard: self.name.clone(),
            object: self.origin.clone(),
            expected: expected.into(),
            actual: actual.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use crate::schema::Column;
    use proptest::prelude::*;

    fn schema(widths: &[Option<u32>]) -> Arc<Schema> {
        let columns = widths
            .iter()
            .enumerate()
            .map(|(i, &width)| Column {
                name: format!("c{i}"),
                encoding: "bytes".into(),
                width,
            })
            .collect();
        Arc::new(Schema { columns })
    }

    fn read_all(bytes: Vec<u8>, schema: Arc<Schema>, samples: u32) -> Result<Vec<Vec<Vec<u8>>>> {
        let shard = Shard::open("s.mds", "there/s.mds", Box::new(bytes), schema, samples)?;
        (0..samples)
            .map(|number| {
                let mut columns = Vec::new();
                shard.sample(number, |_, value| columns.push(value.to_vec()))?;
                Ok(columns)
            })
            .collect()
    }

    fn good() -> Vec<u8> {
        // Two samples of one variable and one 2-byte column; the text in between is not looked at.
        let mut bytes = vec![2, 0, 0, 0];
        for offset in [18u32, 18 + 4 + 3 + 2, 18 + 9 + 4 + 2] {
            bytes.extend(offset.to_le_bytes());
        }
        bytes.extend(b"{}");
        bytes.extend([3, 0, 0, 0]);
        bytes.extend(b"abcXY");
        bytes.extend([0, 0, 0, 0]);
        bytes.extend(b"ZW");
        bytes
    }

    #[test]
    fn reads_what_the_layout_says() {
        let samples = read_all(good(), schema(&[None, Some(2)]), 2).unwrap();
        assert_eq!(samples[0], [b"abc".to_vec(), b"XY".to_vec()]);
        assert_eq!(samples[1], [b"".to_vec(), b"ZW".to_vec()]);
    }

    #[test]
    fn an_empty_shard_is_valid() {
        let bytes = [0u32, 10]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .chain(*b"{}")
            .collect();
        assert!(read_all(bytes, schema(&[None]), 0).unwrap().is_empty());
    }

    #[test]
    fn every_truncation_is_found() {
        for len in 0..good().len() {
            let error = read_all(good()[..len].to_vec(), schema(&[None, Some(2)]), 2).unwrap_err();
            assert!(matches!(error, StreamError::ShardCorrupt { .. }), "{error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>, samples in 0u32..6, widths in prop::collection::vec(prop::option::of(1u32..9), 1..4)) {
            let _ = read_all(bytes, schema(&widths), samples);
        }

        #[test]
        fn altered_bytes_never_panic_or_read_outside(place in 0usize..33, value: u8) {
            let mut bytes = good();
            bytes[place] = value;
            if let Ok(samples) = read_all(bytes, schema(&[None, Some(2)]), 2) {
                prop_assert!(samples.iter().flatten().map(Vec::len).sum::<usize>() <= 33);
            }
        }
    }
}
