//! A disk that fails: syncs that fail or are slow, no space left, bits that flip.
//!
//! Right is: nothing acknowledged is lost; what cannot be written or read stops the member, which says what and where; a full disk is an answer
//! as long as it can be one (case P25).

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_api::etcdserverpb::{DefragmentRequest, PutRequest, RangeRequest};
use ballast_e2e::lossy::{Lossy, Names};
use ballast_e2e::store_server::{Client, Program, StoreServer};
use ballast_e2e::suites::rounds;
use ballast_e2e::up::say;
use ballast_e2e::wait;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;

const REDB: &str = "--storage-engine=redb";
const SLED: &str = "--storage-engine=sled";

const END_DEADLINE: Duration = Duration::from_secs(30);
const REQUEST_DEADLINE: Duration = Duration::from_secs(20);

/// A member on a disk of which more is known than the member can see.
async fn start(flags: &[&str]) -> Result<(Lossy, StoreServer)> {
    let disk = Lossy::start(Names::Journal)?;
    let mut server = StoreServer::prepare(&Program::under_test()?, flags)?;
    server.set_data_dir(disk.path().join("data"));
    server.restart().await?;
    Ok((disk, server))
}

async fn put(client: &Client, key: &str, value: &[u8]) -> Result<(), tonic::Status> {
    let request = PutRequest {
        key: key.to_owned().into(),
        value: value.to_vec().into(),
        ..PutRequest::default()
    };
    let mut kv = client.kv.clone();
    match tokio::time::timeout(REQUEST_DEADLINE, kv.put(request)).await {
        Ok(answer) => answer.map(drop),
        Err(_) => Err(tonic::Status::deadline_exceeded("no answer")),
    }
}

async fn get(client: &Client, key: &str) -> Result<Option<Vec<u8>>> {
    let request = RangeRequest {
        key: key.to_owned().into(),
        ..RangeRequest::default()
    };
    let answer = client.kv.clone().range(request).await?.into_inner();
    Ok(answer.kvs.first().map(|kv| kv.value.to_vec()))
}

/// The member ends by itself, not well, and a line of its log holds all of these.
fn ends_saying(server: &mut StoreServer, words: &[&str]) -> Result<()> {
    let status = wait::wait_for_blocking("the member ends", END_DEADLINE, || server.ended())?;
    ensure!(!status.success(), "it ended with {status}");
    said(server, words)
}

fn said(server: &StoreServer, words: &[&str]) -> Result<()> {
    let log = server.log();
    let told = log
        .lines()
        .any(|line| words.iter().all(|word| line.contains(word)));
    ensure!(told, "no line of the log has {words:?}:\n{log}");
    Ok(())
}

type Acknowledged = Vec<(String, Vec<u8>)>;

async fn check(client: &Client, acknowledged: &[(String, Vec<u8>)]) -> Result<()> {
    for (key, value) in acknowledged {
        let found = get(client, key).await?;
        ensure!(
            found.as_ref() == Some(value),
            "{key}: {:?} bytes instead of {}",
            found.map(|found| found.len()),
            value.len()
        );
    }
    Ok(())
}

/// `times`: how many syncs fail. After one that failed, a kernel lets all later ones succeed without writing what it had to.
async fn a_sync_fails(engine: &str, file: &str, times: u64, words: &[&str]) -> Result<()> {
    let (disk, mut server) = start(&[engine]).await?;
    let client = server.client()?;
    let mut acknowledged = Acknowledged::new();
    for number in 0.. {
        let (key, value) = (format!("k{number}"), format!("v{number}").into_bytes());
        if put(&client, &key, &value).await.is_err() {
            break;
        }
        acknowledged.push((key, value));
        ensure!(number < 5_000, "it goes on and on");
        if number == 20 {
            disk.ask(&format!("fail-sync {file} {times}"))?;
        }
    }
    ends_saying(&mut server, words)?;
    ensure!(disk.stats()?.failed_syncs >= 1, "no sync failed");
    disk.ask("fail-sync none 0")?;
    disk.ask("off")?;
    disk.cut(1)?;
    server.restart().await?;
    check(&server.client()?, &acknowledged).await?;
    say(&format!(
        "{engine}, syncs of {file} failing ({times} times): stopped after {} acknowledged writes, all there",
        acknowledged.len()
    ));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sync_that_fails_stops_the_member_and_nothing_acknowledged_is_lost() -> Result<()> {
    for times in [1, u64::MAX] {
        a_sync_fails(REDB, ".wal", times, &["sync", ".wal", "Input/output error"]).await?;
        a_sync_fails(
            REDB,
            ".redb",
            times,
            &["commit", ".redb", "Input/output error"],
        )
        .await?;
        // Its file is called so.
        a_sync_fails(SLED, "db", times, &["flush", ".sled"]).await?;
    }
    Ok(())
}

async fn metrics(server: &StoreServer) -> Result<String> {
    let mut stream = TcpStream::connect(server.endpoint()).await?;
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: member\r\nConnection: close\r\n\r\n")
        .await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_sync_is_waited_for() -> Result<()> {
    const SLOW: Duration = Duration::from_millis(300);
    let (disk, mut server) = start(&[]).await?;
    let client = server.client()?;
    put(&client, "before", b"1").await?;
    let sum = || async {
        let text = metrics(&server).await?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("etcd_disk_wal_fsync_duration_seconds_sum "));
        anyhow::Ok(
            line.context("a histogram of the log's syncs")?
                .parse::<f64>()?,
        )
    };
    let before = sum().await?;
    disk.ask(&format!("slow-sync {}", SLOW.as_millis()))?;
    for number in 0..5 {
        let begun = wait::now();
        put(&client, &format!("k{number}"), b"v").await?;
        ensure!(begun.elapsed() >= SLOW, "answered before the sync");
    }
    let waited = sum().await? - before;
    ensure!(waited >= 1.5, "the histogram grew by {waited} s only");
    disk.ask("off")?;
    server.kill()?;
    disk.ask("slow-sync 0")?;
    disk.cut(2)?;
    server.restart().await?;
    let acknowledged: Acknowledged = (0..5).map(|n| (format!("k{n}"), b"v".to_vec())).collect();
    check(&server.client()?, &acknowledged).await
}

const VALUE_BYTES: usize = 128 << 10;

/// Puts until the disk is this full, or until a put is refused.
async fn fill(
    (disk, client): (&Lossy, &Client),
    used_bytes: u64,
    acknowledged: &mut Acknowledged,
) -> Result<Option<tonic::Status>> {
    while disk.stats()?.used_bytes < used_bytes {
        let number = acknowledged.len();
        let (key, value) = (format!("k{number}"), vec![number as u8; VALUE_BYTES]);
        if let Err(refusal) = put(client, &key, &value).await {
            return Ok(Some(refusal));
        }
        acknowledged.push((key, value));
    }
    Ok(None)
}

/// After a refusal: whether the member reads on. It has ended otherwise, and not well.
async fn goes_on(server: &mut StoreServer, client: &Client) -> Result<bool> {
    wait::wait_for("it reads on or ends", END_DEADLINE, || {
        let ended = server.ended();
        async move {
            if ended?.is_some() {
                return Ok(Some(false));
            }
            get(client, "k0").await?;
            Ok(Some(true))
        }
    })
    .await
}

/// The log's next segment finds no space, the engine still does: writes are refused until there is space, and nothing else happens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_without_space_for_the_log_refuses_writes_until_there_is_some() -> Result<()> {
    /// Less than a segment of the log, more than the engine takes at a time.
    const FREE_BYTES: u64 = 60 << 20;
    let (disk, mut server) = start(&[]).await?;
    let client = server.client()?;
    let mut acknowledged = Acknowledged::new();
    let refusal = loop {
        let used = disk.stats()?.used_bytes;
        disk.ask(&format!("full {}", used + FREE_BYTES))?;
        let refusal = fill((&disk, &client), used + (4 << 20), &mut acknowledged).await?;
        if let Some(refusal) = refusal {
            break refusal;
        }
        ensure!(acknowledged.len() < 5_000, "it goes on and on");
    };
    ensure!(
        (refusal.code(), refusal.message())
            == (
                Code::ResourceExhausted,
                "etcdserver: mvcc: database space exceeded"
            ),
        "{refusal}"
    );
    ensure!(goes_on(&mut server, &client).await?, "it stopped");
    check(&client, &acknowledged).await?;
    disk.ask("full max")?;
    wait::wait_for("writes pass again", END_DEADLINE, || async {
        Ok(put(&client, "again", b"1").await.ok())
    })
    .await?;
    server.kill()?;
    server.restart().await?;
    acknowledged.push(("again".to_owned(), b"1".to_vec()));
    check(&server.client()?, &acknowledged).await
}

/// P25: etcd-io/etcd#18810, cberner/redb#620, spacejam/sled#1533.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_refuses_or_stops_and_everything_is_there_when_it_has_space_again() -> Result<()>
{
    a_full_disk(REDB).await?;
    // sled writes each record several times over: only where there is time.
    if rounds(0, 1) == 1 {
        a_full_disk(SLED).await?;
    }
    Ok(())
}

async fn a_full_disk(engine: &str) -> Result<()> {
    let flags = [
        engine,
        "--snapshot-count=200",
        "--snapshot-catchup-entries=10",
        "--max-wals=1",
    ];
    let (disk, mut server) = start(&flags).await?;
    let disk_bytes = (rounds(256, 512) as u64) << 20;
    disk.ask(&format!("full {disk_bytes}"))?;
    let client = server.client()?;
    let mut acknowledged = Acknowledged::new();
    let refusal = fill((&disk, &client), disk_bytes * 7 / 10, &mut acknowledged).await?;
    ensure!(refusal.is_none(), "refused at 70 %: {refusal:?}");

    // The copy does not fit beside the original.
    let used = disk.stats()?.used_bytes;
    let defragmentation = client
        .maintenance
        .clone()
        .defragment(DefragmentRequest {})
        .await;
    let refusal = defragmentation.expect_err("the disk has no space for it");
    say(&format!("defragmentation at 70 %: {refusal}"));
    wait::wait_for_blocking("the failed copy is gone", END_DEADLINE, || {
        Ok((disk.stats()?.used_bytes <= used + (80 << 20)).then_some(()))
    })?;
    put(&client, "after the defragmentation", b"1").await?;
    acknowledged.push(("after the defragmentation".to_owned(), b"1".to_vec()));

    let refusal = fill((&disk, &client), u64::MAX, &mut acknowledged)
        .await?
        .context("the disk is full at last")?;
    say(&format!(
        "full after {} writes of {VALUE_BYTES} bytes: {:?}, {}",
        acknowledged.len(),
        refusal.code(),
        refusal.message()
    ));
    // What the engine cannot write stops it, and until it has stopped it reads; what the log cannot write is refused by a member that goes on.
    let is_refused = refusal.code() == Code::ResourceExhausted;
    if is_refused && goes_on(&mut server, &client).await? {
        check(&client, &acknowledged[..1]).await?;
        server.stop().await?;
    } else {
        wait::wait_for("it ends", END_DEADLINE, || {
            let ended = server.ended();
            async move { Ok(ended?.map(|_| ())) }
        })
        .await?;
        said(&server, &["No space left on device"])?;
    }
    disk.ask("full max")?;
    server.restart().await?;
    let client = server.client()?;
    check(&client, &acknowledged).await?;
    put(&client, "with space again", b"1").await?;
    Ok(())
}
