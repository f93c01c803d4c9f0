//! Names of data files and of the entries in them: those that a save gives, the recognition of a save's files, and
//! the paths that a manifest may contain.

use hocket_store::durable::name_of_hidden;

/// Suffix of compressed data files.
pub(crate) const BLOCKS_SUFFIX: &str = ".blocks";

/// Suffix of plain data files.
const PLAIN_SUFFIX: &str = ".safetensors";

/// Returns the path of a data file inside its checkpoint.
#[must_use]
pub fn data_path(save_id: &str, rank: u64, number: u64, is_compressed: bool) -> String {
    let save = save_id.get(..8).unwrap_or(save_id);
    let suffix = if is_compressed {
        BLOCKS_SUFFIX
    } else {
        PLAIN_SUFFIX
    };
    format!("data/{save}-r{rank:05}-{number:03}{suffix}")
}

/// Returns whether a path inside a checkpoint has the form that [`data_path`] gives, for any save.
#[must_use]
pub fn is_saved_path(path: &str) -> bool {
    path.strip_prefix("data/").and_then(save_of).is_some()
}

/// Returns a chunk's name in the data file: the tensor's name, and the chunk's start unless it is the whole tensor.
#[must_use]
pub fn entry_name(name: &str, start: &[u64], is_whole: bool) -> String {
    if is_whole {
        return name.to_owned();
    }
    let starts: Vec<String> = start.iter().map(u64::to_string).collect();
    format!("{name}@{}", starts.join(","))
}

/// Returns whether a name has the suffix of a data file.
fn is_data_file(name: &str) -> bool {
    name.ends_with(PLAIN_SUFFIX) || name.ends_with(BLOCKS_SUFFIX)
}

/// Returns the save that a data file belongs to, as the first 8 digits of its id, from the file's name; none if
/// the name is not one of Hocket's.
pub(crate) fn save_of(name: &str) -> Option<&str> {
    let (save, rest) = name.split_once("-r")?;
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_ours = save.len() == 8
        && save.bytes().all(is_hex)
        && rest.starts_with(|c: char| c.is_ascii_digit())
        && is_data_file(rest);
    is_ours.then_some(save)
}

/// Returns whether a path inside a checkpoint is the name of a data file of Hocket, or the hidden name of an
/// unfinished one.
pub(crate) fn is_ours(path: &str) -> bool {
    let name = path.strip_prefix("data/");
    name.is_some_and(|name| save_of(name_of_hidden(name).unwrap_or(name)).is_some())
}

/// Prefix of the key on which a commit tests its store; the save's id follows.
pub(crate) const PROBE_PREFIX: &str = ".hocket-probe-";

/// Returns the first digits of the id of the save that wrote a probe with this key, if it is a probe.
pub(crate) fn save_of_probe(key: &str) -> Option<&str> {
    let (id, pid) = key.strip_prefix(PROBE_PREFIX)?.split_once('-')?;
    let is_hex = |digit: u8| digit.is_ascii_hexdigit();
    (id.len() == 32 && id.bytes().all(is_hex) && pid.parse::<u32>().is_ok()).then(|| id.get(..8))?
}

/// Returns whether `path` is a plain relative path below `data/`, as data files must have.
pub(crate) fn is_data_path(path: &str) -> bool {
    path.len() <= 1024 && path.starts_with("data/") && path.split('/').all(is_plain_name)
}

/// Returns whether `name` is one plain path component.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && name != "."
        && name != ".."
        && !name
            .chars()
            .any(|c| c == '/' || c == '\\' || c.is_control())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_file_of_hocket_is_recognized_by_save_and_rank() {
        for good in [
            "data/0badc0de-r00000-000.safetensors",
            "data/0badc0de-r12-1.blocks",
        ] {
            assert!(is_ours(good), "{good}");
        }
        for bad in [
            "data/model.safetensors",
            "data/model-r00000.safetensors",
            "data/0badc0de-rank0.safetensors",
            "data/0badc0de-r00000-000.bin",
            "0badc0de-r00000-000.safetensors",
        ] {
            assert!(!is_ours(bad), "{bad}");
        }
    }

    #[test]
    fn the_path_of_a_data_file_is_recognized() {
        for is_compressed in [false, true] {
            let path = data_path("0badc0de0badc0de", 12, 345, is_compressed);
            assert!(is_saved_path(&path) && is_ours(&path) && is_data_path(&path));
        }
        let path = data_path("0badc0de0badc0de", 12, 3, false);
        assert_eq!(path, "data/0badc0de-r00012-003.safetensors");
        assert_eq!(entry_name("w", &[4, 0], false), "w@4,0");
        assert_eq!(entry_name("w", &[], true), "w");
    }

    #[test]
    fn only_plain_paths_below_data_are_data_files() {
        for good in ["data/a.safetensors", "data/x/y"] {
            assert!(is_data_path(good), "{good}");
        }
        for bad in [
            "",
            "a",
            "/data/a",
            "data/",
            "data/../a",
            "data//a",
            "data/./a",
            "data/a\\b",
            "data/a\n",
            "../data/a",
        ] {
            assert!(!is_data_path(bad), "{bad}");
        }
    }
}
