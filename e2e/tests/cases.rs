//! Public bug reports that need a server stopped in its tracks, a client that does not read, or many bytes; and what the flags of the
//! log and the table of flags say, beside etcd's.
//!
//! The other reports are in `server/tests/wire`; docs/cases.md lists them all.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_api::etcdserverpb as pb;
use ballast_e2e::slow_reader::SlowReader;
use ballast_e2e::store_server::{Client, Program, StoreServer};
use ballast_e2e::up::say;
use ballast_e2e::wait;
use bytes::Bytes;
use pb::request_op::Request;
use pb::watch_request::RequestUnion;
use rand::Rng as _;
use rustix::process::{Pid, Signal, kill_process};
use tonic::{Code, Streaming};

fn put(key: impl Into<Bytes>, value: impl Into<Bytes>) -> pb::PutRequest {
    pb::PutRequest {
        key: key.into(),
        value: value.into(),
        ..pb::PutRequest::default()
    }
}

fn signal(server: &StoreServer, signal: Signal) -> Result<()> {
    let pid = i32::try_from(server.pid()?)?;
    let pid = Pid::from_raw(pid).context("a process id is not zero")?;
    Ok(kill_process(pid, signal)?)
}

/// Puts `count` keys, many at a time; `request` makes each.
async fn put_many(
    client: &Client,
    count: usize,
    request: impl Fn(usize) -> pb::PutRequest + Copy + Send + 'static,
) -> Result<()> {
    const WRITERS: usize = 64;
    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let mut kv = client.kv.clone();
        writers.push(tokio::spawn(async move {
            for n in (writer..count).step_by(WRITERS) {
                kv.put(request(n)).await?;
            }
            anyhow::Ok(())
        }));
    }
    for writer in writers {
        writer.await??;
    }
    Ok(())
}

/// 50,000 keys in transactions of 100.
async fn fill(client: &Client) -> Result<()> {
    let mut writers = Vec::new();
    for writer in 0..10 {
        let mut kv = client.kv.clone();
        writers.push(tokio::spawn(async move {
            for txn in 0..50 {
                let puts = (0..100).map(|n| pb::RequestOp {
                    request: Some(Request::RequestPut(put(
                        format!("all/{writer}-{txn:02}-{n:02}"),
                        "v",
                    ))),
                });
                let success = puts.collect();
                kv.txn(pb::TxnRequest {
                    success,
                    ..pb::TxnRequest::default()
                })
                .await?;
            }
            anyhow::Ok(())
        }));
    }
    for writer in writers {
        writer.await??;
    }
    Ok(())
}

/// etcd-io/etcd#14110: reads given up in the middle ended the process.
async fn cancelled_reads() -> Result<()> {
    const READS: usize = 500;
    let mut server = StoreServer::start(&Program::under_test()?, &[]).await?;
    let client = server.client()?;
    fill(&client).await?;
    let all = || pb::RequestOp {
        request: Some(Request::RequestRange(pb::RangeRequest {
            key: "all/".into(),
            range_end: "all0".into(),
            serializable: true,
            ..pb::RangeRequest::default()
        })),
    };
    let mut codes: BTreeMap<String, usize> = BTreeMap::new();
    let pid = Pid::from_raw(i32::try_from(server.pid()?)?).context("a process id is not zero")?;
    let over = Arc::new(AtomicBool::new(false));
    let pausing = tokio::spawn({
        let over = Arc::clone(&over);
        async move {
            while !over.load(Ordering::Acquire) {
                let (running, stopped) = {
                    let mut random = rand::rng();
                    (random.random_range(5..60), random.random_range(1..20))
                };
                tokio::time::sleep(Duration::from_millis(running)).await;
                kill_process(pid, Signal::STOP)?;
                tokio::time::sleep(Duration::from_millis(stopped)).await;
                kill_process(pid, Signal::CONT)?;
            }
            anyhow::Ok(())
        }
    });
    for round in 0..READS / 10 {
        let mut reading = Vec::new();
        for _ in 0..10 {
            let mut kv = client.kv.clone();
            let deadline = Duration::from_millis(rand::rng().random_range(1..=5));
            let mut request = tonic::Request::new(pb::TxnRequest {
                success: vec![all(), all()],
                ..pb::TxnRequest::default()
            });
            request.set_timeout(deadline);
            reading.push(tokio::spawn(async move { kv.txn(request).await.map(drop) }));
        }
        for read in reading {
            let code = match read.await? {
                Ok(()) => "Ok".to_owned(),
                Err(status) => {
                    ensure!(
                        matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled),
                        "round {round}: {status:?}"
                    );
                    format!("{:?}", status.code())
                }
            };
            *codes.entry(code).or_default() += 1;
        }
    }
    over.store(true, Ordering::Release);
    pausing.await??;
    ensure!(server.alive()?, "the server ended:\n{}", server.log());
    let begin = wait::now();
    let counted = client
        .kv
        .clone()
        .range(pb::RangeRequest {
            key: "all/".into(),
            range_end: "all0".into(),
            count_only: true,
            ..pb::RangeRequest::default()
        })
        .await?
        .into_inner();
    ensure!(counted.count == 50_000, "{}", counted.count);
    // What was given up is not worked off first.
    let waited = begin.elapsed();
    ensure!(
        waited < Duration::from_secs(5),
        "the next read took {waited:?}"
    );
    say(&format!("p06: {codes:?}; the next read took {waited:?}"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn p06_reads_given_up_end_nothing_but_themselves() {
    if let Err(error) = cancelled_reads().await {
        panic!("{error:#}");
    }
}

/// A stream of watchers, and what is told on it.
struct Watching {
    requests: tokio::sync::mpsc::UnboundedSender<pb::WatchRequest>,
    told: Streaming<pb::WatchResponse>,
}

impl Watching {
    async fn open(client: &Client) -> Result<Self> {
        let (requests, sent) = tokio::sync::mpsc::unbounded_channel();
        let sent = tokio_stream::wrappers::UnboundedReceiverStream::new(sent);
        let told = client.watch.clone().watch(sent).await?.into_inner();
        Ok(Self { requests, told })
    }

    fn create(&self, start_revision: i64) -> Result<()> {
        let request = pb::WatchCreateRequest {
            key: "s/".into(),
            range_end: "s0".into(),
            start_revision,
            prev_kv: true,
            ..pb::WatchCreateRequest::default()
        };
        let request_union = Some(RequestUnion::CreateRequest(request));
        Ok(self.requests.send(pb::WatchRequest { request_union })?)
    }

    async fn next(&mut self) -> Result<pb::WatchResponse> {
        let next = tokio::time::timeout(Duration::from_secs(30), self.told.message());
        next.await.context("nothing was told")??.context("it ended")
    }
}

fn resident_mib(server: &StoreServer) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid()?))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib: u64 = line
        .and_then(|line| line.split_whitespace().nth(1))
        .context("a process has a size")?
        .parse()?;
    Ok(kib / 1024)
}

/// etcd-io/etcd#17529: watchers of a client that did not read jumped over events.
async fn slow_reader() -> Result<()> {
    const WATCHERS: usize = 200;
    const REVISIONS: usize = 8_000;
    const VALUE_BYTES: usize = 4096;
    /// The caches, what waits for the disk, and one stream's bound; a copy of the events a watcher would be 12 GiB.
    const GROWTH_MIB_MAX: u64 = 320;
    let flags = ["--value-cache-bytes=67108864"];
    let mut server = StoreServer::start(&Program::under_test()?, &flags).await?;
    let client = server.client()?;
    let mut slow = Watching::open(&server.client()?).await?;
    for _ in 0..WATCHERS {
        slow.create(0)?;
    }
    for _ in 0..WATCHERS {
        ensure!(slow.next().await?.created);
    }
    // Somebody who does read is not held up.
    let mut quick = Watching::open(&server.client()?).await?;
    quick.create(0)?;
    ensure!(quick.next().await?.created);
    let reading = tokio::spawn(async move {
        let mut seen = 1;
        while seen < 1 + REVISIONS as i64 {
            for event in quick.next().await?.events {
                let revision = event.kv.context("an event has a record")?.mod_revision;
                ensure!(revision == seen + 1, "{revision} after {seen}");
                seen = revision;
            }
        }
        anyhow::Ok(())
    });
    let before = resident_mib(&server)?;
    let begin = wait::now();
    put_many(&client, REVISIONS, |n| {
        put(format!("s/{:02}", n % 50), vec![b'x'; VALUE_BYTES])
    })
    .await?;
    let wrote = begin.elapsed();
    reading.await??;
    let grown = resident_mib(&server)?.saturating_sub(before);
    ensure!(grown <= GROWTH_MIB_MAX, "the server grew by {grown} MiB");
    let head = 1 + REVISIONS as i64;
    let compacted = head - 5;
    let compaction = pb::CompactionRequest {
        revision: compacted,
        physical: false,
    };
    client.kv.clone().compact(compaction).await?;

    let mut judge = SlowReader::new(WATCHERS, head);
    while !judge.is_done() {
        judge.told(slow.next().await?)?;
    }
    let (canceled, events) = (judge.canceled, judge.events);
    ensure!(canceled > 0, "the client was too quick for this test");
    // Whoever was told begins again where there is history.
    slow.create(compacted)?;
    let mut last = compacted - 1;
    while last < head {
        for event in slow.next().await?.events {
            last = event.kv.context("an event has a record")?.mod_revision;
        }
    }
    say(&format!(
        "p08: {REVISIONS} puts in {wrote:?}, grown by {grown} MiB; {canceled} of {WATCHERS} told of the compaction, after {events} events"
    ));
    ensure!(server.alive()?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn p08_a_slow_reader_is_never_skipped_and_holds_up_nobody() {
    if let Err(error) = slow_reader().await {
        panic!("{error:#}");
    }
}

/// What a client of a lease saw: the answers to its keepalives in order, and whether its key is there at the end.
#[derive(Debug)]
struct LeaseSeen {
    before: Vec<i64>,
    after: Vec<i64>,
    key: bool,
    revision: i64,
}

/// Keeps a lease of six seconds alive each second while the server stands still for `pause`.
async fn paused(program: Program, pause: Duration) -> Result<LeaseSeen> {
    const TTL: i64 = 6;
    let server = StoreServer::start(&program, &[]).await?;
    let mut client = server.client()?;
    let grant = pb::LeaseGrantRequest { ttl: TTL, id: 15 };
    client.lease.lease_grant(grant).await?;
    let leased = pb::PutRequest {
        lease: 15,
        ..put("st/1", "v")
    };
    client.kv.put(leased).await?;
    let beats = futures::stream::unfold((), |()| async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Some((pb::LeaseKeepAliveRequest { id: 15 }, ()))
    });
    let mut answers = client.lease.lease_keep_alive(beats).await?.into_inner();
    let mut seen = LeaseSeen {
        before: Vec::new(),
        after: Vec::new(),
        key: false,
        revision: 0,
    };
    for _ in 0..2 {
        seen.before
            .push(answers.message().await?.context("an answer")?.ttl);
    }
    signal(&server, Signal::STOP)?;
    tokio::time::sleep(pause).await;
    signal(&server, Signal::CONT)?;
    // All that was sent meanwhile, and two more.
    let awaited = 2 + pause.as_secs();
    for _ in 0..awaited {
        let answer = tokio::time::timeout(Duration::from_secs(20), answers.message()).await;
        let answer = answer.context("no answer to a keepalive")??;
        seen.after.push(answer.context("an answer")?.ttl);
    }
    let read = pb::RangeRequest {
        key: "st/1".into(),
        ..pb::RangeRequest::default()
    };
    let answer = client.kv.range(read).await?.into_inner();
    seen.key = answer.count == 1;
    seen.revision = answer.header.context("a header")?.revision;
    Ok(seen)
}

/// etcd-io/etcd#15247, what of it one member can show: a leader that stood still neither acknowledges a lease that ran out meanwhile
/// nor takes the key of one that did not. With one member nobody else could have kept the lease, and its client was not answered
/// for longer than it lives: it is gone, as on etcd.
async fn paused_leader() -> Result<()> {
    let start = |program: Result<Program>, secs| -> Result<_> {
        let program = program?;
        Ok(tokio::spawn(paused(program, Duration::from_secs(secs))))
    };
    let short = start(Program::under_test(), 3)?;
    let long = start(Program::under_test(), 10)?;
    let etcds = start(Program::etcd(), 10)?;
    let (short, long, etcds) = (short.await??, long.await??, etcds.await??);
    say(&format!(
        "p15: {short:?}\np15: {long:?}\np15, etcd: {etcds:?}"
    ));
    ensure!(
        short.key && short.revision == 2 && short.after.iter().all(|ttl| *ttl == 6),
        "a pause shorter than the lease: {short:?}"
    );
    for seen in [&long, &etcds] {
        ensure!(
            !seen.key && seen.revision == 3 && seen.after.iter().all(|ttl| *ttl == 0),
            "a pause longer than the lease: {seen:?}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn p15_a_leader_that_stood_still_acknowledges_no_lease_that_ran_out() {
    if let Err(error) = paused_leader().await {
        panic!("{error:#}");
    }
}

/// The log's files, and the bytes allocated to each.
fn segments(server: &StoreServer) -> Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(server.data_dir().join("member/wal"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "wal") {
            let allocated = std::fs::metadata(&path)?.blocks() * 512;
            found.push((path, allocated));
        }
    }
    found.sort();
    Ok(found)
}

/// `--max-wals`, `--snapshot-count`, `--snapshot-catchup-entries`.
async fn log_life() -> Result<()> {
    const SEGMENT_BYTES: u64 = 64 << 20;
    const LARGE: i64 = 135;
    const SMALL: i64 = 60;
    let program = Program::under_test()?;
    let mut kept = StoreServer::start(&program, &["--max-wals=0", "--snapshot-count=20"]).await?;
    let few = [
        "--max-wals=1",
        "--snapshot-count=20",
        "--snapshot-catchup-entries=10",
    ];
    let mut purged = StoreServer::start(&program, &few).await?;
    let lagging = [
        "--max-wals=1",
        "--snapshot-count=20",
        "--snapshot-catchup-entries=1000",
    ];
    let mut held = StoreServer::start(&program, &lagging).await?;
    for server in [&kept, &purged, &held] {
        let mut kv = server.client()?.kv;
        // Two segments and a little, and then what it takes to let go of them.
        for n in 0..LARGE {
            kv.put(put(format!("w/{}", n % 5), vec![b'x'; 1_048_576]))
                .await?;
        }
        for _ in 0..SMALL {
            kv.put(put("w/0", "v")).await?;
        }
        for (path, allocated) in segments(server)? {
            ensure!(
                allocated >= SEGMENT_BYTES,
                "{} has {allocated} bytes",
                path.display()
            );
        }
    }
    let count = |server: &StoreServer| anyhow::Ok(segments(server)?.len());
    ensure!(count(&kept)? == 3, "{:?}", segments(&kept)?);
    ensure!(count(&held)? == 3, "{:?}", segments(&held)?);
    // The purge follows the writes a little later.
    let begin = wait::now();
    while count(&purged)? > 1 {
        ensure!(
            begin.elapsed() < Duration::from_secs(20),
            "{:?}",
            segments(&purged)?
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for server in [&mut kept, &mut purged, &mut held] {
        server.kill()?;
        server.restart().await?;
        let read = pb::RangeRequest {
            key: "w/".into(),
            range_end: "w0".into(),
            ..pb::RangeRequest::default()
        };
        let answer = server.client()?.kv.range(read).await?.into_inner();
        ensure!(
            answer.count == 5 && answer.header.context("a header")?.revision == 1 + LARGE + SMALL
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_keeps_as_much_as_the_flags_say() {
    if let Err(error) = log_life().await {
        panic!("{error:#}");
    }
}

/// Flags and their defaults as `--help` shows them.
fn told_flags(program: &Program) -> Result<BTreeMap<String, String>> {
    let output = Command::new(&program.path).arg("--help").output()?;
    let text = String::from_utf8(output.stdout)?;
    let mut told = BTreeMap::new();
    for line in text.lines() {
        let Some((name, rest)) = line
            .trim_start()
            .strip_prefix("--")
            .map(|line| line.split_once(' ').unwrap_or((line, "")))
        else {
            continue;
        };
        let default = rest
            .trim()
            .strip_prefix('\'')
            .and_then(|rest| rest.split_once('\''));
        told.insert(
            name.to_owned(),
            default
                .map_or(rest.trim(), |(default, _)| default)
                .to_owned(),
        );
    }
    Ok(told)
}

/// Every flag that etcd tells of is here with its default.
fn compare_flags() -> Result<()> {
    /// Told, but no flags any more.
    const NONE: [&str; 2] = ["discovery", "discovery-proxy"];
    /// Said in other words.
    const OTHER_WORDS: [&str; 6] = [
        "data-dir",
        "max-concurrent-streams",
        "backend-batch-interval",
        "compaction-batch-limit",
        "watch-progress-notify-interval",
        "v2-deprecation",
    ];
    let (etcds, ours) = (
        told_flags(&Program::etcd()?)?,
        told_flags(&Program::under_test()?)?,
    );
    let mut differences = Vec::new();
    for (name, default) in &etcds {
        if NONE.contains(&name.as_str()) {
            continue;
        }
        match ours.get(name) {
            None => differences.push(format!("--{name} is not known")),
            // Some are told without a default.
            Some(own) if own == default || default.is_empty() => {}
            Some(_) if OTHER_WORDS.contains(&name.as_str()) => {}
            Some(own) => differences.push(format!("--{name} is {own:?} and not {default:?}")),
        }
    }
    ensure!(etcds.len() > 100, "etcd told {} flags only", etcds.len());
    ensure!(differences.is_empty(), "{}", differences.join("\n"));
    Ok(())
}

#[test]
fn the_table_of_flags_is_etcds() {
    if let Err(error) = compare_flags() {
        panic!("{error:#}");
    }
}
