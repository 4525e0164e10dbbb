//! Makes a new cluster by `initdb`.

use super::{ClusterDir, ClusterError, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::{path::Path, process::Stdio};

/// The lines that are added to a new cluster's `postgresql.conf`, where an operator can change them. PostgreSQL's
/// default of 128 MB of shared buffers is too much for a machine of 192 MB.
const ADDED_CONFIGURATION: &str = "\n# Of userd\nshared_buffers = 24MB\n";

/// Makes the cluster `pgdata` by `initdb` with further options. Makes it as `pgdata.new` and renames it, so that
/// there is no incomplete `pgdata`. Blocks until `initdb` has ended.
pub(super) fn make_cluster(directory: &ClusterDir, programs: &Path, initdb_options: &[&str]) -> Result<()> {
    let (program, new) = (programs.join("initdb"), directory.path.join("pgdata.new"));
    // Ignores an error, because `initdb` fails with a message if files of an earlier try are still there.
    let _ = fs::remove_dir_all(&new);
    // Gets the errors of `initdb` through a pipe instead of the log, because the disk may be full.
    let mut initdb = directory.command(&program, Stdio::piped());
    // Names the directory by a relative path: an `initdb` that fails removes it by that path, and the parent may have
    // another name by then. With the locale C.UTF-8, `lower` and `upper` change every letter that has a case.
    initdb.args(["-D", "pgdata.new", "-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C.UTF-8"]);
    let output = initdb.args(initdb_options).output().map_err(ClusterError::cannot("run", &program))?;
    if !output.status.success() {
        let problem = format!("initdb failed ({})", output.status);
        return Err(ClusterError::with_output(&problem, &output.stderr));
    }
    let finish = || -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).open(new.join("postgresql.conf"))?;
        file.write_all(ADDED_CONFIGURATION.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, directory.pgdata())?;
        // Syncs the directory, so that `pgdata` keeps its new name after a power failure.
        File::open(&directory.path)?.sync_all()
    };
    finish().map_err(ClusterError::cannot("finish", &new))
}
