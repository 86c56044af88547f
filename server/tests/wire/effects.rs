//! Flags that mean what they say, each against a running server. Those about connections: `connection.rs`; about the log's
//! segments: `e2e/tests/cases.rs`.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use tonic::Code;

use crate::harness::{
    Server, ballast, eventually, free_port, get, prefix, put, refused, spawn_ready,
};
use crate::http::http_get;

const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";

/// Ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Status line and headers, and the body, of a request written by hand.
fn ask(port: u16, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) => (head.to_ascii_lowercase(), body.to_owned()),
        None => (answer, String::new()),
    }
}

fn ask_path(port: u16, path: &str) -> (String, String) {
    ask(
        port,
        &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
    )
}

fn status(answer: &(String, String)) -> &str {
    answer.0.split(' ').nth(1).unwrap_or_default()
}

/// A gauge's or counter's value in a scrape.
fn metric(text: &str, name: &str) -> f64 {
    let line = text
        .lines()
        .find(|line| line.split(' ').next() == Some(name));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name}"))
}

#[tokio::test]
async fn force_new_cluster_keeps_what_the_member_has() {
    let mut server = Server::start();
    let mut kv = server.kv().await;
    for i in 0..20 {
        kv.put(put(format!("f/{i:02}"), "v")).await.unwrap();
    }
    let list = pb::MemberListRequest { linearizable: true };
    let before = server
        .cluster()
        .await
        .member_list(list)
        .await
        .unwrap()
        .into_inner();
    let hash = |revision| pb::HashKvRequest { revision };
    let hashed = server
        .maintenance()
        .await
        .hash_kv(hash(21))
        .await
        .unwrap()
        .into_inner();
    for round in 0..2 {
        server.restart_with(&["--force-new-cluster"]);
        let mut kv = server.kv().await;
        let answer = kv.range(prefix("f/")).await.unwrap().into_inner();
        assert_eq!(
            (answer.count, answer.header.as_ref().unwrap().revision),
            (20 + round, 21 + round)
        );
        let after = server
            .cluster()
            .await
            .member_list(list)
            .await
            .unwrap()
            .into_inner();
        assert_eq!(after.members, before.members);
        assert_eq!(
            after.header.unwrap().cluster_id,
            before.header.as_ref().unwrap().cluster_id
        );
        let again = server
            .maintenance()
            .await
            .hash_kv(hash(21))
            .await
            .unwrap()
            .into_inner();
        assert_eq!(again.hash, hashed.hash);
        kv.put(put(format!("f/later{round}"), "v")).await.unwrap();
    }
    server.restart_with(&[]);
    let mut kv = server.kv().await;
    assert_eq!(kv.range(prefix("f/")).await.unwrap().into_inner().count, 22);
    assert!(!server.log().contains("forcing a new cluster"));
}

#[tokio::test]
async fn a_log_in_a_directory_of_its_own_is_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let wal = dir.path().join("deep/wal");
    let flag = format!("--wal-dir={}", wal.display());
    let mut server = Server::start_with(&[&flag]);
    let mut kv = server.kv().await;
    kv.put(put("a", "v")).await.unwrap();
    let segments = |dir: &Path| {
        let names = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        names
            .filter(|name| name.to_string_lossy().ends_with(".wal"))
            .count()
    };
    assert_eq!(segments(&wal), 1);
    assert!(!server.data_dir().join("member/wal").exists());
    server.kill_and_restart();
    let mut kv = server.kv().await;
    assert_eq!(kv.range(get("a")).await.unwrap().into_inner().count, 1);
}

#[tokio::test]
async fn without_fsync_nothing_is_synced_while_writing() {
    let syncs = |args: &'static [&'static str]| async move {
        let server = Server::start_with(args);
        let mut kv = server.kv().await;
        kv.put(put("a", "v")).await.unwrap();
        let count = "etcd_disk_wal_fsync_duration_seconds_count";
        let before = metric(&http_get(&server, "/metrics").await.1, count);
        for _ in 0..50 {
            kv.put(put("a", "v")).await.unwrap();
        }
        metric(&http_get(&server, "/metrics").await.1, count) - before
    };
    assert!(syncs(&[]).await >= 50.0);
    assert!(syncs(&["--unsafe-no-fsync"]).await < 1.0);
}

#[tokio::test]
async fn requests_are_as_large_as_the_flag_says() {
    let server = Server::start_with(&["--max-request-bytes", "1000"]);
    let mut kv = server.kv().await;
    kv.put(put("a", vec![0; 900])).await.unwrap();
    refused(
        kv.put(put("a", vec![0; 1001])).await,
        Code::InvalidArgument,
        "etcdserver: request is too large",
    );
    let told = kv.put(put("a", vec![0; 530_000])).await.unwrap_err();
    assert!(told.message().ends_with(" vs. 525288)"), "{told:?}");
    let large = Server::start_with(&["--max-request-bytes", "20000000"]);
    let mut kv = large.kv().await;
    kv.put(put("a", vec![0; 12_000_000])).await.unwrap();
    assert!(large.log().contains("exceeded recommended request limit"));
}

#[tokio::test]
async fn the_least_time_of_a_lease_follows_the_election() {
    let server = Server::start_with(&["--election-timeout", "3000", "--heartbeat-interval", "300"]);
    let mut leases = server.leases().await;
    let grant = pb::LeaseGrantRequest { ttl: 1, id: 0 };
    assert_eq!(leases.lease_grant(grant).await.unwrap().into_inner().ttl, 5);
}

#[tokio::test]
async fn history_is_compacted_a_period_after_it_was_written() {
    let server = Server::start_with(&["--auto-compaction-retention", "2s"]);
    let mut kv = server.kv().await;
    for i in 0..5 {
        kv.put(put("a", i.to_string())).await.unwrap();
    }
    let old = pb::RangeRequest {
        revision: 3,
        ..get("a")
    };
    kv.range(old.clone()).await.unwrap();
    let reader = kv.clone();
    eventually("the history is compacted", || {
        let (mut kv, old) = (reader.clone(), old.clone());
        async move {
            let told = kv.range(old).await.err()?;
            assert_eq!(told.message(), COMPACTED);
            Some(())
        }
    })
    .await;
    let head = pb::RangeRequest {
        revision: 6,
        ..get("a")
    };
    assert_eq!(kv.range(head).await.unwrap().into_inner().count, 1);
}

#[tokio::test]
async fn compaction_goes_in_steps_of_the_size_and_with_the_pauses_asked_for() {
    const REVISIONS: i64 = 200;
    let server = Server::start_with(&[
        "--compaction-batch-limit",
        "10",
        "--compaction-sleep-interval",
        "60ms",
    ]);
    let mut kv = server.kv().await;
    for i in 0..REVISIONS {
        kv.put(put("a", i.to_string())).await.unwrap();
    }
    let begin = tokio::time::Instant::now();
    let request = pb::CompactionRequest {
        revision: REVISIONS,
        physical: true,
    };
    kv.compact(request).await.unwrap();
    // Twenty steps, a pause between each two.
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(19 * 60), "it took {took:?}");
}

#[tokio::test]
async fn two_servers_share_a_port_when_both_ask_for_it() {
    let port = free_port();
    let dir = tempfile::tempdir().unwrap();
    let command = |name: &str, flags: &[&str]| {
        let mut command = ballast_at(port);
        command
            .args(["--name", name, "--data-dir"])
            .arg(dir.path().join(name))
            .args(flags);
        command
    };
    let share = ["--socket-reuse-port", "--socket-reuse-address"];
    let _first = Running(spawn_ready(command("first", &share)).0);
    let _second = Running(spawn_ready(command("second", &share)).0);
    let alone = command("third", &[]).output().unwrap();
    assert_eq!(alone.status.code(), Some(1));
    let told = String::from_utf8_lossy(&alone.stderr).into_owned();
    assert!(told.contains("Address already in use"), "{told}");
}

/// Waits for a server whose log is not on its standard error.
async fn serves(port: u16) {
    eventually("it serves", || async move {
        let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await;
        stream.ok().map(drop)
    })
    .await;
}

/// The program, listening to clients on `port`.
fn ballast_at(port: u16) -> Command {
    let url = format!("http://127.0.0.1:{port}");
    let mut command = ballast();
    command
        .args([
            "--listen-client-urls",
            &url,
            "--advertise-client-urls",
            &url,
        ])
        .arg(format!(
            "--listen-peer-urls=http://127.0.0.1:{}",
            free_port()
        ));
    command
}

fn to_file(dir: &Path, port: u16, outputs: &str) -> Command {
    let mut command = ballast_at(port);
    command
        .arg("--data-dir")
        .arg(dir.join("data"))
        .args(["--log-outputs", outputs])
        .stderr(std::process::Stdio::null());
    command
}

#[tokio::test]
async fn log_lines_go_to_the_files_named_and_full_ones_are_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a.log"), dir.path().join("b.log"));
    let port = free_port();
    let outputs = format!("{},{}", a.display(), b.display());
    let running = Running(to_file(dir.path(), port, &outputs).spawn().unwrap());
    serves(port).await;
    eventually("both files say that it serves", || async {
        let said = |path: &Path| {
            let text = fs::read_to_string(path).unwrap();
            text.contains("\"msg\":\"ready to serve client requests\"")
        };
        (said(&a) && said(&b)).then_some(())
    })
    .await;
    drop(running);

    let full = dir.path().join("full.log");
    fs::write(&full, vec![b'x'; 1 << 20]).unwrap();
    let port = free_port();
    let mut command = to_file(dir.path(), port, full.to_str().unwrap());
    command.args([
        "--enable-log-rotation",
        "--log-rotation-config-json",
        r#"{"maxsize": 1}"#,
    ]);
    let _running = Running(command.spawn().unwrap());
    serves(port).await;
    let aside = fs::read_dir(dir.path()).unwrap().filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.to_string_lossy().starts_with("full-")
    });
    assert_eq!(aside.count(), 1);
    assert!(fs::metadata(&full).unwrap().len() < 1 << 20);
}

#[tokio::test]
async fn each_listener_has_its_own_endpoints() {
    let (http, metrics) = (free_port(), free_port());
    let server = Server::start_with(&[
        &format!("--listen-client-http-urls=http://127.0.0.1:{http}"),
        &format!("--listen-metrics-urls=http://127.0.0.1:{metrics}"),
    ]);
    server.kv().await.put(put("a", "v")).await.unwrap();
    let here = |port: u16, path: &str| status(&ask_path(port, path)).to_owned();
    for (path, client, http_only, metrics_only, peer) in [
        ("/health", "415", "200", "200", "404"),
        ("/metrics", "415", "200", "200", "404"),
        ("/readyz", "415", "200", "200", "404"),
        ("/version", "415", "200", "404", "200"),
        ("/members", "415", "404", "404", "200"),
    ] {
        let found = (
            here(server.port, path),
            here(http, path),
            here(metrics, path),
            here(server.peer_port, path),
        );
        let expected = (
            client.to_owned(),
            http_only.to_owned(),
            metrics_only.to_owned(),
            peer.to_owned(),
        );
        assert_eq!(found, expected, "{path}");
    }
    let (head, body) = ask_path(server.peer_port, "/members");
    assert!(
        head.contains("x-etcd-cluster-id: cdf818194e3a8c32"),
        "{head}"
    );
    let members: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        members,
        serde_json::json!([{
            "id": 0x8e9e_05c5_2164_694d_u64,
            "peerURLs": ["http://localhost:2380"],
            "name": "one",
            "clientURLs": [server.url()],
        }])
    );
}

#[test]
fn pages_and_names_are_let_in_as_the_flags_say() {
    let ask_as = |port: u16, method: &str, host: &str, origin: &str| {
        ask(
            port,
            &format!(
                "{method} /version HTTP/1.1\r\nHost: {host}\r\nOrigin: {origin}\r\nConnection: close\r\n\r\n"
            ),
        )
    };
    let open = Server::start();
    let answer = ask_as(open.port, "GET", "evil.example", "http://page.example");
    assert_eq!(status(&answer), "200");
    assert!(
        answer.0.contains("access-control-allow-origin: *"),
        "{}",
        answer.0
    );
    let closed = Server::start_with(&[
        "--cors=http://page.example",
        "--host-whitelist=good.example,::1",
    ]);
    for (host, code) in [
        ("good.example", "200"),
        ("good.example:2379", "200"),
        ("[::1]:2379", "200"),
        ("evil.example", "421"),
    ] {
        let answer = ask_as(closed.port, "GET", host, "http://page.example");
        assert_eq!(status(&answer), code, "{host}");
        let told = answer
            .0
            .contains("access-control-allow-origin: http://page.example");
        assert_eq!(told, code == "200", "{host}: {}", answer.0);
    }
    let stranger = ask_as(closed.port, "GET", "good.example", "http://other.example");
    assert!(
        !stranger.0.contains("access-control-allow-origin"),
        "{}",
        stranger.0
    );
    let preflight = ask_as(
        closed.port,
        "OPTIONS",
        "good.example",
        "http://page.example",
    );
    assert_eq!(status(&preflight), "200");
    assert!(
        preflight
            .0
            .contains("access-control-allow-methods: post, get, options, put, delete"),
        "{}",
        preflight.0
    );
}

#[tokio::test]
async fn a_start_defragments_when_that_frees_as_much_as_asked() {
    let mut server = Server::start();
    let mut kv = server.kv().await;
    // What stays lies between what goes, or the engine gives the end of its file back by itself.
    for i in 0..40 {
        let key = format!("{}/{i:02}", if i % 8 == 7 { "k" } else { "b" });
        kv.put(put(key, vec![7; 1_000_000])).await.unwrap();
    }
    let all = pb::DeleteRangeRequest {
        key: "b/".into(),
        range_end: "b0".into(),
        ..Default::default()
    };
    let deleted = kv.delete_range(all).await.unwrap().into_inner();
    let head = deleted.header.unwrap().revision;
    kv.compact(pb::CompactionRequest {
        revision: head,
        physical: true,
    })
    .await
    .unwrap();
    for (threshold, shrinks) in [("500", false), ("5", true)] {
        server.restart_with(&["--bootstrap-defrag-threshold-megabytes", threshold]);
        let mut maintenance = server.maintenance().await;
        let told = maintenance.status(pb::StatusRequest {}).await.unwrap();
        let size = told.into_inner().db_size;
        assert_eq!(size < 12_000_000, shrinks, "{threshold}: {size}");
        let mut kv = server.kv().await;
        let counted = pb::RangeRequest {
            count_only: true,
            ..prefix("k/")
        };
        assert_eq!(kv.range(counted).await.unwrap().into_inner().count, 5);
    }
}

#[tokio::test]
async fn memory_is_locked_or_the_start_refused() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let log = dir.path().join("log");
    let mut command = to_file(dir.path(), port, log.to_str().unwrap());
    let mut running = Running(command.arg("--memory-mlock").spawn().unwrap());
    // Whether it may depends on who runs the test.
    let served = eventually("it serves or has ended", || {
        let ended = running.0.try_wait().unwrap();
        async move {
            match ended {
                Some(_) => Some(false),
                None => tokio::net::TcpStream::connect(("127.0.0.1", port))
                    .await
                    .ok()
                    .map(|_| true),
            }
        }
    })
    .await;
    if !served {
        let told = fs::read_to_string(log).unwrap();
        assert!(
            told.contains("--memory-mlock: cannot lock memory"),
            "{told}"
        );
        return;
    }
    let status = fs::read_to_string(format!("/proc/{}/status", running.0.id())).unwrap();
    let locked = status
        .lines()
        .find_map(|line| line.strip_prefix("VmLck:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    assert!(locked.is_some_and(|kib| kib > 1024), "{locked:?}");
}
