//! Finds PostgreSQL's programs (`initdb`, `postgres`) on this machine, and their version. Knows nothing of clusters.

use super::{Account, ClusterError, Result};
use std::path::{self, Path, PathBuf};
use std::{env, fs, io};

/// The environment variable that names the directory of PostgreSQL's programs.
const PROGRAMS_VARIABLE: &str = "POSTGRES_BIN";
/// The oldest major version of PostgreSQL that userd supports.
const MIN_VERSION: u32 = 13;

/// Returns the directory of PostgreSQL's programs, and their major version. Takes the directory that `POSTGRES_BIN`
/// names, or else the first directory with programs that the account can run.
///
/// `wanted_major` is the major version that made the cluster: other versions cannot open it. `None` if there is no
/// cluster yet.
pub(super) fn find_programs(wanted_major: Option<u32>, account: &Account) -> Result<(PathBuf, u32)> {
    let mut problem = None;
    for dir in candidate_dirs()? {
        let error = match read_programs_version(&dir, account) {
            Ok(major) if wanted_major.is_none_or(|wanted| wanted == major) => return Ok((dir, major)),
            Ok(major) => ClusterError::new(format!(
                "the cluster needs PostgreSQL {wanted}, and PostgreSQL {major} is installed: \
                 install {wanted} as well, or move the data with pg_upgrade or pg_dump",
                wanted = wanted_major.unwrap_or_default()
            )),
            Err(error) => error,
        };
        problem.get_or_insert(error);
    }
    let of_version = wanted_major.map(|wanted| format!("-{wanted}")).unwrap_or_default();
    Err(problem.unwrap_or_else(|| {
        ClusterError::new(format!(
            "PostgreSQL's server programs (initdb, postgres) were not found; on Debian: \
             apt-get install postgresql{of_version}; or name the directory that has them: POSTGRES_BIN=DIR"
        ))
    }))
}

/// Returns the directories that may have PostgreSQL's programs, best first: only the directory that `POSTGRES_BIN`
/// names, or else the directories of `PATH` and of Debian's packages that have an `initdb`.
fn candidate_dirs() -> Result<Vec<PathBuf>> {
    if let Some(dir) = env::var_os(PROGRAMS_VARIABLE).filter(|dir| !dir.is_empty()) {
        // The path must be absolute, because the programs run in another working directory.
        return Ok(vec![path::absolute(&dir).map_err(ClusterError::cannot("use", Path::new(&dir)))?]);
    }
    let has_initdb = |dir: &PathBuf| dir.is_absolute() && dir.join("initdb").is_file();
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = env::split_paths(&path).collect();
    dirs.extend(debian_dirs(Path::new("/usr/lib/postgresql")));
    dirs.retain(has_initdb);
    Ok(dirs)
}

/// Returns the directories below `parent` that have the programs of Debian's packages, the highest version first.
fn debian_dirs(parent: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| Some((leading_number(entry.file_name().to_str()?)?, entry.path()));
    let mut versions: Vec<(u32, PathBuf)> = entries.filter_map(number).collect();
    versions.sort_unstable();
    versions.into_iter().rev().map(|(_, dir)| dir.join("bin"))
}

/// Returns the major version of the programs in `dir`: 15 if `postgres --version` prints `postgres (PostgreSQL) 15.18
/// (Debian …)`. Runs `postgres` as the account, because the account has to be able to run the server later.
fn read_programs_version(dir: &Path, account: &Account) -> Result<u32> {
    let postgres = dir.join("postgres");
    account.check_may_enter(dir)?;
    let fails = |why: &str| ClusterError::new(format!("{} does not start{why}", postgres.display()));
    let output = account.command(&postgres).arg("--version").current_dir("/").output();
    let output = output.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => fails(&format!(
            ": it is not there, or its loader is missing, as that of another C library; --postgres and {PROGRAMS_VARIABLE} name a \
             directory that has initdb and postgres"
        )),
        _ => fails(&format!(": {error}")),
    })?;
    let [text, said] = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said));
    match text.split_once("(PostgreSQL) ").and_then(|(_, version)| leading_number(version)) {
        Some(major) if major >= MIN_VERSION => Ok(major),
        Some(major) => {
            Err(ClusterError::new(format!("PostgreSQL {major} is too old: install {MIN_VERSION} or newer")))
        }
        None => {
            let said = said.lines().next().unwrap_or("it said nothing");
            Err(fails(&format!(" ({}): {said}", output.status)))
        }
    }
}

/// Returns the number that a text begins with: 9 for `9.6`, 17 for `17beta1`.
pub(super) fn leading_number(text: &str) -> Option<u32> {
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
        let found: Vec<_> = debian_dirs(&parent).collect();
        fs::remove_dir_all(&parent).unwrap();
        assert_eq!(found, ["16/bin", "10/bin", "9.6/bin"].map(|dir| parent.join(dir)));
    }

    #[test]
    fn numbers() {
        let table = [("15.18 (Debian)", Some(15)), ("17beta1", Some(17)), ("9.6", Some(9)), ("x", None)];
        for (text, expected) in table {
            assert_eq!(leading_number(text), expected, "{text}");
        }
    }
}
