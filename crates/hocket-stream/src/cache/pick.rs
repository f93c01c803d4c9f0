//! A few samples out of a shard that is not here, by their ranges alone.

use std::ops::Range;
use std::sync::PoisonError;

use hocket_store::Object;

use super::Cache;
use crate::error::{Result, StreamError};
use crate::index::ShardInfo;
use crate::remote;
use crate::schema::Format;
use crate::shard::{Shard, join};

/// Smaller shards come whole in about the time of the two requests that a range takes.
const LEAST_BYTES: u64 = 1 << 20;

/// Of how many samples of a shard one may be asked for; of more, all come as quickly.
const ONE_OF: usize = 4;

/// A shard that was asked for so often is worth having.
const MOST_TIMES: u32 = 8;

impl Cache {
    /// A shard of which only samples `numbers` (ascending, each once) are there: read by their ranges out of
    /// the remote, near ones together and all of one version of the object. The digest of the whole has no part
    /// in it; that sizes and offsets fit is checked.
    ///
    /// `None` where the shard is better had whole: it is no raw MDS shard of a remote, it is small, much of it is
    /// asked for, or it was asked for often. Whether it is here is not looked at.
    ///
    /// # Errors
    /// [`StreamError::ShardNotFound`], [`StreamError::ShardCorrupt`], the store's own errors;
    /// [`StreamError::Closed`] once `interrupted` says so.
    pub fn pick(
        &self,
        number: u32,
        numbers: &[u32],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Shard>> {
        let shard = self.shard(number)?;
        let Some(remote) = &self.remote else {
            return Ok(None);
        };
        let is_raw = shard.layout.format == Format::Mds && shard.compression.is_none();
        let is_much = numbers.len().saturating_mul(ONE_OF) > shard.samples as usize;
        if !is_raw || is_much || shard.data.raw.bytes < LEAST_BYTES || self.is_wanted(number) {
            return Ok(None);
        }
        let pick = |object: &Object| {
            let picked = take(&shard, numbers, object, interrupted)?;
            self.check_version(&shard.data.raw, object)?;
            Ok(picked)
        };
        let (bytes, shard) = self.versions.read(remote, &shard.data.raw, false, pick)?;
        self.counters.fetched(bytes);
        Ok(Some(shard))
    }

    /// Counts one more request for a shard, and says whether there were so many that it should come whole.
    fn is_wanted(&self, number: u32) -> bool {
        let mut picked = self.picked.lock().unwrap_or_else(PoisonError::into_inner);
        let times = picked.entry(number).or_default();
        *times = times.saturating_add(1);
        *times > MOST_TIMES
    }
}

/// The samples `numbers` as a shard, and how many bytes it has: their offsets, then all of them together, out of
/// one version of the object.
fn take(
    shard: &ShardInfo,
    numbers: &[u32],
    object: &Object,
    interrupted: &dyn Fn() -> bool,
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

/// Where the samples lie, by the offsets before and after each; or what was expected, and what was found.
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
        // Ascending, as in the table: so all together are no more than the shard.
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
