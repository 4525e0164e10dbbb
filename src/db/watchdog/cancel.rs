//! Sends PostgreSQL's cancel request for the statement of a session. A commit that waits for a synchronous standby is
//! ended by nothing else, not even by closing the connection.
//!
//! The server then reports that commit as a success, although no standby has it. So whatever it answers is ignored once
//! the cancel request is sent, and the session is not used again: a request that arrives late cancels no other
//! statement.

use super::{CANCEL_TIMEOUT, descriptor::connected_socket, without_panic};
use crate::db::{explain, tls::Connector};
use nix::sys::socket::{Shutdown, shutdown};
use postgres::{CancelToken, Socket, tls::MakeTlsConnect};
use std::{io, os::fd::AsRawFd};

/// What cancels the statements of one session.
pub(super) struct Cancel {
    pub token: CancelToken,
    pub tls: Connector,
}

impl Cancel {
    /// Sends the request. Blocks for the connect time-out and [`CANCEL_TIMEOUT`] at the most.
    pub fn send(&self) {
        let bounded = Bounded(Connector::clone(&self.tls));
        let line = match without_panic(|| self.token.cancel_query(bounded)) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => explain(&error),
            Err(error) => error.to_string(),
        };
        log::debug!("a statement cannot be cancelled: {line}");
    }
}

/// A connector that has the request's socket shut down when its time is up: a silent server does not answer the
/// question whether it speaks TLS.
struct Bounded(Connector);

impl MakeTlsConnect<Socket> for Bounded {
    type Stream = <Connector as MakeTlsConnect<Socket>>::Stream;
    type TlsConnect = <Connector as MakeTlsConnect<Socket>>::TlsConnect;
    type Error = io::Error;

    // Called before there is a socket, on the thread of the request and within its runtime, which ends with it.
    fn make_tls_connect(&mut self, host: &str) -> io::Result<Self::TlsConnect> {
        tokio::spawn(async {
            tokio::time::sleep(CANCEL_TIMEOUT).await;
            if let Ok(Some(socket)) = connected_socket() {
                let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
            }
        });
        MakeTlsConnect::<Socket>::make_tls_connect(&mut self.0, host).map_err(io::Error::other)
    }
}
