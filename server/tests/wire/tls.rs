//! TLS towards clients and peers: who is let in, what is told to the others, and that everything works inside as it does without.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ballast_api::etcdserverpb as pb;
use hyper_util::rt::TokioIo;
use pb::kv_client::KvClient;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

use crate::authority::Authority;
use crate::harness::{Server, ballast, eventually, free_port, get, prefix, put};

/// With certificates of a server and of a client.
fn issued() -> Authority {
    let authority = Authority::new();
    authority.issue("server", "server", &["127.0.0.1"]);
    authority.issue("client", "client", &[]);
    authority
}

impl Authority {
    /// `--cert-file` and `--key-file` of the server, with `more`; `{ca}` stands for this authority's folder.
    fn start(&self, more: &[&str]) -> Server {
        let own = ["--cert-file={ca}/server.crt", "--key-file={ca}/server.key"];
        let dir = self.file("").display().to_string();
        let args: Vec<String> = own
            .iter()
            .chain(more)
            .map(|arg| arg.replace("{ca}", &dir))
            .collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        Server::start_with(&args)
    }

    /// A client that trusts this authority and shows the certificate of this name.
    fn client(&self, shown: Option<&str>) -> Client {
        self.client_with(shown, &[b"h2"], &[&TLS12, &TLS13])
    }

    fn client_with(
        &self,
        shown: Option<&str>,
        protocols: &[&[u8]],
        versions: &[&'static SupportedProtocolVersion],
    ) -> Client {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_file_iter(self.file("ca.crt")).unwrap() {
            roots.add(root.unwrap()).unwrap();
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match shown {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let chain = CertificateDer::pem_file_iter(self.file(&format!("{name}.crt")));
                let chain = chain.unwrap().map(Result::unwrap).collect();
                let key = PrivateKeyDer::from_pem_file(self.file(&format!("{name}.key"))).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        Client(TlsConnector::from(Arc::new(config)))
    }
}

#[derive(Clone)]
struct Client(TlsConnector);

impl Client {
    async fn kv(&self, port: u16) -> Result<KvClient<Channel>, tonic::transport::Error> {
        let this = self.clone();
        // The scheme is the connector's affair.
        let connector = tower::service_fn(move |_| {
            let this = this.clone();
            async move {
                let stream = TcpStream::connect(("127.0.0.1", port)).await?;
                this.over(stream).await.map(TokioIo::new)
            }
        });
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}"))?;
        let channel = endpoint.connect_with_connector(connector).await?;
        Ok(KvClient::new(channel).max_decoding_message_size(usize::MAX))
    }

    /// A connection that is good for something: under TLS 1.3 a refusal comes after the handshake.
    async fn put(&self, port: u16) -> Result<(), String> {
        let mut kv = self.kv(port).await.map_err(|error| format!("{error:?}"))?;
        let done = kv.put(put("k", "v")).await;
        done.map(|_| ()).map_err(|status| format!("{status:?}"))
    }

    async fn over<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> std::io::Result<tokio_rustls::client::TlsStream<S>> {
        let name = ServerName::try_from("127.0.0.1").unwrap();
        self.0.connect(name, stream).await
    }

    /// Everything that answers an HTTP/1 request.
    async fn http<S>(&self, stream: S, path: &str, host: &str) -> std::io::Result<String>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut stream = self.over(stream).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    async fn get(&self, port: u16, path: &str) -> std::io::Result<String> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        self.http(stream, path, "127.0.0.1").await
    }
}

const HTTPS: [&str; 2] = [
    "--listen-client-urls=https://127.0.0.1:{port}",
    "--advertise-client-urls=https://127.0.0.1:{port}",
];

fn https<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&HTTPS[..], more].concat()
}

#[tokio::test]
async fn grpc_and_http_are_served_on_one_port_over_tls() {
    let authority = issued();
    let server = authority.start(&https(&["--host-whitelist=example.com"]));
    let log = server.log();
    assert!(log.contains("serving client traffic securely"), "{log}");
    let mut kv = authority.client(None).kv(server.port).await.unwrap();
    // More than what is gathered, or than a socket takes at once.
    for i in 0..8 {
        let value = vec![b'v'; 1_000_000];
        kv.put(put(format!("k{i}"), value)).await.unwrap();
    }
    let read = kv.range(prefix("k")).await.unwrap().into_inner();
    assert_eq!(read.kvs.len(), 8);
    for protocols in [&[][..], &[&b"http/1.1"[..]]] {
        let client = authority.client_with(None, protocols, &[&TLS13]);
        // Over TLS a host is not checked against the list.
        let answer = client.get(server.port, "/health").await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(
            answer.ends_with(r#"{"health":"true","reason":""}"#),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn with_an_authority_only_its_clients_are_let_in() {
    let authority = issued();
    let server = authority.start(&https(&[
        "--trusted-ca-file={ca}/ca.crt",
        "--client-cert-auth",
    ]));
    authority
        .client(Some("client"))
        .put(server.port)
        .await
        .unwrap();
    for versions in [&TLS12, &TLS13] {
        let nobody = authority.client_with(None, &[b"h2"], &[versions]);
        nobody.put(server.port).await.unwrap_err();
    }
    let stranger = issued();
    fs::copy(authority.file("ca.crt"), stranger.file("ca.crt")).unwrap();
    stranger
        .client(Some("client"))
        .put(server.port)
        .await
        .unwrap_err();
    eventually("the log tells of the refusals", || async {
        let log = server.log();
        let told = "rejected connection on client endpoint";
        (log.matches(told).count() >= 3
            && log.contains("tls: client didn't provide a certificate")
            && log.contains("certificate signed by unknown authority")
            && log.contains("\"remote-addr\":\"127.0.0.1:"))
        .then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_renewed_certificate_is_served_without_a_restart() {
    let authority = issued();
    authority.issue("server", "server", &["10.0.0.1"]);
    let server = authority.start(&HTTPS);
    let client = authority.client(None);
    client.put(server.port).await.unwrap_err();
    authority.issue("server", "server", &["127.0.0.1"]);
    client.put(server.port).await.unwrap();
    fs::write(authority.file("server.key"), "").unwrap();
    client.put(server.port).await.unwrap();
    assert!(server.log().contains("going on with the earlier ones"));
}

#[tokio::test]
async fn one_port_can_be_asked_with_and_without_tls() {
    let authority = issued();
    let server = authority.start(&[
        "--listen-client-urls=http://127.0.0.1:{port},https://127.0.0.1:{port}",
        "--advertise-client-urls=http://127.0.0.1:{port}",
    ]);
    authority.client(None).put(server.port).await.unwrap();
    let read = server.kv().await.range(get("k")).await.unwrap();
    assert_eq!(read.into_inner().count, 1);
}

#[tokio::test]
async fn a_socket_file_can_have_tls() {
    let authority = issued();
    let server = authority.start(&[
        "--listen-client-urls=unixs://{dir}/s.sock",
        "--advertise-client-urls=unixs://{dir}/s.sock",
    ]);
    let path = server.data_dir().with_file_name("s.sock");
    let stream = UnixStream::connect(&path).await.unwrap();
    let client = authority.client_with(None, &[], &[&TLS13]);
    let answer = client.http(stream, "/health", "localhost").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn metrics_have_the_clients_certificate_and_peers_their_own() {
    let authority = issued();
    authority.issue("peer", "peer", &["127.0.0.1"]);
    authority.issue("elsewhere", "elsewhere", &["10.0.0.1"]);
    let metrics = free_port();
    let metrics_url = format!("--listen-metrics-urls=https://127.0.0.1:{metrics}");
    let args = [
        metrics_url.as_str(),
        "--listen-peer-urls=https://127.0.0.1:{peer_port}",
        "--peer-cert-file={ca}/peer.crt",
        "--peer-key-file={ca}/peer.key",
        "--peer-trusted-ca-file={ca}/ca.crt",
        "--peer-client-cert-auth",
    ];
    let server = authority.start(&args);
    let client = |shown| authority.client_with(shown, &[], &[&TLS12]);
    let answer = client(None).get(metrics, "/metrics").await.unwrap();
    assert!(answer.contains("etcd_server_has_leader 1"), "{answer}");
    let peer_port = server.peer_port;
    let answer = client(Some("peer")).get(peer_port, "/version").await;
    assert!(answer.unwrap().starts_with("HTTP/1.1 200"));
    client(None).get(peer_port, "/version").await.unwrap_err();
    // Its owner is at another address.
    let stolen = client(Some("elsewhere")).get(peer_port, "/version").await;
    assert!(!stolen.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")));
    eventually("the log tells why", || async {
        let log = server.log();
        (log.contains("rejected connection on peer endpoint")
            && log.contains("x509: certificate is valid for 10.0.0.1, not 127.0.0.1"))
        .then_some(())
    })
    .await;
    drop(server);
    let skips = [&args[..], &["--peer-skip-client-san-verification"]].concat();
    let server = authority.start(&skips);
    let answer = client(Some("elsewhere"))
        .get(server.peer_port, "/version")
        .await;
    assert!(answer.unwrap().starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn versions_and_suites_are_those_of_the_flags() {
    let authority = issued();
    let only_12 = authority.client_with(None, &[b"h2"], &[&TLS12]);
    let only_13 = authority.client_with(None, &[b"h2"], &[&TLS13]);
    let server = authority.start(&https(&["--tls-min-version=TLS1.3"]));
    only_13.put(server.port).await.unwrap();
    only_12.put(server.port).await.unwrap_err();
    let server = authority.start(&https(&["--tls-max-version=TLS1.2"]));
    only_12.put(server.port).await.unwrap();
    only_13.put(server.port).await.unwrap_err();
    // The certificate is an ECDSA one.
    let server = authority.start(&https(&[
        "--cipher-suites=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    ]));
    only_12.put(server.port).await.unwrap_err();
    only_13.put(server.port).await.unwrap();
}

#[tokio::test]
async fn a_member_can_make_its_certificate_itself() {
    let authority = issued();
    let mut server = Server::start_with(&https(&["--auto-tls"]));
    let made = server.data_dir().join("fixtures/client/cert.pem");
    // The certificate vouches for itself.
    fs::copy(&made, authority.file("ca.crt")).unwrap();
    authority.client(None).put(server.port).await.unwrap();
    let before = fs::read(&made).unwrap();
    server.restart();
    assert_eq!(fs::read(&made).unwrap(), before);
    authority.client(None).put(server.port).await.unwrap();
}

#[test]
fn a_bad_file_ends_the_start_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent.crt");
    let run = |cert: &Path| {
        let data = dir.path().join("data");
        let output = ballast()
            .args(["--name=one", "--listen-peer-urls=http://127.0.0.1:0"])
            .args(["--listen-client-urls=https://127.0.0.1:0"])
            .args(["--advertise-client-urls=https://127.0.0.1:0"])
            .arg(format!("--data-dir={}", data.display()))
            .arg(format!("--cert-file={}", cert.display()))
            .arg(format!("--key-file={}", cert.display()))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let told = run(&absent);
    let expected = format!("--cert-file {}: No such file", absent.display());
    assert!(told.contains(&expected), "{told}");
    fs::write(&absent, "-----BEGIN nothing").unwrap();
    let told = run(&absent);
    assert!(told.contains("holds no certificate in PEM"), "{told}");
}
