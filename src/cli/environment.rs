//! Makes a configuration from the process's environment: the variables of the table of settings, the name of the
//! account that runs userd, and the sockets that a supervisor passes.

use super::{
    Failure,
    arguments::Args,
    commands::{self, ENV_OPTIONS},
    env_file,
};
use crate::config::{SETTINGS, Scope};
use crate::{Config, ConfigError, Database};
use listenfd::ListenFd;
use std::{env, ffi::OsString, os::fd::OwnedFd, sync::Arc};

/// The warning about a text of `DB_SSL` that does not turn TLS on.
const IGNORED_DB_SSL: &str = "has no effect: TLS to the database is on with the exact text `true`, and beside DATABASE_URL \
                          as its sslmode says";

/// Sets the environment variables of options (`--port` sets `PORT`), and those of `--env-file` that the environment
/// lacks. Must be called while the process has one thread.
pub fn set_env_variables(args: &mut Args) -> Result<(), Failure> {
    let options = ENV_OPTIONS
        .into_iter()
        .filter_map(|(option, name)| Some((name.to_owned(), args.value(option)?.into(), "argument")));
    let file = args.value(commands::ENV_FILE).map(env_file::read_variables).transpose();
    let file = file.map_err(|problem| Failure::usage(format!("--env-file: {problem}")))?;
    let file = file.into_iter().flatten().map(|(name, value)| (name, value, "--env-file"));
    for (name, text, place) in options.chain(file).collect::<Vec<_>>() {
        if place == "argument" || variable(&name).is_none() {
            // SAFETY: the process has one thread, so no other thread reads or writes the environment.
            unsafe { env::set_var(&name, text) };
            args.variable_sources.insert(name, place);
        }
    }
    Ok(())
}

/// Returns the configuration that the environment variables and `--migrate` give.
pub fn read_config(args: &Args) -> Result<Config, ConfigError> {
    let mut config = Config::from_vars(variable_lookup(args))?;
    let user = crate::private_postgres::SystemUser::with_uid(nix::unistd::Uid::effective().as_raw());
    config.os_user = user.map(|user| user.name);
    config.migrate = args.value(commands::MIGRATE).is_none_or(|value| value == "on");
    Ok(config)
}

/// Returns a function that looks an environment variable up by its name. With `--embedded`, the function finds no
/// variable that chooses a database.
pub fn variable_lookup(args: &Args) -> impl Fn(&str) -> Option<OsString> + use<> {
    let settings = SETTINGS.iter().filter(|setting| setting.scope == Scope::Database);
    let names = settings.map(|setting| setting.variable).filter(|name| *name != "POSTGRES_BIN");
    let ignored: Vec<_> = names.filter(|_| args.has(commands::EMBEDDED)).collect();
    move |name| variable(name).filter(|_| !ignored.contains(&name))
}

/// Returns the value of an environment variable, or `None` if the variable is unset or empty.
pub fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns a warning if `DB_SSL` has a text that seems to turn TLS on, but has no effect.
pub fn ssl_warning(args: &Args, config: &Config) -> Option<String> {
    let is_on = matches!(config.database, Database::Parts { ssl: true, .. });
    let text = variable_lookup(args)("DB_SSL").filter(|text| !is_on && text != "false");
    text.map(|text| format!("DB_SSL={text:?} {IGNORED_DB_SSL}"))
}

/// Returns the listening sockets that systemd, or a supervisor with the same protocol, has passed to this process
/// (`LISTEN_FDS`, `LISTEN_PID`).
pub fn supervisor_sockets() -> Result<Vec<Arc<OwnedFd>>, Failure> {
    let mut passed = ListenFd::from_env();
    let count = passed.len();
    let take = |index| {
        let tcp = passed.take_tcp_listener(index).map(|socket| socket.map(OwnedFd::from));
        tcp.or_else(|_| passed.take_unix_listener(index).map(|socket| socket.map(OwnedFd::from))).transpose()
    };
    let sockets = (0..count).filter_map(take);
    let sockets = sockets.map(|socket| socket.map(Arc::new)).collect::<Result<_, _>>();
    sockets
        .map_err(|error| Failure::usage(format!("LISTEN_FDS: {error}; pass sockets as ListenStream= does")))
}
