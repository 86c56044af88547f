//! Members that speak to each other over TLS.

use crate::authority::Authority;
use crate::harness::Cluster;

#[tokio::test]
async fn three_members_speak_over_tls() {
    let authority = Authority::new();
    authority.issue("peer", "peer", &["127.0.0.1"]);
    let file = |name: &str| authority.file(name).display().to_string();
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
