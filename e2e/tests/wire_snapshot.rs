//! Snapshots between the server under test and real etcd, in both directions, judged by bbolt, etcdutl and HashKV.
//!
//! Cases P26 (a bad file is found before anything is touched) and P29 (after a restore no revision is seen twice).

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_api::etcdserverpb::{
    CompactionRequest, DeleteRangeRequest, HashKvRequest, LeaseGrantRequest, LeaseLeasesRequest,
    LeaseTimeToLiveRequest, PutRequest, RangeRequest, RangeResponse, RequestOp, SnapshotRequest,
    TxnRequest, WatchCreateRequest, WatchRequest, request_op, watch_request,
};
use ballast_e2e::progress::Progress;
use ballast_e2e::store_server::{Answer, Client, Program, StoreServer, etcdctl};
use ballast_e2e::{tools, wait};
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};

const LEASE: i64 = 7_587;
const FORMATS: [&str; 4] = ["simple", "fields", "json", "table"];

/// Keys with history: overwritten, deleted, deleted and made again, large, on a lease, several in a transaction.
async fn fill(server: &StoreServer) -> Result<()> {
    let mut client = server.client()?;
    client
        .lease
        .lease_grant(LeaseGrantRequest {
            ttl: 9_000,
            id: LEASE,
        })
        .await?;
    let mut revision = 0;
    for round in 0..20_usize {
        let puts = (0..100).filter(|i| (i + round) % 3 > 0).map(|i| RequestOp {
            request: Some(request_op::Request::RequestPut(PutRequest {
                key: key(i),
                value: vec![b'v'; (i * 7 + round) % 70 + usize::from(i == round) * 40_000].into(),
                lease: if i % 8 == 0 { LEASE } else { 0 },
                ..PutRequest::default()
            })),
        });
        let txn = TxnRequest {
            success: puts.collect(),
            ..TxnRequest::default()
        };
        client.kv.txn(txn).await?;
        delete(
            &mut client,
            key(round * 13 % 100),
            key(round * 13 % 100 + 2),
        )
        .await?;
        revision = put(&mut client, "last", b"one by one", false).await?;
    }
    client
        .kv
        .compact(CompactionRequest {
            revision: revision / 2,
            physical: true,
        })
        .await?;
    put(&mut client, "late", b"after the compaction", false).await?;
    Ok(())
}

async fn put(client: &mut Client, key: &str, value: &[u8], leased: bool) -> Result<i64> {
    let request = PutRequest {
        key: key.to_owned().into(),
        value: value.to_vec().into(),
        lease: if leased { LEASE } else { 0 },
        ..PutRequest::default()
    };
    let header = client.kv.put(request).await?.into_inner().header;
    Ok(header.context("a header")?.revision)
}

fn key(number: usize) -> Bytes {
    format!("key-{number:04}").into()
}

async fn delete(client: &mut Client, from: Bytes, to: Bytes) -> Result<()> {
    let request = DeleteRangeRequest {
        key: from,
        range_end: to,
        ..DeleteRangeRequest::default()
    };
    client.kv.delete_range(request).await?;
    Ok(())
}

async fn everything(client: &mut Client) -> Result<RangeResponse> {
    let request = RangeRequest {
        key: vec![0].into(),
        range_end: vec![0].into(),
        ..RangeRequest::default()
    };
    Ok(client.kv.range(request).await?.into_inner())
}

async fn hash(client: &mut Client, revision: i64) -> Result<(u32, i64)> {
    let answer = client
        .maintenance
        .hash_kv(HashKvRequest { revision })
        .await?
        .into_inner();
    Ok((answer.hash, answer.hash_revision))
}

/// Both hold the same, and go on alike.
async fn assert_same(one: &StoreServer, other: &StoreServer) -> Result<()> {
    let (mut one, mut other) = (one.client()?, other.client()?);
    assert_eq!(hash(&mut one, 0).await?, hash(&mut other, 0).await?);
    let (ours, theirs) = (everything(&mut one).await?, everything(&mut other).await?);
    assert_eq!(ours.kvs, theirs.kvs);
    for client in [&mut one, &mut other] {
        let leases = client
            .lease
            .lease_leases(LeaseLeasesRequest {})
            .await?
            .into_inner();
        let ids: Vec<i64> = leases.leases.iter().map(|lease| lease.id).collect();
        assert_eq!(ids, [LEASE]);
        let request = LeaseTimeToLiveRequest {
            id: LEASE,
            keys: true,
        };
        let lease = client.lease.lease_time_to_live(request).await?.into_inner();
        assert_eq!(lease.granted_ttl, 9_000);
        let attached = ours.kvs.iter().filter(|kv| kv.lease == LEASE).count();
        assert!(attached > 0);
        assert_eq!(lease.keys.len(), attached);
        put(client, "key-0001", b"after the restore", false).await?;
        delete(client, key(2), key(4)).await?;
    }
    assert_eq!(hash(&mut one, 0).await?, hash(&mut other, 0).await?);
    Ok(())
}

fn run(program: &Path, arguments: &[&str]) -> Result<Answer> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| program.display().to_string())?;
    Ok(Answer {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

fn ballast(arguments: &[&str]) -> Result<Answer> {
    run(&Program::under_test()?.path, arguments)
}

fn etcdutl(arguments: &[&str]) -> Result<Answer> {
    run(&tools::path("etcdutl")?, arguments)
}

fn boltcheck(arguments: &[&str]) -> Result<Answer> {
    tools::ensure(&["boltcheck"], &Progress::new())?;
    run(&tools::path("boltcheck")?, arguments)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are plain")
}

/// etcdctl's snapshot of a server.
fn save(server: &StoreServer) -> Result<PathBuf> {
    let path = server.folder().join("snapshot.db");
    etcdctl(server, &["snapshot", "save", text(&path)], "")?.ok()?;
    Ok(path)
}

/// What a restore into a prepared server needs beside the file.
fn restore_arguments(file: &Path, to: &StoreServer, more: &[&str]) -> Vec<String> {
    let mut arguments = vec![
        "snapshot".to_owned(),
        "restore".to_owned(),
        text(file).to_owned(),
        format!("--data-dir={}", to.data_dir().display()),
        format!("--initial-cluster=default={}", to.peer_url()),
        format!("--initial-advertise-peer-urls={}", to.peer_url()),
    ];
    arguments.extend(more.iter().map(|&flag| flag.to_owned()));
    arguments
}

fn restore(tool: &Path, file: &Path, to: &StoreServer, more: &[&str]) -> Result<Answer> {
    let arguments = restore_arguments(file, to, more);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    run(tool, &arguments)
}

/// A server of `program` on what `tool` makes of a snapshot.
async fn restored(
    program: &Program,
    tool: &Path,
    file: &Path,
    more: &[&str],
) -> Result<StoreServer> {
    let mut server = StoreServer::prepare(program, &[])?;
    restore(tool, file, &server, more)?.ok()?;
    server.restart().await?;
    Ok(server)
}

#[tokio::test]
async fn our_snapshot_passes_bbolt_and_etcdutl_and_restores_into_etcd() -> Result<()> {
    let server = StoreServer::start(&Program::under_test()?, &[]).await?;
    fill(&server).await?;
    let file = save(&server)?;
    boltcheck(&["check", text(&file)])?.ok()?;
    let copy = server.folder().join("copy.db");
    fs::copy(&file, &copy)?;
    boltcheck(&["churn", text(&copy)])?.ok()?;
    for format in FORMATS {
        let arguments = ["snapshot", "status", text(&file), "-w", format];
        assert_eq!(ballast(&arguments)?.ok()?, etcdutl(&arguments)?.ok()?);
    }
    let etcd = restored(&Program::etcd()?, &tools::path("etcdutl")?, &file, &[]).await?;
    assert_same(&server, &etcd).await
}

#[tokio::test]
async fn etcds_snapshot_restores_into_ours() -> Result<()> {
    let etcd = StoreServer::start(&Program::etcd()?, &[]).await?;
    fill(&etcd).await?;
    let file = save(&etcd)?;
    for format in FORMATS {
        let arguments = ["snapshot", "status", text(&file), "-w", format];
        assert_eq!(ballast(&arguments)?.ok()?, etcdutl(&arguments)?.ok()?);
    }
    let program = Program::under_test()?;
    let mut server = restored(&program, &program.path, &file, &[]).await?;
    assert_same(&etcd, &server).await?;
    // Not only in memory.
    server.stop().await?;
    server.restart().await?;
    let mut clients = (etcd.client()?, server.client()?);
    assert_eq!(
        hash(&mut clients.0, 0).await?,
        hash(&mut clients.1, 0).await?
    );
    // And through once more, without loss.
    let again = save(&server)?;
    boltcheck(&["check", text(&again)])?.ok()?;
    let back = restored(&Program::etcd()?, &tools::path("etcdutl")?, &again, &[]).await?;
    assert_same(&server, &back).await
}

#[tokio::test]
async fn our_own_save_equals_etcdctls() -> Result<()> {
    let server = StoreServer::start(&Program::under_test()?, &[]).await?;
    fill(&server).await?;
    let theirs = save(&server)?;
    let ours = server.folder().join("ours.db");
    let endpoints = format!("--endpoints={}", server.endpoint());
    let told = ballast(&["snapshot", "save", text(&ours), &endpoints])?.ok()?;
    assert_eq!(
        told,
        format!(
            "Snapshot saved at {}\nServer version 3.7.0\n",
            ours.display()
        )
    );
    assert_eq!(fs::read(&ours)?, fs::read(&theirs)?);
    assert!(!server.folder().join("ours.db.part").exists());
    Ok(())
}

#[tokio::test]
async fn the_pieces_of_a_snapshot_count_down_to_the_hash() -> Result<()> {
    for program in [Program::etcd()?, Program::under_test()?] {
        let server = StoreServer::start(&program, &[]).await?;
        fill(&server).await?;
        let mut client = server.client()?;
        let mut pieces = client
            .maintenance
            .snapshot(SnapshotRequest {})
            .await?
            .into_inner();
        let mut seen = Vec::new();
        while let Some(piece) = pieces.next().await {
            let piece = piece?;
            assert_eq!(piece.version, "3.7.0");
            seen.push((piece.blob.len() as u64, piece.remaining_bytes));
        }
        let (hash, pieces) = seen.split_last().context("no piece")?;
        assert_eq!(*hash, (32, 0), "{}", program.name);
        let total: u64 = pieces.iter().map(|(bytes, _)| bytes).sum();
        assert_eq!(total % 4096, 0);
        let mut sent = 0;
        for (bytes, remaining) in pieces {
            sent += bytes;
            assert_eq!(*remaining, total - sent, "{}", program.name);
            assert!(*bytes <= 1 << 20, "clients accept 4 MiB");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_holds_nothing_up() -> Result<()> {
    let server = StoreServer::start(&Program::under_test()?, &[]).await?;
    fill(&server).await?;
    let mut client = server.client()?;
    for _ in 0..3 {
        let mut other = server.client()?;
        let request = SnapshotRequest {};
        let mut pieces = other.maintenance.snapshot(request).await?.into_inner();
        pieces.next().await.context("no piece")??;
    }
    // A compaction waits for all who read the records it would delete: it must not wait for those.
    let revision = put(&mut client, "after", b"", false).await?;
    let request = CompactionRequest {
        revision,
        physical: true,
    };
    tokio::time::timeout(Duration::from_secs(30), client.kv.compact(request))
        .await
        .context("the compaction still waits")??;
    Ok(())
}

/// P26, etcd-io/etcd#18340 and others: a bad file is found before anything is touched.
#[tokio::test]
async fn a_bad_snapshot_is_refused_before_anything_is_touched() -> Result<()> {
    let program = Program::under_test()?;
    let server = StoreServer::start(&program, &[]).await?;
    fill(&server).await?;
    let good = fs::read(save(&server)?)?;
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    let missing = "snapshot missing hash but --skip-hash-check=false";
    let cases = [
        (
            "cut",
            good[..good.len() - 1_024].to_vec(),
            "expected sha256 ",
        ),
        ("without hash", good[..good.len() - 32].to_vec(), missing),
        ("flipped", flipped, "expected sha256 "),
        ("empty", Vec::new(), missing),
    ];
    for (name, bytes, expected) in cases {
        let file = server.folder().join("bad.db");
        fs::write(&file, bytes)?;
        let to = StoreServer::prepare(&program, &[])?;
        let answer = restore(&program.path, &file, &to, &[])?;
        assert_eq!(answer.code, Some(1), "{name}");
        assert!(
            answer.stderr.contains(expected),
            "{name}: {}",
            answer.stderr
        );
        assert!(!to.data_dir().exists(), "{name}");
    }
    // Without its hash it is taken when told so, and damage that the hash would have shown is looked for.
    let file = server.folder().join("bare.db");
    fs::write(&file, &good[..good.len() - 32])?;
    let bare = restored(&program, &program.path, &file, &["--skip-hash-check"]).await?;
    assert_same(&server, &bare).await?;
    fs::write(&file, &good[..good.len() / 2])?;
    let to = StoreServer::prepare(&program, &[])?;
    let answer = restore(&program.path, &file, &to, &["--skip-hash-check"])?;
    assert_eq!(answer.code, Some(1));
    assert!(
        answer.stderr.contains("is damaged at byte"),
        "{}",
        answer.stderr
    );
    assert!(!to.data_dir().exists());
    Ok(())
}

#[tokio::test]
async fn a_directory_that_is_there_is_not_restored_over() -> Result<()> {
    let program = Program::under_test()?;
    let mut server = StoreServer::start(&program, &[]).await?;
    fill(&server).await?;
    let file = save(&server)?;
    server.stop().await?;
    let answer = restore(&program.path, &file, &server, &[])?;
    assert_eq!(answer.code, Some(1));
    let expected = format!(
        "data-dir {:?} not empty or could not be read",
        server.data_dir()
    );
    assert!(answer.stderr.contains(&expected), "{}", answer.stderr);
    server.restart().await?;

    let to = StoreServer::prepare(&program, &[])?;
    let wal = to.folder().join("wal");
    fs::create_dir(&wal)?;
    let flag = format!("--wal-dir={}", wal.display());
    let answer = restore(&program.path, &file, &to, &[&flag])?;
    assert_eq!(answer.code, Some(1));
    assert!(answer.stderr.contains("exists"), "{}", answer.stderr);
    assert!(!to.data_dir().exists());
    Ok(())
}

/// P29, kubernetes/kubernetes#107457: after a restore no client may see a revision again that it saw before.
#[tokio::test]
async fn a_bumped_restore_tells_old_watchers_that_they_are_compacted() -> Result<()> {
    const BUMP: i64 = 1_000_000;
    let program = Program::under_test()?;
    let server = StoreServer::start(&program, &[]).await?;
    fill(&server).await?;
    let file = save(&server)?;
    let mut client = server.client()?;
    let before = everything(&mut client).await?;
    let saved_at = before.header.context("a header")?.revision;
    let later = futures::stream::iter(0..500).map(|_| {
        let mut client = client.clone();
        async move { put(&mut client, "later", b"", false).await }
    });
    later
        .buffer_unordered(50)
        .try_for_each(|_| async { Ok(()) })
        .await?;
    let bump = format!("--bump-revision={BUMP}");
    for flags in [&[bump.as_str()][..], &["--mark-compacted"]] {
        let to = StoreServer::prepare(&program, &[])?;
        let answer = restore(&program.path, &file, &to, flags)?;
        assert_eq!(answer.code, Some(128), "as etcdutl's");
        let expected = "--mark-compacted required if --revision-bump > 0";
        assert!(answer.stderr.contains(expected), "{}", answer.stderr);
        assert!(!to.data_dir().exists());
    }
    let flags = [bump.as_str(), "--mark-compacted"];
    let ours = restored(&program, &program.path, &file, &flags).await?;
    let mut client = ours.client()?;
    let after = everything(&mut client).await?;
    assert!(after.header.context("a header")?.revision >= saved_at + BUMP);
    assert_eq!(after.kvs, before.kvs, "keys keep their revisions");
    watch_is_compacted(&mut client, saved_at + 500).await?;
    // An etcd restored from the same file by the same flags is in the same state.
    let etcdutl = tools::path("etcdutl")?;
    let etcd = restored(&Program::etcd()?, &etcdutl, &file, &flags).await?;
    watch_is_compacted(&mut etcd.client()?, saved_at + 500).await?;
    assert_same(&ours, &etcd).await
}

async fn watch_is_compacted(client: &mut Client, start: i64) -> Result<()> {
    let create = WatchCreateRequest {
        key: "later".into(),
        start_revision: start,
        ..WatchCreateRequest::default()
    };
    let request = WatchRequest {
        request_union: Some(watch_request::RequestUnion::CreateRequest(create)),
    };
    let requests = futures::stream::iter([request]).chain(futures::stream::pending());
    let mut answers = client.watch.watch(requests).await?.into_inner();
    let deadline = wait::now() + Duration::from_secs(30);
    while wait::now() < deadline {
        let answer = tokio::time::timeout(Duration::from_secs(30), answers.next())
            .await
            .context("the watcher hears nothing")?
            .context("the stream ended")??;
        ensure!(
            answer.events.is_empty(),
            "an event of a revision seen before"
        );
        if answer.canceled {
            ensure!(answer.compact_revision > start, "{answer:?}");
            return Ok(());
        }
    }
    bail!("the watcher was not cancelled")
}

#[test]
fn files_that_bbolt_made_read_the_same() -> Result<()> {
    let dir = tempfile::tempdir()?;
    for name in ["with.db", "without.nofreelist"] {
        let path = dir.path().join(name);
        boltcheck(&["make", text(&path)])?.ok()?;
        let arguments = ["snapshot", "status", text(&path), "-w", "json"];
        assert_eq!(
            ballast(&arguments)?.ok()?,
            etcdutl(&arguments)?.ok()?,
            "{name}"
        );
        // A page that is neither used nor free is found by both.
        let mut bytes = fs::read(&path)?;
        let last = bytes.len() - 4_096;
        bytes[last..].fill(0xFF);
        fs::write(&path, bytes)?;
        let (ours, theirs) = (ballast(&arguments)?, etcdutl(&arguments)?);
        assert_eq!(
            ours.code == Some(0),
            theirs.code == Some(0),
            "{name}: {theirs:?}"
        );
    }
    Ok(())
}

/// etcd-io/etcd-operator and others kept files that a broken connection had cut.
#[test]
fn a_save_that_breaks_off_leaves_no_file() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let endpoints = format!("--endpoints={}", listener.local_addr()?);
    let hang_up = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        let mut preface = [0; 24];
        stream.read_exact(&mut preface)?;
        // An empty SETTINGS frame, and no more.
        stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0])
    });
    let file = dir.path().join("snapshot.db");
    let answer = ballast(&["snapshot", "save", text(&file), &endpoints])?;
    assert_eq!(answer.code, Some(1), "{}", answer.stdout);
    hang_up.join().expect("it only listens")?;
    assert_eq!(fs::read_dir(dir.path())?.count(), 0);

    let answer = ballast(&["snapshot", "save", text(&file), "--endpoints=a:1,b:1"])?;
    let expected = "snapshot must be requested to one selected node, not multiple [a:1 b:1]";
    assert!(answer.stderr.contains(expected), "{}", answer.stderr);
    Ok(())
}

#[tokio::test]
async fn an_offline_defragmentation_keeps_everything_and_refuses_a_directory_in_use() -> Result<()>
{
    let program = Program::under_test()?;
    let mut server = StoreServer::start(&program, &[]).await?;
    fill(&server).await?;
    let before = hash(&mut server.client()?, 0).await?;
    let flag = format!("--data-dir={}", server.data_dir().display());
    let answer = ballast(&["defrag", &flag])?;
    assert_eq!(answer.code, Some(1));
    assert!(answer.stderr.contains("in use"), "{}", answer.stderr);
    server.stop().await?;
    let told = ballast(&["defrag", &flag])?.ok()?;
    assert!(told.starts_with("defragmented "), "{told}");
    server.restart().await?;
    assert_eq!(hash(&mut server.client()?, 0).await?, before);
    Ok(())
}
