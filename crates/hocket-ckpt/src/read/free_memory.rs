//! The amount of free memory, by the kernel's own estimate and the limits of the process's control groups.

use std::fs;
use std::path::Path;

/// Returns the bytes that the process can use without swapping, cached file pages included; none if the system
/// does not report them.
pub(crate) fn free_memory() -> Option<u64> {
    let free = field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")? * 1024;
    Some(free.min(group_memory().unwrap_or(u64::MAX)))
}

/// Returns the least free memory of the process's control group and the groups above it (cgroup v2).
fn group_memory() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let mut least: Option<u64> = None;
    for group in Path::new("/sys/fs/cgroup").join(own).ancestors() {
        if let Some(free) = free_in(group) {
            least = Some(least.map_or(free, |least| least.min(free)));
        }
    }
    least
}

/// Returns the free memory of one group; none if it has no limit.
fn free_in(group: &Path) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        fs::read_to_string(group.join(name))
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    let limit = number("memory.max")?;
    // Cached file pages count as used, but the kernel drops them when memory is needed.
    let cached = field(
        &fs::read_to_string(group.join("memory.stat")).ok()?,
        "file ",
    )
    .unwrap_or(0);
    Some(limit.saturating_sub(number("memory.current")?) + cached)
}

/// Returns the number that follows `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_group_with_a_limit_has_what_is_neither_used_nor_kept() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
        assert_eq!(free_in(group.path()), None, "no such group");
        write("memory.max", "max\n");
        write("memory.current", "600\n");
        write("memory.stat", "anon 100\nfile 500\nfile_mapped 7\n");
        assert_eq!(free_in(group.path()), None, "no limit");
        write("memory.max", "1000\n");
        assert_eq!(free_in(group.path()), Some(900));
        write("memory.current", "1200\n");
        assert_eq!(free_in(group.path()), Some(500));
    }

    #[test]
    fn this_machine_has_free_memory() {
        assert!(free_memory().unwrap() > 0);
    }
}
