//! Certificates and kubeconfigs of one cluster: an authority, a second one for the API
//! aggregation layer, and a certificate per component, valid for the cluster's short life.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};
use serde_json::json;

/// A folder of PEM files: `<name>.crt` and `<name>.key` for each certificate.
pub struct Pki {
    folder: PathBuf,
    /// Only where it was made: who finds the folder later reads certificates, and issues none.
    authority: Option<CertifiedIssuer<'static, KeyPair>>,
}

/// A key and its certificate, in PEM.
struct Identity {
    certificate: String,
    key: String,
}

impl Pki {
    /// Makes the authority and writes `ca.crt` and `ca.key`.
    pub fn create(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let authority = authority("ballast-e2e")?;
        write_private(&folder.join("ca.key"), &authority.key().serialize_pem())?;
        fs::write(folder.join("ca.crt"), authority.pem())?;
        Ok(Self {
            folder: folder.to_path_buf(),
            authority: Some(authority),
        })
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The files an earlier run made.
    pub fn open(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            authority: None,
        }
    }

    /// A certificate for a client of the API: its user is `user`, its groups are `groups`.
    pub fn client(&self, name: &str, user: &str, groups: &[&str]) -> Result<()> {
        self.write(name, &issue(self.authority()?, user, groups, &[])?)
    }

    /// A certificate for a server that is known by these names and addresses.
    pub fn server(&self, name: &str, names: &[&str]) -> Result<()> {
        self.write(name, &issue(self.authority()?, name, &[], names)?)
    }

    /// A kubeconfig for the client of this name, with everything in it.
    pub fn kubeconfig(&self, name: &str, server: &str) -> Result<String> {
        let read = |name: String| {
            fs::read(self.file(&name))
                .map(|bytes| STANDARD.encode(bytes))
                .context(name)
        };
        let (certificate, key) = (read(format!("{name}.crt"))?, read(format!("{name}.key"))?);
        Ok(kubeconfig(
            server,
            &read("ca.crt".to_owned())?,
            &certificate,
            &key,
        ))
    }

    fn authority(&self) -> Result<&CertifiedIssuer<'static, KeyPair>> {
        self.authority
            .as_ref()
            .context("an earlier run made this authority, and no other may issue")
    }

    /// The aggregation layer's authority and client, and the key pair that signs the tokens of
    /// ServiceAccounts: `front-proxy-ca.crt`, `front-proxy.{crt,key}`, `sa.{pub,key}`.
    pub fn api_server_extras(&self) -> Result<()> {
        let front = authority("ballast-e2e-front-proxy")?;
        fs::write(self.file("front-proxy-ca.crt"), front.pem())?;
        self.write("front-proxy", &issue(&front, "front-proxy", &[], &[])?)?;
        let tokens = KeyPair::generate()?;
        write_private(&self.file("sa.key"), &tokens.serialize_pem())?;
        fs::write(self.file("sa.pub"), tokens.public_key_pem())?;
        Ok(())
    }

    fn write(&self, name: &str, identity: &Identity) -> Result<()> {
        fs::write(self.file(&format!("{name}.crt")), &identity.certificate)?;
        write_private(&self.file(&format!("{name}.key")), &identity.key)
    }
}

/// JSON is YAML, so every client reads it.
fn kubeconfig(server: &str, authority: &str, certificate: &str, key: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": "ballast",
            "cluster": { "server": server, "certificate-authority-data": authority },
        }],
        "users": [{
            "name": "ballast",
            "user": { "client-certificate-data": certificate, "client-key-data": key },
        }],
        "contexts": [{ "name": "ballast", "context": { "cluster": "ballast", "user": "ballast" } }],
        "current-context": "ballast",
    })
    .to_string()
}

fn authority(name: &str) -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = params(name, &[], &[])?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    CertifiedIssuer::self_signed(params, KeyPair::generate()?).context("an authority")
}

fn issue(
    authority: &CertifiedIssuer<'static, KeyPair>,
    user: &str,
    groups: &[&str],
    names: &[&str],
) -> Result<Identity> {
    let mut params = params(user, groups, names)?;
    params.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::KeyEncipherment,
    ];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ClientAuth,
        ExtendedKeyUsagePurpose::ServerAuth,
    ];
    let key = KeyPair::generate()?;
    let certificate = params
        .signed_by(&key, authority)
        .context("signing a certificate")?;
    Ok(Identity {
        certificate: certificate.pem(),
        key: key.serialize_pem(),
    })
}

fn params(user: &str, groups: &[&str], names: &[&str]) -> Result<CertificateParams> {
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, user);
    for group in groups {
        params
            .distinguished_name
            .push(DnType::OrganizationName, *group);
    }
    // Fixed dates: certificates of a cluster that lives for hours need no renewal.
    params.not_before = date_time_ymd(2024, 1, 1);
    params.not_after = date_time_ymd(2099, 1, 1);
    Ok(params)
}

fn write_private(path: &Path, text: &str) -> Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .with_context(|| path.display().to_string())?;
    Ok(file.write_all(text.as_bytes())?)
}
