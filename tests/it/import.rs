//! `userd import`: what it accepts, what it refuses and why, and what is left of one that ends early.

use crate::support::{
    Database, Ended, LONG, PASSWORD, Process, Service, TempDir, USERD, blocks, eventually, hash, memory_kib,
    running, shell,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::{fs, path::Path, process::Stdio};

const PAGE: &str = include_str!("../../docs/import.md");

/// A hash of `PASSWORD` by crypt(3), without bcrypt's version.
const BCRYPT: &str = "$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";

/// How many imports have begun to stage lines.
const STAGING: &str = r"
    select count(*) from pg_stat_activity where datname = current_database() and query ~ '^\s*insert into pg_temp'";

fn imported(text: &str) -> Ended {
    (0, text.to_owned(), String::new())
}

/// `userd import` of this file.
fn start(database: &Database, file: &Path, arguments: &[&str]) -> Process {
    let file = file.to_str().expect("UTF-8");
    Process::start(&[&["import"], arguments, &[file]].concat(), &[("DATABASE_URL", &database.url())])
}

/// Imports a text from a file.
fn import<T: AsRef<[u8]>>(database: &Database, text: T, arguments: &[&str]) -> Ended {
    let dir = TempDir::new();
    let file = dir.path().join("users");
    fs::write(&file, text).expect("a fresh directory");
    start(database, &file, arguments).ended()
}

/// The test writes its standard input.
fn piped(database: &Database, arguments: &[&str]) -> Process {
    let (arguments, url) = ([&["import"], arguments].concat(), database.url());
    Process::fed(Stdio::piped(), &[USERD], &arguments, &[("DATABASE_URL", &url)])
}

fn line(email: &str, more: Value) -> String {
    let mut user = json!({"name": "n", "email": email});
    user.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    format!("{user}\n")
}

fn lines(count: usize) -> String {
    (1..=count).map(|n| format!("{{\"name\":\"User {n}\",\"email\":\"{n}@example.com\"}}\n")).collect()
}

/// The number of users, with which the counts of the pages are compared at the end of each test.
fn counted(database: &Database) -> String {
    database.value("select count(*) from users")
}

fn emails(database: &Database) -> String {
    database.value("select coalesce(string_agg(email, ' ' order by id), '') from users")
}

/// One file a row: its text ⇒ addresses that are stored already, and options ⇒ what is said first ⇒ the addresses that are
/// stored then. In the text, `USER` is a line of JSON that can be imported, and `FIELDS` the beginning of one.
const FILES: &str = r##"
# JSON in one array.
[{"name":"a","email":"a@x.org"},{"name":"b","email":"b@x.org"}] ⇒ ⇒ imported: 2 ⇒ a@x.org b@x.org
[\n  {\n    "name": "a]}\"",\n    "email": "a@x.org"\n  }\n]\n ⇒ ⇒ imported: 1 ⇒ a@x.org
[USER,7] ⇒ ⇒ user 2: is not a JSON object ⇒
[{"name":"b\ud83d","email":"b@x.org"},USER] ⇒ --skip-invalid ⇒ imported: 1, existing: 0, refused: 1 ⇒ a@x.org
[USER,{"name":"b","email":"b@x.org","n":1e999}] ⇒ ⇒ user 2: is not JSON: number out of range ⇒
[USER USER] ⇒ ⇒ it is no JSON behind 1 users: expected `,` or `]` at line 1 column 33 ⇒
[USER,] ⇒ ⇒ it is no JSON behind 1 users: trailing comma at line 1 column 33 ⇒
[ USER , {"name":"[\"","email":"b@x.org","tags":null} ] ⇒ --ignore-unknown ⇒ imported: 2, existing: 0, refused: 0, left out "tags": 1 ⇒ a@x.org b@x.org
[USER,{"name":"b","email":"A@x.org"}] ⇒ ⇒ user 2: /email is that of user 1, too ⇒
{"users":[USER]} ⇒ --skip-invalid ⇒ it is one JSON object: write a user a line ⇒
{\n  "name": "a",\n  "email": "a@x.org"\n}\n ⇒ ⇒ it is one JSON object: write a user a line, as `jq -c '.users[]'` does from an array in the object, and `jq -c .` from objects of several lines ⇒

# Formats that the first character tells, and blank lines.
 ⇒ ⇒ imported: 0 ⇒
BOM\nname,email\nn,a@x.org\n ⇒ ⇒ imported: 1 ⇒ a@x.org

# Separators, names, blanks and quotes of CSV.
name;email\na;a@x.org\n ⇒ ⇒ imported: 1 ⇒ a@x.org
"Name";"E"\na;a@x.org\n ⇒ --map=email=e ⇒ imported: 1 ⇒ a@x.org
name\temail\na;b,c\ta@x.org\n5" x\tb@x.org\r\n ⇒ ⇒ imported: 2 ⇒ a@x.org b@x.org
sep=;\r\nname;email\r\na,b;a@x.org\r\n ⇒ ⇒ line 1 has 2 columns, and none is email; is it the header? ⇒
RS{"name":"a","email":"a@x.org"}\n ⇒ --skip-invalid ⇒ line 1 has text behind a closing quote ⇒
RS{"name":"a","email":"a@x.org"}\n ⇒ --format=ndjson --skip-invalid ⇒ imported: 0, existing: 0, refused: 1 ⇒
BOM NAME ,NBSPEmailNBSP\na,NBSPa@x.org NBSP\n ⇒ ⇒ imported: 1 ⇒ a@x.org
name,email,\na,a@x.org,\n,,\n , ,NBSP\nb,b@x.org,\n ⇒ ⇒ imported: 2 ⇒ a@x.org b@x.org
name,email\r\n"",a@x.org\r\n"a\r\n""b""",b@x.org\r\n ⇒ ⇒ imported: 2 ⇒ a@x.org b@x.org
name,email\na,a@x.org,b\n ⇒ ⇒ line 2: has 3 fields, and the header 2 ⇒
email\nx@example.com\n ⇒ ⇒ line 1 has 1 columns, and none is name; is it the header? `userd import --map name=COLUMN` names the column ⇒
Email,email,name\n ⇒ ⇒ line 1 has the column email twice ⇒
name,email\n"n"x,x@example.com\n"m",y@example.com\n ⇒ ⇒ line 2 has text behind a closing quote ⇒
name,email\n"a\nb",a@x.org\n"""",y\n ⇒ ⇒ line 4: /email value is not an e-mail address ⇒
name,email\n\xff,x@example.com\n ⇒ --skip-invalid ⇒ line 2 is not UTF-8: save the file as CSV or JSON in UTF-8 ⇒

# Rows that programs read in different ways: refused as a whole.
name\temail\n"Big\ta@x.org\nMid\tb@x.org\nTall"\tc@x.org\n ⇒ --skip-invalid ⇒ line 2 has, between tabs, a field that begins with a quote or has a backslash or a CR, which programs read in different ways: save the file as CSV with commas, or as JSON ⇒
name\temail\na\ta@x.org\nb\\\\s\tb@x.org\n ⇒ --skip-invalid ⇒ line 3 has, between tabs, a field ⇒
name\temail\n\\N\ta@x.org\n ⇒ --skip-invalid ⇒ line 2 has, between tabs, a field ⇒
"name"\temail\na\ta@x.org\n ⇒ ⇒ line 1 has, between tabs, a field ⇒
name\temail\na\ta@x.org\rb\tb@x.org\n ⇒ --skip-invalid ⇒ line 2 has, between tabs, a field ⇒
name,email\n5" x,a@x.org\n6" y,b@x.org\n ⇒ --skip-invalid ⇒ line 3 has text behind a closing quote, or a quote or a CR in a field without quotes ⇒
name;email\n "a";a@x.org\n ⇒ --skip-invalid ⇒ line 2 has text behind a closing quote, or a quote ⇒
name,email\n"a \\"b\\"",a@x.org\n ⇒ --skip-invalid ⇒ line 2 has text behind a closing quote ⇒
name,email\n"a\\"","a@x.org"\n"b","b@x.org"\n ⇒ --skip-invalid ⇒ line 2 has a quote that is not closed ⇒
name,email\ra,a@x.org\r ⇒ ⇒ line 1 has text behind a closing quote, or a quote or a CR in a field without quotes ⇒
name,email,name\na,a@x.org,b\n ⇒ ⇒ line 1 has the column name twice ⇒
\xff\xfen\0a\0m\0e\0 ⇒ ⇒ line 1 is not UTF-8: save the file as CSV or JSON in UTF-8 ⇒
n\0a\0m\0e\0,\0 ⇒ ⇒ line 1 has 2 columns, and none is email; is it the header? ⇒

# Members and columns that are no field.
FIELDS,"role":7} ⇒ ⇒ line 1: has unknown fields ["role"]; `userd import --ignore-unknown` leaves them out, and --map says ⇒
FIELDS,"role":7}\n{"name":"b","role":7} ⇒ --ignore-unknown --skip-invalid ⇒ imported: 1, existing: 0, refused: 1, left out "role": 1 ⇒ a@x.org
FIELDS,"role":7} ⇒ --ignore-unknown ⇒ imported: 1, existing: 0, refused: 0, left out "role": 1 ⇒ a@x.org
name,email,role,x\na,a@x.org,1,\nb,b@x.org,2,\n ⇒ --ignore-unknown ⇒ imported: 2, existing: 0, refused: 0, left out "role": 2 ⇒ a@x.org b@x.org
{"displayName":"a","emails":[{"value":"a@x.org"}],"passwordHash":"x","createdAt":1} ⇒ --map=name=displayName,email=emails.0.value ⇒ imported: 1, existing: 0, refused: 0, left out "createdAt": 1, left out "passwordHash": 1 ⇒ a@x.org
[{"profile":{"login":"a@x.org"}}] ⇒ --map=name=profile.login,email=profile.login ⇒ imported: 1 ⇒ a@x.org
USER ⇒ --map=passwordHash=pasword ⇒ no user has pasword, which --map names; nothing was imported ⇒
name,email,Password\na,a@x.org,\n ⇒ --map=passwordHash=pasword --skip-invalid ⇒ no user has pasword, which ⇒
name,email,Password\na,a@x.org,\n ⇒ --map=passwordHash=password ⇒ imported: 1 ⇒ a@x.org
FIELDS,"Name":"x"}\n{} ⇒ --map=name=displyName --skip-invalid ⇒ no user has displyName, which ⇒
FIELDS,"p":{"x":1}}\n{"name":"b","email":"b@x.org"} ⇒ --map=createdAt=p.createdat ⇒ no user has p.createdat, which ⇒
FIELDS,"t":null} ⇒ --map=createdAt=t ⇒ imported: 1 ⇒ a@x.org
FIELDS,"c":[]}\n{"name":"b","email":"b@x.org","c":null} ⇒ --map=passwordHash=c.0 ⇒ no user has c.0, which ⇒
FIELDS,"c":[]}\n{"name":"b","email":"b@x.org","c":[null]} ⇒ --map=passwordHash=c.0 ⇒ imported: 2 ⇒ a@x.org b@x.org
FIELDS,"c":[]}\n{"name":"b","email":"b@x.org"} ⇒ --map=passwordHash=c.hash ⇒ no user has c.hash, which ⇒
FIELDS,"c":[7]}\n{"name":"b","email":"b@x.org"} ⇒ --map=passwordHash=c.1 ⇒ no user has c.1, which ⇒
FIELDS,"p":null}\n{"name":"b","email":"b@x.org","p":{"hash":"x"}} ⇒ --map=passwordHash=p.hsh ⇒ no user has p.hsh, which ⇒
FIELDS,"c":[]}\n{"name":"b","email":"b@x.org","c":["x"]} ⇒ --map=passwordHash=c.1 ⇒ no user has c.1, which ⇒
FIELDS,"p":null} ⇒ --map=passwordHash=p.hash ⇒ no user has p.hash, which ⇒
name,email,password\na,a@x.org,\nb,b@x.org,x\n ⇒ --map=passwordHash=password.hash ⇒ no user has password.hash, which ⇒
[] ⇒ --map=passwordHash=pasword ⇒ imported: 0 ⇒
name,email\n ⇒ --map=passwordHash=pasword ⇒ imported: 0 ⇒
{"email":7} ⇒ --map=passwordHash=email --skip-invalid ⇒ imported: 0, existing: 0, refused: 1 ⇒
{"name":"x" ⇒ --map=passwordHash=pasword --skip-invalid ⇒ line 1 is cut off ⇒
{] ⇒ --map=passwordHash=pasword --skip-invalid ⇒ imported: 0, existing: 0, refused: 1 ⇒
USER ⇒ --map=mail=x ⇒ userd: --map must be FIELD=MEMBER,…, each FIELD once and one of id, name, email, createdAt ⇒
USER ⇒ --map=name=a,name=b ⇒ userd: --map must be FIELD=MEMBER,…, each FIELD once ⇒

# Objects with arrays.
{"users":[]} ⇒ ⇒ it is one JSON object: write a user a line ⇒
{\n  "users": [\n  ]\n}\n ⇒ --skip-invalid ⇒ it is one JSON object: write a user a line ⇒
FIELDS,"tags":[]} ⇒ --ignore-unknown ⇒ imported: 1 ⇒ a@x.org
{"n":"a","e":"a@x.org","tags":[]} ⇒ --map=name=n,email=e ⇒ imported: 1 ⇒ a@x.org
{"profile":[{"name":"a","login":"a@x.org"}]} ⇒ --map=name=profile.0.name,email=profile.0.login ⇒ imported: 1 ⇒ a@x.org

# White space: of JSON it is no form feed; around an address it does not matter.
{"name":"a","email":" NBSPa@x.org NBSP"} ⇒ ⇒ imported: 1 ⇒ a@x.org
USER\n\fUSER ⇒ ⇒ line 2: is not JSON ⇒
USER\nNBSP{"name":"b","email":"b@x.org"} ⇒ ⇒ line 2: is not JSON ⇒
[\fUSER] ⇒ ⇒ it is no JSON behind 0 users ⇒
[\f] ⇒ ⇒ it is no JSON behind 0 users ⇒
[USER]\f ⇒ ⇒ it is no JSON behind 1 users: trailing characters ⇒
{\f"users":[USER]} ⇒ ⇒ line 1: is not JSON ⇒

# Lines of JSON.
{"name":"x","name":"a","email":"a@x.org","passwordHash":null,"createdAt":null} ⇒ ⇒ imported: 1 ⇒ a@x.org
USER\nFIELDS\nUSER ⇒ ⇒ line 2: is not JSON: EOF while parsing an object at column 29 ⇒
{"name":"b","tags":[{}]}\nUSER ⇒ --ignore-unknown --skip-invalid ⇒ imported: 1, existing: 0, refused: 1 ⇒ a@x.org
USER\n"text" ⇒ ⇒ line 2: is not a JSON object ⇒
{"name":"\u0000","email":"x@example.com"} ⇒ ⇒ line 1: /name must not contain NUL (U+0000) ⇒
{"name":"LONG","email":"x@example.com"} ⇒ ⇒ line 1: /name value is longer than 1000 characters ⇒
{"name":null,"email":["x"]} ⇒ ⇒ line 1: /name is required; /email value is not of type "string" ⇒
{"name":"n","email":"Ann <ann@example.com>"} ⇒ ⇒ line 1: /email value is not an e-mail address alone: leave out the display name and the < > ⇒
FIELDS,"createdAt":"yesterday"} ⇒ ⇒ line 1: /createdAt must be a time as in 2020-02-29T23:59:59.123456Z ⇒
FIELDS,"createdAt":"2020-02-29T23:59:59.123"} ⇒ ⇒ line 1: /createdAt must be a time as in 2020-02-29T23:59:59.123456Z, with its offset (Z, UTC, +01:00) ⇒
FIELDS,"createdAt":"2020-02-29 23:59:59 UTC"} ⇒ ⇒ imported: 1 ⇒ a@x.org
FIELDS,"password":"short"} ⇒ --clear-passwords ⇒ line 1: /password value is shorter than 8 characters ⇒
FIELDS,"password":"correct horse","passwordHash":"$2bBCRYPT"} ⇒ ⇒ line 1: /password and /passwordHash exclude one another ⇒
FIELDS,"passwordHash":"5f4dcc3b5aa765d61d8327deb882cf99"} ⇒ ⇒ line 1: /passwordHash is neither an Argon2id, bcrypt, PBKDF2, scrypt nor WordPress hash ⇒
FIELDS,"passwordHash":"$2b$14$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2"} ⇒ ⇒ line 1: /passwordHash costs more to verify than 129 MiB of memory, or 1.5 s of a core for any password ⇒
FIELDS} ⇒ --keep-ids ⇒ line 1: /id is required by --keep-ids ⇒
FIELDS,"id":"007"} ⇒ --keep-ids ⇒ line 1: WHOLE ⇒
FIELDS,"id":4611686018427387904} ⇒ --keep-ids ⇒ line 1: WHOLE ⇒
FIELDS,"id":9}\n{"name":"b","email":"b@x.org","id":"9"} ⇒ --keep-ids ⇒ line 2: /id is that of line 1, too ⇒

# A password is clear only if an option says so, and none if there is no value.
FIELDS,"password":"correct horse"} ⇒ ⇒ line 1: /password may be a hash: --map passwordHash=password, or --clear-passwords if all are clear ⇒
FIELDS,"password":7} ⇒ ⇒ line 1: /password may be a hash ⇒
name,email,PASSWORD\na,a@x.org,\nb,b@x.org,hunter2-hunter2\n ⇒ --skip-invalid ⇒ imported: 1, existing: 0, refused: 1 ⇒ a@x.org
name,email,pw\na,a@x.org,hunter2-hunter2\n ⇒ --map=password=pw ⇒ line 2: /password may be a hash: --map passwordHash=pw, or ⇒
name,email,password\na,a@x.org,\n ⇒ ⇒ imported: 1 ⇒ a@x.org
FIELDS,"password":null} ⇒ ⇒ imported: 1 ⇒ a@x.org
FIELDS,"password":"$2yBCRYPT"} ⇒ --clear-passwords ⇒ line 1: /password is a hash: --map passwordHash=password ⇒
name,email,pw\na,a@x.org,$2yBCRYPT ⇒ --map=password=pw --clear-passwords ⇒ line 2: /password is a hash: --map passwordHash=pw ⇒

# Addresses come in one form of Unicode, but for those of an export.
{"name":"n","email":"ae\u0301@x.org"} ⇒ ⇒ imported: 1 ⇒ aé@x.org
{"name":"n","email":"ae\u0301@x.org"} ⇒ aé@x.org --skip-existing ⇒ imported: 0, existing: 1, refused: 0 ⇒ aé@x.org
{"name":"n","email":"ae\u0301@x.org"} ⇒ aé@x.org --as-is ⇒ imported: 1 ⇒ aé@x.org aé@x.org
{"name":"n","email":"a\u00ad@x.org"} ⇒ ⇒ line 1: /email value is not an e-mail address: it has a control, invisible or private ⇒

# Addresses in the file and in the database, equal if only the case of ASCII letters differs.
USER\n{"name":"b","email":"b@x.org"} ⇒ A@x.org ⇒ line 1: /email is that of a user in the database ⇒ A@x.org
USER\n{"name":"b","email":"b@x.org"} ⇒ A@x.org --skip-existing --dry-run ⇒ would import: 1, existing: 1, refused: 0 ⇒ A@x.org
USER\n{"name":"b","email":"b@x.org"} ⇒ A@x.org --skip-existing ⇒ imported: 1, existing: 1, refused: 0 ⇒ A@x.org b@x.org
email,name\na@x.org,n\nZOË@x.org,n\nzoë@x.org,n\nA@X.ORG,n\nZoë@X.org,n\né@x.org,n ⇒ É@x.org ⇒ line 5: /email is that of line 2, too\nline 6: /email is that of line 4, too ⇒ É@x.org
email,name\na@x.org,n\nZOË@x.org,n\nzoë@x.org,n\nA@X.ORG,n\né@x.org,n ⇒ É@x.org --skip-invalid ⇒ imported: 4, existing: 0, refused: 1 ⇒ É@x.org a@x.org ZOË@x.org zoë@x.org é@x.org
USER\n{"name":"b","email":"left@out.org"} ⇒ ⇒ userd: database error: users left out by another program's trigger: 1 ⇒

# Files that are cut off or no text: no rows with a problem, so nothing of them is imported.
[USER,{"name":"b","ema ⇒ --skip-invalid ⇒ it is no JSON behind 1 users: EOF while parsing a string ⇒
[{"name":"a","email":"a@x.org"]] ⇒ --skip-invalid ⇒ it is no JSON behind 0 users ⇒
[USER] USER ⇒ --skip-invalid ⇒ it is no JSON behind 1 users: trailing characters ⇒
USER\n{"name":"b","email":"b@x ⇒ --skip-invalid ⇒ line 2 is cut off ⇒
name,email\na,a@x.org\n"b,b@x.org\nc,c@x.org\n ⇒ --skip-invalid ⇒ line 3 has a quote that is not closed ⇒
\xffUSER ⇒ --skip-invalid ⇒ line 1 is not UTF-8: save the file as CSV or JSON in UTF-8 ⇒
ann;hunter2-hunter2;name\n ⇒ ⇒ line 1 has 3 columns, and none is email ⇒
"##;

/// The bytes of a text of [`FILES`].
fn unescaped(text: &str) -> Vec<u8> {
    const USER: &str = r#"{"name":"a","email":"a@x.org"}"#;
    let words = [
        ("LONG", &*"é".repeat(1001)),
        ("USER", USER),
        ("FIELDS", &USER[..USER.len() - 1]),
        ("BCRYPT", BCRYPT),
        ("WHOLE", "/id must be a whole number from 1 to 4611686018427387903"),
        ("BOM", "\u{feff}"),
        ("NBSP", "\u{a0}"),
        ("RS{", "\u{1e}{"),
        ("\\n", "\n"),
        ("\\r", "\r"),
        ("\\t", "\t"),
        ("\\f", "\x0c"),
        ("\\0", "\0"),
        ("\\\\", "\\"),
    ];
    let text = words.iter().fold(text.to_owned(), |text, (word, meaning)| text.replace(word, meaning));
    let parts: Vec<&[u8]> = text.split("\\xff").map(str::as_bytes).collect();
    parts.join(&0xff)
}

#[test]
fn files() {
    let database = Database::create();
    // It leaves one user out.
    database.run(
        "create function leave() returns trigger language plpgsql as 'begin return null; end';
         create trigger leave before insert on users for each row when (new.email = 'left@out.org') execute function leave()",
    );
    for row in FILES.lines().filter(|row| row.contains(" ⇒")) {
        let cells: Vec<&str> = row.split(" ⇒").map(str::trim).collect();
        let [_, words, said, stored] = cells[..] else { panic!("{row}") };
        let text = unescaped(row.split_once(" ⇒").expect("cells").0);
        let said = String::from_utf8(unescaped(said)).expect("UTF-8");
        let (options, existing): (Vec<&str>, Vec<&str>) =
            words.split_whitespace().partition(|word| word.starts_with("--"));
        let succeeds = ["imported", "would import"].iter().any(|start| said.starts_with(start));
        let is_usage = said.starts_with("userd: ") && !said.contains("database error");
        let expected = if succeeds { 0 } else { 1 + i32::from(is_usage) };
        database.run("delete from users");
        for email in existing {
            database.run(&format!("insert into users (name, email) values ('n', '{email}')"));
        }
        let (code, stdout, stderr) = import(&database, &text, &options);
        let line = stderr.strip_prefix("userd: cannot read: ").unwrap_or(&stderr);
        assert!((stdout.clone() + line).starts_with(&said), "{row}\n{stdout}{stderr}");
        assert_eq!((code, &*emails(&database)), (expected, stored), "{row}\n{stderr}");
        assert!(code != 1 || stderr.ends_with("; nothing was imported\n"), "{row}\n{stderr}");
        assert!(!stderr.contains("hunter2") && !stderr.contains("$2b$"), "{stderr}");
    }
}

/// A name of several parts: the parts that there are, else the address.
#[test]
fn names_of_parts() {
    let service = Service::start();
    let mut client = service.client();
    let csv = "First Name,last name,email\nAda,Lovelace,a@x.org\n Bob ,,b@x.org\n, ,c@x.org\n";
    let json = r#"[{"f":"Ada","p":{"l":"Lovelace"},"email":"a@x.org"},{"p":{"l":null},"email":" b@x.org"},
        {"f":"","p":{"l":"Cee"},"email":"c@x.org"},{"f":"D","email":"d@x.org"}]"#;
    let rows = [
        (csv, "name=First Name+Last Name", "Ada Lovelace|Bob|c@x.org"),
        (json, "name=f+p.l", "Ada Lovelace|b@x.org|Cee|D"),
        (
            csv,
            "name=First Name+Last Nam",
            "userd: cannot read: no user has Last Nam, which --map names; nothing was",
        ),
        (
            csv,
            "name=Last+First",
            "userd: cannot read: line 1 has 3 columns, and none is Last+First; is it the header?",
        ),
        (json, "name=f+l", "userd: cannot read: no user has l, which --map names; nothing was imported"),
        (r#"{"f":7,"l":"x","email":"a@x.org"}"#, "name=f+l", "line 1: /name is required"),
        (
            r#"{"f":"x","l":"y","email":"a@x.org"}"#,
            "name=f,email=f+l",
            "userd: cannot read: no user has f+l, which",
        ),
    ];
    for (text, map, expected) in rows {
        service.database.run("delete from users");
        let (code, _, stderr) = import(&service.database, text, &["--map", map]);
        let page = client.get("/users").json();
        let users = page["data"].as_array().expect("users").iter();
        let names: Vec<&str> = users.map(|user| user["name"].as_str().expect("a text")).collect();
        let found = if code == 0 { names.join("|") } else { format!("{stderr}{}", names.join("|")) };
        assert!(found.starts_with(expected), "{map}: {found}");
        assert_eq!(code == 0, found == expected, "{map}: {found}");
    }
}

/// A first line that is too long is told by its number, unless it is an array.
#[test]
fn long_first_lines() {
    let database = Database::create();
    let long = "x".repeat(1 << 20);
    let user = format!("{{\"name\":\"a\",\"email\":\"a@x.org\",\"bio\":\"{long}\"}}");
    let tags = user.replace('}', ",\"tags\":[]}");
    let friends = user.replace('}', ",\"friends\":[{\"name\":\"b\",\"email\":\"b@x.org\"}]}");
    let many = vec![format!("{{\"t\":\"{}\"}}", &long[..1000]); 1100].join(",");
    let members = format!("{{\"name\":\"a\",\"email\":\"a@x.org\",\"t\":[{many}]}}\n");
    for text in [
        &user,
        &tags,
        &friends,
        &format!("{user}\n{user}\n"),
        &format!("{members}{members}"),
        &format!("{long}x"),
    ] {
        let expected = "userd: cannot read: line 1 is longer than 1048576 bytes; nothing was imported\n";
        let options = ["--format=ndjson", "--skip-invalid", "--ignore-unknown"];
        assert_eq!(import(&database, text, &options), (1, String::new(), expected.to_owned()));
    }
    let document = format!("[{}]", lines(30_000).trim_end().replace('\n', ","));
    assert!(document.len() > 1 << 20);
    assert_eq!(import(&database, document, &[]), imported("imported: 30000, existing: 0, refused: 0\n"));
}

/// At most 20 problems are told, and then their number. Numbers of lines count each line.
#[test]
fn broken_lines_are_told_by_their_number() {
    let database = Database::create();
    let mut text: Vec<String> = lines(500).lines().map(str::to_owned).collect();
    let again = line("8@EXAMPLE.com", json!({}));
    for (number, other) in [(2, ""), (9, &again), (300, "{}"), (499, &again)] {
        text[number - 1] = other.trim_end().to_owned();
    }
    let told = "line 9: /email is that of line 8, too\nline 300: /name is required; /email is required\n\
        line 499: /email is that of line 8, too\n";
    let refused = format!("{told}userd: lines refused: 3; nothing was imported\n");
    let skipped = "imported: 496, existing: 0, refused: 3\n".to_owned();
    assert_eq!(import(&database, text.join("\n"), &[]), (1, String::new(), refused));
    assert_eq!(import(&database, text.join("\n"), &["--skip-invalid"]), (0, skipped, told.to_owned()));
    assert_eq!(counted(&database), "496");
    let (code, _, stderr) = import(&database, "{}\n".repeat(23), &[]);
    let said: Vec<&str> = stderr.lines().collect();
    assert!(code == 1 && said[19].starts_with("line 20: "), "{stderr}");
    assert_eq!(said[20..], ["and 3 more", "userd: lines refused: 23; nothing was imported"]);
}

#[test]
fn fields() {
    let service = Service::start();
    let ada = json!({"id": "77", "createdAt": "2001-02-03T04:05:06.789Z", "updatedAt": "2002-02-03 04:05:06+01",
                     "password": PASSWORD});
    assert_eq!(import(&service.database, line("ada@example.com", ada), &["--clear-passwords"]).0, 0);
    let csv = "id,name,email,password,createdAt\r\n7,\"a \"\"quoted\"\", name\",a@example.com,,2020-01-01 00:00:00+00\r\n\
        8,\"two\r\nlines\",b@example.com,correct horse,\r\n";
    assert_eq!(import(&service.database, csv, &["--format=csv", "--clear-passwords"]).0, 0);
    service.check(
        r#"
        sql select string_agg(concat_ws('|', id, replace(name, e'\r\n', '~'), email, password_hash is not null), ' ' order by id) from users left join credentials on user_id = id => 1|n|ada@example.com|t 2|a "quoted", name|a@example.com|f 3|two~lines|b@example.com|t
        sql select created_at = '2001-02-03 04:05:06.789+00' and updated_at = '2002-02-03 04:05:06+01' from users where id = 1 => t
        sql select created_at = '2020-01-01 00:00:00+00' from users where id = 2 => t
        sql select created_at = updated_at and created_at between now() - interval '10 minutes' and now() from users where id = 3 => t
        POST /users/authenticate {"email":"ada@example.com","password":"correct horse"} => 200 *
        POST /users/authenticate {"email":"b@example.com","password":"correct horse"} => 200 *
        POST /users/authenticate {"email":"a@example.com","password":"correct horse"} => 401 *
        "#,
    );
    // The strict schema asks for a password; a hash will do.
    let hash = service.database.value("select password_hash from credentials where user_id = 1");
    let refused = "line 1: /password is required\nuserd: lines refused: 1; nothing was imported\n";
    for (more, expected) in [(json!({}), (1, refused)), (json!({"passwordHash": hash}), (0, ""))] {
        let dir = TempDir::new();
        dir.write("users", &line("zoe@example.com", more));
        let variables = [("DATABASE_URL", service.database.url()), ("SCHEMA", "strict".to_owned())];
        let (code, _, stderr) = shell(dir.path(), "userd import users", &variables);
        assert_eq!((code, stderr.as_str()), expected);
    }
    assert!(service.client().opens("zoe@example.com", PASSWORD));
}

/// Triggers of one's own may rewrite or leave out users: the others have their own hashes and ids, which a login and a
/// read show.
#[test]
fn hashes_of_users_that_a_trigger_rewrites() {
    let service = Service::start();
    service.database.run(
        "create function rewrite() returns trigger language plpgsql as $$ begin
             new.email := reverse(split_part(new.email, '@', 1)) || '@' || split_part(new.email, '@', 2);
             if new.name = 'moved' then new.id := new.id + 100; end if;
             return new;
         end $$;
         create trigger rewrite before insert on users for each row execute function rewrite()",
    );
    let mut client = service.client();
    let user = |name: &str, email: &str, password: &str, id: u32| {
        json!({"name": name, "email": email, "passwordHash": hash(password), "id": id}).to_string() + "\n"
    };
    // Two addresses that the trigger exchanges.
    let users = user("a", "ab@x.org", "password of a", 11)
        + &user("moved", "ba@x.org", "password of b", 13)
        + "{\"name\":\"e\",\"email\":\"ef@x.org\",\"id\":14}\n";
    for (options, ids) in [(&[][..], "1 3 102"), (&["--keep-ids"], "11 14 113")] {
        service.database.run("truncate users restart identity cascade");
        service.database.run("alter table users alter id restart with 1");
        let said = import(&service.database, &users, options);
        assert_eq!(said, imported("imported: 3, existing: 0, refused: 0\n"));
        for (email, password, opens) in [
            ("ba@x.org", "password of a", true),
            ("ba@x.org", "password of b", false),
            ("ab@x.org", "password of b", true),
            ("fe@x.org", "password of b", false),
        ] {
            assert_eq!(client.opens(email, password), opens, "{email}: {password}");
        }
        let found = service.database.value("select string_agg(id::text, ' ' order by id) from users");
        assert_eq!(found, ids);
    }
}

/// Hashes of formats that userd does not verify: none becomes a password that logs in.
#[test]
fn hashes_are_no_clear_passwords() {
    let service = Service::start();
    let mut client = service.client();
    let forms = [
        "3|$argon2id$v=19$m=65536,t=4,p=1$c2FsdHNhbHRzYWx0$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "$apr1$saltsalt$1nyCYXUy4WCYP2DUwzuiY.",
        "$sha1$24680$saltsalt$1nyCYXUy4WCYP2DUwzuiYabcdefg",
        "$gy$j9T$saltsaltsalt$1nyCYXUy4WCYP2DUwzuiY1nyCYXUy4WCYP2DUwzuiYab",
        "$y$j9T$saltsaltsalt$1nyCYXUy4WCYP2DUwzuiY1nyCYXUy4WCYP2DUwzuiYab",
        "$7$CU..../....saltsaltsalt$1nyCYXUy4WCYP2DUwzuiY1nyCYXUy4WCYP2DUwzuiYab",
        "$shiro1$SHA-256$500000$c2FsdHNhbHRzYWx0$KvWUkHkdWY9NdHNhbHRzYWx0KvWUkHkdWY9NdHNhbHQ=",
        "$md5,rounds=904$saltsalt$$1nyCYXUy4WCYP2DUwzuiY.",
        "$3$$8846f7eaee8fb117ad06bdd830b7586c",
        "$bcrypt-sha256$v=2,t=2b,r=12$n79VH.0Q2TMWmt3Oqt9uku$Kq4Noyk3094Y2QlB8NdRT8SvGiI4ft2",
        "$S$D1nyCYXUy4WCYP2DUwzuiY1nyCYXUy4WCYP2DUwzuiYabcdefghi",
        "{SSHA}c2FsdHNhbHRzYWx0c2FsdHNhbHRzYWx0c2Fs",
        "{CRYPT}abJnggxhB/yWI",
        "{x-issha, 1024}c2FsdHNhbHRzYWx0c2FsdHNhbHRzYWx0c2Fs",
        "{PKCS5S2}c2FsdHNhbHRzYWx0c2FsdHNhbHRzYWx0c2FsdHNhbHRzYWx0c2FsdHNh",
        "{SCRAM-SHA-256}4096,c2FsdA==,c2FsdHNhbHRzYWx0c2FsdHNhbHRz,c2FsdHNhbHRzYWx0c2FsdHNhbHRz",
        "SCRAM-SHA-256$4096:c2FsdA==$c2FsdHNhbHRzYWx0c2FsdHNhbHRz:c2FsdHNhbHRzYWx0c2FsdHNhbHRz",
        "bcrypt_sha256$$2b$12$n79VH.0Q2TMWmt3Oqt9ukuKq4Noyk3094Y2QlB8NdRT8SvGiI4ft2",
        "sha1$saltsalt$5baa61e4c9b93f3f0682250b6cf8331b7ee68fd8",
        // These may be clear passwords, too.
        "5f4dcc3b5aa765d61d8327deb882cf99",
        "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8",
        "W6ph5Mm5Pz8GgiULbPgzG37mj9g=",
        "*2470C0C06DEE42FD1618BBB99005ADCA2EC9D1E0",
        "saltsalt:5baa61e4c9b93f3f0682250b6cf8331b7ee68fd8",
    ];
    let as_clear = forms.len() - 5;
    for (at, form) in forms.into_iter().enumerate() {
        let email = format!("{at}@x.org");
        let users = line(&email, json!({"password": form}));
        for (options, problem) in [(&[][..], "may be a hash"), (&["--clear-passwords"], "is a hash")] {
            let (code, _, said) = import(&service.database, &users, options);
            let is_stored = at >= as_clear && !options.is_empty();
            assert_eq!(code, i32::from(!is_stored), "{form}: {said}");
            assert!(is_stored || said.starts_with(&format!("line 1: /password {problem}: --map")), "{said}");
            assert!(!said.contains(form), "{said}");
            assert_eq!(client.opens(&email, form), is_stored, "{form}");
        }
    }
}

/// The first login replaces a hash of another program or of less cost, unless what matched may not be all of the password;
/// the record stays as it was.
#[test]
fn hashes_are_replaced_at_login() {
    // By crypt(3), of 80 digits. Bcrypt reads 72 bytes, and repeats a password that is shorter behind a NUL.
    const OF_80: &str = "$2b$05$abcdefghijklmnopqrstuuLkMZtUsVwf9Ptg/wgiNv8ZhtnAHnix.";
    let digits = "0123456789".repeat(8);
    let mistyped = format!("{}x", &digits[..79]);
    let repeated = format!("{PASSWORD}\0{PASSWORD}");
    // A hash; the password, and whether it replaces the hash; another one, which does not, and whether it matches.
    let rows = [
        (format!("$2b{BCRYPT}"), PASSWORD, true, &*repeated, true),
        (OF_80.to_owned(), &digits, false, &mistyped, true),
        (hash(PASSWORD), PASSWORD, true, "correct horsf", false),
    ];
    let service = Service::start();
    let mut client = service.client();
    for (id, (hash, password, is_replaced, other, matches)) in (1..).zip(&rows) {
        let email = format!("{id}@example.com");
        assert_eq!(import(&service.database, line(&email, json!({"passwordHash": hash})), &[]).0, 0);
        let stored =
            || service.database.value(&format!("select password_hash from credentials where user_id = {id}"));
        let before = client.get(&format!("/users/{id}"));
        assert_eq!(client.opens(&email, other), *matches, "{hash}");
        // A lock does not keep the user out.
        let mut locked = service.database.transaction("select from credentials for update");
        assert!(client.opens(&email, password), "{hash}");
        assert_eq!(stored(), *hash);
        locked.batch_execute("rollback").unwrap();
        assert!(client.opens(&email, password), "{hash}");
        let new = stored();
        assert_eq!(new.starts_with("$argon2id$v=19$m=19456,t=2,p=1$"), *is_replaced, "{hash}");
        assert!(*is_replaced || new == *hash);
        assert_eq!(client.opens(&email, other), !is_replaced, "{hash}");
        assert!(client.opens(&email, password), "{hash}");
        assert_eq!(stored(), new, "once");
        let after = client.get(&format!("/users/{id}"));
        assert_eq!((&after.body, after.header("ETag")), (&before.body, before.header("ETag")));
    }
}

/// The lines of docs/import.md that copy everything, and their like for CSV: ids, times, hashes and answers of the copy
/// equal the original's.
#[test]
fn a_copy_with_its_ids() {
    let source = Service::start();
    let mut client = source.client();
    for n in 1..=2 {
        let body = line(&format!("{n}@example.com"), json!({"password": PASSWORD}));
        assert_eq!(client.post("/users", body).status, 201);
    }
    assert_eq!(client.put("/users/1", r#"{"name":"Changed"}"#).status, 200);
    // PUT and psql store these users, although POST refuses them.
    let insert = "insert into users (name, email, created_at) values ($1, $2, '2001-02-03 04:05:06.789+00')";
    for (name, email) in [
        ("", "no address"),
        ("two\nlines, \"quoted\"\r", "missing@domain"),
        (" ", ""),
        ("Zoë 😀 \u{1}\u{7f}", "\u{feff}é@b"),
        ("=1+1\\", "\"\\u0041\n"),
    ] {
        source.database.client().execute(insert, &[&name, &email]).unwrap();
    }
    source.database.run(
        "insert into users (id, name, email) overriding system value
             select n, n::text, 'x' || n from generate_series(3000, 5000) n union all select 9007199254740993, 'far', 'odd'",
    );
    let of_page = blocks(PAGE, "\n## Copy everything to another database\n")[0];
    let of_page = of_page.replace("postgres://user:password@new-host/name", "\"$OTHER_DATABASE\"");
    for lines in [&of_page, &of_page.replace("ndjson", "csv")] {
        let (copy, dir) = (Service::start(), TempDir::new());
        let urls = [("DATABASE_URL", source.database.url()), ("OTHER_DATABASE", copy.database.url())];
        // Without --as-is, they are held to the create schema.
        let (code, _, said) = shell(dir.path(), &lines.replace(" --as-is", ""), &urls);
        assert!(code == 1 && said.contains("/email value is not an e-mail address"), "{said}");
        let printed = "nothing to apply\nimported: 2009, existing: 0, refused: 0\n";
        assert_eq!(shell(dir.path(), lines, &urls), imported(printed));
        let rows = "select md5(string_agg(concat_ws('|', id, name, email, created_at, updated_at, password_hash), ';' \
            order by id)) from users left join credentials on user_id = id";
        assert_eq!(copy.database.value(rows), source.database.value(rows));
        assert_eq!(counted(&copy.database), "2009");
        let mut other = copy.client();
        assert!(other.opens("2@example.com", PASSWORD));
        // Behind the largest one.
        assert_eq!(other.post("/users", line("next@example.com", json!({}))).id(), "9007199254740994");
    }
}

#[test]
fn ids_that_are_kept() {
    let service = Service::start();
    let database = &service.database;
    let mut client = service.client();
    let mut create = |name: &str| client.post("/users", line(&format!("{name}@example.com"), json!({}))).id();
    assert_eq!(create("ada"), "1");
    let user = |id: u32, name: &str| line(&format!("{name}@example.com"), json!({"id": id}));
    let some = user(40, "a") + &user(30, "b") + &user(1, "ADA");
    let others = user(40, "other") + &user(50_000, "c");
    let taken = "line 1: /id is that of a user in the database\n";
    // A file, its options, what is said first, and the id of the next user.
    for (text, options, said, next) in [
        (&*user(1, "x"), "--keep-ids", taken, "2"),
        // Refused lines and a dry run draw no value from the sequence.
        (&some, "--keep-ids --dry-run --skip-existing", "would import: 2, existing: 1, refused: 0\n", "3"),
        (&some, "--keep-ids --skip-existing", "imported: 2, existing: 1, refused: 0\n", "41"),
        // The id of another address is taken, whatever is skipped; the others can be imported without it.
        (&others, "--keep-ids --skip-existing", taken, "42"),
        (&others, "--keep-ids --skip-invalid", "imported: 1, existing: 0, refused: 1\n", "50001"),
        // Below the sequence nothing is set back.
        (
            "email,id,name\nd@example.com,7,n\n",
            "--keep-ids",
            "imported: 1, existing: 0, refused: 0\n",
            "50002",
        ),
        // Without the option the id of a line means nothing.
        (&user(1, "new"), "", "imported: 1, existing: 0, refused: 0\n", "50004"),
    ] {
        let options: Vec<&str> = options.split_whitespace().collect();
        let (_, stdout, stderr) = import(database, text, &options);
        assert!((stdout.clone() + &stderr).starts_with(said), "{text}: {stdout}{stderr}");
        assert_eq!(create(&format!("next{next}")), next, "{text}");
    }
    let ids = "select string_agg(concat(id, ' ', split_part(email, '@', 1)), ' ' order by id) from users where email !~ 'next'";
    assert_eq!(database.value(ids), "1 ada 7 d 30 b 40 a 50000 c 50003 new");

    // Users that are created meanwhile never get an id of the file. The import waits for an address.
    let lock = database.transaction("insert into users (name, email) values ('x', 'k3000@example.com')");
    let dir = TempDir::new();
    dir.write("users", &(1..=3000).map(|n| user(60_000 + n, &format!("k{n}"))).collect::<String>());
    let mut process = start(database, &dir.path().join("users"), &["--keep-ids"]);
    database.waits_for_a_lock();
    assert_eq!(create("meanwhile"), "63001");
    drop(lock);
    assert_eq!(
        (process.wait(LONG), process.stdout().as_str()),
        (0, "imported: 3000, existing: 0, refused: 0\n")
    );
    assert_eq!(client.get("/users/63000").json()["email"], "k3000@example.com");
}

/// A line, an element or a row without an end is refused before it fills the memory, by its number.
#[test]
fn one_line_without_an_end() {
    const LENGTH: usize = 100 << 20;
    /// A debug build holds more than a release build.
    const MOST_KIB: usize = 64 << 10;
    let database = Database::create();
    let element = "[{\"name\":\"a\",\"email\":\"a@x.org\"},\n{\"name\":\"";
    let table =
        [("", "ndjson", "line 1"), (element, "ndjson", "user 2"), ("name,email\n\"", "csv", "line 2")];
    for (text, format, expected) in table {
        let mut process = piped(&database, &["--format", format]);
        process.write(text.as_bytes()).unwrap();
        let (mut most, piece) = (0, vec![b'x'; 1 << 20]);
        // The process ends before the line does.
        for _ in 0..LENGTH / piece.len() {
            if process.write(&piece).is_err() {
                break;
            }
            most = most.max(memory_kib(process.id(), "VmRSS:").unwrap_or(0));
        }
        process.end_input();
        let problem =
            format!("userd: cannot read: {expected} is longer than 1048576 bytes; nothing was imported\n");
        assert_eq!(process.ended(), (1, String::new(), problem), "{text}");
        assert!(most < MOST_KIB, "{most} KiB");
    }
}

/// No client sees a user before all are stored, and creates of other addresses go on. If another client stores an address
/// between the look and the insert, which waits for that transaction, nothing is imported.
#[test]
fn the_service_runs_meanwhile() {
    let service = Service::start();
    let (database, mut client) = (&service.database, service.client());
    let imported = "imported: 20000, existing: 0, refused: 0\n";
    let refused = "another session stored one of the addresses";
    for (end, code, said, total) in [("commit", 1, refused, "3"), ("rollback", 0, imported, "20004")] {
        database.run("delete from users where email like '2000%'");
        let mut process = piped(database, &[]);
        process.write(lines(20_000).as_bytes()).unwrap();
        eventually(LONG, "lines are staged", || database.value(STAGING) == "1");
        let before = client.get("/users").json()["total"].as_u64().unwrap();
        assert_eq!(client.post("/users", line(&format!("first-{end}@example.com"), json!({}))).status, 201);
        let insert = "insert into users (name, email) values ('other', '20000@example.com')";
        let mut other = database.transaction(insert);
        process.end_input();
        database.waits_for_a_lock();
        assert_eq!(client.post("/users", line(&format!("second-{end}@example.com"), json!({}))).status, 201);
        assert_eq!(client.get("/users").json()["total"], before + 2);
        other.batch_execute(end).unwrap();
        let (ended_with, stdout, stderr) = process.ended();
        assert!(ended_with == code && (stdout.clone() + &stderr).contains(said), "{end}: {stdout}{stderr}");
        assert_eq!(counted(database), total, "{end}");
    }
}

/// Whatever ends it, while it reads or while it waits for a lock: nothing is imported, and its session ends.
#[test]
fn an_early_end_leaves_nothing() {
    let database = Database::create();
    let ends =
        [(Some(Signal::SIGINT), 130), (Some(Signal::SIGTERM), 143), (Some(Signal::SIGKILL), -9), (None, 1)];
    for ((signal, expected), is_read) in ends.into_iter().flat_map(|end| [(end, true), (end, false)]) {
        let locked = database.transaction("lock table users in exclusive mode");
        let mut process = piped(&database, &[]);
        let mut numbers = 0_u32..;
        let mut more = || -> String {
            let emails = numbers.by_ref().take(100).map(|n| format!("{n}@example.com"));
            emails.map(|email| line(&email, json!({}))).collect()
        };
        eventually(LONG, "it is staging", || {
            process.write(more().as_bytes()).unwrap();
            database.value(STAGING) == "1"
        });
        if is_read {
            process.end_input();
            database.waits_for_a_lock();
        }
        match signal {
            Some(signal) => process.signal(signal),
            None => database.end_sessions(),
        }
        eventually(LONG, "it ends, though its input does not", || {
            // It may end meanwhile.
            let _ = is_read || process.write(more().as_bytes()).is_err();
            !running(process.id())
        });
        let (code, _, stderr) = process.ended();
        assert_eq!(code, expected, "{stderr}");
        if signal == Some(Signal::SIGKILL) {
            // The server executes the statement to its end, and no commit follows.
            drop(locked);
        } else {
            assert!(stderr.lines().count() == 1 && stderr.ends_with("; nothing was imported\n"), "{stderr}");
        }
        database.has_sessions(0);
        assert_eq!(emails(&database), "", "{signal:?}");
    }
}
