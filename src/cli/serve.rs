//! Runs the service from its start to the end of the process. The address is bound before a database is started, so
//! that a port that is taken is told at once.

use super::{Failure, arguments::Args, commands, embedded, environment, log::log_to_stderr, signals};
use crate::{BoundServer, server};
use std::io::{self, Write};
use std::{os::unix::net::UnixDatagram, sync::atomic::Ordering::SeqCst};

const BROKEN: &str = "nothing could be served any more; the log says why, start it again";

/// Runs the service until a signal ends it.
pub fn serve(args: &Args) -> Result<(), Failure> {
    log_to_stderr(&environment::value)?;
    let mut config = environment::config(args).map_err(Failure::usage)?;
    config.sockets = environment::passed_sockets()?;
    server::check_system(&config)?;
    for line in environment::warnings(args, &config) {
        log::warn!("{line}");
    }
    let is_embedded = args.has(commands::EMBEDDED);
    // A signal does not interrupt the making of a cluster, and has PostgreSQL stop if it is starting.
    signals::HAS_WORK.store(is_embedded, SeqCst);
    signals::end_service()?;

    let bound = BoundServer::bind(&config)?;
    let mut cluster = embedded::open(args, &mut config, true)?;
    let server = bound.start(config, || signals::end(Err(BROKEN.to_owned())))?;
    // Sets `HAS_WORK` before it prints the line, because a harness may send a signal as soon as it reads the line.
    signals::HAS_WORK.store(true, SeqCst);
    tell("READY=1");
    // An error is ignored: a harness may have closed standard output.
    let _ = writeln!(io::stdout(), "listening on {}", server.base_url());
    let end = signals::wait(cluster.as_mut());
    log::info!("stopping");
    tell("STOPPING=1");
    server.stop();
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
