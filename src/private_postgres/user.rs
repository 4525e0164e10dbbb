//! Users of the operating system, read from `/etc/passwd`. The C library's functions would load modules of systemd or
//! LDAP, which crash in a static program.

use std::fs;

/// A user of the operating system: a line of `/etc/passwd`.
pub struct SystemUser {
    pub name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl SystemUser {
    /// Returns the user with this user id, if there is one.
    pub fn with_uid(uid: u32) -> Option<SystemUser> {
        SystemUser::find(|user| user.uid == uid)
    }

    pub(super) fn with_name(name: &str) -> Option<SystemUser> {
        SystemUser::find(|user| user.name == name)
    }

    fn find(is_wanted: impl Fn(&SystemUser) -> bool) -> Option<SystemUser> {
        let file = fs::read("/etc/passwd").unwrap_or_default();
        String::from_utf8_lossy(&file).lines().filter_map(SystemUser::parse_passwd_line).find(is_wanted)
    }

    /// Parses a line of `/etc/passwd`. Returns `None` for a line without a user id and a group id, as a comment.
    fn parse_passwd_line(line: &str) -> Option<SystemUser> {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        Some(SystemUser { name, uid: fields.nth(1)?.parse().ok()?, gid: fields.next()?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::SystemUser;

    #[test]
    fn users_are_found() {
        let root = SystemUser::with_uid(0).unwrap();
        assert_eq!((&*root.name, root.uid, root.gid), ("root", 0, 0));
        assert_eq!(SystemUser::with_name("root").unwrap().uid, 0);
        assert!(SystemUser::with_name("no-user").is_none() && SystemUser::with_uid(4_000_000_001).is_none());
        assert!(
            ["", "+::::::", "# a comment", "a:x:one:2"]
                .into_iter()
                .all(|line| SystemUser::parse_passwd_line(line).is_none())
        );
    }
}
