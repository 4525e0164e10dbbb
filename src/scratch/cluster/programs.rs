//! Where this machine keeps `initdb` and `postgres`. Knows places and versions, nothing of clusters.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use super::ClusterError;

/// From here on `postmaster.pid` says when the server is ready.
const OLDEST: u32 = 10;

/// `PARENT/PREFIX<version>/SUFFIX`: how systems keep several versions side by side.
const VERSIONED: [(&str, &str, &str); 7] = [
    ("usr/lib/postgresql", "", "bin"),          // Debian
    ("usr", "pgsql-", "bin"),                   // the PostgreSQL project's RPMs
    ("usr/libexec", "postgresql", ""),          // Alpine
    ("usr/lib", "postgresql", "bin"),           // openSUSE
    ("usr/lib64", "postgresql-", "bin"),        // Gentoo
    ("opt/homebrew/opt", "postgresql@", "bin"), // Homebrew
    ("usr/local/opt", "postgresql@", "bin"),    // Homebrew on Intel
];
const FIXED: [&str; 7] = [
    "usr/local/pgsql/bin",
    "usr/libexec/postgresql",
    "opt/homebrew/opt/postgresql/bin",
    "opt/homebrew/bin",
    "usr/local/opt/postgresql/bin",
    "usr/local/bin",
    "usr/bin",
];

/// One installation's server programs.
pub(super) struct Programs {
    pub initdb: PathBuf,
    pub postgres: PathBuf,
    pub major: u32,
}

impl Programs {
    /// The first installation found (PATH, then `pg_config`, then the usual places, highest version
    /// first), or the first of version `wanted`: a cluster opens with its own version only.
    pub fn find(wanted: Option<u32>) -> Result<Programs, ClusterError> {
        let mut found = Vec::new();
        for dir in candidates(Path::new("/"), env::var_os("PATH").as_deref(), pg_config_bindir()) {
            let (initdb, postgres) = (dir.join("initdb"), dir.join("postgres"));
            if !initdb.is_file() {
                continue;
            }
            match version(&postgres) {
                Some(major) if major >= OLDEST && wanted.is_none_or(|wanted| wanted == major) => {
                    return Ok(Programs { initdb, postgres, major });
                }
                Some(major) if !found.contains(&major) => found.push(major),
                _ => {}
            }
        }
        found.sort_unstable();
        let found: Vec<String> = found.iter().map(u32::to_string).collect();
        let found = found.join(", ");
        Err(ClusterError::new(match (wanted, found.is_empty()) {
            (None, true) => "PostgreSQL's server programs (initdb, postgres) were not found; \
                             on Debian: apt-get install postgresql"
                .to_owned(),
            (None, false) => format!("PostgreSQL {found} is too old: install {OLDEST} or newer"),
            (Some(wanted), true) => format!(
                "the cluster needs PostgreSQL {wanted}, and no PostgreSQL server programs were found; \
                 on Debian: apt-get install postgresql-{wanted}"
            ),
            (Some(wanted), false) => format!(
                "the cluster needs PostgreSQL {wanted}, and PostgreSQL {found} is installed: \
                 install {wanted} as well, or move the data with pg_upgrade or pg_dump"
            ),
        }))
    }
}

/// Directories to look in, best first; `root` is `/` outside tests.
fn candidates(root: &Path, path: Option<&OsStr>, pg_config: Option<PathBuf>) -> Vec<PathBuf> {
    // Relative entries are skipped: the programs run in another directory.
    let path = path.map(env::split_paths).into_iter().flatten();
    let mut dirs: Vec<PathBuf> = path.filter(|dir| dir.is_absolute()).collect();
    dirs.extend(pg_config);
    for (parent, prefix, suffix) in VERSIONED {
        let entries = fs::read_dir(root.join(parent)).into_iter().flatten().flatten();
        let mut versions: Vec<(u32, PathBuf)> = entries
            .filter_map(|entry| {
                let name = entry.file_name();
                let number = number(name.to_str()?.strip_prefix(prefix)?)?;
                Some((number, entry.path().join(suffix)))
            })
            .collect();
        versions.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
        dirs.extend(versions.into_iter().map(|(_, dir)| dir));
    }
    dirs.extend(FIXED.map(|dir| root.join(dir)));
    dirs
}

fn pg_config_bindir() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").output().ok()?;
    let dir = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim_end());
    dir.is_absolute().then_some(dir)
}

/// The major version, from `postgres (PostgreSQL) 15.18 (Debian …)`.
fn version(postgres: &Path) -> Option<u32> {
    let output = Command::new(postgres).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_once("(PostgreSQL) ").and_then(|(_, version)| number(version))
}

/// The number a text begins with: 9 of `9.6`, 17 of `17beta1`.
pub(super) fn number(text: &str) -> Option<u32> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_version_comes_first_and_path_before_all() {
        let root = env::temp_dir().join(format!("userd-programs-{}", std::process::id()));
        for dir in ["9.6", "9", "10", "16", "junk"] {
            fs::create_dir_all(root.join("usr/lib/postgresql").join(dir).join("bin")).unwrap();
        }
        fs::create_dir_all(root.join("usr/pgsql-17/bin")).unwrap();
        fs::create_dir_all(root.join("usr/libexec/postgresql15")).unwrap();
        let path = OsStr::new("/a/bin:relative::/b/bin");
        let found = candidates(&root, Some(path), Some("/pg/bin".into()));
        let found: Vec<_> = found.iter().map(|dir| dir.strip_prefix(&root).unwrap_or(dir)).collect();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found[..3], ["/a/bin", "/b/bin", "/pg/bin"].map(Path::new));
        assert_eq!(found[3], Path::new("usr/lib/postgresql/16/bin"));
        assert_eq!(found[4], Path::new("usr/lib/postgresql/10/bin"));
        assert_eq!(found[7], Path::new("usr/pgsql-17/bin"));
        assert_eq!(found[8], Path::new("usr/libexec/postgresql15"));
        assert_eq!(found.len(), 9 + FIXED.len());
    }

    #[test]
    fn numbers() {
        let table = [("15.18 (Debian)", Some(15)), ("17beta1", Some(17)), ("9.6", Some(9)), ("x", None)];
        for (text, expected) in table {
            assert_eq!(number(text), expected, "{text}");
        }
    }
}
