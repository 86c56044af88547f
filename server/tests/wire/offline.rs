//! The commands that look at a member's data, or rewrite it, while no server runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use ballast_api::etcdserverpb as pb;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prost::Message;

use crate::harness::{Server, ballast, put};

fn run(args: &[&str]) -> Output {
    ballast().args(args).output().unwrap()
}

/// Exit code and what was printed.
fn told(args: &[&str]) -> (i32, String) {
    let output = run(args);
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.code().unwrap(),
        String::from_utf8(text).unwrap(),
    )
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Keys with several versions, some of them deleted, some on a lease, a compaction in the middle.
async fn work(server: &Server) {
    let mut kv = server.kv().await;
    let lease = pb::LeaseGrantRequest { ttl: 1000, id: 77 };
    server.leases().await.lease_grant(lease).await.unwrap();
    for i in 0..200 {
        let mut request = put(format!("k/{:02}", i % 40), format!("value {i}"));
        request.lease = if i % 5 == 0 { 77 } else { 0 };
        kv.put(request).await.unwrap();
        if i % 7 == 0 {
            let request = pb::DeleteRangeRequest {
                key: format!("k/{:02}", (i * 3) % 40).into(),
                ..Default::default()
            };
            kv.delete_range(request).await.unwrap();
        }
        if i == 120 {
            let request = pb::CompactionRequest {
                revision: 100,
                physical: true,
            };
            kv.compact(request).await.unwrap();
        }
    }
}

/// Every file below, with its bytes.
fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut out = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            out.extend(contents(&path));
        } else {
            let bytes = fs::read(&path).unwrap();
            out.push((path, bytes));
        }
    }
    out.sort();
    out
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_dir(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}

fn only(dir: &Path, ending: &str) -> PathBuf {
    let mut found: Vec<PathBuf> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| text(path).ends_with(ending))
        .collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Changes a bit wherever these bytes stand: a database keeps old pages for a while.
fn flip_all(path: &Path, needle: &[u8]) {
    let mut bytes = fs::read(path).unwrap();
    let places: Vec<usize> = bytes
        .windows(needle.len())
        .enumerate()
        .filter(|(_, window)| *window == needle)
        .map(|(at, _)| at)
        .collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at] ^= 1;
    }
    fs::write(path, bytes).unwrap();
}

#[tokio::test]
async fn check_finds_nothing_in_a_sound_directory_and_changes_nothing() {
    let mut server = Server::start();
    work(&server).await;
    let dir = server.data_dir();
    let (code, said) = told(&["check", text(&dir)]);
    assert_eq!(code, 1);
    assert!(said.contains("is in use by another process"), "{said}");
    for end in ["stopped", "killed"] {
        if end == "stopped" {
            server.stop();
        } else {
            server.start_again();
            let mut kv = server.kv().await;
            for i in 0..100 {
                kv.put(put(format!("l/{i}"), "v")).await.unwrap();
            }
            server.kill();
        }
        let before = contents(&dir);
        let (code, said) = told(&["check", text(&dir)]);
        assert_eq!(code, 0, "{end}: {said}");
        assert!(said.contains("no problems found"), "{end}: {said}");
        assert!(said.contains("compacted at 100, "), "{end}: {said}");
        assert!(contents(&dir) == before, "{end}: a file changed");
    }
}

#[tokio::test]
async fn check_names_what_is_damaged_and_where() {
    let mut server = Server::start();
    work(&server).await;
    server.stop();
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        let to = dir.path().join(name);
        copy_dir(&server.data_dir(), &to);
        to
    };
    let sound = copy("sound");
    assert_eq!(told(&["check", text(&sound)]).0, 0);
    let member = |dir: &Path| dir.join("member");

    let log = copy("log");
    let segment = only(&member(&log).join("wal"), ".wal");
    flip_all(&segment, b"value 150");
    let database = copy("database");
    let file = only(&member(&database).join("db"), ".redb");
    flip_all(&file, b"value 150");
    let no_current = copy("no-current");
    fs::remove_file(member(&no_current).join("db/CURRENT")).unwrap();
    let no_segment = copy("no-segment");
    fs::remove_file(only(&member(&no_segment).join("wal"), ".wal")).unwrap();
    let other_log = copy("other-log");
    let mut other = Server::start_with(&["--initial-cluster-token", "other"]);
    other.stop();
    fs::remove_dir_all(member(&other_log).join("wal")).unwrap();
    copy_dir(
        &member(&other.data_dir()).join("wal"),
        &member(&other_log).join("wal"),
    );
    let old_log = copy("old-log");
    let mut young = Server::start();
    young.stop();
    fs::remove_dir_all(member(&old_log).join("wal")).unwrap();
    copy_dir(
        &member(&young.data_dir()).join("wal"),
        &member(&old_log).join("wal"),
    );

    for (dir, place, what) in [
        (&log, text(&segment), "is damaged at byte"),
        (&database, text(&file), "orrupt"),
        (&no_current, "CURRENT", "No such file"),
        (&no_segment, "wal", "is missing"),
        (&other_log, "wal", "the log belongs to member"),
        (&old_log, ".redb", "and the log ends at"),
    ] {
        let before = contents(dir);
        let (code, said) = told(&["check", text(dir)]);
        assert_eq!(code, 1, "{}: {said}", dir.display());
        let problem = said.lines().find(|line| line.starts_with("problem: "));
        let problem = problem.unwrap_or_else(|| panic!("{}: {said}", dir.display()));
        assert!(
            problem.contains(place) && problem.contains(what),
            "{}: {said}",
            dir.display()
        );
        assert!(contents(dir) == before, "{}: a file changed", dir.display());
    }
}

#[test]
fn check_and_the_others_say_how_they_are_used() {
    for command in ["check", "defrag", "snapshot"] {
        let (code, said) = told(&[command, "--help"]);
        assert_eq!(code, 0, "{said}");
        assert!(said.contains("Usage: ballast"), "{said}");
        let (code, said) = told(&[command, "--speed"]);
        assert!(code == 2 || code == 128, "{command} {code}: {said}");
        assert!(said.contains("--speed"), "{said}");
    }
    assert_eq!(told(&["wal"]).0, 2);
    assert!(told(&["wal", "--help"]).1.contains("InternalRaftRequest"));
    let (code, said) = told(&["check", "/nonexistent"]);
    assert_eq!(code, 1);
    assert!(said.contains("/nonexistent/member"), "{said}");
    let (code, said) = told(&["defrag", "--data-dir", "/nonexistent"]);
    assert_eq!(code, 1);
    assert!(said.contains("Failed to defragment /nonexistent"), "{said}");
}

#[tokio::test]
async fn defrag_returns_the_space_of_a_member_that_does_not_run() {
    let mut server = Server::start_with(&["--auto-defrag", "off"]);
    let mut kv = server.kv().await;
    for i in 0..100 {
        kv.put(put("k", vec![i; 100_000])).await.unwrap();
    }
    let request = pb::CompactionRequest {
        revision: 101,
        physical: true,
    };
    kv.compact(request).await.unwrap();
    let dir = server.data_dir();
    let (code, said) = told(&["defrag", "--data-dir", text(&dir)]);
    assert_eq!(code, 1);
    assert!(said.contains("is in use"), "{said}");
    server.stop();
    let (code, said) = told(&["defrag", "--data-dir", text(&dir)]);
    assert_eq!(code, 0, "{said}");
    assert!(
        said.contains(&format!("defragmented {}: ", dir.display())),
        "{said}"
    );
    let sizes: Vec<u64> = said
        .lines()
        .find(|line| line.starts_with("defragmented "))
        .unwrap()
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    assert!(sizes[0] > 9_000_000 && sizes[1] < 1_000_000, "{said}");
    assert_eq!(told(&["check", text(&dir)]).0, 0);
    server.start_again();
    let mut kv = server.kv().await;
    let found = kv
        .range(crate::harness::get("k"))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(found.kvs[0].value, vec![99; 100_000]);
}

#[tokio::test]
async fn snapshot_verify_accepts_what_is_whole_and_names_what_is_not() {
    let server = Server::start();
    work(&server).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s.db");
    let endpoint = format!("127.0.0.1:{}", server.port);
    let saved = told(&["snapshot", "save", text(&file), "--endpoints", &endpoint]);
    assert_eq!(saved.0, 0, "{}", saved.1);
    let (code, said) = told(&["snapshot", "verify", text(&file)]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("is sound: revision "), "{said}");

    let bytes = fs::read(&file).unwrap();
    let variant = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let short = variant("short.db", &bytes[..bytes.len() - 1024]);
    let no_hash = variant("no-hash.db", &bytes[..bytes.len() - 32]);
    let changed = variant("changed.db", &bytes);
    flip_all(&changed, b"value 150");
    for (path, what) in [
        (&short, "problem"),
        (
            &no_hash,
            "snapshot missing hash but --skip-hash-check=false",
        ),
        (&changed, "expected sha256 "),
        (&dir.path().join("absent.db"), "No such file"),
    ] {
        let (code, said) = told(&["snapshot", "verify", text(path)]);
        assert_eq!(code, 1, "{said}");
        assert!(said.contains(what) && said.contains(text(path)), "{said}");
    }
    let (code, said) = told(&["snapshot", "verify", text(&no_hash), "--skip-hash-check"]);
    assert_eq!(code, 0, "{said}");
}

/// The copy is taken while the member writes, file by file and in any order, `synced.mark` last.
#[tokio::test(flavor = "multi_thread")]
async fn wal_dump_reads_a_copy_of_a_log_in_use() {
    let server = Server::start();
    let mut kv = server.kv().await;
    for i in 0..50 {
        kv.put(put(format!("k/{i}"), "v")).await.unwrap();
    }
    let writing = tokio::spawn({
        let mut kv = server.kv().await;
        async move {
            let mut written = 50;
            while kv.put(put(format!("k/{written}"), "v")).await.is_ok() {
                written += 1;
            }
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let wal = server.data_dir().join("member/wal");
    for round in 0..5 {
        let copy = dir.path().join(round.to_string());
        fs::create_dir_all(&copy).unwrap();
        fs::copy(
            only(&wal, ".wal"),
            copy.join(only(&wal, ".wal").file_name().unwrap()),
        )
        .unwrap();
        kv.put(put("between", "v")).await.unwrap();
        fs::copy(wal.join("synced.mark"), copy.join("synced.mark")).unwrap();
        let output = run(&["wal", "dump", text(&copy)]);
        assert!(output.status.success(), "{output:?}");
        let mut puts = 0;
        let lines = String::from_utf8(output.stdout).unwrap();
        for (index, line) in (1..).zip(lines.lines()) {
            let entry: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(entry["index"], index, "{line}");
            let request = STANDARD.decode(entry["request"].as_str().unwrap()).unwrap();
            match entry["type"].as_str().unwrap() {
                "request" => {
                    let request = pb::InternalRaftRequest::decode(&*request).unwrap();
                    let put = request.put.filter(|put| put.key.starts_with(b"k/"));
                    if let Some(put) = put {
                        assert_eq!(put.key, format!("k/{puts}"));
                        puts += 1;
                    }
                }
                "blank" | "membership" => assert!(request.is_empty()),
                other => panic!("{other}"),
            }
        }
        assert!(puts >= 50, "round {round}: {puts}");
    }
    // While it runs, too.
    assert!(
        run(&["wal", "dump", text(&server.data_dir())])
            .status
            .success()
    );
    writing.abort();
}
