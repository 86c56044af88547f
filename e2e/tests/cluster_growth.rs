//! 1 -> 3 -> 5 -> 3 members through learners, under 500 writes a second: at most one gap in the writes per step, each short, and no watch
//! misses an event or is told one twice.
//!
//! `BALLAST_STORE=etcd` runs it on real etcd.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ballast_api::etcdserverpb as pb;
use ballast_e2e::members::{Members, Setup};
use ballast_e2e::store_server::{Client, Program};
use ballast_e2e::up::say;
use ballast_e2e::wait::{self, wait_for};
use pb::watch_request::RequestUnion;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

const PERIOD: Duration = Duration::from_millis(2);
const ATTEMPT_DEADLINE: Duration = Duration::from_secs(2);
const GAP: Duration = Duration::from_millis(500);
const GAP_MAX: Duration = Duration::from_millis(2_500);
const TOLD_DEADLINE: Duration = Duration::from_secs(30);
/// Under way at once; more would mean that the members do not keep up.
const IN_FLIGHT_MAX: usize = 4_000;

/// An open loop of puts, each tried until it is answered.
#[derive(Debug)]
struct Writes {
    clients: Mutex<Vec<Client>>,
    stop: AtomicBool,
    sent: AtomicU64,
    /// When each was answered, and by value its revision.
    answered: Mutex<Vec<Instant>>,
    revisions: Mutex<BTreeMap<String, i64>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Writes {
    fn new() -> Self {
        Self {
            clients: Mutex::default(),
            stop: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            answered: Mutex::default(),
            revisions: Mutex::default(),
        }
    }

    async fn run(self: Arc<Self>) -> Result<()> {
        let mut tick = tokio::time::interval(PERIOD);
        let mut puts = JoinSet::new();
        while !self.stop.load(Ordering::Acquire) {
            tick.tick().await;
            while let Some(done) = puts.try_join_next() {
                done?;
            }
            ensure!(puts.len() < IN_FLIGHT_MAX, "the members do not keep up");
            let number = self.sent.fetch_add(1, Ordering::Relaxed);
            puts.spawn(Arc::clone(&self).put(number));
        }
        while let Some(done) = puts.join_next().await {
            done?;
        }
        Ok(())
    }

    /// Every attempt has a value of its own, so that one that was done though nobody was told is no double.
    async fn put(self: Arc<Self>, number: u64) {
        for attempt in 0.. {
            let value = format!("{number}-{attempt}");
            let client = {
                let clients = lock(&self.clients);
                clients[(number as usize + attempt) % clients.len()].clone()
            };
            let request = pb::PutRequest {
                key: format!("g/{:04}", number % 1_000).into(),
                value: value.clone().into(),
                ..pb::PutRequest::default()
            };
            let mut kv = client.kv;
            let answer = tokio::time::timeout(ATTEMPT_DEADLINE, kv.put(request)).await;
            if let Ok(Ok(answer)) = answer {
                let header = answer.into_inner().header;
                let revision = header.map_or(0, |header| header.revision);
                lock(&self.revisions).insert(value, revision);
                lock(&self.answered).push(wait::now());
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Times between answers that were longer than is a gap, since then.
    fn gaps(&self, since: Instant) -> Vec<Duration> {
        let now = wait::now();
        let mut times: Vec<Instant> = lock(&self.answered).clone();
        times.retain(|&time| time >= since);
        times.push(since);
        times.push(now);
        times.sort_unstable();
        times
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .filter(|gap| *gap >= GAP)
            .collect()
    }
}

/// What a member's watcher of everything was told: value by revision.
type Told = Arc<Mutex<BTreeMap<i64, String>>>;

/// From revision 1 on, over and over when the stream breaks.
async fn watch(client: Client, told: Told, stop: Arc<AtomicBool>) -> Result<()> {
    while !stop.load(Ordering::Acquire) {
        let start = lock(&told).keys().next_back().map_or(1, |last| last + 1);
        match stream(&client, &told, &stop, start).await {
            Err(error) if error.is::<Wrong>() => return Err(error),
            _ => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
    Ok(())
}

#[derive(Debug)]
struct Wrong(String);

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Wrong {}

async fn stream(client: &Client, told: &Told, stop: &AtomicBool, start: i64) -> Result<()> {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let create = pb::WatchCreateRequest {
        key: "g/".into(),
        range_end: "g0".into(),
        start_revision: start,
        ..pb::WatchCreateRequest::default()
    };
    let request_union = Some(RequestUnion::CreateRequest(create));
    sender.send(pb::WatchRequest { request_union }).await?;
    let mut watch = client.watch.clone();
    let mut stream = watch
        .watch(ReceiverStream::new(receiver))
        .await?
        .into_inner();
    while !stop.load(Ordering::Acquire) {
        let next = tokio::time::timeout(Duration::from_millis(200), stream.message());
        let Ok(response) = next.await else { continue };
        let response = response?.context("the stream ended")?;
        for event in response.events {
            let kv = event.kv.context("a record")?;
            let value = String::from_utf8(kv.value.to_vec())?;
            let mut told = lock(told);
            let last = told.keys().next_back().copied();
            if last.is_some_and(|last| kv.mod_revision != last + 1) || kv.mod_revision < start {
                bail!(Wrong(format!("{} after {last:?}", kv.mod_revision)));
            }
            told.insert(kv.mod_revision, value);
        }
        if response.canceled {
            bail!(Wrong(format!("canceled: {}", response.cancel_reason)));
        }
    }
    Ok(())
}

struct Growing {
    members: Members,
    writes: Arc<Writes>,
    watchers: JoinSet<Result<()>>,
    told: BTreeMap<usize, Told>,
    /// A removed member's watcher ends.
    stops: BTreeMap<usize, Arc<AtomicBool>>,
}

impl Growing {
    fn watch(&mut self, index: usize) -> Result<()> {
        let (told, stop) = (Told::default(), Arc::new(AtomicBool::new(false)));
        self.told.insert(index, Arc::clone(&told));
        self.stops.insert(index, Arc::clone(&stop));
        let client = self.members.client(index)?;
        self.watchers.spawn(watch(client, told, stop));
        Ok(())
    }

    async fn grow(&mut self) -> Result<()> {
        let index = self.members.add(true).await?;
        self.members.promote(index).await?;
        self.members.wait_healthy(TOLD_DEADLINE).await?;
        self.watch(index)?;
        lock(&self.writes.clients).push(self.members.client(index)?);
        Ok(())
    }

    async fn shrink(&mut self, index: usize) -> Result<()> {
        let id = self.members.id(index).await?;
        if let Some(stop) = self.stops.get(&index) {
            stop.store(true, Ordering::Release);
        }
        let clients: Result<Vec<Client>> = (self.members.present().into_iter())
            .filter(|&other| other != index)
            .map(|other| self.members.client(other))
            .collect();
        *lock(&self.writes.clients) = clients?;
        self.members.remove(index, id).await?;
        self.members.wait_healthy(TOLD_DEADLINE).await
    }

    fn step(&self, what: &str, since: Instant) -> Result<()> {
        let gaps = self.writes.gaps(since);
        say(&format!(
            "{what}: {:.1} s, {} writes so far, gaps {gaps:?}",
            since.elapsed().as_secs_f64(),
            lock(&self.writes.answered).len()
        ));
        ensure!(gaps.len() <= 1, "{what}: gaps {gaps:?}");
        ensure!(
            gaps.iter().all(|gap| *gap < GAP_MAX),
            "{what}: gaps {gaps:?}"
        );
        Ok(())
    }

    /// Every member's watcher was told the same, all of it, and every answered write at its revision.
    async fn judge(&mut self) -> Result<()> {
        let mut kv = self.members.client(0)?.kv;
        let probe = pb::RangeRequest {
            key: "health".into(),
            ..pb::RangeRequest::default()
        };
        let head = kv.range(probe).await?.into_inner();
        let head = head.header.context("a header")?.revision;
        for index in self.members.present() {
            let told = &self.told[&index];
            let what = format!("member {index} tells everything up to {head}");
            wait_for(&what, TOLD_DEADLINE, || async {
                let last = lock(told).keys().next_back().copied();
                ensure!(last >= Some(head), "told {last:?}");
                Ok(Some(()))
            })
            .await?;
        }
        for stop in self.stops.values() {
            stop.store(true, Ordering::Release);
        }
        while let Some(ended) = self.watchers.join_next().await {
            ended??;
        }
        let whole = lock(&self.told[&0]).clone();
        ensure!(whole.len() as i64 == head - 1, "{} events", whole.len());
        for (value, revision) in lock(&self.writes.revisions).iter() {
            ensure!(
                whole.get(revision) == Some(value),
                "{value} was answered with {revision}, there is {:?}",
                whole.get(revision)
            );
        }
        for (index, told) in &self.told {
            for (revision, value) in lock(told).iter() {
                ensure!(
                    whole.get(revision) == Some(value),
                    "member {index} tells {value} at {revision}"
                );
            }
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_and_go_under_500_writes_a_second() -> Result<()> {
    // Those who join get a snapshot first.
    let flags = ["--snapshot-count=1000", "--snapshot-catchup-entries=500"];
    let members = Members::start(Setup::new(Program::chosen()?, &flags), 1).await?;
    let writes = Arc::new(Writes::new());
    lock(&writes.clients).push(members.client(0)?);
    let mut growing = Growing {
        members,
        writes: Arc::clone(&writes),
        watchers: JoinSet::new(),
        told: BTreeMap::new(),
        stops: BTreeMap::new(),
    };
    growing.watch(0)?;
    let load = tokio::spawn(Arc::clone(&writes).run());
    tokio::time::sleep(Duration::from_secs(1)).await;
    for target in [2, 3, 4, 5] {
        let since = wait::now();
        growing.grow().await?;
        growing.step(&format!("to {target} members"), since)?;
    }
    // The leader first, then another.
    let since = wait::now();
    let mut leader = growing.members.leader().await?;
    if leader == 0 {
        // Whose watcher is to see it all.
        growing.members.move_leader(4).await?;
        leader = 4;
    }
    growing.shrink(leader).await?;
    growing.step("to 4 members, without the leader", since)?;
    let since = wait::now();
    let other = (1..5).find(|&index| index != leader).context("another")?;
    growing.shrink(other).await?;
    growing.step("to 3 members", since)?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    writes.stop.store(true, Ordering::Release);
    load.await??;
    growing.judge().await?;
    let writes = lock(&writes.answered).len();
    say(&format!("{writes} writes, every watch was told each once"));
    Ok(())
}
