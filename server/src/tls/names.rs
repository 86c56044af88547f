//! What a certificate says of its owner, and whether the address at the other end of a connection is one of its owner's.
//!
//! Peers present certificates to each other: one that names addresses or hosts is taken only from there, as in etcd.
//!
//! etcd: client/pkg/transport/listener_tls.go (checkCertSAN).

use std::net::IpAddr;

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// The names in a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    pub common_name: Option<String>,
    pub addresses: Vec<IpAddr>,
    pub hosts: Vec<String>,
}

impl Names {
    /// None when it is no certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let common_name = parsed.subject().iter_common_name().next();
        let mut names = Names {
            common_name: common_name.and_then(|name| Some(name.as_str().ok()?.to_owned())),
            ..Names::default()
        };
        let alternatives = parsed.subject_alternative_name().ok().flatten();
        for name in alternatives.iter().flat_map(|all| &all.value.general_names) {
            match name {
                GeneralName::DNSName(host) => names.hosts.push((*host).to_owned()),
                GeneralName::IPAddress(bytes) => names.addresses.extend(address(bytes)),
                _ => {}
            }
        }
        Some(names)
    }

    /// Whether a connection from `remote` may be this certificate's owner; if not, why.
    pub async fn check(&self, remote: IpAddr) -> Result<(), String> {
        let remote = remote.to_canonical();
        let anywhere = self.addresses.is_empty() && self.hosts.is_empty();
        if anywhere || self.addresses.contains(&remote) {
            return Ok(());
        }
        if self.hosts.is_empty() {
            let addresses: Vec<String> = self.addresses.iter().map(IpAddr::to_string).collect();
            return Err(format!(
                "x509: certificate is valid for {}, not {remote}",
                addresses.join(", ")
            ));
        }
        if self.is_known_as(remote).await {
            return Ok(());
        }
        Err(format!(
            "tls: \"{remote}\" does not match any of DNSNames {:?}",
            self.hosts
        ))
    }

    /// By the address's names first, which alone help for wildcards, then by the names' addresses.
    async fn is_known_as(&self, remote: IpAddr) -> bool {
        let looked_up = tokio::task::spawn_blocking(move || dns_lookup::lookup_addr(&remote));
        if let Ok(Ok(name)) = looked_up.await
            && self.hosts.iter().any(|host| covers(host, &name))
        {
            return true;
        }
        for host in self.hosts.iter().filter(|host| !host.starts_with("*.")) {
            if let Ok(mut found) = tokio::net::lookup_host((host.as_str(), 0)).await
                && found.any(|at| at.ip().to_canonical() == remote)
            {
                return true;
            }
        }
        false
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(IpAddr::from(v4));
    }
    Some(IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical())
}

/// Any depth below a wildcard, as etcd has it here.
fn covers(host: &str, name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    match host.strip_prefix('*') {
        Some(tail) if tail.starts_with('.') => name.ends_with(tail),
        _ => host == name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_cover_any_depth_and_names_themselves() {
        for (host, name, expected) in [
            ("a.example", "a.example", true),
            ("a.example", "a.example.", true),
            ("*.example", "a.b.example", true),
            ("*.example", "example", false),
            ("a.example", "b.a.example", false),
        ] {
            assert_eq!(covers(host, name), expected, "{host} {name}");
        }
    }

    #[tokio::test]
    async fn a_certificate_is_taken_from_its_owners_addresses_alone() {
        let names = |addresses: &[&str], hosts: &[&str]| Names {
            common_name: None,
            addresses: addresses.iter().map(|at| at.parse().unwrap()).collect(),
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        };
        let local: IpAddr = "::ffff:127.0.0.1".parse().unwrap();
        assert_eq!(names(&[], &[]).check(local).await, Ok(()));
        assert_eq!(names(&["127.0.0.1"], &[]).check(local).await, Ok(()));
        assert_eq!(names(&[], &["localhost"]).check(local).await, Ok(()));
        assert_eq!(
            names(&["10.0.0.1"], &["localhost"]).check(local).await,
            Ok(())
        );
        assert_eq!(
            names(&["10.0.0.1"], &[]).check(local).await,
            Err("x509: certificate is valid for 10.0.0.1, not 127.0.0.1".to_owned())
        );
        assert_eq!(
            names(&[], &["nowhere.invalid"]).check(local).await,
            Err(
                "tls: \"127.0.0.1\" does not match any of DNSNames [\"nowhere.invalid\"]"
                    .to_owned()
            )
        );
    }
}
