//! Writes of data files straight from the caller's memory.

use std::collections::BTreeMap;

use crate::error::{CkptError, Result};
use crate::format::names::{BLOCKS_SUFFIX, is_data_path};
use crate::format::safetensors::{TensorEntry, lay_out};
use crate::place::CheckpointPlace;
use crate::workers::Interrupted;
use crate::write::written::{WriteOptions, WrittenDataFile};

/// Writes one data file of a checkpoint and computes its digests.
///
/// # Errors
/// `Exists` if `path` exists already, `Invalid` for a bad entry, path or level, and errors of the disk or the
/// store. After an error no file remains.
pub fn write_file(
    place: &CheckpointPlace,
    path: &str,
    entries: Vec<TensorEntry>,
    metadata: &BTreeMap<String, String>,
    options: WriteOptions,
    interrupted: Interrupted<'_>,
) -> Result<WrittenDataFile> {
    check_arguments(path, options.encoding.map(|encoding| encoding.level))?;
    let layout = lay_out(entries, metadata)?;
    let content = place.files().write(path, &layout, options, interrupted)?;
    Ok(WrittenDataFile::of(path, layout, content))
}

fn check_arguments(path: &str, level: Option<i32>) -> Result<()> {
    if !is_data_path(path) {
        return Err(CkptError::Invalid(format!(
            "`{path}`: expected a plain path below `data/`"
        )));
    }
    if path.ends_with(BLOCKS_SUFFIX) != level.is_some() {
        return Err(CkptError::Invalid(format!(
            "`{path}`: compressed files, and no others, end with `{BLOCKS_SUFFIX}`"
        )));
    }
    let levels = zstd::compression_level_range();
    match level {
        Some(level) if level == 0 || !levels.contains(&level) => Err(CkptError::Invalid(format!(
            "zstd has no level {level}; expected one from {} to {}, not 0",
            levels.start(),
            levels.end()
        ))),
        _ => Ok(()),
    }
}
