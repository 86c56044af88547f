//! The flags of TLS as one checked [`TlsOptions`] for each side, and etcd's checks between them and the URLs.
//!
//! Not here: reading the files (`tls.rs`).
//!
//! etcd: server/embed/{config,etcd}.go, client/pkg/tlsutil.

use std::path::PathBuf;

use super::Config;
use super::urls::Url;
use super::values::Values;
use crate::tls::suites::{self, Versions};

/// Whom a certificate is shown to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Client,
    Peer,
    /// A tool that asks a member, with etcdctl's flags.
    Tool,
}

impl Side {
    /// The flag of this side; `name` is the clients'.
    pub fn flag(self, name: &str) -> String {
        match self {
            Side::Client => format!("--{name}"),
            Side::Peer => format!("--peer-{name}"),
            Side::Tool => match name {
                "client-cert-file" => "--cert".to_owned(),
                "client-key-file" => "--key".to_owned(),
                "trusted-ca-file" => "--cacert".to_owned(),
                other => format!("--{other}"),
            },
        }
    }

    /// As log lines and folders name it.
    pub const fn name(self) -> &'static str {
        match self {
            Side::Client => "client",
            Side::Peer => "peer",
            Side::Tool => "tool",
        }
    }
}

/// A side's files and rules.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    pub side: Side,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    /// Shown instead of the above where this member is the one that connects.
    pub client_cert_file: Option<PathBuf>,
    pub client_key_file: Option<PathBuf>,
    pub trusted_ca_file: Option<PathBuf>,
    pub client_cert_auth: bool,
    /// Of the other's certificate; empty allows any.
    pub allowed_cns: Vec<String>,
    pub allowed_hostnames: Vec<String>,
    pub skip_client_san_verification: bool,
    /// A certificate of this member's own making, when no file is given.
    pub auto: bool,
    pub auto_validity_years: u64,
    pub versions: Versions,
}

impl TlsOptions {
    /// True when this side can be served over TLS.
    pub fn can_serve(&self) -> bool {
        self.auto || self.cert_file.is_some()
    }

    /// Of a tool: authorities, and a certificate to show with its key. The system's authorities when there are none.
    pub fn of_tool(
        cacert: Option<PathBuf>,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
    ) -> Result<Self, String> {
        Ok(Self {
            side: Side::Tool,
            cert_file: None,
            key_file: None,
            client_cert_file: cert,
            client_key_file: key,
            trusted_ca_file: cacert,
            client_cert_auth: false,
            allowed_cns: Vec::new(),
            allowed_hostnames: Vec::new(),
            skip_client_san_verification: true,
            auto: false,
            auto_validity_years: 0,
            versions: suites::versions("", "", "", &mut Vec::new())?,
        })
    }

    fn from_values(side: Side, values: &Values, versions: Versions) -> Result<Self, String> {
        let text = |name: &str| {
            let flag = side.flag(name);
            values.text(flag.trim_start_matches('-')).to_owned()
        };
        let list = |name: &str| -> Vec<String> {
            text(name)
                .split(',')
                .filter(|item| !item.is_empty())
                .map(str::to_owned)
                .collect()
        };
        let file = |name: &str| Some(text(name)).filter(|path| !path.is_empty());
        let pair = |what: &str, cert: &str, key: &str| {
            let (cert_file, key_file) = (file(cert), file(key));
            if cert_file.is_some() == key_file.is_some() {
                return Ok((cert_file.map(PathBuf::from), key_file.map(PathBuf::from)));
            }
            let shown = |file: Option<String>| file.unwrap_or_default();
            Err(format!(
                "{what}[key: {}, cert: {}] ({}, {})",
                shown(key_file),
                shown(cert_file),
                side.flag(cert),
                side.flag(key)
            ))
        };
        let (cert_file, key_file) = pair(
            "KeyFile and CertFile must both be present",
            "cert-file",
            "key-file",
        )?;
        let (client_cert_file, client_key_file) = pair(
            "ClientKeyFile and ClientCertFile must both be present or both absent",
            "client-cert-file",
            "client-key-file",
        )?;
        let (allowed_cns, allowed_hostnames) = match side {
            // etcd has no such flag for common names of clients.
            Side::Client | Side::Tool => (Vec::new(), list("client-cert-allowed-hostname")),
            Side::Peer => (list("cert-allowed-cn"), list("cert-allowed-hostname")),
        };
        if !allowed_cns.is_empty() && !allowed_hostnames.is_empty() {
            return Err(format!(
                "AllowedCNs and AllowedHostnames are mutually exclusive (cns={allowed_cns:?}, hostnames={allowed_hostnames:?})"
            ));
        }
        let options = Self {
            side,
            auto: values.bool(side.flag("auto-tls").trim_start_matches('-')) && cert_file.is_none(),
            cert_file,
            key_file,
            client_cert_file,
            client_key_file,
            trusted_ca_file: file("trusted-ca-file").map(PathBuf::from),
            client_cert_auth: values.bool(side.flag("client-cert-auth").trim_start_matches('-')),
            allowed_cns,
            allowed_hostnames,
            skip_client_san_verification: side == Side::Client
                || values.bool("peer-skip-client-san-verification"),
            auto_validity_years: values.u64("self-signed-cert-validity"),
            versions,
        };
        options.check_auto()?;
        Ok(options)
    }

    fn check_auto(&self) -> Result<(), String> {
        if !self.auto {
            return Ok(());
        }
        if self.auto_validity_years == 0 {
            return Err("selfSignedCertValidity is invalid,it should be greater than 0".to_owned());
        }
        // etcd drops them without a word, and whoever set them believes that peers are known.
        if self.side == Side::Peer && (self.trusted_ca_file.is_some() || self.client_cert_auth) {
            return Err(
                "--peer-auto-tls makes a certificate that no authority has signed: --peer-trusted-ca-file and --peer-client-cert-auth cannot be used with it"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

/// Both sides, clients first.
pub fn from_values(
    values: &Values,
    warnings: &mut Vec<String>,
) -> Result<(TlsOptions, TlsOptions), String> {
    let versions = suites::versions(
        values.text("tls-min-version"),
        values.text("tls-max-version"),
        values.text("cipher-suites"),
        warnings,
    )?;
    let side = |side| TlsOptions::from_values(side, values, versions.clone());
    let (client, peer) = (side(Side::Client)?, side(Side::Peer)?);
    for options in [&client, &peer] {
        let auto = options.side.flag("auto-tls");
        if values.bool(auto.trim_start_matches('-')) && !options.auto {
            let side = options.side.name();
            warnings.push(format!("ignoring {side} auto TLS since certs given"));
        }
    }
    Ok((client, peer))
}

/// Every https URL needs a certificate; etcd's texts.
pub fn check_urls(config: &Config, warnings: &mut Vec<String>) -> Result<(), String> {
    let (client, peer) = (&config.client_tls, &config.peer_tls);
    for url in (config.listen_client_urls.iter()).chain(&config.listen_client_http_urls) {
        if url.is_secure() && !client.can_serve() {
            return Err(format!(
                "TLS key/cert (--cert-file, --key-file) must be provided for client url {url} with HTTPS scheme"
            ));
        }
        warn_of_plain(url, client, "http or unix", "client-url", warnings);
    }
    for url in &config.listen_metrics_urls {
        if url.is_secure() && !client.can_serve() {
            return Err(format!(
                "client TLS key/cert (--cert-file, --key-file) must be provided for metrics secure url {url}"
            ));
        }
    }
    for url in &config.listen_peer_urls {
        if url.is_secure() && !peer.can_serve() {
            return Err(format!(
                "cannot listen on TLS for {}: KeyFile and CertFile are not presented (--peer-cert-file, --peer-key-file)",
                url.address
            ));
        }
        warn_of_plain(url, peer, "HTTP", "peer-url", warnings);
    }
    Ok(())
}

fn warn_of_plain(
    url: &Url,
    options: &TlsOptions,
    schemes: &str,
    what: &str,
    warnings: &mut Vec<String>,
) {
    if url.is_secure() {
        return;
    }
    if options.cert_file.is_some() {
        warnings.push(format!("scheme is {schemes} while key and cert files are present; ignoring key and cert files ({what} {url})"));
    }
    if options.client_cert_auth {
        let flag = options.side.flag("client-cert-auth");
        warnings.push(format!("scheme is {schemes} while {flag} is enabled; ignoring client cert auth for this URL ({what} {url})"));
    }
}
