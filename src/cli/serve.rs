//! Runs the service from its start to the end of the process. The address is bound before a database is started, so
//! that a port that is taken is told at once.

use super::{
    Failure, arguments::Args, embedded, environment, import, log::log_to_stderr, privileges, signals,
};
use std::io::{self, Write};
use std::{os::unix::net::UnixDatagram, sync::atomic::Ordering::SeqCst};
use userd::{BoundServer, Database, private_postgres::Account, server};

const BROKEN: &str = "nothing could be served any more; the log says why, start it again";

/// Runs the service until a signal, or the end of its parent, ends it.
pub fn serve(args: &Args) -> Result<(), Failure> {
    log_to_stderr(environment::log_level(), environment::logs_json())?;
    let (is_embedded, is_ephemeral) = (args.has("--embedded"), args.has("--ephemeral"));
    if is_ephemeral && args.value("--embedded").is_some() {
        return Err(Failure::usage("--ephemeral keeps nothing: it goes without a directory"));
    }
    let is_kept = is_embedded && !is_ephemeral;
    let mut config = environment::config(args).map_err(Failure::usage)?;
    config.sockets = environment::passed_sockets()?;
    server::check_system(&config)?;
    for line in environment::warnings(args, &config) {
        log::warn!("{line}");
    }
    let account = is_embedded.then(|| Account::find(is_kept)).transpose().map_err(Failure::runtime)?;
    // A signal does not interrupt the making of a cluster, and has PostgreSQL stop if it is starting.
    signals::HAS_WORK.store(is_kept, SeqCst);
    signals::end_service()?;
    let has_commands = args.has("--commands");
    let is_parent = args.occurrences("--with-parent").any(|pid| pid.is_none());
    if is_parent && !has_commands {
        signals::watch_input(None, is_parent)?;
    }
    for pid in args.occurrences("--with-parent").flatten() {
        signals::watch_parent(pid)?;
    }

    let bound = BoundServer::bind(&config)?;
    let mut cluster = if is_kept { embedded::open(args, &mut config, true)? } else { None };
    let scratch = is_ephemeral.then(|| import::scratch(args, &config)).transpose()?;
    if let Some(scratch) = &scratch {
        config.database = Database::Url(scratch.url().into());
    }
    let on_listening = || account.as_ref().map_or(Ok(()), privileges::give_up);
    let on_broken = || signals::end(Err(BROKEN.to_owned()));
    let (server, control) = match scratch.as_ref().filter(|_| has_commands) {
        Some(scratch) => {
            let (server, control) = scratch.serve(bound, config, on_listening, on_broken)?;
            if args.has("--seed") {
                control.save(None).map_err(Failure::runtime)?;
            }
            (server, Some(control))
        }
        None => (bound.start(config, on_listening, on_broken)?, None),
    };
    // Set before the line on standard output, after which a harness may send a signal.
    signals::HAS_WORK.store(true, SeqCst);
    tell("READY=1");
    // A harness may have closed standard output.
    let _ = writeln!(io::stdout(), "listening on {}", server.base_url());
    if has_commands {
        signals::watch_input(control, is_parent)?;
    }
    let end = signals::wait(cluster.as_mut());
    log::info!("stopping");
    tell("STOPPING=1");
    server.stop();
    // A harness waits for the end of this process, so its database is dropped later: by the next process, or with the cluster.
    std::mem::forget(scratch);
    drop(cluster);
    log::info!("stopped");
    end.map_err(Failure::runtime)
}

/// Tells systemd the state of the service (`Type=notify`).
fn tell(state: &str) {
    let Some(socket) = environment::value("NOTIFY_SOCKET") else { return };
    let sent = UnixDatagram::unbound().and_then(|from| from.send_to(state.as_bytes(), socket));
    if let Err(error) = sent {
        log::warn!("NOTIFY_SOCKET: {state} cannot be sent: {error}");
    }
}
