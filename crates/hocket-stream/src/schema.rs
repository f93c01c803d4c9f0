//! The columns of a shard: names, encodings, and which of them have one size for every sample.

/// One column.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// The encoding as the index writes it, such as `int` or `ndarray:uint16:2048`.
    pub encoding: String,
    /// Bytes of every value, or `None` where each sample says its own.
    pub width: Option<u32>,
}

/// The columns of a shard, in the order in which a sample holds them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Schema {
    /// All columns, sorted by name when written by any known writer.
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
}
