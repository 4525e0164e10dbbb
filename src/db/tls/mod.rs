//! TLS to the database, by rustls. Owns how far a server's certificate is verified. Must not know where settings come
//! from. Installs nothing process-wide: the crypto provider goes with each configuration.

#[cfg(test)]
#[cfg(feature = "tls")]
mod tests;

use std::path::PathBuf;

#[cfg(feature = "tls")]
pub use verified::{Connector, connector};

/// The settings of TLS. `ssl_mode` of `postgres::Config` says if TLS is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsSettings {
    /// The extent to which the server's certificate is verified.
    pub verify: Verify,
    /// PEM file of the certificates to trust; `None`: the system's.
    pub roots: Option<PathBuf>,
    /// PEM files of the certificate (chain) and private key to show to the server.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// The extent to which a server's certificate is verified. The server proves in any case that it owns the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// No verification: the connection is encrypted, but to any server that answers.
    #[default]
    Nothing,
    /// The dates of the certificate are valid, and a trusted authority signed it, or it is itself trusted.
    Chain,
    /// Everything that `Chain` verifies, and also that it names the host.
    ChainAndName,
}

#[cfg(not(feature = "tls"))]
pub use postgres::NoTls as Connector;

/// Returns a connector that never speaks TLS: a target that requires it is refused before.
#[cfg(not(feature = "tls"))]
pub fn connector(_: &TlsSettings) -> Result<Connector, String> {
    Ok(Connector)
}

#[cfg(feature = "tls")]
mod verified {
    use super::{TlsSettings, Verify};
    use rustls::SignatureScheme;
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor, verify_server_name};
    use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature};
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject};
    use rustls::server::ParsedCertificate;
    use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore};
    use std::os::unix::fs::MetadataExt;
    use std::{fmt::Display, fs, path::Path, sync::Arc};

    /// The signature of a handshake is verified with the key of a certificate, and rustls reads version 3 alone.
    const NOT_X509_V3: &str = "the server's certificate is not of X.509 version 3: sign it anew with \
        `openssl x509 -req -extfile FILE ...`, where FILE holds the line subjectAltName = DNS:NAME-OF-THE-SERVER";

    /// The certificate of the settings is of a version that rustls does not read.
    const CLIENT_NOT_X509_V3: &str = "is no certificate of X.509 version 3: sign it anew with \
        `openssl x509 -req -extfile FILE ...`, where FILE holds the line extendedKeyUsage = clientAuth";

    /// The certificate has another authority than those of the settings or of the system.
    const OTHER_AUTHORITY: &str = "no trusted authority has signed the server's certificate: DB_SSL_CA, or sslrootcert in \
        DATABASE_URL, names the file of its authority";

    /// Connector of every connection, whether it speaks TLS or not. Cloning is cheap.
    pub type Connector = tokio_postgres_rustls::MakeRustlsConnect;

    /// Returns a connector that speaks TLS by these settings. Reads the named files, or the system's certificates, once:
    /// blocks on the file system only. An error is a line that names the file.
    pub fn connector(settings: &TlsSettings) -> Result<Connector, String> {
        let provider = Arc::new(ring::default_provider());
        let trusted = match (settings.verify, &settings.roots) {
            (Verify::Nothing, _) => Vec::new(),
            (_, Some(file)) => certificates(file)?,
            // Reads the system's certificates from the files that OpenSSL would read.
            (_, None) => rustls_native_certs::load_native_certs().certs,
        };
        if trusted.is_empty() && settings.verify != Verify::Nothing {
            return Err("no system certificates found: install ca-certificates, or name a file".to_owned());
        }
        // Certificates that cannot be parsed are left out: the store of a system has some.
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(trusted.iter().cloned());
        let algorithms = provider.signature_verification_algorithms;
        let verifier = Verifier { verify: settings.verify, trusted, roots, algorithms };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the ring provider supports the default versions")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match &settings.client {
            Some((certificate, key)) => {
                let private = PrivateKeyDer::from_pem_slice(&read(key)?)
                    .map_err(|_| unusable(key, "holds no unencrypted PEM private key"))?;
                if is_open(key) {
                    log::warn!("{}", unusable(key, "can be read by others: chmod 600"));
                }
                let built = builder.with_client_auth_cert(certificates(certificate)?, private);
                built.map_err(|error| match error {
                    Error::InvalidCertificate(_) => unusable(certificate, CLIENT_NOT_X509_V3),
                    error => unusable(key, error),
                })?
            }
            None => builder.with_no_client_auth(),
        };
        // The protocol `postgresql` is offered: sslnegotiation=direct requires it, and libpq always sends it.
        config.alpn_protocols = vec![b"postgresql".to_vec()];
        // Sessions are not resumed: a resumed session would not verify a certificate that may have expired since.
        config.resumption = Resumption::disabled();
        Ok(Connector::new(config))
    }

    #[derive(Debug)]
    struct Verifier {
        verify: Verify,
        trusted: Vec<CertificateDer<'static>>,
        /// The trusted certificates in the form of webpki.
        roots: RootCertStore,
        algorithms: WebPkiSupportedAlgorithms,
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
            let parsed = ParsedCertificate::try_from(certificate)
                .map_err(|_| Error::General(NOT_X509_V3.to_owned()))?;
            if self.verify == Verify::Nothing {
                return Ok(ServerCertVerified::assertion());
            }
            let all = self.algorithms.all;
            match verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, all) {
                // A trusted certificate that is marked as an authority's, as `openssl req -x509` makes it: webpki
                // refuses it after it has looked at the dates.
                Err(Error::InvalidCertificate(CertificateError::Other(_)))
                    if self.trusted.contains(certificate) => {}
                Err(Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
                    return Err(Error::General(OTHER_AUTHORITY.to_owned()));
                }
                result => result?,
            }
            if self.verify == Verify::ChainAndName {
                verify_server_name(&parsed, name)?;
            }
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls12_signature(message, certificate, signature, &self.algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, certificate, signature, &self.algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.algorithms.supported_schemes()
        }
    }

    /// Reads every certificate of a PEM file, at least one.
    fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
        match found {
            Ok(certificates) if !certificates.is_empty() => Ok(certificates),
            _ => {
                Err(unusable(path, "holds no PEM certificate, as `openssl x509 -in FILE -out NEW` writes it"))
            }
        }
    }

    /// Reads a file of PEM, which may begin with a byte order mark.
    fn read(path: &Path) -> Result<Vec<u8>, String> {
        let bytes = fs::read(path).map_err(|error| unusable(path, format!("cannot be read: {error}")))?;
        Ok(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes).to_vec())
    }

    /// Returns whether libpq would refuse a key, because more than its owner, or the group of a file of root's, may read it.
    fn is_open(key: &Path) -> bool {
        fs::metadata(key).is_ok_and(|file| file.mode() & if file.uid() == 0 { 0o037 } else { 0o077 } != 0)
    }

    fn unusable(path: &Path, why: impl Display) -> String {
        format!("{} {why}", path.display())
    }
}
