//! E-mail addresses that a user may be given.
//!
//! The rule is this crate's own, so that no version of a library changes which addresses are valid: one bare
//! `local@domain`, with atoms separated by dots on the left, also beyond ASCII, and a host name in ASCII on the right.

/// Checks an address. The error says what is wrong with it; the length of the whole is not checked.
pub fn check(address: &str) -> Result<(), String> {
    // Characters of an atom: of RFC 5322, or of RFC 6532 beyond ASCII.
    let is_atext = |c: char| !c.is_ascii() || c.is_ascii_alphanumeric() || "!#$%&'*+-/=?^_`{|}~".contains(c);
    let is_atom = |text: &str| !text.is_empty() && text.chars().all(is_atext);
    let is_label = |text: &str| {
        let is_hyphenated = text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        is_hyphenated && (1..=63).contains(&text.len()) && text.trim_matches('-') == text
    };
    let is_number = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit());
    let (local, domain) = address.split_once('@').unwrap_or((address, ""));
    let is_local = local.len() <= 64 && local.split('.').all(is_atom);
    let is_host = domain.split('.').all(is_label) && !domain.rsplit('.').next().is_some_and(is_number);
    let problem = match address {
        _ if address.contains(['<', '>']) => " alone: leave out the display name and the < >",
        _ if address.contains(char::is_whitespace) => ": it has white space in it",
        _ if address.contains(is_invisible) => ": it has a control or invisible character in it",
        _ if !address.contains('@') => ": it has no @",
        _ if domain.contains('@') => ": it has more than one @",
        _ if !is_local => ": the part before the @ is not valid",
        _ if !domain.is_ascii() => ": write the domain after the @ in ASCII, as xn--…",
        _ if !domain.is_empty() && !domain.contains('.') => ": the domain after the @ needs a dot",
        _ if !is_host => ": the domain after the @ is not valid",
        _ => return Ok(()),
    };
    Err(format!("value is not an e-mail address{problem}"))
}

/// Controls and the characters that change how the text around them is shown.
fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn accepted_addresses() {
        let rows = [
            "ada@example.com",
            "A@B.CO",
            "a.b+c@x.org",
            "o'b!#$%&*/=?^_{|}~-@x.org",
            "`@x.org",
            "jürgen@x.org",
            "ju\u{308}rgen@x.org",
            "हिन्दी@x.org",
            "用户@x.org",
            "😀@x.org",
            "\u{1f468}\u{200d}\u{1f469}@x.org",
            "a@xn--bcher-kva.example",
            "a@1.2.3.4a",
            "a@4.example",
            "a@b--c.example",
            &format!("{}@x.org", "l".repeat(64)),
            &format!("{}@x.org", "é".repeat(32)),
            &format!("a@{}.org", "d".repeat(63)),
        ];
        for address in rows {
            assert_eq!(check(address), Ok(()), "{address:?}");
        }
    }

    #[test]
    fn refused_addresses() {
        let long = format!("{}@x.org", "l".repeat(65));
        let long_beyond_ascii = format!("{}é@x.org", "l".repeat(63));
        let label = format!("a@{}.org", "d".repeat(64));
        let rows = [
            ("Ann <a@x.org>", "display name"),
            ("<a@x.org>", "display name"),
            ("A\r\nBcc: eve@example.net <ann@example.com>", "display name"),
            ("a@x.org\r\nBcc: eve@example.net", "white space"),
            ("\"a b\"@x.org", "white space"),
            (" a@x.org", "white space"),
            ("a@x.org\n", "white space"),
            ("a@x .org", "white space"),
            ("a\u{a0}b@x.org", "white space"),
            ("a\u{2028}b@x.org", "white space"),
            ("a\u{3000}b@x.org", "white space"),
            ("a\0@x.org", "invisible"),
            ("a\u{7f}@x.org", "invisible"),
            ("a\u{9f}@x.org", "invisible"),
            ("a\u{200b}@x.org", "invisible"),
            ("a\u{200e}@x.org", "invisible"),
            ("a\u{200f}@x.org", "invisible"),
            ("a\u{202e}@x.org", "invisible"),
            ("a\u{2060}@x.org", "invisible"),
            ("a\u{206f}@x.org", "invisible"),
            ("\u{feff}a@x.org", "invisible"),
            ("a@x.org\u{feff}", "invisible"),
            ("", "no @"),
            ("a", "no @"),
            ("a@b@x.org", "more than one @"),
            ("@x.org", "before the @"),
            (".a@x.org", "before the @"),
            ("a.@x.org", "before the @"),
            ("a..b@x.org", "before the @"),
            ("\"ab\"@x.org", "before the @"),
            ("\"\"@x.org", "before the @"),
            ("a(c)@x.org", "before the @"),
            ("a,b@x.org", "before the @"),
            ("a;b@x.org", "before the @"),
            ("mailto:a@x.org", "before the @"),
            ("a\\b@x.org", "before the @"),
            (&long, "before the @"),
            (&long_beyond_ascii, "before the @"),
            ("a@bücher.example", "xn--"),
            ("a@例え.テスト", "xn--"),
            ("a@x。org", "xn--"),
            ("a@localhost", "needs a dot"),
            ("a@", "after the @ is not valid"),
            ("a@[127.0.0.1]", "after the @ is not valid"),
            ("a@1.2.3.4", "after the @ is not valid"),
            ("a@x.org.", "after the @ is not valid"),
            ("a@.x.org", "after the @ is not valid"),
            ("a@x..org", "after the @ is not valid"),
            ("a@-x.org", "after the @ is not valid"),
            ("a@x-.org", "after the @ is not valid"),
            ("a@x_y.org", "after the @ is not valid"),
            ("a@x.org:25", "after the @ is not valid"),
            (&label, "after the @ is not valid"),
        ];
        for (address, reason) in rows {
            let message = check(address).expect_err(address);
            assert!(message.starts_with("value is not an e-mail address"), "{message}");
            assert!(message.contains(reason), "{address:?}: {message}");
        }
    }
}
