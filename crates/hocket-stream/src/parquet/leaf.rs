//! The values and levels of one leaf column of a row group.

use std::sync::Arc;

use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::{ByteArray, DataType, FixedLenByteArray, Int96};
use parquet::errors::Result;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::serialized_reader::SerializedPageReader;

use crate::parquet::sparse::SparseFile;

/// The values of a leaf column that are not null, by physical type.
pub(crate) enum LeafValues {
    Bool(Vec<bool>),
    Int32(Vec<i32>),
    Int64(Vec<i64>),
    Int96(Vec<Int96>),
    Float(Vec<f32>),
    Double(Vec<f64>),
    Bytes(Vec<ByteArray>),
    Fixed(Vec<FixedLenByteArray>),
}

impl LeafValues {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Bool(values) => values.len(),
            Self::Int32(values) => values.len(),
            Self::Int64(values) => values.len(),
            Self::Int96(values) => values.len(),
            Self::Float(values) => values.len(),
            Self::Double(values) => values.len(),
            Self::Bytes(values) => values.len(),
            Self::Fixed(values) => values.len(),
        }
    }
}

/// A leaf column, and the position up to which it was read.
pub(crate) struct LeafColumn {
    pub(crate) values: LeafValues,
    /// Definition levels; empty if all values are there and none is in a list.
    def: Vec<i16>,
    /// Repetition levels; empty outside of lists.
    rep: Vec<i16>,
    /// The level, and the value, that come next.
    level: usize,
    value: usize,
    max_def: i16,
}

impl LeafColumn {
    /// Reads leaf column `number` of a row group.
    pub(crate) fn read(
        file: Arc<SparseFile>,
        group: &RowGroupMetaData,
        number: usize,
    ) -> Result<Self> {
        let chunk = group.columns().get(number).ok_or_else(|| {
            parquet::errors::ParquetError::General(format!("no column {number} in the row group"))
        })?;
        let rows = group.num_rows().max(0) as usize;
        let descriptor = chunk.column_descr_ptr();
        let pages = SerializedPageReader::new(file, chunk, rows, None)?;
        let reader = get_column_reader(descriptor.clone(), Box::new(pages));
        let (mut def, mut rep) = (Vec::new(), Vec::new());
        let levels = (&mut def, &mut rep);
        let values = match reader {
            ColumnReader::BoolColumnReader(reader) => LeafValues::Bool(all(reader, rows, levels)?),
            ColumnReader::Int32ColumnReader(reader) => {
                LeafValues::Int32(all(reader, rows, levels)?)
            }
            ColumnReader::Int64ColumnReader(reader) => {
                LeafValues::Int64(all(reader, rows, levels)?)
            }
            ColumnReader::Int96ColumnReader(reader) => {
                LeafValues::Int96(all(reader, rows, levels)?)
            }
            ColumnReader::FloatColumnReader(reader) => {
                LeafValues::Float(all(reader, rows, levels)?)
            }
            ColumnReader::DoubleColumnReader(reader) => {
                LeafValues::Double(all(reader, rows, levels)?)
            }
            ColumnReader::ByteArrayColumnReader(reader) => {
                LeafValues::Bytes(all(reader, rows, levels)?)
            }
            ColumnReader::FixedLenByteArrayColumnReader(reader) => {
                LeafValues::Fixed(all(reader, rows, levels)?)
            }
        };
        Ok(Self {
            values,
            def,
            rep,
            level: 0,
            value: 0,
            max_def: descriptor.max_def_level(),
        })
    }

    /// Returns the definition level of the next entry.
    pub(crate) fn def(&self) -> i16 {
        self.def.get(self.level).copied().unwrap_or(self.max_def)
    }

    /// Returns the repetition level of the next entry; none at the end, or outside of lists.
    pub(crate) fn rep(&self) -> Option<i16> {
        self.rep.get(self.level).copied()
    }

    /// Returns whether the next entry has a value.
    pub(crate) fn is_value(&self) -> bool {
        self.def() == self.max_def
    }

    /// Moves past an entry without a value.
    pub(crate) fn skip(&mut self) {
        self.level += 1;
    }

    /// Moves past an entry with a value, and returns the value's number.
    pub(crate) fn take(&mut self) -> usize {
        self.level += 1;
        self.value += 1;
        self.value - 1
    }

    /// Moves past all entries of the next row.
    pub(crate) fn pass_row(&mut self) {
        loop {
            if self.is_value() {
                self.take();
            } else {
                self.skip();
            }
            // An entry that is not the first of its row has a level above 0.
            if self.rep().is_none_or(|level| level == 0) {
                return;
            }
        }
    }

    /// Returns whether all entries were read.
    pub(crate) fn is_at_end(&self) -> bool {
        self.value == self.values.len() && (self.def.is_empty() || self.level == self.def.len())
    }

    /// Returns the number of the first row that is null in a column without lists.
    pub(crate) fn first_null(&self) -> Option<usize> {
        self.def.iter().position(|&level| level < self.max_def)
    }
}

/// Reads all values of a column of `rows` rows.
fn all<T: DataType>(
    mut reader: ColumnReaderImpl<T>,
    rows: usize,
    levels: (&mut Vec<i16>, &mut Vec<i16>),
) -> Result<Vec<T::T>> {
    let (def, rep) = levels;
    let (mut values, mut seen) = (Vec::new(), 0);
    while seen < rows {
        let (records, ..) =
            reader.read_records(rows - seen, Some(&mut *def), Some(&mut *rep), &mut values)?;
        if records == 0 {
            break;
        }
        seen += records;
    }
    if seen != rows {
        return Err(parquet::errors::ParquetError::General(format!(
            "{seen} of {rows} rows in a column"
        )));
    }
    Ok(values)
}
