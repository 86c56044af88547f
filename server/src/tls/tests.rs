//! Two members that meet over a pipe, with certificates of an authority made for the test.

use std::fs;

use tokio_rustls::TlsAcceptor;

use super::*;
use crate::config::{Asked, Config, Values};
use authority::Authority;

#[path = "../../tests/common/authority.rs"]
mod authority;

impl Authority {
    /// The peers' side of the flags in `line`; `{}` stands for the folder of the certificates.
    fn peer(&self, line: &str) -> Result<Arc<Tls>, TlsError> {
        let dir = self.file("");
        let line = line.replace("{}", &dir.to_string_lossy());
        let config = config(&line).unwrap();
        Tls::load(
            config.peer_tls,
            &dir.join("data"),
            &["127.0.0.1".to_owned()],
        )
    }
}

fn config(line: &str) -> Result<Config, String> {
    let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    match Values::from_args(&args) {
        Ok(Asked::Run(values)) => Config::from_values(&values),
        other => Err(format!("{other:?}")),
    }
}

/// The words of either side's failure: of who connects, of who is connected to.
async fn meet(from: &Arc<Tls>, to: &Arc<Tls>) -> Result<(), (String, String)> {
    let (ours, theirs) = tokio::io::duplex(64 * 1024);
    let connecting = async {
        let mut stream = from.connect("127.0.0.1", ours).await?;
        // Under TLS 1.3 whoever connects learns only now what is thought of its certificate.
        tokio::io::AsyncReadExt::read_u8(&mut stream).await
    };
    let accepting = async {
        let acceptor = TlsAcceptor::from(to.server().await?);
        let mut stream = acceptor.accept(theirs).await?;
        tokio::io::AsyncWriteExt::write_u8(&mut stream, 7).await?;
        tokio::io::AsyncWriteExt::flush(&mut stream).await
    };
    let (connected, accepted) = tokio::join!(connecting, accepting);
    match (connected, accepted) {
        (Ok(7), Ok(())) => Ok(()),
        (connected, accepted) => {
            let told =
                |error: Option<io::Error>| error.map_or(String::new(), |error| words(&error));
            Err((told(connected.err()), told(accepted.err())))
        }
    }
}

const MUTUAL: &str = "--peer-cert-file {}/a.crt --peer-key-file {}/a.key --peer-trusted-ca-file {}/ca.crt --peer-client-cert-auth";

#[tokio::test]
async fn members_of_one_authority_meet_and_others_do_not() {
    let (ours, others) = (Authority::new(), Authority::new());
    for authority in [&ours, &others] {
        authority.issue("a", "a", &["127.0.0.1"]);
    }
    let (one, two) = (ours.peer(MUTUAL).unwrap(), ours.peer(MUTUAL).unwrap());
    assert_eq!(meet(&one, &two).await, Ok(()));
    let stranger = others.peer(MUTUAL).unwrap();
    let (connecting, accepting) = meet(&stranger, &two).await.unwrap_err();
    assert!(
        connecting.contains("signed by unknown authority"),
        "{connecting}"
    );
    assert_eq!(
        accepting,
        "remote error: tls: unknown certificate authority"
    );
    // Members that know nobody are asked for a certificate all the same.
    let anonymous = ours.peer("--peer-trusted-ca-file {}/ca.crt").unwrap();
    let (_, accepting) = meet(&anonymous, &two).await.unwrap_err();
    assert_eq!(accepting, "tls: client didn't provide a certificate");
}

#[tokio::test]
async fn a_certificate_for_another_host_is_not_the_member_that_was_meant() {
    let ours = Authority::new();
    ours.issue("a", "a", &["10.0.0.1"]);
    let (one, two) = (ours.peer(MUTUAL).unwrap(), ours.peer(MUTUAL).unwrap());
    let (_, accepting) = meet(&one, &two).await.unwrap_err();
    assert_eq!(accepting, "remote error: tls: bad certificate");
}

#[tokio::test]
async fn only_allowed_names_are_let_in() {
    let ours = Authority::new();
    ours.issue("a", "a.example", &["127.0.0.1", "a.example"]);
    let plain = ours.peer(MUTUAL).unwrap();
    for (flags, expected) in [
        ("--peer-cert-allowed-cn b.example,a.example", Ok(())),
        ("--peer-cert-allowed-hostname a.example", Ok(())),
        (
            "--peer-cert-allowed-cn b.example",
            Err("client certificate authentication failed"),
        ),
        (
            "--peer-cert-allowed-hostname b.example",
            Err("client certificate authentication failed"),
        ),
    ] {
        let strict = ours.peer(&format!("{MUTUAL} {flags}")).unwrap();
        // Both as the one that is connected to and as the one that connects.
        let told = meet(&plain, &strict).await;
        assert_eq!(
            told.map_err(|told| told.1).as_ref().map_err(String::as_str),
            expected.as_ref().map(|()| &()).map_err(|why| *why),
            "{flags}"
        );
        let told = meet(&strict, &plain).await;
        assert_eq!(told.is_ok(), expected.is_ok(), "{flags}");
        if let Err((connecting, _)) = told {
            assert_eq!(connecting, "client certificate authentication failed");
        }
    }
}

#[tokio::test]
async fn members_that_make_their_certificates_meet_each_other() {
    let (one, two) = (Authority::new(), Authority::new());
    let (one, two) = (
        one.peer("--peer-auto-tls").unwrap(),
        two.peer("--peer-auto-tls").unwrap(),
    );
    assert_eq!(meet(&one, &two).await, Ok(()));
}

#[tokio::test]
async fn renewed_files_are_used_and_broken_ones_are_not() {
    let ours = Authority::new();
    ours.issue("a", "a", &["10.0.0.1"]);
    let (one, two) = (ours.peer(MUTUAL).unwrap(), ours.peer(MUTUAL).unwrap());
    assert!(meet(&one, &two).await.is_err());
    ours.issue("a", "a", &["127.0.0.1"]);
    assert_eq!(meet(&one, &two).await, Ok(()));
    fs::write(ours.file("a.crt"), "half a cert").unwrap();
    assert_eq!(meet(&one, &two).await, Ok(()));
    // Authorities too.
    let others = Authority::new();
    others.issue("a", "a", &["127.0.0.1"]);
    let copy = |name: &str| fs::copy(others.file(name), ours.file(name));
    for name in ["ca.crt", "a.crt", "a.key"] {
        copy(name).unwrap();
    }
    let stranger = others.peer(MUTUAL).unwrap();
    assert_eq!(meet(&stranger, &two).await, Ok(()));
}

#[test]
fn bad_files_are_named_with_their_flags() {
    let ours = Authority::new();
    ours.issue("a", "a", &["127.0.0.1"]);
    ours.issue("b", "b", &["127.0.0.1"]);
    let dir = ours.file("");
    fs::write(dir.join("empty"), "").unwrap();
    for (line, expected) in [
        (
            "--peer-cert-file {}/none --peer-key-file {}/a.key",
            "--peer-cert-file {}/none: No such file or directory (os error 2)",
        ),
        (
            "--peer-cert-file {}/a.crt --peer-key-file {}/none",
            "--peer-key-file {}/none: No such file",
        ),
        (
            "--peer-cert-file {}/empty --peer-key-file {}/a.key",
            "--peer-cert-file {}/empty holds no certificate in PEM",
        ),
        (
            "--peer-cert-file {}/a.crt --peer-key-file {}/empty",
            "--peer-key-file {}/empty holds no private key in PEM",
        ),
        (
            "--peer-cert-file {}/a.crt --peer-key-file {}/b.key",
            "--peer-cert-file and --peer-key-file {}/a.crt and {}/b.key cannot be used together",
        ),
        (
            "--peer-cert-file {}/a.crt --peer-key-file {}/a.key --peer-trusted-ca-file {}/empty",
            "--peer-trusted-ca-file {}/empty holds no certificate",
        ),
        (
            "--peer-client-cert-file {}/a.crt --peer-client-key-file {}/b.key",
            "--peer-client-cert-file and --peer-client-key-file",
        ),
    ] {
        let why = ours.peer(line).unwrap_err().to_string();
        let expected = expected.replace("{}", &dir.to_string_lossy());
        assert!(why.starts_with(&expected), "{why}");
    }
}

#[test]
fn flags_and_urls_that_do_not_fit_are_refused_in_etcds_words() {
    for (line, expected) in [
        (
            "--cert-file /c",
            "KeyFile and CertFile must both be present[key: , cert: /c] (--cert-file, --key-file)",
        ),
        (
            "--peer-client-key-file /k",
            "ClientKeyFile and ClientCertFile must both be present or both absent[key: /k, cert: ] (--peer-client-cert-file, --peer-client-key-file)",
        ),
        (
            "--listen-client-urls https://127.0.0.1:1 --advertise-client-urls https://127.0.0.1:1",
            "TLS key/cert (--cert-file, --key-file) must be provided for client url https://127.0.0.1:1 with HTTPS scheme",
        ),
        (
            "--listen-metrics-urls https://127.0.0.1:1",
            "client TLS key/cert (--cert-file, --key-file) must be provided for metrics secure url",
        ),
        (
            "--listen-peer-urls https://127.0.0.1:1",
            "cannot listen on TLS for 127.0.0.1:1: KeyFile and CertFile are not presented",
        ),
        (
            "--peer-cert-allowed-cn a --peer-cert-allowed-hostname b",
            "AllowedCNs and AllowedHostnames are mutually exclusive (cns=[\"a\"], hostnames=[\"b\"])",
        ),
        (
            "--auto-tls --self-signed-cert-validity 0",
            "selfSignedCertValidity is invalid,it should be greater than 0",
        ),
        (
            "--peer-auto-tls --peer-client-cert-auth",
            "--peer-auto-tls makes a certificate that no authority has signed",
        ),
    ] {
        let why = config(line).unwrap_err();
        assert!(why.starts_with(expected), "{line}: {why}");
    }
    let config = config("--auto-tls --cert-file /c --key-file /k --client-cert-auth").unwrap();
    for expected in [
        "ignoring client auto TLS since certs given",
        "scheme is http or unix while key and cert files are present; ignoring key and cert files",
        "scheme is http or unix while --client-cert-auth is enabled; ignoring client cert auth",
    ] {
        assert!(
            config
                .warnings
                .iter()
                .any(|warning| warning.contains(expected)),
            "{:?}",
            config.warnings
        );
    }
    assert_eq!(
        config.client_tls.cert_file.as_deref(),
        Some(Path::new("/c"))
    );
}
