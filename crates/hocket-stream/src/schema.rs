//! What the samples of a shard consist of: its columns, and how its file writes them.

/// One column.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// The encoding as MDS names it, such as `int` or `ndarray:uint16:2048`; columns of text shards have
    /// the one that their values are handed over in.
    pub encoding: String,
    /// Bytes of every value, or `None` where each sample says its own.
    pub width: Option<u32>,
}

/// Columns in an order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Schema {
    /// All columns; of a shard, in the order in which a sample holds them.
    pub columns: Vec<Column>,
}

impl Schema {
    /// How many columns carry their size in each sample.
    pub fn num_variable(&self) -> usize {
        self.columns
            .iter()
            .filter(|column| column.width.is_none())
            .count()
    }

    /// Bytes of the smallest MDS sample that has these columns.
    pub fn least_bytes(&self) -> u64 {
        self.columns
            .iter()
            .map(|column| column.width.map_or(4, u64::from))
            .sum()
    }
}

/// How a shard's file writes its samples.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// MDS: the table of offsets and the samples in one file.
    Mds,
    /// A JSON object for each sample, ended by `newline`; the offsets are in a file beside it.
    Json {
        /// What ends a sample.
        newline: String,
    },
    /// Values with a separator between them and no quoting, below a line of column names; the offsets are
    /// in a file beside it.
    Xsv {
        /// What stands between two values.
        separator: String,
        /// What ends a sample.
        newline: String,
    },
}

/// One kind of shard in a data set: its format, its columns, and where they go in the data set's.
#[derive(Clone, Debug)]
pub struct Layout {
    /// How the file writes samples.
    pub format: Format,
    /// The shard's own columns.
    pub schema: Schema,
    /// The place of each of them among the columns of the data set.
    pub places: Vec<usize>,
}
