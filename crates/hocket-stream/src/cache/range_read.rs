//! Range reads: single samples of a remote shard, without fetching the shard.

use std::ops::Range;
use std::sync::PoisonError;

use hocket_store::{Interrupted, Object};

use super::Cache;
use crate::cache::remote;
use crate::error::{Result, StreamError};
use crate::shard::info::ShardInfo;
use crate::shard::schema::Format;
use crate::shard::{Shard, join};

/// A smaller shard is fetched whole in about the time of a range read's two requests.
const MIN_SHARD_BYTES: u64 = 1 << 20;

/// A range read is used for at most one in this many samples of a shard; for more, a whole fetch is as fast.
const MIN_SAMPLES_PER_REQUEST: usize = 4;

/// After this many range reads, a shard is fetched whole.
const MAX_RANGE_READS: u32 = 8;

impl Cache {
    /// Reads the samples `numbers` (ascending, without repeats) of a remote shard by byte ranges.
    ///
    /// Nearby ranges share a request, and all have the same version (ETag) of the object. Sizes and offsets are
    /// checked; the digest of the whole shard cannot be. The cache is not consulted.
    ///
    /// Returns a shard with only these samples, or none if the whole shard should be fetched: because it is not
    /// a raw MDS shard of a remote, it is small, many of its samples are requested, or it was read often and
    /// would be kept.
    ///
    /// # Errors
    /// [`StreamError::ShardNotFound`], [`StreamError::ShardCorrupt`], the store's own errors;
    /// [`StreamError::Closed`] once `interrupted` returns true.
    pub fn read_ranges(
        &self,
        number: u32,
        numbers: &[u32],
        interrupted: Interrupted<'_>,
    ) -> Result<Option<Shard>> {
        let shard = self.shard(number)?;
        let Some(remote) = &self.remote else {
            return Ok(None);
        };
        let is_raw = shard.row_group.is_none()
            && shard.layout.format == Format::Mds
            && shard.compression.is_none();
        let is_much =
            numbers.len().saturating_mul(MIN_SAMPLES_PER_REQUEST) > shard.samples as usize;
        if !is_raw
            || is_much
            || shard.data.raw.bytes < MIN_SHARD_BYTES
            || (self.is_keeping() && self.is_often_read(number))
        {
            return Ok(None);
        }
        let read = |object: &Object| {
            let samples = take(&shard, numbers, object, interrupted)?;
            self.check_version(&shard.data.raw, object, interrupted)?;
            Ok(samples)
        };
        let (bytes, shard) = self.versions.read(remote, &shard.data.raw, false, read)?;
        self.counters.fetched(bytes);
        Ok(Some(shard))
    }

    /// Counts a range read of a shard and returns whether the shard should be fetched whole from now on.
    fn is_often_read(&self, number: u32) -> bool {
        let mut counts = self
            .range_reads
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let times = counts.entry(number).or_default();
        *times = times.saturating_add(1);
        *times > MAX_RANGE_READS
    }
}

/// Reads the offsets of the samples `numbers`, then the samples, from one version of the object.
///
/// Returns the bytes of the samples, and a shard that contains them.
fn take(
    shard: &ShardInfo,
    numbers: &[u32],
    object: &Object,
    interrupted: Interrupted<'_>,
) -> Result<(u64, Shard)> {
    let name = &shard.data.raw.basename;
    let get = |ranges: &[Range<u64>]| {
        remote::get_ranges(object, ranges, interrupted)?.ok_or_else(|| StreamError::ShardNotFound {
            shard: name.clone(),
            uri: object.uri(),
        })
    };
    let pairs: Vec<Range<u64>> = numbers
        .iter()
        .map(|&number| 4 * u64::from(number) + 4..4 * u64::from(number) + 12)
        .collect();
    let corrupt = |(expected, actual)| StreamError::ShardCorrupt {
        shard: name.clone(),
        object: object.uri(),
        expected,
        actual,
    };
    let words = get(&pairs);
    let bytes = shard.data.raw.bytes;
    if let Some(other) = object.size().filter(|&size| size != bytes) {
        return Err(corrupt((
            format!("{bytes} bytes"),
            format!("{other} bytes"),
        )));
    }
    let extents = extents(shard, numbers, &words?).map_err(corrupt)?;
    let samples = get(&extents)?;
    let bytes = join(&samples);
    let num_bytes = bytes.len() as u64;
    let alone = ShardInfo {
        samples: samples.len() as u32,
        ..shard.clone()
    };
    let opened = Shard::open(&alone, &object.uri(), Box::new(bytes), None)?;
    Ok((num_bytes, opened.only(numbers)))
}

/// Returns the byte range of each sample, from its offset and the next one.
///
/// The error is a pair of texts: the expected value and the actual one.
fn extents<T: AsRef<[u8]>>(
    shard: &ShardInfo,
    numbers: &[u32],
    words: &[T],
) -> std::result::Result<Vec<Range<u64>>, (String, String)> {
    let bytes = shard.data.raw.bytes;
    let mut before = 8 + 4 * u64::from(shard.samples);
    let mut extents = Vec::with_capacity(numbers.len());
    for (number, pair) in numbers.iter().zip(words) {
        let mut offsets = pair.as_ref().chunks_exact(4).map(|word| {
            let bytes = word.iter().rev();
            bytes.fold(0u64, |value, &byte| (value << 8) | u64::from(byte))
        });
        let (Some(begin), Some(end)) = (offsets.next(), offsets.next()) else {
            return Err((format!("offsets of sample {number}"), "fewer bytes".into()));
        };
        // Ascending and disjoint, so all ranges together are at most the size of the shard.
        if begin < before || end < begin || end > bytes {
            return Err((
                format!("sample {number} between {before} and {bytes}"),
                format!("{begin}..{end}"),
            ));
        }
        before = end;
        extents.push(begin..end);
    }
    Ok(extents)
}
