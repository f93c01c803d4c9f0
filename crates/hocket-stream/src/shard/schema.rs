//! The columns of a shard's samples, and the file formats of shards.

/// One column.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// The encoding by its MDS name, such as `int` or `ndarray:uint16:2048`; for a column of a text shard, the
    /// encoding in which its values are returned.
    pub encoding: String,
    /// Bytes of every value, or `None` if each sample stores its own size.
    pub width: Option<u32>,
}

/// An ordered list of columns.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Schema {
    /// All columns; for a shard, in the order in which a sample stores them.
    pub columns: Vec<Column>,
}

impl Schema {
    /// Returns the number of columns whose size each sample stores.
    pub fn num_variable(&self) -> usize {
        self.columns
            .iter()
            .filter(|column| column.width.is_none())
            .count()
    }

    /// Returns the size in bytes of the smallest MDS sample with these columns.
    pub fn least_bytes(&self) -> u64 {
        self.columns
            .iter()
            .map(|column| column.width.map_or(4, u64::from))
            .sum()
    }
}

/// The file format of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// MDS: the table of offsets and the samples in one file.
    Mds,
    /// A JSON object per sample, terminated by `newline`; the offsets are in a second file.
    Json {
        /// The terminator of a sample.
        newline: String,
    },
    /// Values with a separator and without quoting, after a line of column names; the offsets are in a second
    /// file.
    Xsv {
        /// The separator of two values.
        separator: String,
        /// The terminator of a sample.
        newline: String,
    },
}

/// The layout of a kind of shard: its format, its columns, and their positions in the data set's schema.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The file format.
    pub format: Format,
    /// The shard's own columns.
    pub schema: Schema,
    /// The position of each of them among the columns of the data set.
    pub places: Vec<usize>,
}
