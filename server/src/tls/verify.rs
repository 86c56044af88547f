//! Checks of the other side's certificate beyond its signature: allowed names, and none at all for certificates that peers make
//! for themselves.
//!
//! etcd: client/pkg/transport/listener.go (VerifyPeerCertificate).

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use super::names::Names;
use crate::config::tls::TlsOptions;

/// Who may be at the other end.
#[derive(Clone, Debug)]
pub struct Allowed {
    common_names: Vec<String>,
    hosts: Vec<ServerName<'static>>,
}

impl Allowed {
    /// None when anybody with a good certificate may.
    pub fn of(options: &TlsOptions) -> Option<Self> {
        if options.allowed_cns.is_empty() && options.allowed_hostnames.is_empty() {
            return None;
        }
        let hosts = &options.allowed_hostnames;
        Some(Self {
            common_names: options.allowed_cns.clone(),
            // What is no name is in no certificate.
            hosts: (hosts.iter().cloned())
                .filter_map(|host| ServerName::try_from(host).ok())
                .collect(),
        })
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let name = Names::of(certificate).and_then(|names| names.common_name);
        if name.is_some_and(|name| self.common_names.contains(&name)) {
            return Ok(());
        }
        let parsed = ParsedCertificate::try_from(certificate)?;
        if (self.hosts.iter()).any(|host| verify_server_name(&parsed, host).is_ok()) {
            return Ok(());
        }
        // It becomes the alert that etcd sends.
        Err(Error::InvalidCertificate(CertificateError::NotValidForName))
    }
}

/// Clients with a good certificate that are allowed.
#[derive(Debug)]
pub struct AllowedClients {
    pub inner: Arc<dyn ClientCertVerifier>,
    pub allowed: Allowed,
}

impl ClientCertVerifier for AllowedClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .inner
            .verify_client_cert(end_entity, intermediates, now)?;
        self.allowed.check(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// Who says that a certificate is good.
#[derive(Debug)]
pub enum Trust {
    Authorities(Arc<dyn ServerCertVerifier>),
    /// Peers make their certificates themselves: nobody could vouch for them.
    SelfMade,
    /// No file names an authority and the system has none.
    Nobody,
}

/// Servers with a good certificate that are allowed.
#[derive(Debug)]
pub struct Servers {
    pub trust: Trust,
    pub allowed: Option<Allowed>,
    pub provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Servers {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let authorities = match &self.trust {
            Trust::Authorities(authorities) => authorities,
            Trust::SelfMade => return Ok(ServerCertVerified::assertion()),
            Trust::Nobody => {
                return Err(Error::InvalidCertificate(CertificateError::UnknownIssuer));
            }
        };
        let verified = authorities.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        )?;
        if let Some(allowed) = &self.allowed {
            allowed.check(end_entity)?;
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}
