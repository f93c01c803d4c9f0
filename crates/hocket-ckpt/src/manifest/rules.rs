//! The rules that every document must satisfy, independent of its writer.

use std::collections::{HashMap, HashSet};

use zstd::zstd_safe::compress_bound;

use super::column::IntegerColumn;
use super::document::{DataFile, ManifestChunks, ManifestDocument, ManifestTensor, PathStep};
use super::table::BlockTable;
use super::{ranges, tiling};
use crate::error::{CkptError, Result};
use crate::format::digest::{BLOCK_BYTES, from_base64};
use crate::format::dtypes::Dtype;
use crate::format::names::{BLOCKS_SUFFIX, is_data_path, is_plain_name};
use crate::format::safetensors::HEADER_LIMIT;

/// Limit of a tensor stored inside the manifest, in bytes.
pub const INLINE_BYTES: u64 = 1 << 10;

/// Limit of all tensors inside the manifest together, in bytes.
pub const INLINE_TOTAL_BYTES: u64 = 4 << 20;

/// The most dims of a tensor: NumPy's limit, so that every tensor read can be shown.
pub const MAX_DIMS: usize = 64;

/// Checks a document of a known format, and returns the decoded tables of its files; the error names the
/// violated rule and the item that violates it.
pub(super) fn check(document: &ManifestDocument, uri: &str) -> Result<Vec<BlockTable>> {
    let run = || {
        check_top(document)?;
        let tables = check_files(&document.files)?;
        check_names(document)?;
        check_tensors(document)?;
        Ok(tables)
    };
    run().map_err(|reason: String| CkptError::bad_manifest(uri, reason))
}

fn check_top(document: &ManifestDocument) -> std::result::Result<(), String> {
    check_save_id(&document.save_id)?;
    if let Some(thinned) = &document.thinned {
        check_save_id(&thinned.save_id).map_err(|reason| format!("thinned: {reason}"))?;
    }
    if let Some(delta) = &document.delta {
        check_save_id(&delta.save_id).map_err(|reason| format!("delta: {reason}"))?;
        if !is_plain_name(&delta.base) {
            return Err(format!(
                "delta: the base `{}` is not a plain name",
                delta.base
            ));
        }
        let inlined = document
            .tensors
            .0
            .iter()
            .find(|(_, tensor)| tensor.data.is_some());
        if let Some((name, _)) = inlined {
            return Err(format!("`{name}` is in the manifest of a delta"));
        }
    }
    if document.format < document.least_format() {
        return Err(format!(
            "format {}, and it has fields of format {}",
            document.format,
            document.least_format()
        ));
    }
    check_created(&document.created)?;
    if document.world_size == 0 {
        return Err("world_size 0: expected at least 1".to_owned());
    }
    if let Some(per_rank) = &document.per_rank
        && per_rank.ranks.len() as u64 != document.world_size
    {
        return Err(format!(
            "per_rank has {} ranks, world_size is {}",
            per_rank.ranks.len(),
            document.world_size
        ));
    }
    Ok(())
}

fn check_save_id(id: &str) -> std::result::Result<(), String> {
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if id.len() == 32 && id.bytes().all(is_digit) {
        return Ok(());
    }
    Err(format!(
        "save_id `{id}`: expected 32 lower-case hexadecimal digits"
    ))
}

/// Checks for `YYYY-MM-DDTHH:MM:SS.ffffffZ`, the form that listings show and compare.
pub(super) fn check_created(created: &str) -> std::result::Result<(), String> {
    const FORM: &[u8] = b"0000-00-00T00:00:00.000000Z";
    let fits = |(byte, form): (u8, u8)| byte == form || form == b'0' && byte.is_ascii_digit();
    if created.len() == FORM.len() && created.bytes().zip(FORM.iter().copied()).all(fits) {
        return Ok(());
    }
    Err(format!(
        "created {created:?}: expected `YYYY-MM-DDTHH:MM:SS.ffffffZ`"
    ))
}

fn check_files(files: &[DataFile]) -> std::result::Result<Vec<BlockTable>, String> {
    let mut paths = HashSet::with_capacity(files.len());
    let mut tables = Vec::with_capacity(files.len());
    for file in files {
        let path = &file.path;
        if !is_data_path(path) {
            return Err(format!(
                "file `{path}`: expected a plain path below `data/`"
            ));
        }
        if !paths.insert(path) {
            return Err(format!("file `{path}` is listed twice"));
        }
        if file.data_start > file.size {
            return Err(format!(
                "file `{path}`: data_start {} is beyond its size {}",
                file.data_start, file.size
            ));
        }
        if file.data_start > HEADER_LIMIT as u64 {
            return Err(format!(
                "file `{path}`: a header of {} bytes, at most {HEADER_LIMIT} are read",
                file.data_start
            ));
        }
        if file.header_digest().is_none() {
            return Err(format!("file `{path}`: `header` is not a digest"));
        }
        let table = check_blocks(file).map_err(|reason| format!("file `{path}`: {reason}"))?;
        tables.push(table);
    }
    Ok(tables)
}

/// Decodes the digests and frames of a file. A compressed file has a frame for its header and one for each block,
/// none larger than zstd's bound.
fn check_blocks(file: &DataFile) -> std::result::Result<BlockTable, String> {
    if file.frames.is_some() != file.path.ends_with(BLOCKS_SUFFIX) {
        return Err(format!(
            "files with `frames`, and no others, end with `{BLOCKS_SUFFIX}`"
        ));
    }
    let table = BlockTable::decode(file)?;
    let Some(starts) = &table.frames else {
        return Ok(table);
    };
    let header_limit = compress_bound(file.data_start as usize) as u64;
    let limit = compress_bound(BLOCK_BYTES as usize) as u64;
    let is_too_long = starts.first().is_none_or(|length| *length > header_limit)
        || starts.windows(2).any(|pair| pair[1] - pair[0] > limit);
    if is_too_long {
        return Err("a frame is longer than zstd makes it".to_owned());
    }
    Ok(table)
}

fn check_names(document: &ManifestDocument) -> std::result::Result<(), String> {
    let mut names = HashSet::new();
    let tensors = document
        .tensors
        .0
        .iter()
        .map(|(name, tensor)| (name, &tensor.path));
    let values = document
        .values
        .0
        .iter()
        .map(|(name, leaf)| (name, &leaf.path));
    for (name, path) in tensors.chain(values) {
        let joined = path
            .iter()
            .map(PathStep::to_string)
            .collect::<Vec<_>>()
            .join(".");
        if *name != joined {
            return Err(format!("`{name}` has the path of `{joined}`"));
        }
        if !names.insert(name) {
            return Err(format!("`{name}` is both a tensor and a value"));
        }
    }
    Ok(())
}

fn check_tensors(document: &ManifestDocument) -> std::result::Result<(), String> {
    let by_name: HashMap<&str, &ManifestTensor> = document
        .tensors
        .0
        .iter()
        .map(|(name, tensor)| (name.as_str(), tensor))
        .collect();
    let mut inlined = 0_u64;
    for (name, tensor) in &document.tensors.0 {
        let fail = |reason: String| format!("tensor `{name}`: {reason}");
        let bytes = check_shape(tensor).map_err(fail)?;
        if let Some(other) = &tensor.same_as {
            check_alias(tensor, by_name.get(other.as_str()).copied(), other).map_err(fail)?;
            continue;
        }
        if let Some(data) = &tensor.data {
            inlined += check_inline(data, bytes).map_err(fail)?;
        }
        match &tensor.chunks {
            Some(chunks) => {
                check_chunks(tensor, chunks, &document.files).map_err(fail)?;
            }
            None if bytes > 0 && tensor.data.is_none() => {
                return Err(fail("has neither chunks nor data".to_owned()));
            }
            None => {}
        }
    }
    if inlined > INLINE_TOTAL_BYTES {
        return Err(format!(
            "{inlined} bytes of tensors are inlined, expected at most {INLINE_TOTAL_BYTES}"
        ));
    }
    ranges::check(document)
}

/// Returns the dtype of a tensor's `dtype`.
pub(crate) fn dtype_of(name: &str) -> std::result::Result<Dtype, String> {
    Dtype::parse(name).ok_or_else(|| format!("no dtype is called `{name}`"))
}

/// Returns the size of the whole tensor in bytes.
fn check_shape(tensor: &ManifestTensor) -> std::result::Result<u64, String> {
    let dtype = dtype_of(&tensor.dtype)?;
    if tensor.shape.len() > MAX_DIMS {
        return Err(format!(
            "{} dimensions, expected at most {MAX_DIMS}",
            tensor.shape.len()
        ));
    }
    dtype.num_bytes(&tensor.shape).ok_or_else(|| {
        format!(
            "shape {:?} has more bytes than a 64-bit integer can count",
            tensor.shape
        )
    })
}

fn check_alias(
    tensor: &ManifestTensor,
    other: Option<&ManifestTensor>,
    name: &str,
) -> std::result::Result<(), String> {
    let Some(other) = other else {
        return Err(format!("same_as `{name}`, which does not exist"));
    };
    if other.same_as.is_some() {
        return Err(format!("same_as `{name}`, which is itself an alias"));
    }
    if tensor.chunks.is_some() || tensor.data.is_some() {
        return Err(format!(
            "same_as `{name}`, but it has chunks or data of its own"
        ));
    }
    if tensor.dtype != other.dtype || tensor.shape != other.shape {
        return Err(format!(
            "same_as `{name}`, which has another dtype or shape"
        ));
    }
    Ok(())
}

fn check_inline(data: &str, bytes: u64) -> std::result::Result<u64, String> {
    if bytes > INLINE_BYTES {
        return Err(format!(
            "{bytes} bytes are inlined, expected at most {INLINE_BYTES}"
        ));
    }
    match from_base64(data) {
        Some(data) if data.len() as u64 == bytes => Ok(bytes),
        _ => Err(format!("`data` is not the base64 of {bytes} bytes")),
    }
}

fn check_chunks(
    tensor: &ManifestTensor,
    chunks: &ManifestChunks,
    files: &[DataFile],
) -> std::result::Result<(), String> {
    let count = chunks.file.len();
    let dims = tensor.shape.len();
    let columns = [&chunks.offset, &chunks.length]
        .into_iter()
        .chain(&chunks.start)
        .chain(&chunks.size);
    if chunks.start.len() != dims
        || chunks.size.len() != dims
        || columns.into_iter().any(|column| column.len() != count)
    {
        return Err(format!(
            "its chunks' columns do not have {count} entries each, in {dims} dimensions"
        ));
    }
    let item_bytes = dtype_of(&tensor.dtype)?.item_bytes();
    let mut sizes: Vec<_> = chunks.size.iter().map(IntegerColumn::iter).collect();
    let places = chunks.file.iter().zip(chunks.offset.iter());
    for (index, ((number, offset), length)) in places.zip(chunks.length.iter()).enumerate() {
        let mut sizes = sizes.iter_mut().filter_map(Iterator::next);
        let bytes = sizes.try_fold(item_bytes, u64::checked_mul);
        if length == 0 || bytes != Some(length) {
            let size = chunks.size.iter().map(|column| column.at(index));
            return Err(format!(
                "chunk {index} of size {:?} has a length of {length} bytes",
                size.collect::<Vec<_>>()
            ));
        }
        let file = usize::try_from(number)
            .ok()
            .and_then(|file| files.get(file));
        let Some(file) = file else {
            return Err(format!(
                "chunk {index} is in file {number}, there are {}",
                files.len()
            ));
        };
        if offset
            .checked_add(length)
            .is_none_or(|end| end > file.data_bytes())
        {
            return Err(format!(
                "chunk {index} ends beyond the {} bytes of data of `{}`",
                file.data_bytes(),
                file.path
            ));
        }
    }
    tiling::check_columns(&tensor.shape, count, &chunks.start, &chunks.size)
}
