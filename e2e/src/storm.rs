//! A mixed load on a store that is about to be killed: puts, transactions, deletions, and beside them compactions, defragmentations and
//! snapshots; and what must be true of the store when it is back.
//!
//! Promises: everything sent is in the attempts; the history since `checked` is never compacted, so that [`Witness::check`] can read it.
//! Not here: the judge of a history (`kill_history.rs`), how the store is stopped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_api::etcdserverpb::{
    CompactionRequest, DefragmentRequest, HashKvRequest, RangeRequest, SnapshotRequest,
};
use bytes::Bytes;
use rand::Rng as _;
use sha2::Digest as _;
use tokio::task::JoinHandle;

use crate::kill_history::{Attempt, Change, Work, history, judge, write};
use crate::store_server::{Client, StoreServer};

const CLIENTS: [Work; 9] = [
    Work::Puts,
    Work::Puts,
    Work::Puts,
    Work::LargePuts,
    Work::Txns,
    Work::Txns,
    Work::Deletes,
    Work::Moves,
    Work::Moves,
];
/// Requests of one kind of maintenance begin no closer together.
const MAINTENANCE_PAUSE_MS: std::ops::Range<u64> = 5..80;
/// None of them may hold a round up when the server is gone.
const MAINTENANCE_DEADLINE: Duration = Duration::from_mins(1);

/// How much of each came to its end.
#[derive(Debug, Default)]
pub struct Counts {
    pub compactions: AtomicU64,
    pub defragmentations: AtomicU64,
    pub snapshots: AtomicU64,
}

/// The load while it runs.
#[derive(Debug)]
pub struct Storm {
    stop: Arc<AtomicBool>,
    writers: Vec<JoinHandle<Vec<Attempt>>>,
    others: Vec<JoinHandle<Result<()>>>,
}

impl Storm {
    /// `name` is unlike that of any other storm on this store.
    pub fn start(
        server: &StoreServer,
        name: &str,
        checked: i64,
        counts: &Arc<Counts>,
    ) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut writers = Vec::new();
        for (number, work) in CLIENTS.into_iter().enumerate() {
            let (client, stop) = (server.client()?, Arc::clone(&stop));
            let lane = format!("w{number}");
            let name = format!("{name}{lane}");
            writers.push(tokio::spawn(async move {
                write(client, &lane, &name, work, &stop).await
            }));
        }
        let mut others = Vec::new();
        for kind in [Kind::Compact { checked }, Kind::Defragment, Kind::Snapshot] {
            let (client, stop) = (server.client()?, Arc::clone(&stop));
            let counts = Arc::clone(counts);
            others.push(tokio::spawn(async move {
                maintain(client, kind, &counts, &stop).await
            }));
        }
        Ok(Self {
            stop,
            writers,
            others,
        })
    }

    /// Lets it run for a moment nobody chose.
    pub async fn rage(&self) {
        let pause = rand::rng().random_range(20..400);
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }

    /// After the server is gone.
    pub async fn end(self) -> Result<Vec<Attempt>> {
        self.stop.store(true, Ordering::Release);
        let mut attempts = Vec::new();
        for writer in self.writers {
            attempts.extend(writer.await?);
        }
        for other in self.others {
            other.await??;
        }
        Ok(attempts)
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Compact { checked: i64 },
    Defragment,
    Snapshot,
}

/// Does it again and again. An error only for an answer that is wrong; none at all is what a dying server gives.
async fn maintain(client: Client, kind: Kind, counts: &Counts, stop: &AtomicBool) -> Result<()> {
    let mut client = client;
    while !stop.load(Ordering::Acquire) {
        let pause = rand::rng().random_range(MAINTENANCE_PAUSE_MS);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let once = once(&mut client, kind);
        let done = tokio::time::timeout(MAINTENANCE_DEADLINE, once)
            .await
            .with_context(|| format!("{kind:?} hangs"))??;
        let counter = match kind {
            Kind::Compact { .. } => &counts.compactions,
            Kind::Defragment => &counts.defragmentations,
            Kind::Snapshot => &counts.snapshots,
        };
        counter.fetch_add(u64::from(done), Ordering::Relaxed);
    }
    Ok(())
}

/// Whether it was done.
async fn once(client: &mut Client, kind: Kind) -> Result<bool> {
    Ok(match kind {
        Kind::Compact { checked } => {
            let (revision, physical) = {
                let mut random = rand::rng();
                (
                    random.random_range(checked / 2..=checked).max(1),
                    random.random_bool(0.5),
                )
            };
            let request = CompactionRequest { revision, physical };
            client.kv.compact(request).await.is_ok()
        }
        Kind::Defragment => {
            let answer = client.maintenance.defragment(DefragmentRequest {}).await;
            answer.is_ok()
        }
        Kind::Snapshot => return snapshot(client).await,
    })
}

/// One that came to its end must have the hash it says.
async fn snapshot(client: &mut Client) -> Result<bool> {
    let Ok(answer) = client.maintenance.snapshot(SnapshotRequest {}).await else {
        return Ok(false);
    };
    let mut stream = answer.into_inner();
    let mut file = Vec::new();
    loop {
        match stream.message().await {
            Ok(Some(part)) => file.extend_from_slice(&part.blob),
            Ok(None) => break,
            Err(_) => return Ok(false),
        }
    }
    let (database, hash) = file
        .split_last_chunk::<32>()
        .context("a snapshot has a hash")?;
    let sound = sha2::Sha256::digest(database)[..] == hash[..];
    ensure!(sound, "a snapshot of {} bytes has another hash", file.len());
    Ok(true)
}

/// What is known of a store, round after round.
#[derive(Debug)]
pub struct Witness {
    /// Everything up to this revision was checked.
    pub checked: i64,
    /// Key to value and revision.
    state: BTreeMap<String, (String, i64)>,
    hash: Option<Hash>,
    pub sent: usize,
    pub acknowledged: usize,
    /// Hashes that could be compared with an earlier one.
    pub hashes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hash {
    revision: i64,
    compact_revision: i64,
    sum: u32,
}

impl Default for Witness {
    fn default() -> Self {
        Self {
            checked: 1,
            state: BTreeMap::new(),
            hash: None,
            sent: 0,
            acknowledged: 0,
            hashes: 0,
        }
    }
}

impl Witness {
    /// What all rounds came to, with what `counts` saw beside the writes.
    pub fn told(&self, counts: &Counts) -> String {
        format!(
            "{} writes sent, {} acknowledged, {} revisions, {} compactions, {} defragmentations, {} snapshots, {} hashes compared",
            self.sent,
            self.acknowledged,
            self.checked,
            counts.compactions.load(Ordering::Relaxed),
            counts.defragmentations.load(Ordering::Relaxed),
            counts.snapshots.load(Ordering::Relaxed),
            self.hashes,
        )
    }

    /// Holds what the store says now against what it said before and what was sent since.
    pub async fn check(&mut self, client: &Client, attempts: &[Attempt]) -> Result<()> {
        self.same_hash(client).await?;
        let (changes, head) = history(client, self.checked).await?;
        let complaints = judge(attempts, &changes, self.checked);
        ensure!(complaints.is_empty(), "{complaints:#?}");
        self.sent += attempts.len();
        self.acknowledged += attempts
            .iter()
            .filter(|attempt| attempt.acknowledged.is_some())
            .count();
        self.take(changes);
        self.checked = head;
        self.same_state(client).await?;
        self.hash = Some(hash(client, head).await?);
        Ok(())
    }

    /// History is as it was, unless a compaction took part of it.
    async fn same_hash(&mut self, client: &Client) -> Result<()> {
        let Some(before) = self.hash else {
            return Ok(());
        };
        let now = hash(client, before.revision).await?;
        if now.compact_revision == before.compact_revision {
            ensure!(now == before, "HashKV was {before:?} and is {now:?}");
            self.hashes += 1;
        }
        Ok(())
    }

    fn take(&mut self, changes: Vec<Change>) {
        for change in changes {
            if change.value.starts_with('-') {
                self.state.remove(&change.key);
            } else {
                let value = (change.value, change.revision);
                self.state.insert(change.key, value);
            }
        }
    }

    async fn same_state(&self, client: &Client) -> Result<()> {
        let everything = RangeRequest {
            key: Bytes::from_static(b"\0"),
            range_end: Bytes::from_static(b"\0"),
            ..RangeRequest::default()
        };
        let answer = client.kv.clone().range(everything).await?.into_inner();
        let mut found = BTreeMap::new();
        for kv in answer.kvs {
            let key = String::from_utf8(kv.key.to_vec())?;
            let value = String::from_utf8(kv.value.to_vec())?;
            found.insert(key, (value, kv.mod_revision));
        }
        for key in self.state.keys().chain(found.keys()) {
            let (ours, theirs) = (self.state.get(key), found.get(key));
            if ours != theirs {
                let short = |there: Option<&(String, i64)>| {
                    there.map(|(value, revision)| {
                        (value.chars().take(40).collect::<String>(), *revision)
                    })
                };
                let (ours, theirs) = (short(ours), short(theirs));
                bail!("{key} must be {ours:?} and is {theirs:?}");
            }
        }
        Ok(())
    }
}

async fn hash(client: &Client, revision: i64) -> Result<Hash> {
    let request = HashKvRequest { revision };
    let answer = client.maintenance.clone().hash_kv(request).await?;
    let answer = answer.into_inner();
    Ok(Hash {
        revision: answer.hash_revision,
        compact_revision: answer.compact_revision,
        sum: answer.hash,
    })
}
