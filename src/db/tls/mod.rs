//! Opens TLS connections to the database by rustls, and decides how far a server's certificate is verified. Does not
//! know where settings come from. Installs no crypto provider for the process, because a program that embeds userd may
//! have another one.

#[cfg(test)]
#[cfg(feature = "tls")]
mod tests;

use std::path::PathBuf;

#[cfg(feature = "tls")]
pub use with_rustls::{Connector, connector};

/// The settings of TLS connections. Whether a connection uses TLS is in `ssl_mode` of `postgres::Config`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsSettings {
    pub verification: Verification,
    /// The PEM file with the certificates to trust. If it is `None`, the system's certificates are trusted.
    pub root_file: Option<PathBuf>,
    /// The PEM file with the certificate that userd shows to the server, and the PEM file with its private key.
    pub client_cert_and_key: Option<(PathBuf, PathBuf)>,
}

/// How far a server's certificate is verified. In each case the server proves that it owns the key of the certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verification {
    /// Verifies nothing: the connection is encrypted, but any server is accepted.
    #[default]
    Nothing,
    /// Verifies the dates of the certificate, and that a trusted authority has signed it or that it is trusted itself.
    Chain,
    /// Verifies what `Chain` does, and also that the certificate names the host.
    ChainAndName,
}

#[cfg(not(feature = "tls"))]
pub use postgres::NoTls as Connector;

/// Returns a connector without TLS, for a build without the feature `tls`. Settings that require TLS were refused
/// before, by `DbTarget`.
#[cfg(not(feature = "tls"))]
pub fn connector(_: &TlsSettings) -> Result<Connector, String> {
    Ok(Connector)
}

#[cfg(feature = "tls")]
mod with_rustls {
    use super::{TlsSettings, Verification};
    use rustls::SignatureScheme;
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor, verify_server_name};
    use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature};
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject};
    use rustls::server::ParsedCertificate;
    use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore};
    use std::os::unix::fs::MetadataExt;
    use std::{fmt::Display, fs, path::Path, sync::Arc};

    /// The problem of a certificate that is not of X.509 version 3, the only version that rustls reads. A certificate
    /// with any extension is of version 3.
    const NOT_X509_V3: &str = "is not of X.509 version 3: sign it anew with \
        `openssl x509 -req -extfile FILE ...`, where FILE holds the line subjectAltName = DNS:NAME-OF-ITS-OWNER";

    /// The problem of a server's certificate that no trusted authority has signed.
    const UNTRUSTED_CERTIFICATE: &str = "no trusted authority has signed the server's certificate: DB_SSL_CA, or sslrootcert in \
        DATABASE_URL, names the PEM file of its authority, or of the certificate itself if it is self-signed";

    /// The type that opens connections with or without TLS. A clone of it is cheap.
    pub type Connector = tokio_postgres_rustls::MakeRustlsConnect;

    /// Returns a connector that uses TLS as `settings` say. Reads the files of the settings, or the system's
    /// certificates, and blocks meanwhile. The error is a line that names the file.
    pub fn connector(settings: &TlsSettings) -> Result<Connector, String> {
        let provider = Arc::new(ring::default_provider());
        let trusted = match (settings.verification, &settings.root_file) {
            (Verification::Nothing, _) => Vec::new(),
            (_, Some(file)) => read_certificates(file)?,
            // Reads the certificates of the system from the files that OpenSSL reads.
            (_, None) => rustls_native_certs::load_native_certs().certs,
        };
        if trusted.is_empty() && settings.verification != Verification::Nothing {
            return Err("no system certificates found: install ca-certificates, or name a file".to_owned());
        }
        // Leaves out certificates that cannot be parsed, because there may be some among the system's certificates.
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(trusted.iter().cloned());
        let algorithms = provider.signature_verification_algorithms;
        let verifier = CertVerifier { verification: settings.verification, trusted, roots, algorithms };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the ring provider supports the default versions")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match &settings.client_cert_and_key {
            Some((certificate, key)) => {
                let private = PrivateKeyDer::from_pem_slice(&read_pem(key)?)
                    .map_err(|_| file_error(key, "holds no unencrypted PEM private key"))?;
                if is_key_too_open(key) {
                    log::warn!("{}", file_error(key, "can be read by others: chmod 600"));
                }
                let built = builder.with_client_auth_cert(read_certificates(certificate)?, private);
                built.map_err(|error| match error {
                    Error::InvalidCertificate(_) => file_error(certificate, NOT_X509_V3),
                    error => file_error(key, error),
                })?
            }
            None => builder.with_no_client_auth(),
        };
        // Offers the protocol `postgresql` by ALPN, as libpq does, because sslnegotiation=direct requires it.
        config.alpn_protocols = vec![b"postgresql".to_vec()];
        // Resumes no TLS session, because a resumption would not verify the certificate, which may have expired.
        config.resumption = Resumption::disabled();
        Ok(Connector::new(config))
    }

    /// Verifies a server's certificate as far as `verification` says.
    #[derive(Debug)]
    struct CertVerifier {
        verification: Verification,
        /// The trusted certificates as they were read, to compare a server's own certificate with.
        trusted: Vec<CertificateDer<'static>>,
        /// The trusted certificates in the form that webpki needs to verify a chain.
        roots: RootCertStore,
        algorithms: WebPkiSupportedAlgorithms,
    }

    impl ServerCertVerifier for CertVerifier {
        fn verify_server_cert(
            &self,
            certificate: &CertificateDer<'_>,
            intermediates: &[CertificateDer<'_>],
            name: &ServerName<'_>,
            _ocsp_response: &[u8],
            now: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            let parsed = ParsedCertificate::try_from(certificate)
                .map_err(|_| Error::General(format!("the server's certificate {NOT_X509_V3}")))?;
            if self.verification == Verification::Nothing {
                return Ok(ServerCertVerified::assertion());
            }
            let all = self.algorithms.all;
            match verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, all) {
                // Accepts a server's certificate that is itself trusted and is marked as an authority's, as `openssl
                // req -x509` makes it. webpki refuses such a certificate only after it has checked the dates.
                Err(Error::InvalidCertificate(CertificateError::Other(_)))
                    if self.trusted.contains(certificate) => {}
                Err(Error::InvalidCertificate(
                    error @ (CertificateError::UnknownIssuer | CertificateError::Other(_)),
                )) => return Err(Error::General(format!("{UNTRUSTED_CERTIFICATE} ({error})"))),
                result => result?,
            }
            if self.verification == Verification::ChainAndName {
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

    /// Returns the certificates of a PEM file. Fails if there is none.
    fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read_pem(path)?).collect();
        match certificates {
            Ok(certificates) if !certificates.is_empty() => Ok(certificates),
            _ => Err(file_error(
                path,
                "holds no PEM certificate, as `openssl x509 -in FILE -out NEW` writes it",
            )),
        }
    }

    /// Returns the bytes of a PEM file without the byte order mark that some programs write.
    fn read_pem(path: &Path) -> Result<Vec<u8>, String> {
        let bytes = fs::read(path).map_err(|error| file_error(path, format!("cannot be read: {error}")))?;
        Ok(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes).to_vec())
    }

    /// Returns whether too many users may read the file of a private key, by libpq's rule: only the owner may read it,
    /// and if root owns it, its group, too.
    fn is_key_too_open(key: &Path) -> bool {
        fs::metadata(key).is_ok_and(|file| file.mode() & if file.uid() == 0 { 0o037 } else { 0o077 } != 0)
    }

    /// Returns an error in one line that says why a file cannot be used.
    fn file_error(path: &Path, why: impl Display) -> String {
        format!("{} {why}", path.display())
    }
}
