//! One shard: the locations of its samples and their columns, with every offset and size checked.
//!
//! ```text
//! 0            u32 n
//! 4            u32 offset[n + 1]     of the samples; the last is the size of the file that holds them
//! 4 + 4(n+1)   JSON that no reader needs
//! ```
//!
//! An MDS shard begins with this table, and its samples follow up to the end of the file: each has the `u32`
//! sizes of its variable columns, then the columns' bytes in order. A text shard has the table in a second
//! file.

pub mod buffers;
pub mod codec;
pub mod files;
pub mod hash;
pub mod info;
pub mod raw_file;
pub mod row_group;
pub mod samples;
pub mod schema;
mod text;

use std::sync::Arc;

use crate::error::{Result, StreamError};
use crate::shard::info::ShardInfo;
use crate::shard::schema::{Format, Layout};

/// The bytes of a file, mapped or in memory.
pub type ShardBytes = Box<dyn AsRef<[u8]> + Send + Sync>;

/// A shard whose table of offsets has been checked completely.
pub struct Shard {
    name: String,
    origin: String,
    data: ShardBytes,
    /// The second file with the offsets, if there is one.
    meta: Option<ShardBytes>,
    layout: Arc<Layout>,
    samples: u32,
    /// The numbers of its samples in the whole shard, ascending, if it is an excerpt.
    only: Option<Vec<u32>>,
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
    /// Opens a shard from its bytes, read from `origin`, and checks count and offsets. `meta` is the content of
    /// the second file of a text shard.
    ///
    /// # Errors
    /// [`StreamError::ShardCorrupt`] if the table does not match the file or the index.
    pub fn open(
        info: &ShardInfo,
        origin: &str,
        data: ShardBytes,
        meta: Option<ShardBytes>,
    ) -> Result<Self> {
        let table = meta.as_ref().unwrap_or(&data);
        check_table(info, origin, (**table).as_ref(), (*data).as_ref().len())?;
        Ok(Self {
            name: info.data.raw.basename.clone(),
            origin: origin.into(),
            data,
            meta,
            layout: info.layout.clone(),
            samples: info.samples,
            only: None,
        })
    }

    /// Marks this shard as an excerpt: samples `numbers` (ascending) of a larger shard, addressed by these
    /// numbers.
    #[must_use]
    pub(crate) fn only(mut self, numbers: &[u32]) -> Self {
        self.only = Some(numbers.to_vec());
        self
    }

    /// Copies samples `numbers` (ascending, without repeats) to a separate shard.
    ///
    /// # Errors
    /// As [`sample`](Self::sample).
    pub(crate) fn excerpt(&self, numbers: &[u32]) -> Result<Self> {
        let samples = numbers.iter().map(|&number| self.sample_bytes(number));
        let samples = samples.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            name: self.name.clone(),
            origin: self.origin.clone(),
            data: Box::new(join(&samples)),
            // The table is part of the single file, whatever the format.
            meta: None,
            layout: self.layout.clone(),
            samples: samples.len() as u32,
            only: Some(numbers.to_vec()),
        })
    }

    /// Renumbers the columns: `places[p]` is the new position of column `p`.
    pub(crate) fn moved(mut self, places: &[usize]) -> Self {
        let mut layout = (*self.layout).clone();
        for place in &mut layout.places {
            *place = places.get(*place).copied().unwrap_or(*place);
        }
        self.layout = Arc::new(layout);
        self
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> u32 {
        self.samples
    }

    /// Returns the format and the columns.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Passes each column of sample `number` to `take(column number, bytes)`, by the shard's own column
    /// numbers. Columns of a text shard have the encodings of [`Layout::schema`].
    ///
    /// # Errors
    /// [`StreamError::SampleCorrupt`] if the sizes do not add up to the sample's extent, or a text does not
    /// match its columns' types; [`StreamError::ShardCorrupt`] if the table lacks the sample;
    /// [`StreamError::Config`] for a number past the end.
    pub fn sample(&self, number: u32, take: impl FnMut(usize, &[u8])) -> Result<()> {
        let sample = self.sample_bytes(number)?;
        let columns = &self.layout.schema.columns;
        let read = match &self.layout.format {
            Format::Mds => {
                return self.split(sample, take).ok_or_else(|| {
                    let actual = format!("sizes that do not add up to its {} bytes", sample.len());
                    self.corrupt_sample(number, "columns that fill the sample".into(), actual)
                });
            }
            Format::Json { newline } => text::read_json(sample, columns, newline, take),
            Format::Xsv { separator, newline } => {
                text::read_xsv(sample, columns, separator, newline, take)
            }
        };
        read.map_err(|found| self.corrupt_sample(number, found.expected, found.actual))
    }

    /// Returns all bytes of sample `number`.
    fn sample_bytes(&self, number: u32) -> Result<&[u8]> {
        let place = match &self.only {
            None => Some(number).filter(|&number| number < self.samples),
            Some(only) => only.binary_search(&number).ok().map(|place| place as u32),
        };
        let place = place.ok_or_else(|| {
            StreamError::config(format!(
                "sample {number} of shard `{}`: expected one of its {} samples",
                self.name, self.samples
            ))
        })?;
        let (Some(begin), Some(end)) = (self.offset(place), self.offset(place + 1)) else {
            return Err(self.corrupt("a complete table of offsets", "a shorter one"));
        };
        (*self.data).as_ref().get(begin..end).ok_or_else(|| {
            self.corrupt(
                &format!("sample {number} inside the file"),
                &format!("{begin}..{end}"),
            )
        })
    }

    /// Splits an MDS sample into columns; returns none if sizes and extent differ.
    fn split(&self, sample: &[u8], mut take: impl FnMut(usize, &[u8])) -> Option<()> {
        let schema = &self.layout.schema;
        let (mut sizes, mut rest) = sample.split_at_checked(4 * schema.num_variable())?;
        for (place, column) in schema.columns.iter().enumerate() {
            let size = match column.width {
                Some(width) => width as usize,
                None => {
                    let (size, others) = sizes.split_first_chunk::<4>()?;
                    sizes = others;
                    u32::from_le_bytes(*size) as usize
                }
            };
            let (value, others) = rest.split_at_checked(size)?;
            rest = others;
            take(place, value);
        }
        rest.is_empty().then_some(())
    }

    fn offset(&self, number: u32) -> Option<usize> {
        let table = self.meta.as_ref().unwrap_or(&self.data);
        let at = 4 + 4 * number as usize;
        let word = (**table).as_ref().get(at..at + 4)?;
        Some(u32::from_le_bytes(word.try_into().ok()?) as usize)
    }

    fn corrupt_sample(&self, sample: u32, expected: String, actual: String) -> StreamError {
        StreamError::SampleCorrupt {
            sample,
            shard: self.name.clone(),
            object: self.origin.clone(),
            expected,
            actual,
        }
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

/// Builds an MDS shard from samples.
pub(crate) fn join<T: AsRef<[u8]>>(samples: &[T]) -> Vec<u8> {
    let sizes = samples.iter().map(|sample| sample.as_ref().len());
    let first = 8 + 4 * samples.len();
    let mut bytes = Vec::with_capacity(first + sizes.clone().sum::<usize>());
    bytes.extend_from_slice(&(samples.len() as u32).to_le_bytes());
    let mut offset = first;
    bytes.extend_from_slice(&(offset as u32).to_le_bytes());
    for size in sizes {
        offset += size;
        bytes.extend_from_slice(&(offset as u32).to_le_bytes());
    }
    for sample in samples {
        bytes.extend_from_slice(sample.as_ref());
    }
    bytes
}

/// Checks the table of offsets in `table`, the file named by `origin`, against the size of the file with the
/// samples.
///
/// # Errors
/// [`StreamError::ShardCorrupt`] for a count that differs from the index, offsets outside the file or not
/// ascending, and samples that are too small.
pub fn check_table(info: &ShardInfo, origin: &str, table: &[u8], data_bytes: usize) -> Result<()> {
    let corrupt = |expected: String, actual: String| StreamError::ShardCorrupt {
        shard: info.data.raw.basename.clone(),
        object: origin.into(),
        expected,
        actual,
    };
    let Some((count, words)) = table.split_first_chunk::<4>() else {
        return Err(corrupt(
            "at least 4 bytes".into(),
            format!("{}", table.len()),
        ));
    };
    let count = u32::from_le_bytes(*count);
    if count != info.samples {
        return Err(corrupt(
            format!("{} samples", info.samples),
            format!("a count of {count}"),
        ));
    }
    let num_words = count as usize + 1;
    let Some(words) = words.get(..4 * num_words) else {
        return Err(corrupt(
            format!("a table of {num_words} offsets"),
            format!("{} bytes in all", table.len()),
        ));
    };
    let is_mds = info.layout.format == Format::Mds;
    let first = if is_mds { 4 + 4 * num_words } else { 0 };
    let mut before = first;
    for (number, word) in words.chunks_exact(4).enumerate() {
        let offset = word
            .iter()
            .rev()
            .fold(0usize, |value, &byte| (value << 8) | usize::from(byte));
        if offset < before || offset > data_bytes {
            return Err(corrupt(
                format!("offset {number} between {before} and {data_bytes}"),
                format!("{offset}"),
            ));
        }
        before = offset;
    }
    if before != data_bytes {
        return Err(corrupt(
            format!("a last offset of {data_bytes}"),
            format!("{before}"),
        ));
    }
    // Checked before memory for so many values is allocated.
    let least = info
        .layout
        .schema
        .least_bytes()
        .saturating_mul(count.into());
    if is_mds && least > (data_bytes - first) as u64 {
        return Err(corrupt(
            format!("at least {least} bytes for the fixed columns of {count} samples"),
            format!("{} bytes in all", data_bytes),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use crate::shard::info::{FileInfo, StoredFile};
    use crate::shard::schema::{Column, Schema};
    use proptest::prelude::*;

    fn schema(widths: &[Option<u32>]) -> Schema {
        let columns = widths
            .iter()
            .enumerate()
            .map(|(i, &width)| Column {
                name: format!("c{i}"),
                encoding: "bytes".into(),
                width,
            })
            .collect();
        Schema { columns }
    }

    fn read_all(bytes: Vec<u8>, schema: Schema, samples: u32) -> Result<Vec<Vec<Vec<u8>>>> {
        let raw = FileInfo {
            basename: "s.mds".into(),
            bytes: bytes.len() as u64,
            hashes: Vec::new(),
        };
        let places = (0..schema.columns.len()).collect();
        let layout = Layout {
            format: Format::Mds,
            schema,
            places,
        };
        let info = ShardInfo {
            data: StoredFile {
                raw,
                zip: None,
                holds_offsets: true,
            },
            meta: None,
            compression: None,
            layout: Arc::new(layout),
            samples,
            row_group: None,
        };
        let shard = Shard::open(&info, "there/s.mds", Box::new(bytes), None)?;
        (0..samples)
            .map(|number| {
                let mut columns = Vec::new();
                shard.sample(number, |_, value| columns.push(value.to_vec()))?;
                Ok(columns)
            })
            .collect()
    }

    fn good() -> Vec<u8> {
        // Two samples of one variable and one 2-byte column; the JSON in between is not parsed.
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
    fn samples_are_read_by_the_layout() {
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
