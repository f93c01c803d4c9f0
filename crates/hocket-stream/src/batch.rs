//! Whole batches as contiguous columns.

use std::collections::HashMap;
use std::sync::Arc;

use crate::buffers::{Buffer, Buffers};
use crate::error::{Result, StreamError};
use crate::order::{Location, Share};
use crate::schema::Schema;
use crate::shard::Shard;

/// One column of a batch.
#[derive(Debug)]
pub enum ColumnData {
    /// Values of one size, back to back.
    Fixed(Buffer),
    /// Values of their own sizes, back to back; value `i` is `offsets[i]..offsets[i + 1]`.
    Ragged {
        /// The values.
        data: Buffer,
        /// One more than there are values, from 0.
        offsets: Vec<u64>,
    },
}

/// A column of a batch, and which of its samples have it.
#[derive(Debug)]
pub struct BatchColumn {
    /// The values.
    pub data: ColumnData,
    /// The samples they belong to, ascending; `None` where all of them have one.
    pub rows: Option<Vec<u64>>,
}

/// What the columns of batches are.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    /// Every column that any shard has.
    pub schema: Arc<Schema>,
    /// Whether some shard lacks one of them.
    pub is_mixed: bool,
}

/// A rank's part of one global batch.
#[derive(Debug)]
pub struct Batch {
    /// The batch's number in its epoch.
    pub number: u64,
    /// What part of it this is.
    pub share: Share,
    /// The columns, in the index's order.
    pub columns: Vec<BatchColumn>,
}

/// Makes the columns of batches, in memory that earlier batches gave back.
pub struct Gatherer {
    columns: Columns,
    /// Where each column's memory comes from, and how much of it the last batch filled.
    buffers: Vec<(Arc<Buffers>, usize)>,
}

impl Gatherer {
    /// For batches of `columns`.
    pub fn new(columns: Columns) -> Self {
        let count = columns.schema.columns.len();
        Self {
            columns,
            buffers: std::iter::repeat_with(Default::default)
                .take(count)
                .collect(),
        }
    }

    /// Copies the samples at `locations` into columns. Every shard named must be in `shards`.
    ///
    /// # Errors
    /// [`StreamError::SampleCorrupt`] for a sample whose sizes do not add up.
    pub fn gather(
        &mut self,
        locations: &[Location],
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

    /// Empty columns for a batch of `num_samples`.
    fn start(&self, num_samples: usize) -> Vec<ColumnData> {
        // Room for columns that all shards have; each has been found to hold as much for its samples.
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
