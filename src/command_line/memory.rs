//! How much memory this process may use: the machine's, or less where a control group has a limit. Knows nothing of
//! what it is used for.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Bytes of memory, of the files below `root` (`/`): the least of what the machine has and what each control group of
/// the process, version 1 or 2, may use. `None` where no file tells.
pub fn available(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = groups.lines().flat_map(|line| limits(root, line));
    machine(root).into_iter().chain(limits).min()
}

/// Of `MemTotal:  24684292 kB`.
fn machine(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// Of a line of `/proc/self/cgroup`, `0::/path` in version 2, `4:memory:/path` in version 1: the limits of the group
/// and of those that it is in. In a container the path may be the host's, and only the root of the hierarchy be there.
fn limits(root: &Path, line: &str) -> Vec<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
        return Vec::new();
    };
    let (hierarchy, files): (_, &[&str]) = match controllers {
        "" => ("sys/fs/cgroup", &["memory.max", "memory.high"]),
        _ if controllers.split(',').any(|name| name == "memory") => {
            ("sys/fs/cgroup/memory", &["memory.limit_in_bytes"])
        }
        _ => return Vec::new(),
    };
    let hierarchy = root.join(hierarchy);
    // `max`, where there is none.
    let limit = |file: PathBuf| fs::read_to_string(file).ok()?.trim().parse().ok();
    let groups = Path::new(path.trim_start_matches('/')).ancestors();
    let found = groups.flat_map(|group| files.iter().map(move |file| group.join(file)));
    found.filter_map(|file| limit(hierarchy.join(file))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of 2 GiB, and what its files say.
    fn tell(files: &[(&str, &str)]) -> Option<u64> {
        let root = std::env::temp_dir().join(format!("userd-memory-{}", std::process::id()));
        let machine = ("proc/meminfo", "MemTotal:        2097152 kB\nMemFree:          123456 kB\n");
        for (file, text) in [machine].iter().chain(files) {
            let file = root.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let told = available(&root);
        fs::remove_dir_all(&root).unwrap();
        told
    }

    #[test]
    fn the_least_of_what_the_machine_and_the_control_groups_have() {
        const MIB: u64 = 1 << 20;
        let in_version_2 = ("proc/self/cgroup", "0::/system.slice/userd.service\n");
        let in_version_1 = ("proc/self/cgroup", "5:cpu:/\n4:cpuacct,memory:/docker/a:b\n0::/x\n");
        let rows: &[(&[(&str, &str)], u64)] = &[
            (&[], 2048),
            (&[in_version_2], 2048),
            (&[in_version_2, ("sys/fs/cgroup/system.slice/userd.service/memory.max", "268435456\n")], 256),
            (&[in_version_2, ("sys/fs/cgroup/system.slice/userd.service/memory.high", "201326592\n")], 192),
            // Of a group that it is in, and of the root, where the path is another one's.
            (
                &[
                    in_version_2,
                    ("sys/fs/cgroup/system.slice/userd.service/memory.max", "max\n"),
                    ("sys/fs/cgroup/system.slice/memory.max", "536870912\n"),
                ],
                512,
            ),
            (&[in_version_2, ("sys/fs/cgroup/memory.max", "134217728\n")], 128),
            (&[in_version_1, ("sys/fs/cgroup/memory/docker/a:b/memory.limit_in_bytes", "268435456\n")], 256),
            (&[in_version_1, ("sys/fs/cgroup/memory/memory.limit_in_bytes", "201326592\n")], 192),
            (&[in_version_1, ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")], 2048),
            // More than the machine has.
            (&[in_version_2, ("sys/fs/cgroup/memory.max", "8589934592\n")], 2048),
            // Another one's.
            (&[in_version_2, ("sys/fs/cgroup/system.slice/other.service/memory.max", "1048576\n")], 2048),
        ];
        for (files, expected) in rows {
            assert_eq!(tell(files), Some(expected * MIB), "{files:?}");
        }
        assert_eq!(available(Path::new("/nowhere/at/all")), None);
    }
}
