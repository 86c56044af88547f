//! Opening a store: the live file, the index from its records, the threads.
//!
//! Promises: a record that cannot be read stops the open and is named; a layout we do not know is refused.
//! Not here: which file is live (backend/current.rs).
//!
//! etcd: `restore` in server/storage/mvcc/kvstore.go.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64};
use std::thread::JoinHandle;

use arc_swap::ArcSwap;
use bytes::Bytes;
use parking_lot::Mutex;

use crate::LogPosition;
use crate::backend::current::{self, Name};
use crate::backend::{Batch, Engine, Pairs, Tally};
use crate::background::{self, Priority};
use crate::committer::{Committer, Limits, decode_position};
use crate::error::StorageError;
use crate::mvcc::compact::{CompactJob, CompactQueue};
use crate::mvcc::hash::StoredHashes;
use crate::mvcc::index_file::{self, Entry};
use crate::mvcc::key_index::KeyIndex;
use crate::mvcc::store::{Picture, Shared, Store, StoreOptions};
use crate::mvcc::tree::Tree;
use crate::mvcc::values::Values;
use crate::runner::{Runner, Threads, Wait, Worker};
use crate::schema::{self, Table, meta};

/// The layout this release writes.
pub const FORMAT_VERSION: u64 = 2;
/// etcd's revision before the first write.
const FIRST_REVISION: i64 = 1;
/// Bytes of one read of a small table.
const SCAN_CHUNK_BYTES: usize = 1 << 20;

impl Store {
    /// Opens or makes the database and rebuilds the index. An unfinished compaction goes on.
    pub fn open(options: StoreOptions) -> Result<Arc<Self>, StorageError> {
        Self::open_on(options, &Threads)
    }

    /// As [`Self::open`]; `runner` takes the steps of the committer.
    pub fn open_on(options: StoreOptions, runner: &dyn Runner) -> Result<Arc<Self>, StorageError> {
        let started = crate::clock::now();
        let (database, engine) = open_engine(&options)?;
        let found = Recovered::read(&*engine, &options.dir)?;
        let path = database.path(&options.dir);
        let kept = current::index_path(&path);
        let by_file = from_file(&*engine, &kept, found.tally)?;
        let mut index = if let Some(index) = by_file {
            index
        } else {
            let index = rebuild(&engine, &options.dir)?;
            check_tally(&*engine, &path, found.tally, index.tally)?;
            index
        };
        // From the first write on it would be of the past. It is known by the tally, so one that stays is of no use and does no harm.
        if let Err(error) = current::remove(&kept) {
            tracing::warn!(%error, "an index file stays until the next start");
        }
        index.live_bytes += found
            .small
            .iter()
            .map(|(k, v)| (k.len() + v.len()) as i64)
            .sum::<i64>();
        // What the last records said may be compacted away (etcd#17780).
        let revision = [
            found.revision,
            index.revision,
            found.scheduled,
            found.finished,
            FIRST_REVISION,
        ]
        .into_iter()
        .max()
        .unwrap_or(FIRST_REVISION);
        let compact_revision = found.finished.max(found.scheduled);
        let limits = Limits {
            batch_interval: options.batch_interval,
            batch_limit: options.batch_limit,
        };
        tracing::info!(
            revision,
            compact_revision,
            applied = found.applied.index,
            keys = index.tree.live_len(),
            database = %database,
            took = ?started.elapsed(),
            "opened the database"
        );
        let shared = Arc::new(Shared {
            committer: Committer::new(engine, found.applied, limits),
            newest: ArcSwap::from_pointee(Picture {
                tree: index.tree,
                revision,
                compact_revision,
            }),
            values: Values::new(options.value_cache_bytes, revision),
            writer: Mutex::new(()),
            applied: Mutex::new(found.applied),
            small: Mutex::new(found.small),
            live_bytes: AtomicI64::new(index.live_bytes),
            holds: Arc::default(),
            compact_queue: CompactQueue::default(),
            hashes: StoredHashes::new(found.finished),
            defragmenting: Mutex::default(),
            superseded: AtomicBool::default(),
            receives: Arc::default(),
            database: Mutex::new(database),
            options,
        });
        if found.scheduled > found.finished {
            tracing::info!(
                revision = found.scheduled,
                "resuming a scheduled compaction"
            );
            // Not the previous compact revision: a hash over what is left would not be the others'.
            let (job, _) = CompactJob::new(found.scheduled, found.scheduled);
            shared.compact_queue.push(job);
        }
        let committer = runner
            .start("committer", Box::new(Committing(Arc::clone(&shared))))
            .map_err(|e| StorageError::io("start a thread for", &shared.options.dir, e))?;
        let compaction = spawn("compaction", &shared, Shared::run_compactions)?;
        Ok(Arc::new(Self {
            shared,
            threads: Mutex::new(committer.into_iter().chain([compaction]).collect()),
        }))
    }
}

/// The committer's worker.
struct Committing(Arc<Shared>);

impl Worker for Committing {
    fn step(&mut self, wait: Wait) -> bool {
        self.0.committer.step(wait)
    }
}

fn spawn(
    name: &str,
    shared: &Arc<Shared>,
    run: impl FnOnce(&Shared) + Send + 'static,
) -> Result<JoinHandle<()>, StorageError> {
    let for_thread = Arc::clone(shared);
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || run(&for_thread))
        .map_err(|e| StorageError::io("start a thread for", &shared.options.dir, e))
}

fn open_engine(options: &StoreOptions) -> Result<(Name, Arc<dyn Engine>), StorageError> {
    let dir = &options.dir;
    crate::dirs::make(dir, 0o700)?;
    let name = match current::recover(dir)? {
        current::Found::Database(name) => name,
        current::Found::Nothing => {
            let name = Name::first(options.engine);
            let path = name.unpublished_path(dir);
            let engine = name.kind.open(&path, options.engine_cache_bytes)?;
            let mut batch = Batch::default();
            batch.put(
                Table::Meta.key(meta::FORMAT),
                FORMAT_VERSION.to_le_bytes().to_vec(),
            );
            engine.write(&batch)?;
            drop(engine);
            current::publish(dir, name)?;
            name
        }
    };
    let engine = name
        .kind
        .open(&name.path(dir), options.engine_cache_bytes)?;
    Ok((name, engine))
}

/// Compares what was read with what the engine says was written.
fn check_tally(
    engine: &dyn Engine,
    path: &Path,
    small: Tally,
    records: Tally,
) -> Result<(), StorageError> {
    let read = small.with(records);
    match engine.tally()? {
        Some(written) if written != read => Err(StorageError::DamagedRecord {
            path: path.to_owned(),
            record: "unknown".to_owned(),
            what: written.differs_from(read),
        }),
        _ => Ok(()),
    }
}

/// What the small tables say.
struct Recovered {
    applied: LogPosition,
    revision: i64,
    scheduled: i64,
    finished: i64,
    small: BTreeMap<Bytes, Bytes>,
    /// Of all that was read.
    tally: Tally,
}

impl Recovered {
    fn read(engine: &dyn Engine, dir: &Path) -> Result<Self, StorageError> {
        let mut small = BTreeMap::new();
        let mut tally = Tally::default();
        for table in Table::SMALL {
            let mut next = vec![table.prefix()];
            loop {
                let pairs = engine.scan(&next, &[table.prefix() + 1], SCAN_CHUNK_BYTES)?;
                let Some((last, _)) = pairs.last() else { break };
                next = last.to_vec();
                next.push(0);
                tally.add_all(&pairs);
                small.extend(pairs);
            }
        }
        // The committer's own counters are not the tables' business.
        let mut take = |name: &[u8]| small.remove(&Table::Meta.key(name)[..]);
        let damaged = |name: &[u8], value: &[u8]| StorageError::DamagedRecord {
            path: dir.to_owned(),
            record: String::from_utf8_lossy(name).into_owned(),
            what: format!("{} bytes that are no value of it", value.len()),
        };
        let applied = match take(meta::APPLIED) {
            Some(bytes) => decode_position(&bytes).ok_or_else(|| damaged(meta::APPLIED, &bytes))?,
            None => LogPosition::default(),
        };
        let revision = take(meta::CURRENT_REVISION);
        take(meta::LIVE_BYTES);
        let number = |name: &[u8], bytes: Option<&Bytes>, absent: i64| match bytes {
            Some(bytes) => match <[u8; 8]>::try_from(&bytes[..]) {
                Ok(bytes) => Ok(i64::from_be_bytes(bytes)),
                Err(_) => Err(damaged(name, bytes)),
            },
            None => Ok(absent),
        };
        let get = |name: &[u8]| small.get(&Table::Meta.key(name)[..]);
        let format = get(meta::FORMAT).and_then(|bytes| <[u8; 8]>::try_from(&bytes[..]).ok());
        match format.map(u64::from_le_bytes) {
            Some(FORMAT_VERSION) => {}
            Some(other) => {
                return Err(StorageError::Refused {
                    path: dir.to_owned(),
                    why: format!(
                        "its format is {other} and this release knows {FORMAT_VERSION}; start the release that wrote it"
                    ),
                });
            }
            None => {
                return Err(StorageError::Refused {
                    path: dir.to_owned(),
                    why: "it names no format, so it is no database of this store".to_owned(),
                });
            }
        }
        Ok(Self {
            applied,
            revision: number(meta::CURRENT_REVISION, revision.as_ref(), 0)?,
            scheduled: number(meta::SCHEDULED_COMPACT, get(meta::SCHEDULED_COMPACT), -1)?,
            finished: number(meta::FINISHED_COMPACT, get(meta::FINISHED_COMPACT), -1)?,
            small,
            tally,
        })
    }
}

/// The index and what was counted on the way.
#[derive(Default)]
struct Rebuilt {
    tree: Tree<KeyIndex>,
    revision: i64,
    live_bytes: i64,
    tally: Tally,
}

/// The index of a database that was filled and not opened since. What it was filled with was read a moment ago, and the next open reads all of it.
fn from_file(
    engine: &dyn Engine,
    path: &Path,
    small: Tally,
) -> Result<Option<Rebuilt>, StorageError> {
    let Some(written) = engine.tally()? else {
        return Ok(None);
    };
    let mut out = Rebuilt::default();
    let mut read = small;
    // On a machine of several members the others serve meanwhile.
    let is_whole = background::run("index", Priority::Low, || {
        index_file::read(path, written, &mut |entry| {
            read.pairs += 1;
            read.bytes += entry.live_bytes().cast_unsigned();
            out.add(entry);
        })
    });
    let is_all = (read.pairs, read.bytes) == (written.pairs, written.bytes);
    Ok((is_whole && is_all).then_some(out))
}

/// Chunks of records read ahead of building the index.
const READ_AHEAD_CHUNKS: usize = 4;

fn rebuild(engine: &Arc<dyn Engine>, dir: &Path) -> Result<Rebuilt, StorageError> {
    std::thread::scope(|scope| {
        let (send, chunks) = std::sync::mpsc::sync_channel(READ_AHEAD_CHUNKS);
        scope.spawn(move || read_records(&**engine, &send));
        let mut out = Rebuilt::default();
        for chunk in chunks {
            let (pairs, tally) = chunk?;
            out.tally = out.tally.with(tally);
            for (key, value) in pairs {
                let entry = Entry::of(&key[1..], value);
                let entry = entry.map_err(|what| StorageError::DamagedRecord {
                    path: dir.to_owned(),
                    record: schema::name_of(&key),
                    what,
                })?;
                out.add(&entry);
            }
        }
        Ok(out)
    })
}

/// Sends all records in order, until nobody wants them any more.
fn read_records(
    engine: &dyn Engine,
    send: &std::sync::mpsc::SyncSender<Result<(Pairs, Tally), StorageError>>,
) {
    let mut next = vec![Table::Key.prefix()];
    loop {
        let chunk = engine.scan_as_one(&next, &[Table::Key.prefix() + 1], SCAN_CHUNK_BYTES);
        let failed = chunk.is_err();
        if let Ok(pairs) = &chunk {
            let Some((last, _)) = pairs.last() else {
                return;
            };
            next.clear();
            next.extend_from_slice(last);
            next.push(0);
        }
        // Summed up here, beside the building of the index.
        let chunk = chunk.map(|pairs| {
            let mut tally = Tally::default();
            tally.add_all(&pairs);
            (pairs, tally)
        });
        // The receiver ends at an error; if it is gone, it has one already.
        if send.send(chunk).is_err() || failed {
            return;
        }
    }
}

impl Rebuilt {
    fn add(&mut self, entry: &Entry) {
        self.live_bytes += entry.live_bytes();
        self.revision = entry.head.main;
        self.tree.upsert(&entry.key, |old| match old {
            Some(old) => old.with(entry.head, entry.lease),
            None => KeyIndex::new(entry.head, entry.lease),
        });
    }
}
