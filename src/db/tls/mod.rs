//! TLS to the database. Owns what of a server's certificate is checked, and how its refusal is put into words. Must
//! not know where settings come from.

#[cfg(feature = "tls")]
mod certificate;
#[cfg(feature = "tls")]
mod connector;
#[cfg(test)]
#[cfg(feature = "tls")]
mod tests;
#[cfg(feature = "tls")]
mod verifier;

use std::path::PathBuf;

pub use connector::{Connector, connector};

/// Of a build without TLS. A target that requires TLS is refused before it gets here.
#[cfg(not(feature = "tls"))]
mod connector {
    pub use postgres::NoTls as Connector;

    /// A connector that never speaks TLS.
    pub fn connector(_: Option<&super::TlsSettings>) -> Result<Connector, String> {
        Ok(Connector)
    }
}

/// How TLS is spoken where it is spoken. Whether it is, and whether it may fall back to plain text,
/// is `postgres::Config`'s `ssl_mode`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSettings {
    /// What of the server's certificate is checked.
    pub verify: Verify,
    /// PEM file of the certificates to trust; `None`: the system's.
    pub roots: Option<PathBuf>,
    /// PEM files of the certificate (chain) and private key to show to the server.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// What of a server's certificate is checked. That the server owns its key always is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// Nothing: encrypted, but to any server that answers.
    Nothing,
    /// Its dates, and that a trusted authority signed it or that it is itself a trusted certificate.
    Chain,
    /// The same, and that it names the host connected to.
    ChainAndName,
}
