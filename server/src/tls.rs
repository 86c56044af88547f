//! TLS of one side, clients or peers: from files to what a handshake needs.
//!
//! Promises: the files are read again for each handshake, certificates, keys and authorities alike, so that a renewed one is used
//! without a restart. Files that are missing or do not fit each other refuse the start; later they are told in the log, and the
//! last good ones stay in use.
//! A side with an authority, or told to ask for certificates, lets nobody in without one.
//!
//! Not here: flags (`config/tls.rs`), listening (`serve.rs`).
//!
//! etcd: client/pkg/transport/listener.go, client/pkg/tlsutil.

pub mod auto;
pub mod names;
pub mod suites;
pub mod verify;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsConnector, client};

use crate::config::tls::{Side, TlsOptions};
use verify::{Allowed, AllowedClients, Servers, Trust};

/// What a client may speak after the handshake, the better first.
const SERVED_PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// What members speak to each other.
const PEER_PROTOCOL: &[u8] = b"h2";

/// What is wrong with the files.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{flag} {path}: {source}")]
    Read {
        flag: String,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{flag} {path} holds no {what} in PEM{why}")]
    Nothing {
        flag: String,
        path: PathBuf,
        what: &'static str,
        why: String,
    },
    #[error("{flags} {files} cannot be used together: {why}")]
    Pair {
        flags: String,
        files: String,
        why: String,
    },
    #[error("{flag}: {why}")]
    Authorities { flag: String, why: String },
    #[error("{flag}: cannot make a certificate in {path}: {source}")]
    Auto {
        flag: String,
        path: PathBuf,
        source: io::Error,
    },
    /// Versions and suites were checked with the flags: this would be a bug.
    #[error("TLS: {0}")]
    Library(#[from] rustls::Error),
}

/// One side's certificates, authorities and rules.
#[derive(Debug)]
pub struct Tls {
    options: TlsOptions,
    current: Mutex<Arc<Loaded>>,
}

/// Both sides, and what was made of the files as they are now.
#[derive(Debug)]
struct Loaded {
    files: Files,
    /// None without a certificate.
    server: Option<Arc<ServerConfig>>,
    /// Made when it is asked for first: without a file of authorities the system's are read, which is not for nothing.
    client: OnceLock<Arc<ClientConfig>>,
}

/// What the files held.
#[derive(Debug, PartialEq, Eq)]
struct Files {
    own: Option<Pair>,
    /// When this side has another one for connections that it opens.
    own_client: Option<Pair>,
    authorities: Option<File>,
}

#[derive(Debug, PartialEq, Eq)]
struct Pair {
    cert: File,
    key: File,
}

#[derive(Debug, PartialEq, Eq)]
struct File {
    flag: String,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Tls {
    /// Reads the files, or makes the certificate in `data_dir` for `hosts`.
    pub fn load(
        mut options: TlsOptions,
        data_dir: &Path,
        hosts: &[String],
    ) -> Result<Arc<Self>, TlsError> {
        if options.auto {
            let path = data_dir.join("fixtures").join(options.side.name());
            let made = auto::files(&path, hosts, options.auto_validity_years);
            let (cert, key) = made.map_err(|source| TlsError::Auto {
                flag: options.side.flag("auto-tls"),
                path,
                source,
            })?;
            (options.cert_file, options.key_file) = (Some(cert), Some(key));
        }
        let loaded = Loaded::new(&options, Files::read(&options)?)?;
        Ok(Arc::new(Self {
            options,
            current: Mutex::new(Arc::new(loaded)),
        }))
    }

    pub fn side(&self) -> Side {
        self.options.side
    }

    /// True when a certificate is taken only from its owner's addresses.
    pub fn checks_addresses(&self) -> bool {
        !self.options.skip_client_san_verification
    }

    /// For one handshake with who connects to this member.
    pub async fn server(self: &Arc<Self>) -> io::Result<Arc<ServerConfig>> {
        let loaded = self.fresh().await;
        let none = || io::Error::other("this member has no certificate");
        loaded.server.clone().ok_or_else(none)
    }

    /// Opens TLS to the member at `host`, over a connection to it.
    pub async fn connect<S>(
        self: &Arc<Self>,
        host: &str,
        stream: S,
    ) -> io::Result<client::TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let loaded = self.fresh().await;
        let config = loaded.client(&self.options).map_err(io::Error::other)?;
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        TlsConnector::from(config).connect(name, stream).await
    }

    /// What the files hold now; when they are of no use, what they held before.
    async fn fresh(self: &Arc<Self>) -> Arc<Loaded> {
        let this = Arc::clone(self);
        let reading = tokio::task::spawn_blocking(move || this.read_again());
        match reading.await {
            Ok(Ok(loaded)) => loaded,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot use the TLS files as they are now; going on with the earlier ones");
                Arc::clone(&self.current.lock())
            }
            Err(_) => Arc::clone(&self.current.lock()),
        }
    }

    fn read_again(&self) -> Result<Arc<Loaded>, TlsError> {
        let files = Files::read(&self.options)?;
        let current = Arc::clone(&self.current.lock());
        if current.files == files {
            return Ok(current);
        }
        let loaded = Arc::new(Loaded::new(&self.options, files)?);
        *self.current.lock() = Arc::clone(&loaded);
        tracing::info!(
            side = self.options.side.name(),
            "the TLS files have changed"
        );
        Ok(loaded)
    }
}

impl Files {
    fn read(options: &TlsOptions) -> Result<Self, TlsError> {
        let read = |name: &str, path: &Option<PathBuf>| {
            let Some(path) = path else { return Ok(None) };
            let flag = options.side.flag(name);
            match std::fs::read(path) {
                Ok(bytes) => Ok(Some(File {
                    flag,
                    path: path.clone(),
                    bytes,
                })),
                Err(source) => Err(TlsError::Read {
                    flag,
                    path: path.clone(),
                    source,
                }),
            }
        };
        let pair = |cert: Option<File>, key: Option<File>| {
            cert.zip(key).map(|(cert, key)| Pair { cert, key })
        };
        Ok(Self {
            own: pair(
                read("cert-file", &options.cert_file)?,
                read("key-file", &options.key_file)?,
            ),
            own_client: pair(
                read("client-cert-file", &options.client_cert_file)?,
                read("client-key-file", &options.client_key_file)?,
            ),
            authorities: read("trusted-ca-file", &options.trusted_ca_file)?,
        })
    }
}

impl File {
    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&self.bytes).collect();
        let why = match found {
            Ok(found) if !found.is_empty() => return Ok(found),
            Ok(_) => String::new(),
            Err(error) => format!(": {error}"),
        };
        Err(self.nothing("certificate", why))
    }

    fn nothing(&self, what: &'static str, why: String) -> TlsError {
        TlsError::Nothing {
            flag: self.flag.clone(),
            path: self.path.clone(),
            what,
            why,
        }
    }
}

impl Pair {
    fn key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(&self.key.bytes)
            .map_err(|error| self.key.nothing("private key", format!(": {error}")))
    }

    fn check(&self, options: &TlsOptions) -> Result<(), TlsError> {
        let provider = &options.versions.provider;
        CertifiedKey::from_der(self.cert.certificates()?, self.key()?, provider)
            .map(|_| ())
            .map_err(|error| self.unfit(&error))
    }

    fn unfit(&self, error: &rustls::Error) -> TlsError {
        let (cert, key) = (&self.cert, &self.key);
        TlsError::Pair {
            flags: format!("{} and {}", cert.flag, key.flag),
            files: format!("{} and {}", cert.path.display(), key.path.display()),
            why: error.to_string(),
        }
    }
}

impl Loaded {
    fn new(options: &TlsOptions, files: Files) -> Result<Self, TlsError> {
        let given = match &files.authorities {
            Some(file) => Some(Arc::new(authorities(file)?)),
            None => None,
        };
        let server = match &files.own {
            Some(own) => Some(Arc::new(server_config(options, own, given.as_ref())?)),
            None => None,
        };
        if let Some(own_client) = &files.own_client {
            own_client.check(options)?;
        }
        Ok(Self {
            files,
            server,
            client: OnceLock::new(),
        })
    }

    fn client(&self, options: &TlsOptions) -> Result<Arc<ClientConfig>, TlsError> {
        if let Some(client) = self.client.get() {
            return Ok(Arc::clone(client));
        }
        let made = Arc::new(client_config(options, &self.files)?);
        Ok(Arc::clone(self.client.get_or_init(|| made)))
    }
}

fn authorities(file: &File) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in file.certificates()? {
        roots
            .add(certificate)
            .map_err(|error| TlsError::Authorities {
                flag: file.flag.clone(),
                why: format!("{}: {error}", file.path.display()),
            })?;
    }
    Ok(roots)
}

/// Those of the system, where no file names others.
fn system_authorities() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn server_config(
    options: &TlsOptions,
    own: &Pair,
    given: Option<&Arc<RootCertStore>>,
) -> Result<ServerConfig, TlsError> {
    let provider = &options.versions.provider;
    let builder = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&options.versions.protocols)?;
    let builder = if given.is_some() || options.client_cert_auth {
        let roots = given.map_or_else(|| Arc::new(system_authorities()), Arc::clone);
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(provider)).build();
        let verifier = verifier.map_err(|error| TlsError::Authorities {
            flag: options.side.flag("trusted-ca-file"),
            why: error.to_string(),
        })?;
        builder.with_client_cert_verifier(match Allowed::of(options) {
            Some(allowed) => Arc::new(AllowedClients {
                inner: verifier,
                allowed,
            }),
            None => verifier,
        })
    } else {
        builder.with_no_client_auth()
    };
    let mut config = builder
        .with_single_cert(own.cert.certificates()?, own.key()?)
        .map_err(|error| own.unfit(&error))?;
    config.alpn_protocols = SERVED_PROTOCOLS.map(<[u8]>::to_vec).to_vec();
    Ok(config)
}

fn client_config(options: &TlsOptions, files: &Files) -> Result<ClientConfig, TlsError> {
    let provider = &options.versions.provider;
    let builder = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&options.versions.protocols)?;
    let trust = if options.auto {
        Trust::SelfMade
    } else {
        let roots = match &files.authorities {
            Some(file) => authorities(file)?,
            None => system_authorities(),
        };
        let provider = Arc::clone(provider);
        match WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build() {
            Ok(verifier) => Trust::Authorities(verifier),
            Err(_) => Trust::Nobody,
        }
    };
    let builder = builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Servers {
            trust,
            allowed: Allowed::of(options),
            provider: Arc::clone(provider),
        }));
    let mut config = match files.own_client.as_ref().or(files.own.as_ref()) {
        Some(own) => builder
            .with_client_auth_cert(own.cert.certificates()?, own.key()?)
            .map_err(|error| own.unfit(&error))?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![PEER_PROTOCOL.to_vec()];
    Ok(config)
}

/// A handshake's failure, where etcd's logs have words for it in those.
pub fn words(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(rustls::Error::AlertReceived(alert)) => match alert_words(*alert) {
            Some(words) => format!("remote error: tls: {words}"),
            None => format!("remote error: tls: {alert:?}"),
        },
        Some(rustls::Error::NoCertificatesPresented) => {
            "tls: client didn't provide a certificate".to_owned()
        }
        Some(rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        )) => "tls: failed to verify certificate: x509: certificate signed by unknown authority"
            .to_owned(),
        Some(rustls::Error::InvalidCertificate(CertificateError::NotValidForName)) => {
            "client certificate authentication failed".to_owned()
        }
        Some(rustls::Error::InvalidMessage(_)) => {
            "tls: first record does not look like a TLS handshake".to_owned()
        }
        _ => error.to_string(),
    }
}

fn alert_words(alert: AlertDescription) -> Option<&'static str> {
    Some(match alert {
        AlertDescription::HandshakeFailure => "handshake failure",
        AlertDescription::BadCertificate => "bad certificate",
        AlertDescription::UnsupportedCertificate => "unsupported certificate",
        AlertDescription::CertificateRevoked => "revoked certificate",
        AlertDescription::CertificateExpired => "expired certificate",
        AlertDescription::CertificateUnknown => "unknown certificate",
        AlertDescription::UnknownCA => "unknown certificate authority",
        AlertDescription::AccessDenied => "access denied",
        AlertDescription::DecryptError => "error decrypting message",
        AlertDescription::ProtocolVersion => "protocol version not supported",
        AlertDescription::InternalError => "internal error",
        AlertDescription::UnrecognisedName => "unrecognized name",
        AlertDescription::CertificateRequired => "certificate required",
        AlertDescription::NoApplicationProtocol => "no application protocol",
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
