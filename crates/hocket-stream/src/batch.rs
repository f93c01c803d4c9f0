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

/// A rank's part of one global batch.
#[derive(Debug)]
pub struct Batch {
    /// The batch's number in its epoch.
    pub number: u64,
    /// What part of it this is.
    pub share: Share,
    /// The columns, in the schema's order.
    pub columns: Vec<ColumnData>,
}

/// Copies the samples at `locations` into columns. Every shard named must be in `shards`.
///
/// # Errors
/// [`StreamError::ShardCorrupt`] for a sample whose sizes do not add up.
pub fn gather(
    schema: &Schema,
    locations: &[Location],
    shards: &HashMap<u32, Arc<Shard>>,
) -> Result<Vec<ColumnData>> {
    let mut columns: Vec<ColumnData> = schema
        .columns
        .iter()
        .map(|column| match column.width {
            Some(width) => ColumnData::Fixed(Vec::with_capacity(width as usize * locations.len())),
            None => {
                let mut offsets = Vec::with_capacity(locations.len() + 1);
                offsets.push(0);
                ColumnData::Ragged {
                    data: Vec::new(),
                    offsets,
                }
            }
        })
        .collect();
    for location in locations {
        let shard = shards.get(&location.shard).ok_or_else(|| {
            StreamError::config(format!("shard {} was not opened first", location.shard))
        })?;
        shard.sample(location.sample, |place, value| {
            match columns.get_mut(place) {
                Some(ColumnData::Fixed(data)) => data.extend_from_slice(value),
                Some(ColumnData::Ragged { data, offsets }) => {
                    data.extend_from_slice(value);
                    offsets.push(data.len() as u64);
                }
                None => {}
            }
        })?;
    }
    Ok(columns)
}
