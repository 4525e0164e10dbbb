//! Gives root's privileges up: the process becomes the user that its PostgreSQL runs as.

use crate::private_postgres::{Account, SystemUser};
use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
use std::io;

/// Changes the user of all threads of a root process to this account, for good. After an error the process must end,
/// because its rights are unknown.
pub fn give_up_root(account: &Account) -> io::Result<()> {
    let Some((uid, gid)) = account.ids_to_switch_to() else { return Ok(()) };
    let name = SystemUser::with_uid(uid).map_or_else(|| uid.to_string(), |user| user.name);
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    let failed = |error| io::Error::other(format!("root cannot become user {name}: {error}"));
    // Calls the C library, which changes every thread; a system call would change one. Leaves out further groups of the
    // account, because `initgroups` loads NSS modules, which a static binary cannot do.
    setgroups(&[]).map_err(failed)?;
    setgid(gid).map_err(failed)?;
    setuid(uid).map_err(failed)?;
    log::info!("the process is user {name} from now on, as its PostgreSQL is");
    Ok(())
}
