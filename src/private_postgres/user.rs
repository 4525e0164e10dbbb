//! Users of the system, by name and by number.

use nix::libc::{AT_BASE, getauxval};
use nix::unistd::{Uid, User as Known};
use std::fs;

/// A user of the system.
pub struct User {
    /// The name.
    pub name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl User {
    /// Returns the user with this number, if there is one.
    pub fn with_uid(uid: u32) -> Option<User> {
        User::find(|user| user.uid == uid, || Known::from_uid(Uid::from_raw(uid)))
    }

    pub(super) fn with_name(name: &str) -> Option<User> {
        User::find(|user| user.name == name, || Known::from_name(name))
    }

    /// Looks in `/etc/passwd`, then asks the C library. A static program does not ask: the library would load modules of
    /// systemd or LDAP into it, which crash there.
    fn find(
        is_meant: impl Fn(&User) -> bool,
        ask: impl FnOnce() -> nix::Result<Option<Known>>,
    ) -> Option<User> {
        let file = fs::read("/etc/passwd").unwrap_or_default();
        let user = String::from_utf8_lossy(&file).lines().filter_map(User::of_line).find(is_meant);
        // SAFETY: the call has no other effect. A static program has no loader, and so no address of one.
        if user.is_some() || unsafe { getauxval(AT_BASE) } == 0 {
            return user;
        }
        let Known { name, uid, gid, .. } = ask().ok()??;
        Some(User { name, uid: uid.as_raw(), gid: gid.as_raw() })
    }

    fn of_line(line: &str) -> Option<User> {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        Some(User { name, uid: fields.nth(1)?.parse().ok()?, gid: fields.next()?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::User;

    #[test]
    fn users_are_found() {
        let root = User::with_uid(0).unwrap();
        assert_eq!((&*root.name, root.uid, root.gid), ("root", 0, 0));
        assert_eq!(User::with_name("root").unwrap().uid, 0);
        assert!(User::with_name("no-such-user").is_none() && User::with_uid(4_000_000_001).is_none());
        assert!(
            ["", "+::::::", "# a comment", "a:x:one:2"].into_iter().all(|line| User::of_line(line).is_none())
        );
    }
}
