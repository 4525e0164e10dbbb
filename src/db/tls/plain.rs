//! The connector of a build without TLS: every connection is plain text. A target that requires TLS is refused before
//! it gets here.

use std::io;

use postgres::tls::{MakeTlsConnect, NoTlsStream};
use postgres::{NoTls, Socket};

use super::TlsSettings;

/// The one connector type for every mode. Cloning is cheap.
#[derive(Clone)]
pub struct Connector(());

/// A handshake that never takes place.
pub type Handshake = NoTls;

/// An encrypted connection, of which there are none.
pub type Stream = NoTlsStream;

/// A connector that never speaks TLS.
pub fn connector(_: Option<&TlsSettings>) -> Result<Connector, String> {
    Ok(Connector(()))
}

impl MakeTlsConnect<Socket> for Connector {
    type Stream = Stream;
    type TlsConnect = Handshake;
    type Error = io::Error;

    fn make_tls_connect(&mut self, _: &str) -> io::Result<Handshake> {
        Ok(NoTls)
    }
}
