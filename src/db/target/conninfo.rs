//! libpq's two ways to write a connection string, taken apart into names and values: URLs
//! (`postgres://…`) and keywords (`host=… user='…'`). Knows the syntax only: which names exist and
//! what they mean is `target`'s. An error never quotes any of the text, which may hold a password.

use percent_encoding::percent_decode_str;

/// What is to be said of a name that is unknown, which may be nothing; `None` for one that is known.
pub type Unknown<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The names and values in `text`, decoded, in order, repeated ones included. The error is a line on
/// what is wrong with the syntax, or that a name is unknown.
pub fn parse(text: &str, unknown: Unknown) -> Result<Vec<(String, String)>, String> {
    if text.contains('\0') {
        return Err("it contains a NUL character".into());
    }
    let url = ["postgres://", "postgresql://"].iter().find_map(|scheme| text.strip_prefix(scheme));
    match url {
        Some(rest) => url_pairs(rest, unknown),
        None => keyword_pairs(text, unknown),
    }
}

/// `[user[:password]@][host][:port][,…][/dbname][?name=value[&…]]`, as loose as libpq reads it.
fn url_pairs(text: &str, unknown: Unknown) -> Result<Vec<(String, String)>, String> {
    let mut pairs = Vec::new();
    // Credentials end at the first `@` that comes before any `/`.
    let authority_end = text.find('/').unwrap_or(text.len());
    let mut rest = text;
    if let Some(at) = text[..authority_end].find('@') {
        let (user, password) = text[..at].split_once(':').unwrap_or((&text[..at], ""));
        pairs.push(("user".into(), decode(user)?));
        pairs.push(("password".into(), decode(password)?));
        rest = &text[at + 1..];
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    // A stray `@` is a piece of a password: what follows would be shown as a host or a database.
    if rest.contains('@') {
        return Err("a user name or password holds '@', '/' or '?': write %40, %2F or %3F".into());
    }
    let (authority, dbname) = rest.split_once('/').unwrap_or((rest, ""));

    let (mut hosts, mut ports) = (Vec::new(), Vec::new());
    for item in authority.split(',') {
        let (host, port) = match item.strip_prefix('[') {
            Some(item) => {
                let (host, port) = item.split_once(']').ok_or("']' is missing after an IPv6 address")?;
                if host.is_empty() || !(port.is_empty() || port.starts_with(':')) {
                    return Err("an IPv6 address must read [address] or [address]:port".into());
                }
                (host, port.trim_start_matches(':'))
            }
            None => item.split_once(':').unwrap_or((item, "")),
        };
        hosts.push(decode(host)?);
        ports.push(decode(port)?);
    }
    pairs.push(("host".into(), hosts.join(",")));
    if ports.iter().any(|port| !port.is_empty()) {
        pairs.push(("port".into(), ports.join(",")));
    }
    pairs.push(("dbname".into(), decode(dbname)?));

    for (at, parameter) in query.split_terminator('&').enumerate() {
        let (name, value) = match parameter.split_once('=') {
            Some((name, value)) if !value.contains('=') => (decode(name)?, decode(value)?),
            _ => return Err("each parameter after '?' must read name=value".into()),
        };
        // JDBC's spelling, which libpq takes in URLs too.
        pairs.push(match (name.as_str(), value.as_str()) {
            ("ssl", "true") => ("sslmode".into(), "require".into()),
            _ => match unknown(&name) {
                None => (name, value),
                Some(hint) => {
                    return Err(format!("parameter {} after '?' is unknown to PostgreSQL{hint}", at + 1));
                }
            },
        });
    }
    Ok(pairs)
}

/// `name = value name='quoted value'`, where a backslash takes the next character as it is.
fn keyword_pairs(text: &str, unknown: Unknown) -> Result<Vec<(String, String)>, String> {
    if text.split(['=', ' ']).next().is_some_and(|start| start.contains("://")) {
        return Err("a URL must start with postgres:// or postgresql://".into());
    }
    let mut pairs = Vec::new();
    let mut rest = text.trim_ascii_start();
    while !rest.is_empty() {
        let (name, after) = rest
            .split_once('=')
            .filter(|(name, _)| !name.trim_ascii_end().contains(|c: char| c.is_ascii_whitespace()))
            .ok_or("'=' is missing after a name (quote values with spaces: 'like this')")?;
        let mut chars = after.trim_ascii_start().chars();
        let quoted = chars.as_str().starts_with('\'');
        if quoted {
            chars.next();
        }
        let mut value = String::new();
        loop {
            match chars.next() {
                Some('\'') if quoted => break,
                Some(c) if !quoted && c.is_ascii_whitespace() => break,
                Some('\\') => value.extend(chars.next()),
                Some(c) => value.push(c),
                None if quoted => return Err("a quoted value is not closed".into()),
                None => break,
            }
        }
        if let Some(hint) = unknown(name.trim_ascii_end()) {
            return Err(format!("name {} in it is unknown to PostgreSQL{hint}", pairs.len() + 1));
        }
        pairs.push((name.trim_ascii_end().into(), value));
        rest = chars.as_str().trim_ascii_start();
    }
    Ok(pairs)
}

/// Percent-decodes one component of a URL.
fn decode(text: &str) -> Result<String, String> {
    let starts_with_digits =
        |rest: &str| rest.as_bytes().get(..2).is_some_and(|two| two.iter().all(u8::is_ascii_hexdigit));
    if !text.split('%').skip(1).all(starts_with_digits) {
        return Err("'%' must be followed by two hexadecimal digits (write % itself as %25)".into());
    }
    let decoded = percent_decode_str(text).decode_utf8();
    let decoded = decoded.map_err(|_| "percent-encoded text is not UTF-8")?.into_owned();
    if decoded.contains('\0') { Err("it contains %00".into()) } else { Ok(decoded) }
}

#[cfg(test)]
mod tests {
    use super::parse;

    /// Checks rows of `connection string | names and values`, empty ones left out, or `| ! error`.
    fn table(rows: &str) {
        for row in rows.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let (text, expected) = row.split_once('|').unwrap();
            let shown = match parse(text.trim(), &|name| name.contains("secret").then(String::new)) {
                Ok(mut pairs) => {
                    pairs.retain(|(_, value)| !value.is_empty());
                    let shown = |(name, value)| format!("{name}={value}");
                    pairs.into_iter().map(shown).collect::<Vec<_>>().join("; ")
                }
                Err(error) => format!("! {error}"),
            };
            assert_eq!(shown, expected.trim(), "{row}");
        }
    }

    #[test]
    fn urls() {
        table(
            r"
            postgres://                      |
            postgresql://h                   | host=h
            postgres://u:p@h:1/d?a=b         | user=u; password=p; host=h; port=1; dbname=d; a=b
            postgres://u@/d                  | user=u; dbname=d
            postgres://u%40x:p%2Fq%3A%25@h/d%20b | user=u@x; password=p/q:%; host=h; dbname=d b
            postgres://u:p:q?r#s@h/d         | user=u; password=p:q?r#s; host=h; dbname=d
            postgres://h1:1,h2,[::1]:3/d     | host=h1,h2,::1; port=1,,3; dbname=d
            postgres://[::1]                 | host=::1
            postgres://%2Frun%2Fpg:5/d       | host=/run/pg; port=5; dbname=d
            postgres:///d?host=/run/pg&user=a@b | dbname=d; host=/run/pg; user=a@b
            postgres://h?user=u              | host=h; user=u
            postgres://h/d?ssl=true&         | host=h; dbname=d; sslmode=require
            postgres://h/d?a=%3D%26&b=x+y    | host=h; dbname=d; a==&; b=x+y
            postgres://h/d?secret            | ! each parameter after '?' must read name=value
            postgres://h/d?a=b=secret        | ! each parameter after '?' must read name=value
            postgres://h/d?a=b&secret=1      | ! parameter 2 after '?' is unknown to PostgreSQL
            postgres://[::1                  | ! ']' is missing after an IPv6 address
            postgres://[::1]5                | ! an IPv6 address must read [address] or [address]:port
            postgres://u:1%@h                | ! '%' must be followed by two hexadecimal digits (write % itself as %25)
            postgres://u:%zz@h               | ! '%' must be followed by two hexadecimal digits (write % itself as %25)
            postgres://u:%ff@h               | ! percent-encoded text is not UTF-8
            postgres://u:%00@h               | ! it contains %00
            postgres://u:sec@ret@h/d         | ! a user name or password holds '@', '/' or '?': write %40, %2F or %3F
            postgres://u:1/secret@h/d        | ! a user name or password holds '@', '/' or '?': write %40, %2F or %3F
            mysql://u:secret@h/d?a=b         | ! a URL must start with postgres:// or postgresql://
            postgresql+asyncpg://u:secret@h  | ! a URL must start with postgres:// or postgresql://
            ",
        );
    }

    #[test]
    fn keywords() {
        table(
            r"
                                             |
            host=h  user = u  port= 1        | host=h; user=u; port=1
            password='a b\'c\\d' dbname=x\ y | password=a b'c\d; dbname=x y
            host='' user=u password=         | user=u
            password=a=b user=u              | password=a=b; user=u
            password=postgres://x user=u     | password=postgres://x; user=u
            user='é' host=a,b                | user=é; host=a,b
            host                             | ! '=' is missing after a name (quote values with spaces: 'like this')
            password=my secret user=u        | ! '=' is missing after a name (quote values with spaces: 'like this')
            password=my secret=1             | ! name 2 in it is unknown to PostgreSQL
            password='secret                 | ! a quoted value is not closed
            ",
        );
        let pairs = parse("host=h\n\tuser=u\n", &|_| None).unwrap();
        assert_eq!(pairs[1], ("user".to_owned(), "u".to_owned()));
    }
}
