//! Members that speak to each other over TLS.

use std::fs;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::harness::Cluster;

/// An authority and a certificate of it that is good for both sides.
fn certificates(dir: &Path) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    fs::write(dir.join("ca.crt"), issuer.pem()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    fs::write(dir.join("peer.crt"), certificate.pem()).unwrap();
    fs::write(dir.join("peer.key"), key.serialize_pem()).unwrap();
}

#[tokio::test]
async fn three_members_speak_over_tls() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let file = |name: &str| dir.path().join(name).display().to_string();
    let files = [
        format!("--peer-cert-file={}", file("peer.crt")),
        format!("--peer-key-file={}", file("peer.key")),
        format!("--peer-trusted-ca-file={}", file("ca.crt")),
        "--peer-client-cert-auth".to_owned(),
    ];
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    for flags in [&files[..], &["--peer-auto-tls"]] {
        let mut cluster = Cluster::start(3, flags).await;
        for writer in &cluster.members {
            writer.put_eventually("k", &writer.name).await;
            for reader in &cluster.members {
                let read = reader.get("k").await.unwrap();
                assert_eq!(read.as_ref(), Some(&writer.name));
            }
        }
        // One that joins asks who it is over TLS too.
        cluster.grow().await;
        cluster.agree().await;
    }
}
