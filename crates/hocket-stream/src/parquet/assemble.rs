//! Nested values as JSON, from the levels of their leaf columns.

use crate::parquet::leaf::LeafColumn;
use crate::parquet::scalar::{Unreadable, append_text};
use crate::parquet::types::{Node, Shape};

/// The leaf columns of one column of the data set.
pub(crate) struct Leaves {
    columns: Vec<LeafColumn>,
    /// The number of the first one in the file.
    first: usize,
}

impl Leaves {
    pub(crate) fn new(columns: Vec<LeafColumn>, first: usize) -> Self {
        Self { columns, first }
    }

    pub(crate) fn get(&mut self, number: usize) -> Result<&mut LeafColumn, Unreadable> {
        let found = self.columns.get_mut(number - self.first);
        found.ok_or_else(|| format!("no leaf column {number}"))
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.columns.iter().all(LeafColumn::is_at_end)
    }

    /// Moves past the entry of a value that is null, or of a list that is empty.
    pub(crate) fn skip(&mut self, node: &Node) -> Result<(), Unreadable> {
        node.leaves().try_for_each(|number| {
            self.get(number)?.skip();
            Ok(())
        })
    }

    /// Moves past the next row, whatever it holds.
    pub(crate) fn pass(&mut self, node: &Node) -> Result<(), Unreadable> {
        node.leaves().try_for_each(|number| {
            self.get(number)?.pass_row();
            Ok(())
        })
    }

    /// Returns whether the next value of `node` is null.
    pub(crate) fn is_null(&mut self, node: &Node) -> Result<bool, Unreadable> {
        let def = self.get(node.first)?.def();
        Ok(node.null_below.is_some_and(|level| def < level))
    }

    /// Passes the elements of the next list to `take`, which has to read each one.
    pub(crate) fn each(
        &mut self,
        node: &Node,
        element: &Node,
        (empty_below, rep): (i16, i16),
        mut take: impl FnMut(&mut Self, usize) -> Result<(), Unreadable>,
    ) -> Result<(), Unreadable> {
        if self.get(node.first)?.def() < empty_below {
            return self.skip(element);
        }
        for number in 0.. {
            take(self, number)?;
            if self.get(node.first)?.rep() != Some(rep) {
                break;
            }
        }
        Ok(())
    }
}

/// Appends the next value of `node` as JSON.
pub(crate) fn append_json(
    node: &Node,
    leaves: &mut Leaves,
    out: &mut Vec<u8>,
) -> Result<(), Unreadable> {
    if leaves.is_null(node)? {
        out.extend_from_slice(b"null");
        return leaves.skip(node);
    }
    match &node.shape {
        Shape::Leaf(kind) => {
            let leaf = leaves.get(node.first)?;
            let at = leaf.take();
            append_text(kind, &leaf.values, at, true, out)
        }
        Shape::Struct(fields) => {
            out.push(b'{');
            for (number, (name, field)) in fields.iter().enumerate() {
                separate(number, out);
                serde_json::to_writer(&mut *out, name).map_err(|error| error.to_string())?;
                out.push(b':');
                append_json(field, leaves, out)?;
            }
            out.push(b'}');
            Ok(())
        }
        Shape::Pair(both) => {
            out.push(b'[');
            for (number, node) in both.iter().enumerate() {
                separate(number, out);
                append_json(node, leaves, out)?;
            }
            out.push(b']');
            Ok(())
        }
        Shape::List {
            element,
            empty_below,
            rep,
        } => {
            out.push(b'[');
            leaves.each(node, element, (*empty_below, *rep), |leaves, number| {
                separate(number, out);
                append_json(element, leaves, out)
            })?;
            out.push(b']');
            Ok(())
        }
    }
}

fn separate(number: usize, out: &mut Vec<u8>) {
    if number > 0 {
        out.push(b',');
    }
}
