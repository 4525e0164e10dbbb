//! `--env-file`: reads environment variables from a file in the form of systemd's `EnvironmentFile=`, so that a
//! subcommand has the settings of the service.

use std::{collections::BTreeMap, ffi::OsString, fs, path::Path};

/// The variables of an environment file, by name. If the file has a name twice, the last line counts.
pub type Variables = BTreeMap<String, OsString>;

/// Reads the variables of a file. The error is one line, which quotes no part of the file, because values may be
/// secret.
pub fn read_variables(file: &Path) -> Result<Variables, String> {
    let shown = file.display();
    let text = fs::read_to_string(file)
        .map_err(|error| format!("cannot read {shown}: {error}; name a file of lines NAME=value"))?;
    parse_lines(&text).map_err(|line| format!("{shown}: line {line} is not NAME=value or NAME='value'"))
}

/// Parses the lines of a file. The error is the number of the first line that is not `NAME=value`. Skips blank lines,
/// and lines that begin with `#` or `;`. Refuses such a line if it ends with a backslash, because systemd before version
/// 254 takes the next line for a part of the comment.
fn parse_lines(text: &str) -> Result<Variables, usize> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = (1..).zip(text.lines().map(str::trim_ascii));
    let is_comment = |line: &str| line.starts_with(['#', ';']) && !line.ends_with('\\');
    let lines = lines.filter(|(_, line)| !line.is_empty() && !is_comment(line));
    lines.map(|(number, line)| parse_assignment(line).ok_or(number)).collect()
}

/// Parses a line `NAME=value`, whose value may be in single or double quotes. Refuses an escape or a second pair of
/// quotes, because other programs read them in different ways.
fn parse_assignment(line: &str) -> Option<(String, OsString)> {
    let (name, value) = line.split_once('=')?;
    let (name, value) = (name.trim_ascii_end(), value.trim_ascii_start());
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let is_valid = name.bytes().all(is_name) && !name.starts_with(|c: char| c.is_ascii_digit());
    let quote = value.chars().next().filter(|sign| ['"', '\''].contains(sign));
    let text = quote.map_or(Some(value), |quote| value[1..].strip_suffix(quote))?;
    let has_quote = quote.is_some_and(|quote| text.contains(quote));
    let has_escape = quote != Some('\'') && text.contains('\\');
    let is_clear = is_valid && !name.is_empty() && !has_quote && !has_escape && !text.contains('\0');
    is_clear.then(|| (name.to_owned(), text.into()))
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
            ("A='b \"c\"'", r#"Ok({"A": "b \"c\""})"#),
            ("A=\"it's $5 #\"", r#"Ok({"A": "it's $5 #"})"#),
            ("A=it's a \"b\"", r#"Ok({"A": "it's a \"b\""})"#),
            ("A=options='-c search_path=x'", r#"Ok({"A": "options='-c search_path=x'"})"#),
            ("A='b\\c'", r#"Ok({"A": "b\\c"})"#),
            ("URL=postgres://u:p@h/d?a=b&c=d#e", r#"Ok({"URL": "postgres://u:p@h/d?a=b&c=d#e"})"#),
            ("A=b\r\n", r#"Ok({"A": "b"})"#),
            ("A='b '  \nC= d  e  ", r#"Ok({"A": "b ", "C": "d  e"})"#),
            ("\u{feff}A=b\r\nC=d\r\n", r#"Ok({"A": "b", "C": "d"})"#),
            ("# a\\ b\nA=b", r#"Ok({"A": "b"})"#),
            ("# A=b \\\nC=d", "Err(1)"),
            ("A=b\n;\\\r\nC=d", "Err(2)"),
            ("secret", "Err(1)"),
            ("A=b\nexport C=d", "Err(2)"),
            ("=b", "Err(1)"),
            ("1A=b", "Err(1)"),
            ("A=b\\\nC=d", "Err(1)"),
            ("A=\"secret", "Err(1)"),
            ("A=\"", "Err(1)"),
            ("A=b\\c", "Err(1)"),
            ("A=\"b\\c\"", "Err(1)"),
            ("A='b'c'", "Err(1)"),
            ("A=\"b\"c", "Err(1)"),
            ("A='b' 'c'", "Err(1)"),
            ("A=b\0", "Err(1)"),
        ];
        for (text, expected) in rows {
            assert_eq!(format!("{:?}", parse_lines(text)), expected, "{text:?}");
        }
    }
}
