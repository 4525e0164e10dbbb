//! What makes a database server's certificate acceptable: sslmode's degrees, with the two habits of
//! PostgreSQL set-ups that webpki refuses (a trusted server certificate that signed itself, and
//! version 1 certificates). Signatures of the handshake are verified in every degree.

use std::cmp::Ordering;

use rustls::CertificateError::{BadEncoding, Expired, NotValidForName, NotValidYet, Other, UnknownIssuer};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{
    WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
    verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme};

use super::Verify;
use super::certificate::Certificate;

/// The name to connect by when the host is not a name that a certificate can hold: an address, for
/// which rustls tells the server no name. `Verify::ChainAndName` never accepts it.
pub fn no_name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from([0; 4]).into())
}

/// rustls's question put to `Verify`.
#[derive(Debug)]
pub struct Verifier {
    verify: Verify,
    trusted: Vec<CertificateDer<'static>>,
    /// `trusted` again, as webpki takes them.
    authorities: RootCertStore,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Verifier {
    /// Accepts what `trusted` are or have signed. Trusted certificates that are unreadable are
    /// skipped, as system stores hold some.
    pub fn new(
        verify: Verify,
        trusted: Vec<CertificateDer<'static>>,
        algorithms: WebPkiSupportedAlgorithms,
    ) -> Verifier {
        let mut authorities = RootCertStore::empty();
        authorities.add_parsable_certificates(trusted.iter().cloned());
        Verifier { verify, trusted, authorities, algorithms }
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.verify == Verify::Nothing {
            return Ok(ServerCertVerified::assertion());
        }
        let fields = Certificate::parse(certificate).ok_or(BadEncoding)?;
        if self.trusted.contains(certificate) {
            // webpki takes no certificate marked as an authority's for a server's own.
            match fields.validity(now) {
                Ordering::Less => return Err(NotValidYet.into()),
                Ordering::Greater => return Err(Expired.into()),
                Ordering::Equal => {}
            }
        } else {
            verify_server_cert_signed_by_trust_anchor(
                &parse(certificate)?,
                &self.authorities,
                intermediates,
                now,
                self.algorithms.all,
            )
            .map_err(|error| match (error, fields.is_self_issued) {
                (Error::InvalidCertificate(UnknownIssuer | Other(_)), true) => {
                    refusal("it signed itself, and is not among the trusted ones")
                }
                (error, _) => error,
            })?;
        }
        if self.verify == Verify::ChainAndName {
            if *name == no_name() {
                return Err(NotValidForName.into());
            }
            verify_server_name(&parse(certificate)?, name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        parse(certificate)?;
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        match Certificate::parse(certificate) {
            Some(fields) if fields.is_version_1 => {
                verify_tls13_signature_with_raw_key(message, &fields.public_key, signature, &self.algorithms)
            }
            _ => verify_tls13_signature(message, certificate, signature, &self.algorithms),
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// The certificate for webpki, which cannot read version 1. OpenSSL before 3.2 (Debian 12, Ubuntu 24.04) makes such
/// where no extensions are asked for, as in the example of PostgreSQL's manual.
fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<ParsedCertificate<'a>, Error> {
    if Certificate::parse(certificate).is_some_and(|fields| fields.is_version_1) {
        return Err(refusal("it is of X.509 version 1; make it again with a subjectAltName"));
    }
    ParsedCertificate::try_from(certificate)
}

/// A reason that rustls has no name for.
fn refusal(why: &'static str) -> Error {
    let why: Box<dyn std::error::Error + Send + Sync> = why.into();
    Other(OtherError(why.into())).into()
}
