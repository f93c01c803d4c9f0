//! Packed shard entries, decoded on access, because an index may list millions.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::shard::codec::Compression;
use crate::shard::info::{ShardInfo, StoredFile};
use crate::shard::row_group::RowGroup;
use crate::shard::schema::Layout;

/// The fields of an entry that are not shared with other shards of its kind.
#[derive(Serialize, Deserialize)]
struct ShardRow {
    kind: u32,
    samples: u32,
    data: StoredFile,
    meta: Option<StoredFile>,
    row_group: Option<RowGroup>,
}

/// The fields that shards of one kind share.
#[derive(Clone, Debug)]
struct ShardKind {
    layout: Arc<Layout>,
    compression: Option<Compression>,
}

/// A list of shards that takes about 60 bytes each, plus their names.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShardList {
    bytes: Vec<u8>,
    /// The end of each shard's bytes.
    ends: Vec<usize>,
    kinds: Vec<ShardKind>,
}

impl ShardList {
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns shard `number`; none past the last.
    pub(crate) fn get(&self, number: usize) -> Option<ShardInfo> {
        let end = *self.ends.get(number)?;
        let begin = match number.checked_sub(1) {
            Some(before) => *self.ends.get(before)?,
            None => 0,
        };
        let row: ShardRow = postcard::from_bytes(self.bytes.get(begin..end)?).ok()?;
        let kind = self.kinds.get(row.kind as usize)?;
        Some(ShardInfo {
            data: row.data,
            meta: row.meta,
            compression: kind.compression,
            layout: kind.layout.clone(),
            samples: row.samples,
            row_group: row.row_group,
        })
    }
}

/// A builder that packs shards in sequence.
#[derive(Default)]
pub(crate) struct ShardListBuilder {
    packed: ShardList,
    known: HashMap<(usize, Option<Compression>), u32>,
}

impl ShardListBuilder {
    pub(crate) fn push(&mut self, shard: ShardInfo) -> postcard::Result<()> {
        let ShardList { bytes, ends, kinds } = &mut self.packed;
        let kind_key = (Arc::as_ptr(&shard.layout) as usize, shard.compression);
        let kind = *self.known.entry(kind_key).or_insert_with(|| {
            kinds.push(ShardKind {
                layout: shard.layout,
                compression: shard.compression,
            });
            kinds.len() as u32 - 1
        });
        let row = ShardRow {
            kind,
            samples: shard.samples,
            data: shard.data,
            meta: shard.meta,
            row_group: shard.row_group,
        };
        *bytes = postcard::to_extend(&row, std::mem::take(bytes))?;
        ends.push(bytes.len());
        Ok(())
    }

    pub(crate) fn finish(mut self) -> ShardList {
        self.packed.bytes.shrink_to_fit();
        self.packed.ends.shrink_to_fit();
        self.packed
    }
}
