//! The coordinator's part of a save: joins the reports of all ranks to the manifest.

use std::collections::HashMap;

use serde_json::value::RawValue;

use super::report::{ChunkReport, ReportedChunk, UnpackedReport};
use crate::error::{CkptError, Result};
use crate::format::digest::to_base64;
use crate::manifest::{
    DataFile, IntegerColumn, ManifestChunks, ManifestDocument, ManifestTensor, PathStep,
    encode_document,
};

/// The node of the tensors that hold values of single ranks; they are no part of the state tree.
pub const RANK_VALUES_NODE: &str = "$per_rank";

/// The reports of a save's ranks, in rank order. The chunks stay packed until they are joined.
pub struct RankReports<B> {
    reports: Vec<B>,
    unpacked: Vec<UnpackedReport>,
}

/// How the trees of the ranks relate to the document's tensors.
pub struct ReportedTrees {
    /// For each distinct tree, the index in the document of each of its tensors.
    pub trees: Vec<Vec<usize>>,
    /// The index of each rank's tree.
    pub tree_of: Vec<usize>,
    /// Distinct groups of ranks that hold parts of a tensor.
    pub holders: Vec<Vec<usize>>,
    /// The index of the group of each tensor of the document.
    pub holders_of: Vec<usize>,
    /// The bytes of the tensors that the document has itself, by name.
    pub inlined: HashMap<String, Vec<u8>>,
}

impl<B: AsRef<[u8]>> RankReports<B> {
    /// Unpacks the reports' files.
    ///
    /// # Errors
    /// `Invalid` for bytes that are not a report; the message names the rank.
    pub fn new(reports: Vec<B>) -> Result<Self> {
        let unpack = |(rank, report): (usize, &B)| {
            UnpackedReport::of(report.as_ref()).map_err(|reason| unreadable(rank, &reason))
        };
        let unpacked = reports.iter().enumerate().map(unpack);
        Ok(Self {
            unpacked: unpacked.collect::<Result<_>>()?,
            reports,
        })
    }

    /// Returns the files with the ranks that wrote them, in rank order.
    pub fn files(&self) -> impl Iterator<Item = (usize, &str, u64)> {
        let ranks = self.unpacked.iter().enumerate();
        ranks.flat_map(|(rank, report)| {
            let files = report.files.iter();
            files.map(move |file| (rank, file.path.as_str(), file.stored_bytes()))
        })
    }

    /// Returns the manifest with the files, the chunks and the ranks' own values of all reports. A chunk is left out if
    /// its rank is not among the holders of the tensor: another rank has written it too.
    ///
    /// # Arguments
    /// - `document`: the document without files, chunks, inlined tensors and the values of ranks.
    ///
    /// # Errors
    /// `Invalid` if a report does not match the trees, and the errors of [`crate::encode`], which checks that the
    /// chunks of each tensor tile it.
    pub fn join(&self, document: &[u8], trees: &ReportedTrees) -> Result<Vec<u8>> {
        let mut document: ManifestDocument = serde_json::from_slice(document)
            .map_err(|error| CkptError::Invalid(format!("the document: {error}")))?;
        let num_ranks = self.reports.len();
        if trees.tree_of.len() != num_ranks || trees.holders_of.len() != document.tensors.0.len() {
            return Err(CkptError::Invalid(format!(
                "{num_ranks} reports and {} tensors, and trees of {} ranks and {} tensors",
                document.tensors.0.len(),
                trees.tree_of.len(),
                trees.holders_of.len()
            )));
        }
        for (name, tensor) in &mut document.tensors.0 {
            let data = trees.inlined.get(name);
            tensor.data = data.map(|bytes| to_base64(bytes));
        }
        let mut join = Join::new(&mut document, trees, num_ranks);
        for (rank, report) in self.reports.iter().enumerate() {
            let unpacked = &self.unpacked[rank];
            let frame = &report.as_ref()[unpacked.chunks_at..];
            join.add(rank, frame, &unpacked.files)
                .map_err(|reason| unreadable(rank, &reason))?;
        }
        let (chunks, files, own) = join.finish();
        for ((_, tensor), chunks) in document.tensors.0.iter_mut().zip(chunks) {
            tensor.chunks = (!chunks.file.is_empty()).then_some(chunks);
        }
        document.files = files;
        document.tensors.0.extend(own);
        self.add_own_values(&mut document)?;
        encode_document(document)
    }

    fn add_own_values(&self, document: &mut ManifestDocument) -> Result<()> {
        if self.unpacked.iter().all(|report| report.per_rank.is_none()) {
            document.per_rank = None;
        }
        if let Some(per_rank) = &mut document.per_rank {
            let null = RawValue::from_string("null".to_owned());
            let null = null.map_err(|error| CkptError::process(error.to_string()))?;
            let own = self.unpacked.iter().map(|report| report.per_rank.clone());
            per_rank.ranks = own.map(|own| own.unwrap_or_else(|| null.clone())).collect();
        }
        Ok(())
    }
}

fn unreadable(rank: usize, reason: &str) -> CkptError {
    CkptError::Invalid(format!(
        "the report of rank {rank} on its part of the save cannot be read: {reason}"
    ))
}

/// A join in progress.
struct Join<'a> {
    trees: &'a ReportedTrees,
    /// For each group of ranks, whether a rank is in it.
    holds: Vec<Vec<bool>>,
    chunks: Vec<ManifestChunks>,
    files: Vec<DataFile>,
    own: Vec<(String, ManifestTensor)>,
}

impl<'a> Join<'a> {
    fn new(document: &mut ManifestDocument, trees: &'a ReportedTrees, num_ranks: usize) -> Self {
        let holds = trees.holders.iter().map(|ranks| {
            let mut holds = vec![false; num_ranks];
            for &rank in ranks.iter().filter(|rank| **rank < num_ranks) {
                holds[rank] = true;
            }
            holds
        });
        let tensors = document.tensors.0.iter();
        Self {
            trees,
            holds: holds.collect(),
            chunks: tensors
                .map(|(_, tensor)| ManifestChunks::empty(tensor.shape.len()))
                .collect(),
            files: Vec::with_capacity(num_ranks),
            own: Vec::new(),
        }
    }

    fn add(
        &mut self,
        rank: usize,
        frame: &[u8],
        files: &[DataFile],
    ) -> std::result::Result<(), String> {
        let tree = self.trees.trees.get(self.trees.tree_of[rank]);
        let tree = tree.ok_or("its tree is not known")?;
        let first_file = self.files.len() as u64;
        ChunkReport::of(frame)?.for_each(|chunk| {
            let Some(position) = chunk.tensor else {
                self.own.push(own_values(rank, first_file, chunk)?);
                return Ok(());
            };
            let number = tree.get(position).copied();
            let number = number.ok_or_else(|| format!("its tree has no tensor {position}"))?;
            let group = self.trees.holders_of.get(number);
            let holds = group.and_then(|&group| self.holds.get(group));
            let holds = holds.ok_or_else(|| format!("tensor {number} has no ranks"))?;
            if !holds[rank] {
                return Ok(());
            }
            push(&mut self.chunks[number], first_file, chunk)
        })?;
        self.files.extend_from_slice(files);
        Ok(())
    }

    fn finish(
        mut self,
    ) -> (
        Vec<ManifestChunks>,
        Vec<DataFile>,
        Vec<(String, ManifestTensor)>,
    ) {
        for chunks in &mut self.chunks {
            sort_by_start(chunks);
        }
        (self.chunks, self.files, self.own)
    }
}

fn push(
    columns: &mut ManifestChunks,
    first_file: u64,
    chunk: &ReportedChunk<'_>,
) -> std::result::Result<(), String> {
    if chunk.dims() != columns.size.len() {
        return Err(format!(
            "a chunk has {} dims, its tensor has {}",
            chunk.dims(),
            columns.size.len()
        ));
    }
    columns.file.push(first_file + chunk.file);
    columns.offset.push(chunk.offset);
    columns.length.push(chunk.length);
    for dim in 0..chunk.dims() {
        columns.start[dim].push(chunk.start(dim));
        columns.size[dim].push(chunk.size(dim));
    }
    Ok(())
}

/// Returns the tensor that holds a rank's own values.
fn own_values(
    rank: usize,
    first_file: u64,
    chunk: &ReportedChunk<'_>,
) -> std::result::Result<(String, ManifestTensor), String> {
    let mut chunks = ManifestChunks::empty(1);
    push(&mut chunks, first_file, chunk)?;
    let node = PathStep::Key(RANK_VALUES_NODE.to_owned());
    let tensor = ManifestTensor {
        dtype: "U8".to_owned(),
        shape: vec![chunk.size(0)],
        path: vec![node, PathStep::Position(rank as i64)],
        same_as: None,
        chunks: Some(chunks),
        data: None,
    };
    Ok((format!("{RANK_VALUES_NODE}.{rank}"), tensor))
}

/// Sorts chunks by their starts; those with equal starts keep their order.
fn sort_by_start(chunks: &mut ManifestChunks) {
    let starts = std::mem::take(&mut chunks.start);
    let key = |index: usize| {
        starts
            .iter()
            .map(move |column: &IntegerColumn| column.at(index))
    };
    let count = chunks.file.len();
    let is_sorted = (1..count).all(|index| key(index - 1).le(key(index)));
    if !is_sorted {
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|&one, &other| key(one).cmp(key(other)));
        let sorted = |column: &IntegerColumn| order.iter().map(|&index| column.at(index)).collect();
        let columns = [&mut chunks.file, &mut chunks.offset, &mut chunks.length];
        for column in columns.into_iter().chain(&mut chunks.size) {
            *column = sorted(column);
        }
        chunks.start = starts.iter().map(sorted).collect();
        return;
    }
    chunks.start = starts;
}

#[cfg(test)]
mod tests;
