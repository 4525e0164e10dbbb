//! The password for a target that names none, as libpq finds it: a file of lines `host:port:database:user:password`,
//! where `*` matches anything and a backslash takes the next character as it is. Reads that file alone.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::{fs, io};

use postgres::Config;

use super::{Host, parameters::socket_directory};

/// Gives `config` the password that the file has for its hosts. A file that is missing is none; one that other users
/// can read is ignored with a line in the log, as libpq does.
///
/// An error if it has different passwords for several hosts: one is sent to all of them. It quotes no password.
pub fn add_password(config: &mut Config, hosts: &[Host], file: &Path) -> Result<(), String> {
    let path = file.display();
    let metadata = match fs::metadata(file) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(format!("the password file {path} cannot be read: {error}")),
    };
    let mode = metadata.permissions().mode();
    if !metadata.is_file() || mode & 0o077 != 0 {
        log::warn!(
            "the password file {path} is ignored: it must be a file that only its owner can read (chmod 600)"
        );
        return Ok(());
    }
    let text = fs::read_to_string(file)
        .map_err(|error| format!("the password file {path} cannot be read: {error}"))?;
    let database = config.get_dbname().unwrap_or_default();
    let user = config.get_user().unwrap_or_default();
    let of_host = |host: &Host| find(&text, [name(host), &host.port.to_string(), database, user]);
    let mut found: Vec<String> = hosts.iter().filter_map(of_host).collect();
    found.dedup();
    match found.len() {
        0 => {}
        1 => drop(config.password(&found[0])),
        _ => {
            return Err(format!(
                "the password file {path} has different passwords for the hosts: one serves all"
            ));
        }
    }
    Ok(())
}

/// The host as a line has it: the usual directory of a Unix socket is `localhost`.
fn name(host: &Host) -> &str {
    if host.name == socket_directory() { "localhost" } else { &host.name }
}

/// The password of the first line that matches the four.
fn find(text: &str, wanted: [&str; 4]) -> Option<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(fields).find_map(|mut fields| {
        let matches = fields.len() >= 5
            && fields
                .iter()
                .zip(wanted)
                .all(|((field, plain), wanted)| field == wanted || *plain && field == "*");
        matches.then(|| fields.swap_remove(4).0)
    })
}

/// The fields of a line, and whether each is written without a backslash.
fn fields(line: &str) -> Vec<(String, bool)> {
    let mut fields = vec![(String::new(), true)];
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        let (field, plain) = fields.last_mut().expect("it is never empty");
        match character {
            '\\' => {
                field.extend(characters.next());
                *plain = false;
            }
            ':' => fields.push((String::new(), true)),
            character => field.push(character),
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_matches() {
        let text = "# h:1:d:u:no\nh:1:d:u:one\nh:*:d:u:two\n[::1]:5432:*:*:no\n\\:\\:1:5432:*:*:six\n\
                    *:*:*:\\*:star\n*:5432:we\\:ird:*:a\\:b\\\\c\nshort:1:d:u\nh2:*:*:*:";
        let rows = [
            (["h", "1", "d", "u"], Some("one")),
            (["h", "2", "d", "u"], Some("two")),
            (["::1", "5432", "d", "u"], Some("six")),
            (["x", "1", "d", "*"], Some("star")),
            (["x", "5432", "we:ird", "u"], Some("a:b\\c")),
            (["short", "1", "d", "u"], None),
            (["h2", "1", "d", "u"], Some("")),
            (["x", "1", "d", "u"], None),
        ];
        for (wanted, expected) in rows {
            assert_eq!(find(text, wanted).as_deref(), expected, "{wanted:?}");
        }
    }

    #[test]
    fn files() {
        let path = std::env::temp_dir().join(format!("userd-pgpass-{}", std::process::id()));
        fs::write(&path, "a:*:*:*:one\nb:*:*:*:two\nlocalhost:*:*:*:three\n").unwrap();
        let password = |hosts: &[&str]| {
            let mut config = Config::new();
            config.user("u").dbname("d");
            let host = |name: &&str| Host { name: (*name).to_owned(), address: None, port: 5432 };
            let hosts: Vec<Host> = hosts.iter().map(host).collect();
            let added = add_password(&mut config, &hosts, &path);
            added.map(|()| {
                config.get_password().map(|password| String::from_utf8_lossy(password).into_owned())
            })
        };
        fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(password(&["a"]), Ok(None), "others can read it");
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(password(&["a"]), Ok(Some("one".into())));
        assert_eq!(password(&["a", "c"]), Ok(Some("one".into())));
        assert_eq!(password(&[socket_directory()]), Ok(Some("three".into())));
        let error = password(&["a", "b"]).unwrap_err();
        assert!(!error.contains("one") || error.contains("one serves all"), "{error}");
        fs::remove_file(&path).unwrap();
        assert_eq!(password(&["a"]), Ok(None));
    }
}
