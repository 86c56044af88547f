//! `--tls-min-version`, `--tls-max-version` and `--cipher-suites`: Go's names to what the library has.
//!
//! As in Go, suites are chosen for TLS 1.2 alone; those of 1.3 are always on. Suites without forward secrecy or with CBC, which
//! Go still has, are not here: one that is asked for is warned of, and refused when nothing else remains.
//!
//! etcd: client/pkg/tlsutil.

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};
use rustls::version::{TLS12, TLS13};
use rustls::{CipherSuite, SupportedProtocolVersion};

/// Versions and suites that a handshake may agree on.
#[derive(Clone, Debug)]
pub struct Versions {
    pub protocols: Vec<&'static SupportedProtocolVersion>,
    pub provider: Arc<CryptoProvider>,
}

/// Go's names for TLS 1.2, two of them as it once had them.
const TLS12_SUITES: [(&str, CipherSuite); 8] = [
    (
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
        CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    ),
    (
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
        CipherSuite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
    ),
    (
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    ),
    (
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    ),
    (
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
        CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
    ),
    (
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
        CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
    ),
    (
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
        CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
    ),
    (
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305",
        CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
    ),
];

const TLS13_SUITES: [&str; 3] = [
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
];

/// Go knows them, the library does not.
const ABSENT_SUITES: [&str; 16] = [
    "TLS_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
];

/// What the three flags allow, in etcd's words when nothing.
pub fn versions(
    min: &str,
    max: &str,
    suites: &str,
    warnings: &mut Vec<String>,
) -> Result<Versions, String> {
    let number = |text: &str, empty: u8| match text {
        "" => Ok(empty),
        "TLS1.2" => Ok(2),
        "TLS1.3" => Ok(3),
        other => Err(format!(
            "unexpected TLS version {other:?} (must be one of: TLS1.2, TLS1.3)"
        )),
    };
    let (lowest, highest) = (number(min, 2)?, number(max, 3)?);
    if lowest > highest {
        return Err(format!(
            "min version ({min}) is greater than max version ({max})"
        ));
    }
    if lowest == 3 && !suites.is_empty() {
        return Err("cipher suites cannot be configured when only TLS1.3 is enabled".to_owned());
    }
    let mut provider = ring::default_provider();
    let chosen = chosen(suites, warnings)?;
    if let Some(chosen) = &chosen {
        provider
            .cipher_suites
            .retain(|suite| suite.tls13().is_some() || chosen.contains(&suite.suite()));
    }
    let mut protocols = Vec::new();
    if lowest == 2 && chosen.is_none_or(|chosen| !chosen.is_empty()) {
        protocols.push(&TLS12);
    }
    if highest == 3 {
        protocols.push(&TLS13);
    }
    if protocols.is_empty() {
        return Err(format!(
            "--cipher-suites {suites}: none of these is supported; this server has those with ECDHE and GCM or CHACHA20_POLY1305"
        ));
    }
    Ok(Versions {
        protocols,
        provider: Arc::new(provider),
    })
}

/// Of TLS 1.2; None for all there are.
fn chosen(suites: &str, warnings: &mut Vec<String>) -> Result<Option<Vec<CipherSuite>>, String> {
    if suites.is_empty() {
        return Ok(None);
    }
    let mut chosen = Vec::new();
    for name in suites.split(',') {
        if let Some((_, suite)) = TLS12_SUITES.iter().find(|(known, _)| *known == name) {
            chosen.push(*suite);
        } else if ABSENT_SUITES.contains(&name) {
            warnings.push(format!(
                "--cipher-suites: {name} is not supported and left out"
            ));
        } else if !TLS13_SUITES.contains(&name) {
            return Err(format!("unexpected TLS cipher suite {name:?}"));
        }
    }
    Ok(Some(chosen))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_suites_are_chosen_or_refused_in_etcds_words() {
        let shape = |min, max, suites| {
            let mut warnings = Vec::new();
            let versions = versions(min, max, suites, &mut warnings)?;
            Ok((
                versions.protocols.len(),
                versions.provider.cipher_suites.len(),
                warnings.len(),
            ))
        };
        let one = "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305";
        let old = "TLS_RSA_WITH_AES_128_CBC_SHA";
        for (min, max, suites, expected) in [
            ("TLS1.2", "", "", Ok((2, 9, 0))),
            ("TLS1.3", "", "", Ok((1, 9, 0))),
            ("TLS1.2", "TLS1.2", one, Ok((1, 4, 0))),
            ("TLS1.2", "", old, Ok((1, 3, 1))),
            ("TLS1.2", "TLS1.2", old, Err("none of these is supported")),
            ("TLS1.2", "", "X", Err("unexpected TLS cipher suite \"X\"")),
            (
                "TLS1.1",
                "",
                "",
                Err("unexpected TLS version \"TLS1.1\" (must be one of: TLS1.2, TLS1.3)"),
            ),
            (
                "TLS1.3",
                "TLS1.2",
                "",
                Err("min version (TLS1.3) is greater than max version (TLS1.2)"),
            ),
            (
                "TLS1.3",
                "",
                one,
                Err("cipher suites cannot be configured when only TLS1.3 is enabled"),
            ),
        ] {
            match (shape(min, max, suites), expected) {
                (Ok(got), Ok(expected)) => assert_eq!(got, expected, "{min} {max} {suites}"),
                (Err(got), Err(expected)) => {
                    let got: String = got;
                    assert!(got.contains(expected), "{got}");
                }
                (got, expected) => panic!("{min} {max} {suites}: {got:?}, not {expected:?}"),
            }
        }
    }
}
