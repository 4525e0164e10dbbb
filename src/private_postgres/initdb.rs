//! A new cluster in a directory, made by `initdb`.

use super::{ClusterDir, ClusterError, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::{path::Path, process::Stdio};

/// Appended to the `postgresql.conf` of a new cluster, where it can be edited: a service of users needs little, and
/// PostgreSQL's default of 128 MB is too much for a machine of 192 MB.
const CONFIGURATION: &str = "\n# Of userd\nshared_buffers = 24MB\n";

/// Makes `pgdata`, complete or not there at all: made as `pgdata.new` and renamed. Blocks until `initdb` has ended.
pub(super) fn initialize(directory: &ClusterDir, programs: &Path, more: &[&str]) -> Result<()> {
    let (program, new) = (programs.join("initdb"), directory.dir.join("pgdata.new"));
    // An error is ignored, because initdb reports files of an earlier try that remain.
    let _ = fs::remove_dir_all(&new);
    // initdb writes into a pipe and not into the log, as the disk may be full.
    let mut initdb = directory.command(&program, Stdio::piped());
    // Passes a relative name, because initdb removes the directory if it fails, and the parent may be renamed by then.
    // Chooses the locale C.UTF-8, because it has upper and lower case of every letter.
    initdb.args(["-D", "pgdata.new", "-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C.UTF-8"]);
    let output = initdb.args(more).output().map_err(ClusterError::io("run", &program))?;
    if !output.status.success() {
        let failure = ClusterError::said(&format!("initdb failed ({})", output.status), &output.stderr);
        return Err(directory.account.explain_initdb_failure(failure));
    }
    let finish = || -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).open(new.join("postgresql.conf"))?;
        file.write_all(CONFIGURATION.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, directory.pgdata())?;
        // Syncs the directory, so that the rename outlasts a power failure.
        File::open(&directory.dir)?.sync_all()
    };
    finish().map_err(ClusterError::io("finish", &new))
}
