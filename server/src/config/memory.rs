//! How much memory this process may use, and what is given to caches by default.
//!
//! The limit is the least of the machine's memory and of the limits of the process's cgroup and all its ancestors, cgroup v2 or v1.

use std::path::{Path, PathBuf};

const MIB: u64 = 1024 * 1024;
/// What is assumed where nothing can be read.
const LIMIT_UNKNOWN: u64 = 1024 * MIB;
/// cgroup v1 says "no limit" by a number near 2^63.
const NO_LIMIT: u64 = 1 << 60;

/// Current values kept in memory: an eighth, between 64 and 192 MiB. Beyond it the gain is small: what is not here is read from the
/// system's page cache.
pub fn value_cache_default(limit: u64) -> u64 {
    (limit / 8).clamp(64 * MIB, 192 * MIB)
}

/// Large responses under way: a quarter, between 64 MiB and 4 GiB.
pub fn response_budget_default(limit: u64) -> u64 {
    (limit / 4).clamp(64 * MIB, 4096 * MIB)
}

/// Bytes that this process may use.
pub fn limit() -> u64 {
    limit_below(Path::new("/"))
}

fn limit_below(root: &Path) -> u64 {
    let machine = of_machine(root);
    let group = of_groups(root);
    match (machine, group) {
        (Some(machine), Some(group)) => machine.min(group),
        (Some(limit), None) | (None, Some(limit)) => limit,
        (None, None) => LIMIT_UNKNOWN,
    }
}

fn of_machine(root: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// The least limit on the way from the process's group to the root. In a container the groups are mounted as if its own were
/// the root, while `/proc/self/cgroup` may still tell the path outside: then only the mount's root is found, which is right.
fn of_groups(root: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mount = root.join("sys/fs/cgroup");
    let mut least = None;
    for line in text.lines().chain(["0::/", "0:memory:/"]) {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (base, file) = if controllers.is_empty() {
            (mount.clone(), "memory.max")
        } else if controllers.split(',').any(|name| name == "memory") {
            (mount.join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        for folder in up_from(&base, path) {
            let limit = std::fs::read_to_string(folder.join(file))
                .ok()
                .and_then(|text| text.trim().parse::<u64>().ok())
                .filter(|limit| *limit < NO_LIMIT);
            least = [least, limit].into_iter().flatten().min();
        }
    }
    least
}

/// `base/a/b`, `base/a`, `base`.
fn up_from(base: &Path, path: &str) -> Vec<PathBuf> {
    let mut folders = vec![base.to_owned()];
    for part in path
        .split('/')
        .filter(|part| !part.is_empty() && *part != "..")
    {
        let next = folders[folders.len() - 1].join(part);
        folders.push(next);
    }
    folders.reverse();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Root(tempfile::TempDir);

    impl Root {
        fn new(files: &[(&str, &str)]) -> Self {
            let root = tempfile::tempdir().unwrap();
            for (path, text) in files {
                let path = root.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            Self(root)
        }

        fn limit(&self) -> u64 {
            limit_below(self.0.path())
        }
    }

    const MACHINE: (&str, &str) = (
        "proc/meminfo",
        "MemTotal:       16384000 kB\nMemFree: 1 kB\n",
    );

    #[test]
    fn the_least_limit_on_the_way_up_counts() {
        let v2 = ("proc/self/cgroup", "0::/pods/a\n");
        assert_eq!(Root::new(&[]).limit(), LIMIT_UNKNOWN);
        assert_eq!(Root::new(&[MACHINE]).limit(), 16_384_000 * 1024);
        let pod = Root::new(&[
            MACHINE,
            v2,
            ("sys/fs/cgroup/pods/a/memory.max", "max\n"),
            ("sys/fs/cgroup/pods/memory.max", "536870912\n"),
        ]);
        assert_eq!(pod.limit(), 512 * MIB);
        // As a container sees it: its own group is the mount's root.
        let inside = Root::new(&[MACHINE, v2, ("sys/fs/cgroup/memory.max", "1073741824\n")]);
        assert_eq!(inside.limit(), 1024 * MIB);
    }

    #[test]
    fn the_older_groups_are_read_too() {
        let files = |limit| {
            [
                MACHINE,
                (
                    "proc/self/cgroup",
                    "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/\n",
                ),
                (
                    "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes",
                    limit,
                ),
            ]
        };
        assert_eq!(Root::new(&files("268435456\n")).limit(), 256 * MIB);
        assert_eq!(
            Root::new(&files("9223372036854771712\n")).limit(),
            16_384_000 * 1024
        );
    }

    #[test]
    fn defaults_have_a_floor_and_a_ceiling() {
        assert_eq!(value_cache_default(100 * MIB), 64 * MIB);
        assert_eq!(value_cache_default(1024 * MIB), 128 * MIB);
        assert_eq!(value_cache_default(1 << 50), 192 * MIB);
        assert_eq!(response_budget_default(1 << 50), 4096 * MIB);
        assert_eq!(response_budget_default(0), 64 * MIB);
    }
}
