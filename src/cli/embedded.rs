//! The private cluster of `--embedded`: the options that it is started with, and how other verbs (export, import,
//! migrate, …) get at it: they join the server that runs, or start one.

use super::{
    Failure,
    arguments::{Given, format_of},
    environment::{self, is_set},
    import::{seed, unreadable},
    signals,
};
use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::Path,
};
use userd::{
    Config, Database, ScratchDatabase,
    private_postgres::{self, Cluster},
};

/// Returns how many sessions a private cluster has: some beyond the pool's, for migrations and psql.
pub fn max_connections(config: &Config) -> u32 {
    config.db_pool_size + 10
}

/// Makes the private cluster, if one is given, the database of `config`, for as long as the value is kept: the one that
/// a service runs, or else one that is started. `make`: it is made where the directory has none. Blocks until it
/// accepts connections.
pub fn join(given: &Given, config: &mut Config, make: bool) -> Result<Option<Cluster>, Failure> {
    let Some(dir) = given.dir() else { return Ok(None) };
    // A signal ends the process once the server can be told, too.
    let mut server = signals::SERVER.lock();
    if !make {
        private_postgres::check(&dir).map_err(Failure::runtime)?;
    }
    let joined = Cluster::join(&dir, max_connections(config)).map_err(Failure::runtime)?;
    *server = joined.pid();
    config.database = Database::Url(joined.connection_string("postgres").into());
    Ok(Some(joined))
}

/// Creates the database of `--ephemeral`. With `--seed` it begins with the users of a file, which are read once for all
/// services that begin with them.
pub fn scratch(given: &Given, config: &Config) -> Result<ScratchDatabase, Failure> {
    let dir = config.migrations_dir.as_deref();
    let Some(file) = given.value("--seed").map(Path::new) else {
        return Ok(ScratchDatabase::with_migrations(dir)?);
    };
    let fill = |url: &str| seed(&Config { database: Database::Url(url.into()), ..config.clone() }, file);
    // A pipe can be read only once.
    let database = match fs::metadata(file).is_ok_and(|found| found.is_file()) {
        true => {
            let content = fs::read(file).map_err(|error| unreadable(file, error))?;
            let mut hasher = DefaultHasher::new();
            (content, format_of(file).is_some(), config.schema as u8).hash(&mut hasher);
            ScratchDatabase::filled(dir, Some(hasher.finish()), fill)?
        }
        false => {
            let database = ScratchDatabase::with_migrations(dir)?;
            fill(database.url()).map(|()| database)?
        }
    };
    if given.has("--commands") {
        database.keep_seed()?;
    }
    log::info!("the database begins with the users of {}", file.display());
    Ok(database)
}

/// Has the service listen for this machine alone, where no setting says where it listens. Returns whether it does.
pub fn listen_privately(config: &mut Config) -> bool {
    let is_private = !is_set("HOST");
    if is_private {
        config.host = Config::default().host;
    }
    is_private
}

/// Puts the cluster in `dir`, which is not started, into the table of settings, instead of a database of the variables.
/// Returns the line below the table: the command that opens it with psql.
pub fn describe(dir: &Path, rows: &mut [(&'static str, String, String)]) -> Result<String, Failure> {
    let dir = private_postgres::check(dir).map_err(Failure::runtime)?;
    for (variable, value, source) in rows {
        if environment::is_of_database(variable) {
            *value = "-".to_owned();
            *source = "--embedded is used instead".to_owned();
        }
    }
    Ok(format!("\npsql -h {} -U postgres\n", shell_word(&dir.to_string_lossy())))
}

/// Returns lines for the person who starts the service: where the data are; at the first start also a command to try.
/// `token`: the shell expression that yields the token, if one is needed.
pub fn greeting(dir: &Path, is_new: bool, base_url: &str, token: Option<&str>) -> Vec<String> {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let dir = dir.display();
    if !is_new {
        return vec![format!("started again, with the users that are kept in {dir}")];
    }
    let client = match base_url.strip_prefix("unix:") {
        Some(path) => format!("curl --unix-socket {} http://localhost/users", shell_word(path)),
        None => format!("curl {base_url}/users"),
    };
    let token = token.map(|token| format!(r#" -H "Authorization: Bearer {token}""#)).unwrap_or_default();
    vec![
        format!(
            "first start: users over HTTP, kept by a PostgreSQL of its own in {dir}, where each start finds them"
        ),
        format!(r#"to try it: {client}{token} -d '{{"name":"Ada Lovelace","email":"ada@example.com"}}'"#),
    ]
}

/// Returns a shell expression that yields the token.
pub fn token_in_a_shell() -> String {
    let file = environment::value("API_TOKEN_FILE")
        .map(|file| format!("$(cat {})", shell_word(&file.to_string_lossy())));
    file.unwrap_or_else(|| "$API_TOKEN".to_owned())
}

/// Quotes a text, if a shell would not read it as one word.
fn shell_word(text: &str) -> String {
    let plain = |sign: char| sign.is_alphanumeric() || "/._-+:@%".contains(sign);
    match text.chars().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_to_try_is_for_this_service() {
        let line = |base_url, token| greeting(Path::new("/nowhere"), true, base_url, token).remove(1);
        let user = r#"-d '{"name":"Ada Lovelace","email":"ada@example.com"}'"#;
        let token = r#" -H "Authorization: Bearer $API_TOKEN""#;
        for (base_url, token_of, expected) in [
            ("http://127.0.0.1:3000", None, format!("curl http://127.0.0.1:3000/users {user}")),
            ("http://0.0.0.0:1", Some("$API_TOKEN"), format!("curl http://0.0.0.0:1/users{token} {user}")),
            ("unix:/a b", None, format!("curl --unix-socket '/a b' http://localhost/users {user}")),
        ] {
            assert_eq!(line(base_url, token_of), format!("to try it: {expected}"));
        }
    }

    #[test]
    fn words_of_a_shell() {
        assert_eq!(shell_word("/var/lib/userd"), "/var/lib/userd");
        assert_eq!(shell_word("/o'brien/a b"), r"'/o'\''brien/a b'");
    }
}
