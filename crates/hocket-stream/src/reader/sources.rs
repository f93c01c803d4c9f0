//! The data sets of one reader.

use std::sync::Arc;

use hocket_store::Interrupted;

use crate::cache::{Cache, Unsettled};
use crate::error::{Result, StreamError};
use crate::reader::batch::BatchSchema;
use crate::shard::Shard;
use crate::shard::schema::{Column, Schema};

/// Several caches whose shards are numbered consecutively, in the order of the caches.
pub struct DatasetSources {
    caches: Vec<Arc<Cache>>,
    /// The number of each cache's first shard.
    firsts: Vec<u32>,
    columns: BatchSchema,
    /// The position in `columns` of each column of a cache; `None` if they are the same.
    places: Vec<Option<Vec<usize>>>,
}

impl DatasetSources {
    /// Combines `caches`. If their columns differ, a batch has all of them.
    ///
    /// # Errors
    /// [`StreamError::Config`] for 2^32 shards or more.
    pub fn new(caches: Vec<Arc<Cache>>) -> Result<Self> {
        let mut firsts = Vec::with_capacity(caches.len());
        let mut total = 0usize;
        for cache in &caches {
            firsts.push(total as u32);
            total += cache.index().num_shards();
        }
        if u32::try_from(total).is_err() {
            return Err(StreamError::config(format!(
                "the streams together have {total} shards: expected fewer than 2^32"
            )));
        }
        let (columns, places) = merge_columns(&caches);
        Ok(Self {
            caches,
            firsts,
            columns,
            places,
        })
    }

    /// Returns the columns of all streams together.
    pub fn columns(&self) -> &BatchSchema {
        &self.columns
    }

    /// Returns the number of shards of all streams together.
    pub(crate) fn num_shards(&self) -> usize {
        self.caches
            .iter()
            .map(|cache| cache.index().num_shards())
            .sum()
    }

    /// Returns the raw size of a shard in bytes; 0 if there is no such shard.
    pub fn shard_bytes(&self, number: u32) -> u64 {
        let found = self.find(number);
        found
            .and_then(|(cache, number, _)| cache.index().shard(number as usize))
            .map_or(0, |shard| shard.files().map(|file| file.raw.bytes).sum())
    }

    /// Returns the lowest limit of the caches, if any has one.
    pub fn limit_bytes(&self) -> Option<u64> {
        let limits = self.caches.iter().filter_map(|cache| cache.limit_bytes());
        limits.min()
    }

    /// Opens a shard, as [`Cache::open`] does.
    ///
    /// # Errors
    /// As [`Cache::open`].
    pub fn open(&self, number: u32, interrupted: Interrupted<'_>) -> Result<Shard> {
        let (cache, number, places) = self.locate(number)?;
        Ok(moved(cache.open(number, interrupted)?, places))
    }

    /// Opens a shard early, as [`Cache::open_early`] does.
    ///
    /// # Errors
    /// As [`Cache::open`].
    pub(crate) fn open_early(
        &self,
        number: u32,
        interrupted: Interrupted<'_>,
    ) -> Result<(Shard, Unsettled)> {
        let (cache, number, places) = self.locate(number)?;
        let (shard, unsettled) = cache.open_early(number, interrupted)?;
        Ok((moved(shard, places), unsettled))
    }

    /// Opens a shard if it is available locally, as [`Cache::open_here`] does.
    ///
    /// # Errors
    /// As [`Cache::open_here`].
    pub fn open_here(&self, number: u32) -> Result<Option<Shard>> {
        let (cache, number, places) = self.locate(number)?;
        let shard = cache.open_here(number)?;
        Ok(shard.map(|shard| moved(shard, places)))
    }

    /// Reads samples of a shard that is not available locally, as [`Cache::read_ranges`] does.
    ///
    /// # Errors
    /// As [`Cache::read_ranges`].
    pub fn read_ranges(
        &self,
        number: u32,
        numbers: &[u32],
        interrupted: Interrupted<'_>,
    ) -> Result<Option<Shard>> {
        let (cache, number, places) = self.locate(number)?;
        let shard = cache.read_ranges(number, numbers, interrupted)?;
        Ok(shard.map(|shard| moved(shard, places)))
    }

    /// Returns whether some shard did not fit in its cache.
    pub fn has_passed(&self) -> bool {
        self.caches.iter().any(|cache| cache.counts().passed > 0)
    }

    fn locate(&self, number: u32) -> Result<Found<'_>> {
        self.find(number).ok_or_else(|| {
            StreamError::config(format!(
                "shard {number}: there is no stream to read it from"
            ))
        })
    }

    fn find(&self, number: u32) -> Option<Found<'_>> {
        // A stream without shards has the same start as the next one, so the last stream with this start has
        // the shard.
        let stream = self
            .firsts
            .partition_point(|&first| first <= number)
            .checked_sub(1)?;
        let places = self.places.get(stream)?.as_deref();
        Some((
            self.caches.get(stream)?,
            number - self.firsts.get(stream)?,
            places,
        ))
    }
}

/// A cache, the number of a shard in it, and the positions of its columns.
type Found<'a> = (&'a Cache, u32, Option<&'a [usize]>);

fn moved(shard: Shard, places: Option<&[usize]>) -> Shard {
    match places {
        Some(places) => shard.moved(places),
        None => shard,
    }
}

/// Merges the columns of all caches in order of appearance, and returns the positions of each cache's columns
/// among them.
fn merge_columns(caches: &[Arc<Cache>]) -> (BatchSchema, Vec<Option<Vec<usize>>>) {
    // A cache without shards has no columns.
    let full = || caches.iter().filter(|it| it.index().num_shards() > 0);
    let mut columns: Vec<Column> = Vec::new();
    for cache in full() {
        for column in &cache.index().schema().columns {
            if !columns.contains(column) {
                columns.push(column.clone());
            }
        }
    }
    let is_whole = |cache: &Arc<Cache>| cache.index().schema().columns.len() == columns.len();
    let is_mixed = full().any(|cache| cache.index().is_mixed() || !is_whole(cache));
    let place = |column: &Column| columns.iter().position(|known| known == column);
    let places = caches.iter().map(|cache| {
        let own = &cache.index().schema().columns;
        let is_same = columns.starts_with(own);
        (!is_same).then(|| own.iter().filter_map(place).collect())
    });
    let places = places.collect();
    let schema = Arc::new(Schema { columns });
    (BatchSchema { schema, is_mixed }, places)
}
