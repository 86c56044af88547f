//! Bits that turn over on the disk: in the log, in the database, in a snapshot. Whatever is read afterwards is right, or the member stops and
//! says what is damaged.
//!
//! A bit that nothing depends on (free space of an engine's file, a part of the log that an older engine needed) may go unnoticed: then
//! everything is read and held against what is known.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_api::etcdserverpb::{
    CompactionRequest, DefragmentRequest, DeleteRangeRequest, HashKvRequest, LeaseGrantRequest,
    LeaseLeasesRequest, PutRequest, RangeRequest, SnapshotRequest,
};
use ballast_api::mvccpb::KeyValue;
use ballast_e2e::kill_history::{Change, history};
use ballast_e2e::store_server::{Client, Program, StoreServer};
use ballast_e2e::suites::rounds;
use ballast_e2e::up::say;
use ballast_e2e::wait;
use bytes::Bytes;
use rand::Rng as _;

const KEYS: usize = 250;
const LARGE_BYTES: usize = 30_000;
const END_DEADLINE: Duration = Duration::from_secs(20);

/// Everything a client can read.
#[derive(Clone, Debug, PartialEq)]
struct Contents {
    now: Vec<KeyValue>,
    /// At some revisions of the past.
    before: Vec<Vec<KeyValue>>,
    hash: u32,
    leases: Vec<i64>,
    history: Vec<Change>,
}

const PAST: [i64; 3] = [420, 500, 600];

async fn range(client: &Client, revision: i64) -> Result<Vec<KeyValue>> {
    let request = RangeRequest {
        key: Bytes::from_static(b"\0"),
        range_end: Bytes::from_static(b"\0"),
        revision,
        ..RangeRequest::default()
    };
    Ok(client.kv.clone().range(request).await?.into_inner().kvs)
}

async fn read(client: &Client) -> Result<Contents> {
    let mut before = Vec::new();
    for revision in PAST {
        before.push(range(client, revision).await?);
    }
    let leases = client
        .lease
        .clone()
        .lease_leases(LeaseLeasesRequest {})
        .await?;
    let hash = client
        .maintenance
        .clone()
        .hash_kv(HashKvRequest { revision: 0 })
        .await?;
    let mut leases: Vec<i64> = leases
        .into_inner()
        .leases
        .iter()
        .map(|lease| lease.id)
        .collect();
    leases.sort_unstable();
    Ok(Contents {
        now: range(client, 0).await?,
        before,
        hash: hash.into_inner().hash,
        leases,
        history: history(client, PAST[0]).await?.0,
    })
}

/// Keys with history, small and large, deleted ones, leases; part of it compacted.
async fn fill(client: &Client) -> Result<()> {
    let mut kv = client.kv.clone();
    for id in 1..=20 {
        let request = LeaseGrantRequest { ttl: 90_000, id };
        client.lease.clone().lease_grant(request).await?;
    }
    for round in 0..3 {
        for number in 0..KEYS {
            let value = if number % 12 == round {
                vec![b'l'; LARGE_BYTES + number]
            } else {
                format!("value {round} of {number}").into_bytes()
            };
            kv.put(PutRequest {
                key: format!("key-{number:05}").into(),
                value: value.into(),
                lease: [0, 1 + number as i64 % 20][usize::from(number % 5 == 0)],
                ..PutRequest::default()
            })
            .await?;
        }
        kv.delete_range(DeleteRangeRequest {
            key: format!("key-{:05}", round * 20).into(),
            range_end: format!("key-{:05}", round * 20 + 5).into(),
            ..DeleteRangeRequest::default()
        })
        .await?;
    }
    kv.compact(CompactionRequest {
        revision: PAST[0],
        physical: true,
    })
    .await?;
    Ok(())
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output()?;
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{program} {arguments:?}: {told}");
    Ok(())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary folders have plain names")
}

/// The files of the database, and the bytes in them that are not zeros.
fn database_files(data: &Path) -> Result<Vec<(PathBuf, Vec<u64>)>> {
    let mut files = Vec::new();
    let mut folders = vec![data.join("member/db")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let bytes = std::fs::read(&path)?;
            // All of a sector that holds something: a bit may turn from zero to one too.
            let used = bytes
                .chunks(512)
                .enumerate()
                .filter(|(_, sector)| sector.iter().any(|&byte| byte != 0))
                .flat_map(|(number, sector)| {
                    (0..sector.len()).map(move |at| (number * 512 + at) as u64)
                })
                .collect();
            files.push((path, used));
        }
    }
    Ok(files)
}

fn flip(path: &Path, offset: u64, bit: u8) -> Result<()> {
    let mut bytes = std::fs::read(path)?;
    bytes[offset as usize] ^= 1 << bit;
    std::fs::write(path, bytes)?;
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Refused,
    StoppedLater,
    Unnoticed,
}

/// Starts a member on damaged data and reads everything. An error only for an answer that is wrong, or a member that is silent about why
/// it stopped.
async fn outcome(
    server: &mut StoreServer,
    expected: &Contents,
    defragment: bool,
) -> Result<Outcome> {
    let said = server.log().len();
    let named = |server: &StoreServer| {
        let log = server.log();
        let log = &log[said..];
        ensure!(
            log.contains("member/db")
                && ["damaged", "engine", "refusing"]
                    .iter()
                    .any(|word| log.contains(word)),
            "it does not say what is damaged:\n{log}"
        );
        Ok(())
    };
    if server.restart().await.is_err() {
        named(server)?;
        return Ok(Outcome::Refused);
    }
    let client = server.client()?;
    let everything = async {
        let first = read(&client).await?;
        if defragment {
            client
                .maintenance
                .clone()
                .defragment(DefragmentRequest {})
                .await?;
            let mut snapshot = client
                .maintenance
                .clone()
                .snapshot(SnapshotRequest {})
                .await?;
            while snapshot.get_mut().message().await?.is_some() {}
        }
        anyhow::Ok((first, read(&client).await?))
    };
    match everything.await {
        Ok((first, second)) => {
            ensure!(first == *expected, "what it serves is wrong");
            ensure!(
                second == *expected,
                "what it serves after a defragmentation is wrong"
            );
            server.kill()?;
            Ok(Outcome::Unnoticed)
        }
        Err(error) => {
            wait::wait_for_blocking("the member ends", END_DEADLINE, || server.ended())
                .with_context(|| format!("it goes on after {error:#}"))?;
            named(server)?;
            Ok(Outcome::StoppedLater)
        }
    }
}

/// A copy of the data of a server that does not run, to begin each try from.
fn sound_copy(server: &StoreServer) -> Result<PathBuf> {
    let sound = server.folder().join("sound");
    let data = server.data_dir();
    run("cp", &["-a", "--sparse=always", text(&data), text(&sound)])?;
    Ok(sound)
}

async fn database_flips(flags: &[&str], count: usize) -> Result<()> {
    let mut server = StoreServer::start(&Program::under_test()?, flags).await?;
    fill(&server.client()?).await?;
    let expected = read(&server.client()?).await?;
    ensure!(expected.leases.len() == 20 && expected.now.len() > 200);
    server.stop().await?;
    let sound = sound_copy(&server)?;
    let mut seen = Vec::new();
    for number in 0..count {
        std::fs::remove_dir_all(server.data_dir())?;
        run(
            "cp",
            &[
                "-a",
                "--sparse=always",
                text(&sound),
                text(&server.data_dir()),
            ],
        )?;
        let (path, offset, bit) = {
            let mut random = rand::rng();
            let files = database_files(&server.data_dir())?;
            let mut at = random.random_range(0..files.iter().map(|(_, used)| used.len()).sum());
            let (path, used) = files
                .iter()
                .find(|(_, used)| {
                    let here = at < used.len();
                    at -= if here { 0 } else { used.len() };
                    here
                })
                .context("one of the files")?;
            (path.clone(), used[at], random.random_range(0..8))
        };
        flip(&path, offset, bit)?;
        let outcome = outcome(&mut server, &expected, number % 3 == 0)
            .await
            .with_context(|| format!("bit {bit} of byte {offset} in {}", path.display()))?;
        seen.push(outcome);
    }
    let times = |outcome| seen.iter().filter(|&&o| o == outcome).count();
    say(&format!(
        "database {flags:?}: {count} flips, {} refused, {} stopped later, {} without consequence",
        times(Outcome::Refused),
        times(Outcome::StoppedLater),
        times(Outcome::Unnoticed)
    ));
    // A few may all fall where nothing depends on them.
    ensure!(
        count < 10 || times(Outcome::Refused) > 0,
        "no flip was noticed"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_in_the_database_is_named_and_never_served() -> Result<()> {
    database_flips(&["--storage-engine=redb"], rounds(10, 400)).await?;
    // sled takes a damaged record of its log for the torn end of it, and goes back to there; ours goes on from that, as far as it reaches.
    let sled = [
        "--storage-engine=sled",
        "--snapshot-count=100",
        "--snapshot-catchup-entries=10",
        "--max-wals=1",
    ];
    database_flips(&sled, rounds(5, 200)).await
}

/// The last segment's bytes up to the end of what is written.
fn used_log(data: &Path) -> Result<(PathBuf, usize)> {
    let mut segments = Vec::new();
    for entry in std::fs::read_dir(data.join("member/wal"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "wal") {
            segments.push(path);
        }
    }
    segments.sort();
    let path = segments.pop().context("there is a segment")?;
    let bytes = std::fs::read(&path)?;
    let used = bytes
        .iter()
        .rposition(|&byte| byte != 0)
        .context("it is empty")?
        + 1;
    Ok((path, used))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_in_the_log_is_named_and_never_served() -> Result<()> {
    let mut server = StoreServer::start(&Program::under_test()?, &[]).await?;
    fill(&server.client()?).await?;
    let expected = read(&server.client()?).await?;
    // Killed, so that the log counts; what was acknowledged last is behind a mark that says so.
    server.kill()?;
    let sound = sound_copy(&server)?;
    let (mut refused, mut cut) = (0, 0);
    for _ in 0..rounds(6, 200) {
        std::fs::remove_dir_all(server.data_dir())?;
        run(
            "cp",
            &[
                "-a",
                "--sparse=always",
                text(&sound),
                text(&server.data_dir()),
            ],
        )?;
        let (path, used) = used_log(&server.data_dir())?;
        let (offset, bit) = {
            let mut random = rand::rng();
            (
                random.random_range(0..used as u64),
                random.random_range(0..8),
            )
        };
        flip(&path, offset, bit)?;
        let told = || format!("bit {bit} of byte {offset} of {used}");
        let Err(error) = server.restart().await else {
            let found = read(&server.client()?).await.with_context(told)?;
            ensure!(found == expected, "{}: what it serves is wrong", told());
            server.kill()?;
            cut += 1;
            continue;
        };
        let error = format!("{error:#}");
        let name = path.file_name().context("a file")?.to_string_lossy();
        ensure!(error.contains(&*name), "{}: not named: {error}", told());
        ensure!(!error.contains("panicked at"), "{}: {error}", told());
        refused += 1;
    }
    say(&format!(
        "log: {refused} flips refused, {cut} behind what was acknowledged"
    ));
    ensure!(refused > 0, "no flip was noticed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_in_a_snapshot_is_named_before_anything_is_made_of_it() -> Result<()> {
    let program = Program::under_test()?;
    let server = StoreServer::start(&program, &[]).await?;
    fill(&server.client()?).await?;
    let file = server.folder().join("snapshot.db");
    let endpoints = format!("--endpoints={}", server.endpoint());
    run(
        text(&program.path),
        &["snapshot", "save", text(&file), &endpoints],
    )?;
    let bytes = std::fs::read(&file)?;
    for _ in 0..rounds(10, 200) {
        let (offset, bit) = {
            let mut random = rand::rng();
            (
                random.random_range(0..bytes.len()),
                random.random_range(0..8),
            )
        };
        let mut damaged = bytes.clone();
        damaged[offset] ^= 1 << bit;
        std::fs::write(&file, damaged)?;
        let data = server.folder().join("restored");
        let data_dir = format!("--data-dir={}", data.display());
        let output = Command::new(&program.path)
            .args(["snapshot", "restore", text(&file), &data_dir])
            .output()?;
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code() == Some(1) && told.contains("expected sha256"),
            "bit {bit} of byte {offset}: {told}"
        );
        ensure!(
            !data.exists(),
            "bit {bit} of byte {offset}: it made a directory"
        );
    }
    Ok(())
}
