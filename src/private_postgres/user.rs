//! Users of the machine, read from `/etc/passwd`. The C library's functions would load modules of systemd or LDAP,
//! which crash in a static program.

use std::fs;

/// A user of the machine.
pub struct User {
    /// The name of the user.
    pub name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl User {
    /// Returns the user with this number, if there is one.
    pub fn with_uid(uid: u32) -> Option<User> {
        User::find(|user| user.uid == uid)
    }

    pub(super) fn with_name(name: &str) -> Option<User> {
        User::find(|user| user.name == name)
    }

    fn find(is_meant: impl Fn(&User) -> bool) -> Option<User> {
        let file = fs::read("/etc/passwd").unwrap_or_default();
        String::from_utf8_lossy(&file).lines().filter_map(User::parse_line).find(is_meant)
    }

    /// Parses a line of `/etc/passwd`. Returns `None` for a comment and for a line without numbers.
    fn parse_line(line: &str) -> Option<User> {
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
            ["", "+::::::", "# a comment", "a:x:one:2"]
                .into_iter()
                .all(|line| User::parse_line(line).is_none())
        );
    }
}
