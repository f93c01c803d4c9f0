//! Batches as contiguous columns.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Result, StreamError};
use crate::order::{BatchShare, SamplePlace};
use crate::shard::Shard;
use crate::shard::buffers::{Buffer, BufferPool};
use crate::shard::schema::Schema;

/// One column of a batch.
#[derive(Debug)]
pub enum ColumnData {
    /// Values of equal size, concatenated.
    Fixed(Buffer),
    /// Values of different sizes, concatenated; value `i` is `offsets[i]..offsets[i + 1]`.
    Ragged {
        /// The values.
        data: Buffer,
        /// One offset more than there are values, starting at 0.
        offsets: Vec<u64>,
    },
}

/// A column of a batch, with the samples that have it.
#[derive(Debug)]
pub struct BatchColumn {
    /// The values.
    pub data: ColumnData,
    /// The samples of the values, ascending; `None` if every sample has one.
    pub rows: Option<Vec<u64>>,
}

/// The columns of all batches.
#[derive(Clone, Debug, Default)]
pub struct BatchSchema {
    /// Every column that any shard has.
    pub schema: Arc<Schema>,
    /// Whether some shard lacks a column.
    pub is_mixed: bool,
}

/// A rank's part of one global batch.
#[derive(Debug)]
pub struct Batch {
    /// The batch's number in its epoch.
    pub number: u64,
    /// The part of the batch.
    pub share: BatchShare,
    /// The columns, in the index's order.
    pub columns: Vec<BatchColumn>,
}

/// A builder of batch columns, in memory reused from earlier batches.
pub struct BatchGatherer {
    columns: BatchSchema,
    /// The memory pool of each column, and the number of bytes that the last batch used.
    buffers: Vec<(Arc<BufferPool>, usize)>,
}

impl BatchGatherer {
    /// Creates a gatherer for batches of `columns`.
    pub fn new(columns: BatchSchema) -> Self {
        let count = columns.schema.columns.len();
        Self {
            columns,
            buffers: std::iter::repeat_with(Default::default)
                .take(count)
                .collect(),
        }
    }

    /// Copies the samples at `locations` into columns. `shards` must contain every shard they name.
    ///
    /// # Errors
    /// [`StreamError::SampleCorrupt`] for a sample whose sizes do not add up.
    pub fn gather(
        &mut self,
        locations: &[SamplePlace],
        shards: &HashMap<u32, Arc<Shard>>,
    ) -> Result<Vec<BatchColumn>> {
        let is_mixed = self.columns.is_mixed;
        let mut columns = self.start(locations.len());
        let mut rows = vec![Vec::new(); columns.len()];
        for (row, location) in locations.iter().enumerate() {
            let shard = shards.get(&location.shard).ok_or_else(|| {
                StreamError::config(format!("shard {} was not opened first", location.shard))
            })?;
            let places = &shard.layout().places;
            shard.sample(location.sample, |own, value| {
                let Some(&place) = places.get(own) else {
                    return;
                };
                match columns.get_mut(place) {
                    Some(ColumnData::Fixed(data)) => data.extend_from_slice(value),
                    Some(ColumnData::Ragged { data, offsets }) => {
                        data.extend_from_slice(value);
                        offsets.push(data.len() as u64);
                    }
                    None => {}
                }
                if let (true, Some(rows)) = (is_mixed, rows.get_mut(place)) {
                    rows.push(row as u64);
                }
            })?;
        }
        for (column, (_, filled)) in columns.iter().zip(&mut self.buffers) {
            let (ColumnData::Fixed(data) | ColumnData::Ragged { data, .. }) = column;
            *filled = data.len();
        }
        let whole = |rows: &Vec<u64>| !is_mixed || rows.len() == locations.len();
        let columns = columns.into_iter().zip(rows);
        Ok(columns
            .map(|(data, rows)| BatchColumn {
                data,
                rows: (!whole(&rows)).then_some(rows),
            })
            .collect())
    }

    /// Returns empty columns for a batch of `num_samples`.
    fn start(&self, num_samples: usize) -> Vec<ColumnData> {
        // Reserves memory only if all shards have all columns: each shard was then checked to be large enough
        // for its samples, so a wrong width in the index cannot request too much memory.
        let room = if self.columns.is_mixed {
            0
        } else {
            num_samples
        };
        let columns = self.columns.schema.columns.iter().zip(&self.buffers);
        columns
            .map(|(column, (buffers, filled))| match column.width {
                Some(width) => ColumnData::Fixed(buffers.take(width as usize * room)),
                None => {
                    let mut offsets = Vec::with_capacity(room + 1);
                    offsets.push(0);
                    let data = buffers.take(*filled);
                    ColumnData::Ragged { data, offsets }
                }
            })
            .collect()
    }
}
