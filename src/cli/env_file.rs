//! `--env-file`: variables from a file, in the form of systemd's `EnvironmentFile=`, so that a person's command gets
//! what the service gets.

use std::{env, fs, path::Path};

/// Sets the variables of the file that the environment lacks. To be called while this is the only thread. The error is
/// one line, which quotes nothing of the file but a name.
pub fn read(file: &Path) -> Result<(), String> {
    let text = fs::read_to_string(file).map_err(|error| {
        format!("cannot read {}: {error}; name a file of lines NAME=value", file.display())
    })?;
    let variables = parse(&text).map_err(|problem| format!("{}: {problem}", file.display()))?;
    for (name, value) in variables {
        // An empty variable counts as unset everywhere.
        if env::var_os(&name).is_none_or(|value| value.is_empty()) {
            // SAFETY: no other thread reads or writes the environment.
            unsafe { env::set_var(name, value) };
        }
    }
    Ok(())
}

/// The assignments, of equal names the last one. Blank lines and those that begin with `#` or `;` are comments; a
/// backslash at the end of a line continues it; quotes, single or double, are left out.
fn parse(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut variables: Vec<(String, String)> = Vec::new();
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
        variables.retain(|(known, _)| known != name);
        variables.push((name.to_owned(), value));
    }
    Ok(variables)
}

/// The value without its quotes: in double ones and outside of any a backslash takes the next character as it is.
/// `None` where a quote is open.
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
            ("A=b\nC = d e \n", r#"Ok([("A", "b"), ("C", "d e")])"#),
            ("A=b\nA=c", r#"Ok([("A", "c")])"#),
            ("A=\nB=''\nC=\"\"", r#"Ok([("A", ""), ("B", ""), ("C", "")])"#),
            (r#"A="b c"'d "e"'f"#, r#"Ok([("A", "b cd \"e\"f")])"#),
            (r#"A="b\"c" B"#, r#"Ok([("A", "b\"c B")])"#),
            ("A='b\\c'", r#"Ok([("A", "b\\c")])"#),
            ("A=b\\\nc\nD=e", r#"Ok([("A", "bc"), ("D", "e")])"#),
            ("URL=postgres://u:p@h/d?a=b&c=d#e", r#"Ok([("URL", "postgres://u:p@h/d?a=b&c=d#e")])"#),
            ("A=b\r\n", r#"Ok([("A", "b")])"#),
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
