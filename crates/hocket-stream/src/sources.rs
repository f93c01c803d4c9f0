//! The data sets that one reader reads from.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::batch::Columns;
use crate::cache::{Cache, Unsettled};
use crate::error::{Result, StreamError};
use crate::schema::Schema;
use crate::shard::Shard;

/// Several caches whose shards are numbered as those of one data set, in the order of the caches.
pub struct Sources {
    caches: Vec<Arc<Cache>>,
    /// The number of each cache's first shard.
    firsts: Vec<u32>,
    columns: Columns,
}

impl Sources {
    /// The shards of `caches`, which must hold the same columns.
    ///
    /// # Errors
    /// [`StreamError::Config`] for differing columns, or for 2^32 shards or more.
    pub fn new(caches: Vec<Arc<Cache>>) -> Result<Self> {
        let mut schema: Option<Arc<Schema>> = None;
        let mut firsts = Vec::with_capacity(caches.len());
        let mut total = 0usize;
        for (number, cache) in caches.iter().enumerate() {
            let index = cache.index();
            firsts.push(total as u32);
            total += index.num_shards();
            match &schema {
                // Without shards there are no columns either.
                _ if index.num_shards() == 0 => {}
                None => schema = Some(index.schema().clone()),
                Some(first) if **first != **index.schema() => {
                    return Err(StreamError::config(format!(
                        "stream {number} has the columns {}, and those before it {}: expected the same names, encodings and sizes in all streams of one run",
                        describe(index.schema()),
                        describe(first)
                    )));
                }
                Some(_) => {}
            }
        }
        if u32::try_from(total).is_err() {
            return Err(StreamError::config(format!(
                "the streams together have {total} shards: expected fewer than 2^32"
            )));
        }
        let columns = Columns {
            schema: schema.unwrap_or_default(),
            is_mixed: caches.iter().any(|cache| cache.index().is_mixed()),
        };
        Ok(Self {
            caches,
            firsts,
            columns,
        })
    }

    /// The columns, the same in every stream.
    pub fn columns(&self) -> &Columns {
        &self.columns
    }

    /// Bytes of a shard as it is read; 0 where there is no such shard.
    pub fn shard_bytes(&self, number: u32) -> u64 {
        let found = self.find(number);
        found
            .and_then(|(cache, number)| cache.index().shard(number as usize))
            .map_or(0, |shard| shard.files().map(|file| file.raw.bytes).sum())
    }

    /// The least limit of the caches, if one has any.
    pub fn limit_bytes(&self) -> Option<u64> {
        let limits = self.caches.iter().filter_map(|cache| cache.limit_bytes());
        limits.min()
    }

    /// Opens a shard; as [`Cache::open`].
    ///
    /// # Errors
    /// As [`Cache::open`].
    pub fn open(&self, number: u32, stop: &AtomicBool) -> Result<Shard> {
        let (cache, number) = self.locate(number)?;
        cache.open(number, stop)
    }

    /// Opens a shard early; as [`Cache::open_early`].
    ///
    /// # Errors
    /// As [`Cache::open`].
    pub(crate) fn open_early(&self, number: u32, stop: &AtomicBool) -> Result<(Shard, Unsettled)> {
        let (cache, number) = self.locate(number)?;
        cache.open_early(number, stop)
    }

    /// Opens a shard if it is here; as [`Cache::open_here`].
    ///
    /// # Errors
    /// As [`Cache::open_here`].
    pub fn open_here(&self, number: u32) -> Result<Option<Shard>> {
        let (cache, number) = self.locate(number)?;
        cache.open_here(number)
    }

    /// Some samples of a shard that is not here; as [`Cache::pick`].
    ///
    /// # Errors
    /// As [`Cache::pick`].
    pub fn pick(
        &self,
        number: u32,
        numbers: &[u32],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Shard>> {
        let (cache, number) = self.locate(number)?;
        cache.pick(number, numbers, interrupted)
    }

    /// Whether some shard found no room in its cache.
    pub fn has_passed(&self) -> bool {
        self.caches.iter().any(|cache| cache.counts().passed > 0)
    }

    fn locate(&self, number: u32) -> Result<(&Cache, u32)> {
        self.find(number).ok_or_else(|| {
            StreamError::config(format!(
                "shard {number}: there is no stream to read it from"
            ))
        })
    }

    fn find(&self, number: u32) -> Option<(&Cache, u32)> {
        // Of streams without shards, which begin where the next does, the last holds the shard.
        let stream = self
            .firsts
            .partition_point(|&first| first <= number)
            .checked_sub(1)?;
        Some((self.caches.get(stream)?, number - self.firsts.get(stream)?))
    }
}

fn describe(schema: &Schema) -> String {
    let columns = schema.columns.iter();
    let columns: Vec<String> = columns
        .map(|column| format!("`{}: {}`", column.name, column.encoding))
        .collect();
    columns.join(", ")
}
