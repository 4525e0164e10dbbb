//! `--env-file`: variables from a file in the form of systemd's `EnvironmentFile=`, so that a subcommand gets the
//! settings of the service.

use std::{collections::BTreeMap, ffi::OsString, fs, path::Path};

/// Variables of a file. If a name is repeated, the last line counts.
pub type Variables = BTreeMap<String, OsString>;

/// Returns the variables of a file. The error is one line, which quotes nothing of the file.
pub fn read(file: &Path) -> Result<Variables, String> {
    let shown = file.display();
    let text = fs::read_to_string(file)
        .map_err(|error| format!("cannot read {shown}: {error}; name a file of lines NAME=value"))?;
    parse(&text).map_err(|line| format!("{shown}: line {line} is not NAME=value"))
}

/// Returns the variables of a text. The error is the number of a line that assigns nothing. Blank lines and lines that begin
/// with `#` or `;` are comments.
fn parse(text: &str) -> Result<Variables, usize> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = (1..).zip(text.lines().map(str::trim_start));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with(['#', ';']));
    lines.map(|(number, line)| assignment(line).ok_or(number)).collect()
}

/// Returns the name and the value of a line. Quotes, single or double, are left out at the start of the value and behind
/// other quotes; elsewhere they are part of it. Outside of quotes a backslash takes the next character as it is, in double
/// ones only a character that a shell would need it for; at the end of a line it is refused.
fn assignment(line: &str) -> Option<(String, OsString)> {
    let (name, value) = line.split_once('=')?;
    let name = name.trim_end();
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    if !name.bytes().all(is_name) || name.starts_with(|c: char| c.is_ascii_digit()) || value.contains('\0') {
        return None;
    }
    // `kept` is the length without white space at the end, which is left out unless a backslash or quotes keep
    // it.
    let (mut text, mut quote, mut is_bare, mut kept) = (String::new(), None, false, 0);
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        match (character, quote) {
            (_, Some(open)) if character == open => quote = None,
            ('"' | '\'', None) if !is_bare => quote = Some(character),
            ('\\', Some('"')) => match characters.next()? {
                escaped @ ('"' | '\\' | '`' | '$') => text.push(escaped),
                other => text.extend(['\\', other]),
            },
            ('\\', None) => text.push(characters.next()?),
            (' ' | '\t', None) if !is_bare => {}
            _ => text.push(character),
        }
        if quote.is_some() || !matches!(character, ' ' | '\t' | '\r') {
            kept = text.len();
        }
        is_bare |= quote.is_none() && !['"', '\'', ' ', '\t'].contains(&character);
    }
    text.truncate(kept);
    (quote.is_none() && !name.is_empty()).then(|| (name.to_owned(), text.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files() {
        let rows = [
            ("", "Ok({})"),
            ("# a\n\n;b\n  # c\n", "Ok({})"),
            ("A=b\nC = d e \n", r#"Ok({"A": "b", "C": "d e"})"#),
            ("A=b\nA=c", r#"Ok({"A": "c"})"#),
            ("A=\nB=''\nC=\"\"", r#"Ok({"A": "", "B": "", "C": ""})"#),
            (r#"A="b c"'d "e"'f"#, r#"Ok({"A": "b cd \"e\"f"})"#),
            (r#"A="b\"c" B"#, r#"Ok({"A": "b\"cB"})"#),
            ("A=it's a \"b\"", r#"Ok({"A": "it's a \"b\""})"#),
            (r#"A="b\c\\d\$" "#, r#"Ok({"A": "b\\c\\d$"})"#),
            (r"A=b\ c\'d", r#"Ok({"A": "b c'd"})"#),
            ("A=options='-c search_path=x'", r#"Ok({"A": "options='-c search_path=x'"})"#),
            ("A='b\\c'", r#"Ok({"A": "b\\c"})"#),
            ("URL=postgres://u:p@h/d?a=b&c=d#e", r#"Ok({"URL": "postgres://u:p@h/d?a=b&c=d#e"})"#),
            ("A=b\r\n", r#"Ok({"A": "b"})"#),
            ("A=g\\ ", r#"Ok({"A": "g "})"#),
            ("A=g\\  \t\r\nC=\\ ", r#"Ok({"A": "g ", "C": " "})"#),
            ("A='b '  \nC= d  e  ", r#"Ok({"A": "b ", "C": "d  e"})"#),
            ("\u{feff}A=b\r\nC=d\r\n", r#"Ok({"A": "b", "C": "d"})"#),
            ("secret", "Err(1)"),
            ("A=b\nexport C=d", "Err(2)"),
            ("=b", "Err(1)"),
            ("1A=b", "Err(1)"),
            ("A=b\\\nC=d", "Err(1)"),
            ("A=\"secret", "Err(1)"),
            ("A=b\0", "Err(1)"),
        ];
        for (text, expected) in rows {
            assert_eq!(format!("{:?}", parse(text)), expected, "{text:?}");
        }
    }
}
