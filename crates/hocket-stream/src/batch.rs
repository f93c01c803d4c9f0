//! Whole batches as contiguous columns.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Result, StreamError};
use crate::order::{Location, Share};
use crate::schema::Schema;
use crate::shard::Shard;

/// One column of a batch.
#[derive(Debug, PartialEq, Eq)]
pub enum ColumnData {
    /// Values of one size, back to back.
    Fixed(Vec<u8>),
    /// Values of their own sizes, back to back; value `i` is `offsets[i]..offsets[i + 1]`.
    Ragged {
        /// The values.
        data: Vec<u8>,
        /// One more than there are values, from 0.
        offsets: Vec<u64>,
    },
}

/// A column of a batch, and which of its samples have it.
#[derive(Debug, PartialEq, Eq)]
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

/// Copies the samples at `locations` into `columns`. Every shard named must be in `shards`.
///
/// # Errors
/// [`StreamError::SampleCorrupt`] for a sample whose sizes do not add up.
pub fn gather(
    columns: &Columns,
    locations: &[Location],
    shards: &HashMap<u32, Arc<Shard>>,
) -> Result<Vec<BatchColumn>> {
    // Room for columns that all shards have; each has been found to hold as much for its samples.
    let is_mixed = columns.is_mixed;
    let room = if is_mixed { 0 } else { locations.len() };
    let mut columns: Vec<ColumnData> = columns
        .schema
        .columns
        .iter()
        .map(|column| match column.width {
            Some(width) => ColumnData::Fixed(Vec::with_capacity(width as usize * room)),
            None => {
                let mut offsets = Vec::with_capacity(room + 1);
                offsets.push(0);
                ColumnData::Ragged {
                    data: Vec::new(),
                    offsets,
                }
            }
        })
        .collect();
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
    let whole = |rows: &Vec<u64>| !is_mixed || rows.len() == locations.len();
    let columns = columns.into_iter().zip(rows);
    Ok(columns
        .map(|(data, rows)| BatchColumn {
            data,
            rows: (!whole(&rows)).then_some(rows),
        })
        .collect())
}
