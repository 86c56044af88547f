//! Snapshots under a mixed load: bbolt's own checker finds nothing in them, and each restores to the HashKV of the moment it was taken.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_api::etcdserverpb::{CompactionRequest, HashKvRequest, SnapshotRequest};
use ballast_e2e::progress::Progress;
use ballast_e2e::store_server::{Client, Program, StoreServer};
use ballast_e2e::storm::{Counts, Storm};
use ballast_e2e::suites::rounds;
use ballast_e2e::tools;
use ballast_e2e::up::say;

/// A snapshot whose moment a compaction made incomparable is taken again.
const ATTEMPTS_MAX: usize = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hash {
    sum: u32,
    compact_revision: i64,
    revision: i64,
}

async fn hash(client: &Client, revision: i64) -> Result<Hash> {
    let request = HashKvRequest { revision };
    let answer = client.maintenance.clone().hash_kv(request).await?;
    let answer = answer.into_inner();
    Ok(Hash {
        sum: answer.hash,
        compact_revision: answer.compact_revision,
        revision: answer.hash_revision,
    })
}

async fn save(client: &Client, path: &Path) -> Result<()> {
    let answer = client
        .maintenance
        .clone()
        .snapshot(SnapshotRequest {})
        .await?;
    let mut stream = answer.into_inner();
    let mut file = Vec::new();
    while let Some(part) = stream.message().await? {
        file.extend_from_slice(&part.blob);
    }
    std::fs::write(path, file)?;
    Ok(())
}

fn run(program: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if !output.status.success() {
        bail!(
            "{arguments:?}: {}{}",
            text(&output.stdout),
            text(&output.stderr)
        );
    }
    Ok(text(&output.stdout))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary folders have plain names")
}

fn revision_of(program: &Program, file: &Path) -> Result<i64> {
    let told = run(
        &program.path,
        &["snapshot", "status", text(file), "-w", "json"],
    )?;
    let told: serde_json::Value = serde_json::from_str(&told)?;
    told["revision"].as_i64().context("a revision")
}

/// Takes one, and the HashKV of its revision from the store that goes on.
async fn take(server: &StoreServer, file: &Path) -> Result<Hash> {
    let client = server.client()?;
    for _ in 0..ATTEMPTS_MAX {
        let before = hash(&client, 0).await?;
        save(&client, file).await?;
        let revision = revision_of(server.program(), file)?;
        // A compaction may have overtaken it.
        let Ok(at) = hash(&client, revision).await else {
            continue;
        };
        if at.compact_revision == before.compact_revision {
            return Ok(at);
        }
    }
    bail!("compactions overtook {ATTEMPTS_MAX} snapshots in a row")
}

/// The HashKV of a member made of the file.
async fn restored(program: &Program, tool: &Path, file: &Path) -> Result<Hash> {
    let mut server = StoreServer::prepare(program, &[])?;
    let arguments = [
        "snapshot",
        "restore",
        text(file),
        &format!("--data-dir={}", server.data_dir().display()),
        &format!("--initial-cluster=default={}", server.peer_url()),
        &format!("--initial-advertise-peer-urls={}", server.peer_url()),
    ];
    run(tool, &arguments)?;
    server.restart().await?;
    hash(&server.client()?, 0).await
}

async fn snapshots(server: &StoreServer, count: usize) -> Result<()> {
    tools::ensure(&["boltcheck"], &Progress::new())?;
    let ours = server.program().clone();
    let tools: [(Program, PathBuf); 2] = [
        (ours.clone(), ours.path.clone()),
        (Program::etcd()?, tools::path("etcdutl")?),
    ];
    for number in 0..count {
        let file = server.folder().join("snapshot.db");
        let expected = take(server, &file).await?;
        run(&tools::path("boltcheck")?, &["check", text(&file)])?;
        // Into etcd every third time.
        let (program, tool) = &tools[usize::from(number % 3 == 2)];
        let found = restored(program, tool, &file).await?;
        ensure!(
            found == expected,
            "number {number} in {}: {found:?}, and was {expected:?}",
            program.name
        );
        // Or each would be larger than the one before; while the next is taken, records go.
        let compaction = CompactionRequest {
            revision: expected.revision,
            physical: false,
        };
        server.client()?.kv.compact(compaction).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_under_load_pass_bbolt_and_restore_to_their_moment() -> Result<()> {
    let count = rounds(3, 100);
    let server = StoreServer::start(&Program::under_test()?, &[]).await?;
    let counts = Arc::new(Counts::default());
    let storm = Storm::start(&server, "s", 1, &counts)?;
    let taken = snapshots(&server, count).await;
    let attempts = storm.end().await?;
    taken?;
    say(&format!(
        "{count} snapshots beside {} writes",
        attempts.len()
    ));
    Ok(())
}
