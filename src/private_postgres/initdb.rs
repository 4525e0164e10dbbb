//! Makes a new cluster by `initdb`.

use super::{ClusterDir, ClusterError, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::{path::Path, process::Stdio};

/// The end of a new cluster's `postgresql.conf`, where an operator can change it. PostgreSQL's own default of 128 MB is
/// too much for a machine of 192 MB.
const CONFIGURATION: &str = "\n# Of userd\nshared_buffers = 24MB\n";

/// Makes the cluster `pgdata`. Makes it as `pgdata.new` and renames it, so that there is no incomplete `pgdata`. Blocks
/// until `initdb` has ended.
pub(super) fn make_cluster(directory: &ClusterDir, programs: &Path, more: &[&str]) -> Result<()> {
    let (program, new) = (programs.join("initdb"), directory.dir.join("pgdata.new"));
    // Ignores an error, because initdb reports files of an earlier try that are still there.
    let _ = fs::remove_dir_all(&new);
    // initdb writes into a pipe instead of the log, because the disk may be full.
    let mut initdb = directory.command(&program, Stdio::piped());
    // The name is relative, because an initdb that fails removes this directory by its name, and the parent may have
    // another name by then. The locale C.UTF-8 has upper and lower case of every letter.
    initdb.args(["-D", "pgdata.new", "-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C.UTF-8"]);
    let output = initdb.args(more).output().map_err(ClusterError::cannot("run", &program))?;
    if !output.status.success() {
        let what = format!("initdb failed ({})", output.status);
        return Err(ClusterError::with_output(&what, &output.stderr));
    }
    let finish = || -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).open(new.join("postgresql.conf"))?;
        file.write_all(CONFIGURATION.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, directory.pgdata())?;
        // Syncs the directory, so that the rename outlasts a power failure.
        File::open(&directory.dir)?.sync_all()
    };
    finish().map_err(ClusterError::cannot("finish", &new))
}
