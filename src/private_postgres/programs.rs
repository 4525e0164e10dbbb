//! Where this machine keeps `initdb` and `postgres`, and whether they start. Knows places and versions, nothing of
//! clusters.

use super::{Account, ClusterError, Result};
use std::os::unix::fs::MetadataExt;
use std::path::{self, Path, PathBuf};
use std::{env, fs, io};

/// Variable that names the directory of the programs.
const VARIABLE: &str = "POSTGRES_BIN";
/// Oldest version that is supported.
const OLDEST_MAJOR: u32 = 13;

/// Returns the directory of the programs that are named, or else of the first that are found, and their version. A
/// cluster opens with its own version only: `wanted`. The account must be able to run them.
pub(super) fn find(wanted: Option<u32>, account: &Account) -> Result<(PathBuf, u32)> {
    let mut problem = None;
    for dir in installations()? {
        let error = match version(&dir, account) {
            Ok(major) if wanted.is_none_or(|wanted| wanted == major) => return Ok((dir, major)),
            Ok(major) => ClusterError::new(format!(
                "the cluster needs PostgreSQL {wanted}, and PostgreSQL {major} is installed: \
                 install {wanted} as well, or move the data with pg_upgrade or pg_dump",
                wanted = wanted.unwrap_or_default()
            )),
            Err(error) => error,
        };
        problem.get_or_insert(error);
    }
    let of_version = wanted.map(|wanted| format!("-{wanted}")).unwrap_or_default();
    Err(problem.unwrap_or_else(|| {
        ClusterError::new(format!(
            "PostgreSQL's server programs (initdb, postgres) were not found; on Debian: \
             apt-get install postgresql{of_version}; or name the directory that has them: POSTGRES_BIN=DIR"
        ))
    }))
}

/// Returns directories of programs, best first: the one that the variable names, and no other; else those that have an
/// `initdb`, of `PATH` and Debian, highest version first.
fn installations() -> Result<Vec<PathBuf>> {
    if let Some(dir) = env::var_os(VARIABLE).filter(|dir| !dir.is_empty()) {
        // The programs are run in another directory, where a relative path would lead elsewhere.
        return Ok(vec![path::absolute(&dir).map_err(ClusterError::io("use", Path::new(&dir)))?]);
    }
    let has_initdb = |dir: &PathBuf| dir.is_absolute() && dir.join("initdb").is_file();
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = env::split_paths(&path).collect();
    dirs.extend(of_debian(Path::new("/usr/lib/postgresql")));
    dirs.retain(has_initdb);
    Ok(dirs)
}

fn of_debian(parent: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| Some((number(entry.file_name().to_str()?)?, entry.path()));
    let mut versions: Vec<(u32, PathBuf)> = entries.filter_map(number).collect();
    versions.sort_unstable();
    versions.into_iter().rev().map(|(_, dir)| dir.join("bin"))
}

/// Returns the directory of the programs that are named, or else of the first that are found, and a name that tells the
/// installation from any other without running it: the file of its server, which an upgrade replaces.
pub(super) fn first(account: &Account) -> Result<(PathBuf, String)> {
    let complete = installations()?.into_iter().find(|dir| dir.join("postgres").is_file());
    // If no installation is complete, `find` returns an error that says what is wrong with the programs.
    let dir = complete.map_or_else(|| Ok(find(None, account)?.0), Ok)?;
    let file = fs::metadata(dir.join("postgres")).map_err(ClusterError::io("read", &dir))?;
    Ok((dir, format!("{:x}-{:x}-{:x}", file.dev(), file.ino(), file.mtime())))
}

/// Returns the major version of the programs in `dir`, which `postgres --version` prints: 15 for `postgres (PostgreSQL)
/// 15.18 (Debian …)`. Runs it as the account that the server will run as.
pub(super) fn version(dir: &Path, account: &Account) -> Result<u32> {
    let postgres = dir.join("postgres");
    account.check_way(dir)?;
    let fails = |why: &str| ClusterError::new(format!("{} does not start{why}", postgres.display()));
    let output = account.command(&postgres).arg("--version").current_dir("/").output();
    let output = output.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => fails(&format!(
            ": it is not there, or its loader is missing, as that of another C library; --postgres and {VARIABLE} name a \
             directory that has initdb and postgres"
        )),
        _ => fails(&format!(": {error}")),
    })?;
    let [text, said] = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said));
    match text.split_once("(PostgreSQL) ").and_then(|(_, version)| number(version)) {
        Some(major) if major >= OLDEST_MAJOR => Ok(major),
        Some(major) => {
            Err(ClusterError::new(format!("PostgreSQL {major} is too old: install {OLDEST_MAJOR} or newer")))
        }
        None => {
            let said = said.lines().next().unwrap_or("it said nothing");
            Err(fails(&format!(" ({}): {said}", output.status)))
        }
    }
}

/// Returns the number that a text begins with: 9 of `9.6`, 17 of `17beta1`.
pub(super) fn number(text: &str) -> Option<u32> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_version_of_debian_comes_first() {
        let parent = env::temp_dir().join(format!("userd-programs-{}", std::process::id()));
        for dir in ["9.6", "10", "16", "junk"] {
            fs::create_dir_all(parent.join(dir)).unwrap();
        }
        let found: Vec<_> = of_debian(&parent).collect();
        fs::remove_dir_all(&parent).unwrap();
        assert_eq!(found, ["16/bin", "10/bin", "9.6/bin"].map(|dir| parent.join(dir)));
    }

    #[test]
    fn numbers() {
        let table = [("15.18 (Debian)", Some(15)), ("17beta1", Some(17)), ("9.6", Some(9)), ("x", None)];
        for (text, expected) in table {
            assert_eq!(number(text), expected, "{text}");
        }
    }
}
