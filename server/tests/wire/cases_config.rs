//! P27: configuration, as public bug reports told of it: etcd-io/etcd#10747, #19704, #17443.

use std::fs;
use std::path::Path;
use std::process::Child;

use ballast_api::etcdserverpb as pb;
use hyper_util::rt::TokioIo;
use pb::cluster_client::ClusterClient;
use pb::kv_client::KvClient;
use tonic::transport::{Channel, Endpoint};

use crate::harness::{ballast, free_port, get, put, spawn_ready};

/// Ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn over_unix(path: &Path) -> Channel {
    let path = path.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move {
            tokio::net::UnixStream::connect(path)
                .await
                .map(TokioIo::new)
        }
    });
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .unwrap()
}

#[tokio::test]
async fn p27_a_file_holds_alone_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let (port, peer_port) = (free_port(), free_port());
    let (by_file, by_flag) = (dir.path().join("file"), dir.path().join("flag"));
    let file = dir.path().join("ballast.yaml");
    fs::write(
        &file,
        format!(
            "name: file\ndata-dir: {}\nlisten-client-urls: http://127.0.0.1:{port}\nlisten-peer-urls: http://127.0.0.1:{peer_port}\n",
            by_file.display()
        ),
    )
    .unwrap();
    let mut command = ballast();
    command
        .arg("--data-dir")
        .arg(&by_flag)
        .env("ETCD_CONFIG_FILE", &file)
        .env("ETCD_DATA_DIR", dir.path().join("env"))
        .env("ETCD_TYPO", "1");
    let (child, log) = spawn_ready(command);
    let _running = Running(child);
    assert!(by_file.join("member").is_dir());
    assert!(!by_flag.exists() && !dir.path().join("env").exists());
    let log = log.lock().unwrap().join("\n");
    assert!(
        log.contains("other configuration command line flags and environment variables will be ignored if provided"),
        "{log}"
    );
}

#[tokio::test]
async fn p27_an_unknown_variable_is_warned_of_and_not_fatal() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("http://127.0.0.1:{}", free_port());
    let mut command = ballast();
    command
        .env("ETCD_TYPO", "1")
        .env("ETCD_NAME", "by-env")
        .env("ETCD_DATA_DIR", dir.path().join("data"))
        .env("ETCD_LISTEN_CLIENT_URLS", &url)
        .env("ETCD_ADVERTISE_CLIENT_URLS", &url)
        .env(
            "ETCD_LISTEN_PEER_URLS",
            format!("http://127.0.0.1:{}", free_port()),
        );
    let (child, log) = spawn_ready(command);
    let _running = Running(child);
    let warned = log.lock().unwrap().iter().any(|line| {
        line.contains("\"level\":\"warn\"")
            && line.contains("unrecognized environment variable ETCD_TYPO=1")
    });
    assert!(warned, "{}", log.lock().unwrap().join("\n"));
    let mut cluster = ClusterClient::connect(url).await.unwrap();
    let listed = cluster
        .member_list(pb::MemberListRequest { linearizable: true })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(listed.members[0].name, "by-env");
}

#[tokio::test]
async fn p27_a_socket_file_and_a_v6_address_are_listened_on_and_advertised() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s.sock");
    let v6 = format!("http://[::1]:{}", free_port());
    let urls = format!("unix://{},{v6}", socket.display());
    let mut command = ballast();
    command
        .arg("--data-dir")
        .arg(dir.path().join("data"))
        .args([
            "--listen-client-urls",
            &urls,
            "--advertise-client-urls",
            &urls,
        ])
        .arg(format!(
            "--listen-peer-urls=http://127.0.0.1:{}",
            free_port()
        ));
    let (child, _) = spawn_ready(command);
    let _running = Running(child);
    let socket_channel = over_unix(&socket).await;
    KvClient::new(socket_channel.clone())
        .put(put("k", "v"))
        .await
        .unwrap();
    let read = KvClient::connect(v6.clone())
        .await
        .unwrap()
        .range(get("k"))
        .await;
    assert_eq!(read.unwrap().into_inner().count, 1);
    let listed = ClusterClient::new(socket_channel)
        .member_list(pb::MemberListRequest { linearizable: true })
        .await
        .unwrap()
        .into_inner();
    let mut expected = vec![format!("unix://{}", socket.display()), v6];
    expected.sort();
    assert_eq!(listed.members[0].client_ur_ls, expected);
}

#[test]
fn p27_a_path_in_a_url_and_other_bad_values_end_with_two_and_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.yaml");
    let ended = |args: &[&str], env: &[(&str, &str)], text: &str| {
        fs::write(&file, text).unwrap();
        let output = ballast()
            .args(args)
            .envs(env.iter().copied())
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let by_file = ["--config-file", file.to_str().unwrap()];
    let path = "URL must not contain a path: http://h:1/path";
    for (args, env, text, code, why) in [
        (
            &["--listen-client-urls=http://h:1/path"][..],
            &[][..],
            "",
            2,
            path,
        ),
        (
            &[],
            &[("ETCD_LISTEN_CLIENT_URLS", "http://h:1/path")],
            "",
            2,
            path,
        ),
        (
            &by_file,
            &[],
            "listen-client-urls: http://h:1/path",
            2,
            path,
        ),
        (
            &["--nmae=x"],
            &[],
            "",
            2,
            "flag provided but not defined: -nmae",
        ),
        (&by_file, &[], "nmae: x", 2, "unknown option \"nmae\""),
        (
            &["--max-txn-ops=many"],
            &[],
            "",
            2,
            "invalid value \"many\" for flag -max-txn-ops",
        ),
        (
            &[],
            &[("ETCD_MAX_TXN_OPS", "many")],
            "",
            2,
            "invalid value \"many\" for ETCD_MAX_TXN_OPS",
        ),
        (
            &by_file,
            &[],
            "max-txn-ops: many",
            2,
            "invalid value \"many\" for flag -max-txn-ops",
        ),
        (
            &[],
            &[("ETCD_CLIENT_CRL_FILE", "/c")],
            "",
            2,
            "--client-crl-file is not supported",
        ),
        (
            &by_file,
            &[],
            "client-transport-security:\n  allowed-cn: [c]",
            2,
            "client-transport-security: allowed-cn is not supported: only peers are asked for it",
        ),
        (
            &by_file,
            &[],
            "- a",
            2,
            "not a mapping of option names to values",
        ),
        (
            &["--name=a"],
            &[("ETCD_NAME", "b")],
            "",
            1,
            "conflicting environment variable",
        ),
        (
            &["--config-file=/nonexistent"],
            &[],
            "",
            1,
            "open /nonexistent: No such file",
        ),
        (&["serve"], &[], "", 1, "\\\"serve\\\" is not a valid flag"),
    ] {
        let (got, told) = ended(args, env, text);
        assert_eq!(got, Some(code), "{args:?} {env:?} {text}: {told}");
        assert!(told.contains(why), "{args:?} {env:?} {text}: {told}");
    }
}
