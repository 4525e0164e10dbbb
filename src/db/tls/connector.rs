//! TLS by rustls, as the sync `postgres` crate takes it. Installs nothing process-wide: the crypto provider goes with
//! each configuration.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::{fs, io};

use postgres::Socket;
use postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, ClientConfig, InconsistentKeys, OtherError};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::certificate::Certificate;
use super::verifier::{Verifier, no_name};
use super::{TlsSettings, Verify};

/// The one connector type for every mode, for `PostgresConnectionManager<Connector>`. Cloning is cheap.
#[derive(Clone)]
pub struct Connector(Option<Arc<ClientConfig>>);

/// A connector that speaks TLS by `settings`, or one that never does (`None`).
///
/// Reads the named files, or the system's certificates, now and not again: blocks on the file
/// system only. An error if one cannot be read or holds nothing usable: a line, which names the file.
pub fn connector(settings: Option<&TlsSettings>) -> Result<Connector, String> {
    let Some(settings) = settings else {
        return Ok(Connector(None));
    };
    let provider = Arc::new(ring::default_provider());
    let trusted = match (settings.verify, &settings.roots) {
        (Verify::Nothing, _) => Vec::new(),
        (_, Some(path)) => certificates(path)?,
        (_, None) => system_certificates()?,
    };
    let verifier = Verifier::new(settings.verify, trusted, provider.signature_verification_algorithms);
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("the ring provider supports the default versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match &settings.client {
        Some((certificate, key)) => {
            let client = client_certificate(certificate, key, &provider)?;
            builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(client)))
        }
        None => builder.with_no_client_auth(),
    };
    // What sslnegotiation=direct requires and libpq always sends.
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    // A resumed session skips the check of the certificate, which may have expired since.
    config.resumption = Resumption::disabled();
    Ok(Connector(Some(Arc::new(config))))
}

/// A failed handshake, in plain words where the server's certificate was refused.
fn handshake_error(error: io::Error) -> io::Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    let Some(rustls::Error::InvalidCertificate(error)) = inner else {
        return error;
    };
    use CertificateError::*;
    let text = match error {
        UnknownIssuer => "it is not signed by a trusted authority".into(),
        BadSignature => "a signature by its key or its authority is wrong".into(),
        Expired | ExpiredContext { .. } => "it has expired".into(),
        NotValidYet | NotValidYetContext { .. } => "it is not valid yet".into(),
        NotValidForName => "the host's name is none that it could hold".into(),
        NotValidForNameContext { expected, presented } => match presented.join(" or ") {
            names if names.is_empty() => "it has no subjectAltName, and its CN does not count".into(),
            names => format!("it is for {names}, not for {:?}", expected.to_str()),
        },
        Other(OtherError(error)) => error.to_string(),
        error => error.to_string(),
    };
    io::Error::other(format!("the server's certificate was refused: {text}"))
}

impl MakeTlsConnect<Socket> for Connector {
    type Stream = Stream;
    type TlsConnect = Handshake;
    type Error = io::Error;

    // Called for every connection, with "" for Unix sockets and even when TLS is off: never fails.
    fn make_tls_connect(&mut self, host: &str) -> io::Result<Handshake> {
        Ok(Handshake { config: self.0.clone(), host: host.to_owned() })
    }
}

/// One TLS handshake to come.
pub struct Handshake {
    config: Option<Arc<ClientConfig>>,
    host: String,
}

impl TlsConnect<Socket> for Handshake {
    type Stream = Stream;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Stream>> + Send>>;

    fn connect(self, socket: Socket) -> Self::Future {
        Box::pin(async move {
            let config = self.config.ok_or_else(|| io::Error::other("TLS is switched off"))?;
            let name = ServerName::try_from(self.host).unwrap_or_else(|_| no_name());
            let connector = tokio_rustls::TlsConnector::from(config);
            let connected = connector.connect(name, socket).await;
            connected.map(Stream).map_err(handshake_error)
        })
    }
}

/// An encrypted connection to the server.
pub struct Stream(tokio_rustls::client::TlsStream<Socket>);

impl TlsStream for Stream {
    fn channel_binding(&self) -> ChannelBinding {
        let certificates = self.0.get_ref().1.peer_certificates().unwrap_or_default();
        certificates
            .first()
            .and_then(|certificate| Certificate::parse(certificate)?.end_point_hash())
            .map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// Every certificate in the PEM file `path`, at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    match found {
        Ok(certificates) if certificates.is_empty() => Err(unusable(path, "holds no PEM certificate")),
        Ok(certificates) => Ok(certificates),
        Err(_) => Err(unusable(path, "is not a well-formed PEM file")),
    }
}

/// The certificates that this machine trusts, found where OpenSSL would look for them.
fn system_certificates() -> Result<Vec<CertificateDer<'static>>, String> {
    let found = rustls_native_certs::load_native_certs();
    if found.certs.is_empty() {
        let hint = "no system certificates found: install ca-certificates, or name a file to trust";
        return Err(hint.into());
    }
    Ok(found.certs)
}

/// The certificate to show to the server, with its key.
fn client_certificate(
    certificate: &Path,
    key: &Path,
    provider: &CryptoProvider,
) -> Result<CertifiedKey, String> {
    let chain = certificates(certificate)?;
    let private = PrivateKeyDer::from_pem_slice(&read(key)?)
        .map_err(|_| unusable(key, "holds no unencrypted PEM private key"))?;
    let private = provider
        .key_provider
        .load_private_key(private)
        .map_err(|_| unusable(key, "holds a kind of private key that is not supported"))?;
    let client = CertifiedKey::new(chain, private);
    // Any other failure only says that the two could not be compared (a version 1 certificate).
    match client.keys_match() {
        Err(rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch)) => {
            Err(unusable(key, &format!("is not the key of {}", certificate.display())))
        }
        _ => Ok(client),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| unusable(path, &format!("cannot be read: {error}")))
}

fn unusable(path: &Path, why: &str) -> String {
    format!("{} {why}", path.display())
}
