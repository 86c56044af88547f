//! `--auto-tls`, `--peer-auto-tls`: a certificate of the member's own making, kept in its data directory.
//!
//!     DIR/fixtures/client, DIR/fixtures/peer   cert.pem and key.pem of each
//!
//! Made once: what is found there is used. It encrypts, and vouches for nobody.
//!
//! etcd: client/pkg/transport/listener.go (SelfCert).

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use rcgen::{
    CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose, date_time_ymd,
};

use crate::clock::Clock;

const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
/// Clocks of two members differ.
const BACKDATED: Duration = Duration::from_secs(3600);

/// The two files, made when they are not there; `hosts` are those that the member listens on.
pub fn files(dir: &Path, hosts: &[String], years: u64) -> io::Result<(PathBuf, PathBuf)> {
    let (cert_file, key_file) = (dir.join("cert.pem"), dir.join("key.pem"));
    if cert_file.exists() && key_file.exists() {
        return Ok((cert_file, key_file));
    }
    fs::create_dir_all(dir)?;
    let (certificate, key) = make(hosts, years).map_err(io::Error::other)?;
    fs::write(&cert_file, certificate)?;
    let mut private = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&key_file)?;
    private.write_all(key.as_bytes())?;
    tracing::warn!(path = %cert_file.display(), years, "automatically generate certificates");
    Ok((cert_file, key_file))
}

/// Certificate and key in PEM.
fn make(hosts: &[String], years: u64) -> Result<(String, String), rcgen::Error> {
    let mut params = CertificateParams::new(hosts.to_vec())?;
    params
        .distinguished_name
        .push(DnType::OrganizationName, "etcd");
    params.key_usages = vec![
        KeyUsagePurpose::KeyEncipherment,
        KeyUsagePurpose::DigitalSignature,
    ];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let since = Clock::default().wall().duration_since(UNIX_EPOCH);
    let since = since.unwrap_or_default();
    let epoch = date_time_ymd(1970, 1, 1);
    let years = u32::try_from(years).unwrap_or(u32::MAX).min(1000);
    params.not_before = epoch + since.saturating_sub(BACKDATED);
    params.not_after = epoch + since + YEAR * years;
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_made_once_and_its_key_is_private() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("fixtures/peer");
        let hosts = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let (cert, key) = files(&dir, &hosts, 1).unwrap();
        let made = fs::read(&cert).unwrap();
        let mode = fs::metadata(&key).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        files(&dir, &hosts, 1).unwrap();
        assert_eq!(fs::read(&cert).unwrap(), made);
    }
}
