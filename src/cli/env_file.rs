//! `--env-file`: variables from a file, in the form of systemd's `EnvironmentFile=`, so that a person's command gets
//! what the service gets.

use std::{env, fs, path::Path};

/// A variable that a file has set.
pub struct Assignment {
    pub name: String,
    /// The file and the number of the line: `/etc/userd.env:3`.
    pub place: String,
}

/// Sets the variables of the file that the environment lacks, and returns them. To be called while this is the only
/// thread. The error is one line, which quotes nothing of the file but a name.
pub fn read(file: &Path) -> Result<Vec<Assignment>, String> {
    let text = fs::read_to_string(file).map_err(|error| {
        format!("cannot read {}: {error}; name a file of lines NAME=value", file.display())
    })?;
    let variables = parse(&text).map_err(|problem| format!("{}: {problem}", file.display()))?;
    let mut set = Vec::new();
    for (name, value, line) in variables {
        // An empty variable counts as unset everywhere.
        if env::var_os(&name).is_none_or(|value| value.is_empty()) {
            // SAFETY: no other thread reads or writes the environment.
            unsafe { env::set_var(&name, value) };
            set.push(Assignment { name, place: format!("{}:{line}", file.display()) });
        }
    }
    Ok(set)
}

/// Returns name, value and line of each assignment, of equal names the last one. Blank lines and lines that begin with
/// `#` or `;` are comments; a backslash at the end of a line continues it; quotes, single or double, are left out.
fn parse(text: &str) -> Result<Vec<(String, String, usize)>, String> {
    let mut variables: Vec<(String, String, usize)> = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        if line.trim_start().is_empty() || line.trim_start().starts_with(['#', ';']) {
            continue;
        }
        let mut assignment = line.to_owned();
        while assignment.ends_with('\\')
            && let Some((_, next)) = lines.next()
        {
            assignment.pop();
            assignment.push_str(next);
        }
        let number = at + 1;
        let (name, value) =
            assignment.split_once('=').ok_or_else(|| format!("line {number} is not NAME=value"))?;
        let name = name.trim();
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        if name.is_empty() || !name.bytes().all(is_name) || name.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(format!("line {number} is not NAME=value"));
        }
        let value = unquoted(value.trim()).ok_or_else(|| format!("line {number} has an open quote"))?;
        if value.contains('\0') {
            return Err(format!("line {number} has a NUL"));
        }
        variables.retain(|(known, ..)| known != name);
        variables.push((name.to_owned(), value, number));
    }
    Ok(variables)
}

/// Returns the value without its quotes: in double ones and outside of any a backslash takes the next character as it
/// is. `None` if a quote is open.
fn unquoted(value: &str) -> Option<String> {
    let mut text = String::new();
    let mut quote = None;
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        match (character, quote) {
            ('\\', None | Some('"')) => text.extend(characters.next()),
            (_, Some(open)) if character == open => quote = None,
            ('"' | '\'', None) => quote = Some(character),
            _ => text.push(character),
        }
    }
    quote.is_none().then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files() {
        let rows = [
            ("", "Ok([])"),
            ("# a\n\n;b\n  # c\n", "Ok([])"),
            ("A=b\nC = d e \n", r#"Ok([("A", "b", 1), ("C", "d e", 2)])"#),
            ("A=b\nA=c", r#"Ok([("A", "c", 2)])"#),
            ("A=\nB=''\nC=\"\"", r#"Ok([("A", "", 1), ("B", "", 2), ("C", "", 3)])"#),
            (r#"A="b c"'d "e"'f"#, r#"Ok([("A", "b cd \"e\"f", 1)])"#),
            (r#"A="b\"c" B"#, r#"Ok([("A", "b\"c B", 1)])"#),
            ("A='b\\c'", r#"Ok([("A", "b\\c", 1)])"#),
            ("A=b\\\nc\nD=e", r#"Ok([("A", "bc", 1), ("D", "e", 3)])"#),
            ("URL=postgres://u:p@h/d?a=b&c=d#e", r#"Ok([("URL", "postgres://u:p@h/d?a=b&c=d#e", 1)])"#),
            ("A=b\r\n", r#"Ok([("A", "b", 1)])"#),
            ("secret", r#"Err("line 1 is not NAME=value")"#),
            ("A=b\nexport C=d", r#"Err("line 2 is not NAME=value")"#),
            ("=b", r#"Err("line 1 is not NAME=value")"#),
            ("1A=b", r#"Err("line 1 is not NAME=value")"#),
            ("A=\"secret", r#"Err("line 1 has an open quote")"#),
            ("A=b\0", r#"Err("line 1 has a NUL")"#),
        ];
        for (text, expected) in rows {
            assert_eq!(format!("{:?}", parse(text)), expected, "{text:?}");
        }
    }
}
