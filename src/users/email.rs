//! Decides which e-mail addresses are valid.
//!
//! An address is one bare `local@domain`. Its local part has atoms, also beyond ASCII, with dots between them; its
//! domain is a host name in ASCII. This crate has a rule of its own, so that no version of a library changes which
//! addresses are valid.

use super::user::MAX_EMAIL_CHARS;
use serde_json::{Map, Value};
use unicode_normalization::{UnicodeNormalization, char::is_combining_mark, is_nfc};

/// Returns a text in Unicode's form NFC, because keyboards differ in how they write é. Addresses are stored and looked
/// up in this form, and passwords are hashed in it.
pub fn to_nfc(text: &str) -> String {
    if is_nfc(text) { text.to_owned() } else { text.nfc().collect() }
}

/// Brings the address among the fields of a user into NFC.
pub fn normalize_email(fields: &mut Map<String, Value>) {
    if let Some(Value::String(address)) = fields.get_mut("email") {
        *address = to_nfc(address);
    }
}

/// Validates an address that is in NFC. The error says what is wrong with the address.
pub fn validate_email(address: &str) -> Result<(), String> {
    // An atom has the characters that RFC 5322 allows, and those beyond ASCII that RFC 6532 adds.
    let is_atext = |c: char| !c.is_ascii() || c.is_ascii_alphanumeric() || "!#$%&'*+-/=?^_`{|}~".contains(c);
    // An atom may not begin with a combining mark, which a screen draws on the character before the atom.
    let is_atom =
        |text: &str| text.chars().all(is_atext) && !text.chars().next().is_none_or(is_combining_mark);
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
        _ if address.contains(is_invisible) => ": it has a control, invisible or private character in it",
        _ if !address.contains('@') => ": it has no @",
        _ if domain.contains('@') => ": it has more than one @",
        _ if !is_local => ": the part before the @ is not valid",
        _ if !domain.is_ascii() => ": write the domain after the @ in ASCII, as xn--…",
        _ if !domain.is_empty() && !domain.contains('.') => ": the domain after the @ needs a dot",
        _ if !is_host => ": the domain after the @ is not valid",
        // Counts bytes, as a mail server does (RFC 5321, 4.5.3.1.3). The column has the same limit, in characters.
        _ if address.len() > MAX_EMAIL_CHARS => ": it is longer than 254 bytes",
        _ => return Ok(()),
    };
    Err(format!("value is not an e-mail address{problem}"))
}

/// Returns whether a reader cannot see a character: a control, a private character, a noncharacter, or a character that
/// Unicode lists as Default_Ignorable_Code_Point. Excepts U+200D, which joins emoji.
fn is_invisible(c: char) -> bool {
    c.is_control()
        || u32::from(c) & 0xfffe == 0xfffe
        || matches!(c, '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}')
        || matches!(c, '\u{180b}'..='\u{180f}' | '\u{200b}' | '\u{200c}' | '\u{200e}' | '\u{200f}')
        || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{e000}'..='\u{f8ff}')
        || matches!(c, '\u{fdd0}'..='\u{fdef}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}')
        || matches!(c, '\u{fff0}'..='\u{fff8}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}')
        || matches!(c, '\u{e0000}'..='\u{e0fff}' | '\u{f0000}'..)
}

#[cfg(test)]
mod tests {
    use super::{is_invisible, to_nfc, validate_email};

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
            assert_eq!(validate_email(address), Ok(()), "{address:?}");
        }
    }

    #[test]
    fn characters_that_are_not_shown() {
        // Unicode 16 has 4,174 default ignorable code points, of which U+200D is excepted, 65 controls, 137,468 private
        // characters and 66 noncharacters.
        assert_eq!(('\0'..=char::MAX).filter(|c| is_invisible(*c)).count(), 4_173 + 65 + 137_468 + 66);
        for c in ['\u{ad}', '\u{200c}', '\u{3164}', '\u{e007f}', '\u{f8ff}', '\u{fffff}', '\u{10fffd}'] {
            assert!(is_invisible(c), "{c:?}");
        }
        assert!(!['\u{200d}', '\u{2010}', '\u{fdf0}', '\u{fffd}', '\u{e1000}'].into_iter().any(is_invisible));
    }

    #[test]
    fn refused_addresses() {
        let long = format!("{}@x.org", "l".repeat(65));
        let long_beyond_ascii = format!("{}é@x.org", "l".repeat(63));
        let label = format!("a@{}.org", "d".repeat(64));
        let beyond_254_bytes = format!("{}@{}.org", "é".repeat(30), vec!["d".repeat(63); 3].join("."));
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
            ("a\u{fe0f}@x.org", "invisible"),
            ("a@x\u{ad}.org", "invisible"),
            ("a\u{ffffe}@x.org", "invisible"),
            ("\u{301}a@x.org", "before the @"),
            ("a.\u{93f}b@x.org", "before the @"),
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
            (&beyond_254_bytes, "longer than 254 bytes"),
        ];
        for (address, reason) in rows {
            let message = validate_email(address).expect_err(address);
            assert!(message.starts_with("value is not an e-mail address"), "{message}");
            assert!(message.contains(reason), "{address:?}: {message}");
        }
    }

    #[test]
    fn normalized_addresses() {
        let rows = [
            ("jos\u{e9}@x.org", "jos\u{e9}@x.org"),
            ("jose\u{301}@x.org", "jos\u{e9}@x.org"),
            ("a\u{37e}b@x.org", "a;b@x.org"),
            ("\u{1112}\u{1161}\u{11ab}@x.org", "\u{d55c}@x.org"),
            ("\u{212a}@x.org", "K@x.org"),
        ];
        for (given, expected) in rows {
            assert_eq!(to_nfc(given), expected, "{given:?}");
        }
    }
}
