//! Runs the service from its start to the end of the process. Binds the address before it starts a database, so that a
//! taken port is reported immediately.

use super::{Failure, arguments::Args, commands, embedded, environment, log::log_to_stderr, signals};
use crate::{BoundServer, server};
use std::io::{self, Write};
use std::{os::unix::net::UnixDatagram, sync::atomic::Ordering::SeqCst};

/// The message of a service that ends because a thread that it needs has ended.
const SERVICE_BROKE: &str = "nothing could be served any more; the log says why, start it again";

/// Runs the service until a signal ends it.
pub fn serve(args: &Args) -> Result<(), Failure> {
    log_to_stderr(&environment::variable)?;
    let mut config = environment::read_config(args).map_err(Failure::usage)?;
    config.sockets = environment::supervisor_sockets()?;
    server::raise_limits_for_connections(&config)?;
    if let Some(line) = environment::ssl_warning(args, &config) {
        log::warn!("{line}");
    }
    let is_embedded = args.has(commands::EMBEDDED);
    // While a private cluster is made or started, a signal must not end the process immediately, because the cluster's
    // server would go on running.
    signals::EXITS_GRACEFULLY.store(is_embedded, SeqCst);
    signals::end_service_on_signal()?;

    let bound = BoundServer::bind(&config)?;
    let mut cluster = embedded::open_cluster(args, &mut config, true)?;
    let server = bound.start(config, || signals::end_service(Err(SERVICE_BROKE.to_owned())))?;
    // Sets `EXITS_GRACEFULLY` before it prints the line, because a test harness may send a signal as soon as it reads
    // the line.
    signals::EXITS_GRACEFULLY.store(true, SeqCst);
    notify_systemd("READY=1");
    // Ignores an error, because a test harness may have closed standard output.
    let _ = writeln!(io::stdout(), "listening on {}", server.base_url());
    let end = signals::wait_for_service_end(cluster.as_mut());
    log::info!("stopping");
    notify_systemd("STOPPING=1");
    server.stop();
    drop(cluster);
    log::info!("stopped");
    end.map_err(Failure::runtime)
}

/// Tells systemd that the service is ready or stops, for units of `Type=notify`.
fn notify_systemd(state: &str) {
    let Some(socket) = environment::variable("NOTIFY_SOCKET") else { return };
    let sent = UnixDatagram::unbound().and_then(|from| from.send_to(state.as_bytes(), socket));
    if let Err(error) = sent {
        log::warn!("NOTIFY_SOCKET: {state} cannot be sent: {error}");
    }
}
