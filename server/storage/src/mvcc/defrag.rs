//! Defragmentation without a pause: the live records are copied into a fresh database, which then takes the old one's place. It is of
//! the engine that the options name, so this is also how one engine is converted into the other.
//!
//!     1 follow   from here on the committer notes which keys it writes to the old database
//!     2 copy     all pairs that the old database had then, in order, in chunks
//!     3 catch up the noted keys: their present value in the old database, or a delete; again until few are left
//!     4 swap     between two batches of the committer: the last noted keys, then CURRENT
//!
//! Reads go on throughout (an old database that was removed stays readable while it is open), writes wait in the overlay for
//! step 4 only, and the apply path touches neither. A key that changes while it is copied is among the noted ones, so that what the new
//! one holds at step 4 is what the old one holds; before it, it counts for nothing. A crash leaves one or the other
//! (backend/current.rs). An error while writing the new one, a full disk say, removes it and leaves the store as it was; so does a close. One
//! while reading the old one, or a copy that lacks what was written, is damage and stops the store.
//! It does not begin, nor go on, when the disk lacks the room: a log or a database that finds its disk full stops the member.
//!
//! etcd: server/storage/backend/backend.go's defrag, which stops everything.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::backend::current::{self, Name};
use crate::backend::{Batch, Engine, Kind, OWN_PREFIX};
use crate::background::{self, Priority};
use crate::committer::Follow;
use crate::error::StorageError;
use crate::mvcc::read::record_key;
use crate::mvcc::revision::Revision;
use crate::mvcc::store::{Shared, Sizes, Store};
use crate::schema::Table;

/// Bytes copied per batch of the new database: what the disk takes in a millisecond or two, since the log's syncs wait behind it (and
/// while sled takes a batch, it lets nobody read, from none of its databases).
const COPY_BYTES: usize = 128 << 10;
/// One batch in so many is synced, and the others with it: the new database counts for nothing before the last one.
const BATCHES_PER_SYNC: usize = 4;
/// Bytes copied per batch when nobody waits.
const COPY_BYTES_OFFLINE: usize = 4 << 20;
/// The copy rests after each batch for as long as the batch took, so that requests have half of the disk and of a core; but no longer than
/// this.
const REST_MAX: Duration = Duration::from_millis(100);
/// How long the swap waits for reads that began before it to end.
const READERS_WAIT_MAX: Duration = Duration::from_secs(2);
const READERS_WAIT_STEP: Duration = Duration::from_millis(5);
/// Keys caught up per batch.
const CATCH_UP_KEYS: usize = 256;
/// So few noted keys are left for the swap, during which the committer waits.
const SWAP_KEYS_MAX: usize = 256;
/// Rounds of catching up before the swap is made with whatever is left: a writer that is faster than the copy must not prolong it for ever.
const CATCH_UP_ROUNDS_MAX: usize = 20;

/// Left free on the disk whatever happens: for the log, and for the batches that are written meanwhile.
const RESERVE_BYTES: u64 = 32 << 20;

/// How it shares the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Copying on a thread of lower priority, and resting as long as it works: nobody needs the space at once.
    Background,
    /// Without either: requests wait for the space.
    Urgent,
}

#[derive(Clone, Copy, Debug)]
pub struct DefragReport {
    pub before: Sizes,
    pub after: Sizes,
    pub from: Kind,
    pub to: Kind,
    pub took: Duration,
}

impl Store {
    /// Rewrites the database into a fresh one and swaps it in. Blocking for the caller only.
    pub fn defragment(&self, pace: Pace) -> Result<DefragReport, StorageError> {
        let shared = &self.shared;
        let _one_at_a_time = shared.defragmenting.lock();
        shared.is_of_now()?;
        let started = crate::clock::now();
        let old = *shared.database.lock();
        let next = old.next(shared.options.engine);
        let before = shared.sizes();
        shared.committer.observer().defragmenting();
        let result = shared.rewrite(next, pace);
        shared.committer.observer().defragmented(started.elapsed());
        // Whatever happened, nobody follows any more.
        shared.committer.between_batches(|follow, _| *follow = None);
        let dir = &shared.options.dir;
        let is_let_go = match result {
            Ok(is_let_go) => is_let_go,
            Err(error) => {
                if let Err(error) = current::remove_database(dir, next) {
                    tracing::warn!(%error, "an unfinished copy of the database stays until the next start");
                }
                return Err(error);
            }
        };
        *shared.database.lock() = next;
        let removed = if is_let_go {
            current::remove_slowly(dir, old, |time| {
                shared.pauses() && shared.compact_queue.pause(time)
            })
        } else {
            current::remove_database(dir, old)
        };
        if let Err(error) = removed {
            tracing::warn!(%error, "the old database stays until the next start");
        }
        Ok(DefragReport {
            before,
            after: shared.sizes(),
            from: old.kind,
            to: next.kind,
            took: started.elapsed(),
        })
    }
}

impl Shared {
    /// Whether nobody reads the old database any more.
    fn rewrite(&self, name: Name, pace: Pace) -> Result<bool, StorageError> {
        let dir = &self.options.dir;
        current::remove_database(dir, name)?; // of an earlier attempt in this run
        check_room(dir, self.sizes().copy_bytes())?;
        let path = name.unpublished_path(dir);
        let fresh = name.kind.open(&path, self.options.engine_cache_bytes)?;
        let old = self.committer.between_batches(|follow, _| {
            *follow = Some(Follow::default());
            self.committer.engine()
        });
        let chunk_bytes = if self.pauses() {
            COPY_BYTES
        } else {
            COPY_BYTES_OFFLINE
        };
        // Later records are noted. Without an end a writer that is faster would be followed for ever.
        let upto = record_key(Revision::new(self.newest.load().revision + 1, 0));
        let after_records = [Table::Key.prefix() + 1];
        let copy = || {
            self.copy(&*old, &*fresh, (b"", &upto), chunk_bytes, pace)?;
            let rest = (&after_records[..], &[OWN_PREFIX][..]);
            self.copy(&*old, &*fresh, rest, chunk_bytes, pace)
        };
        match pace {
            Pace::Background => background::run("defragment", Priority::Lowest, copy),
            Pace::Urgent => copy(),
        }?;
        // From here on with the priority of those who write, or it would never catch up with them while they have the cores.
        let mut before = usize::MAX;
        for _ in 0..CATCH_UP_ROUNDS_MAX {
            let keys = self.committer.between_batches(|follow, _| take(follow));
            let pace = if keys.len() < before {
                pace
            } else {
                Pace::Urgent
            };
            before = keys.len();
            for keys in keys.chunks(CATCH_UP_KEYS) {
                self.go_on()?;
                let begun = crate::clock::now();
                self.catch_up(&*old, &*fresh, keys)?;
                self.rest(begun.elapsed(), pace);
            }
            if keys.len() <= SWAP_KEYS_MAX {
                break;
            }
        }
        self.committer.between_batches(|follow, swap| {
            self.go_on()?;
            // Syncs whatever was copied lazily.
            self.catch_up(&*old, &*fresh, &take(follow))?;
            self.check_copy(&*old, &*fresh)?;
            current::publish(dir, name)?;
            swap(Arc::clone(&fresh));
            Ok::<_, StorageError>(())
        })?;
        // Whoever lets go of the old file last frees it on the disk, gigabytes at once: better here than in the middle of a read.
        let give_up = crate::clock::now() + READERS_WAIT_MAX;
        while Arc::strong_count(&old) > 1 && crate::clock::now() < give_up {
            if !self.compact_queue.pause(READERS_WAIT_STEP) {
                break;
            }
        }
        let readers = Arc::downgrade(&old);
        drop(old);
        Ok(readers.strong_count() == 0)
    }

    /// A store that serves nobody (an offline command) has no pauses.
    const fn pauses(&self) -> bool {
        !self.options.compaction_sleep.is_zero()
    }

    fn rest(&self, worked: Duration, pace: Pace) {
        if self.pauses() && pace == Pace::Background {
            // Cut short when the store is closed, which the next step finds out.
            self.compact_queue.pause(worked.min(REST_MAX));
        }
    }

    /// Asked between any two batches: an error when the store is being closed, which waits for us, and when the disk has filled up.
    fn go_on(&self) -> Result<(), StorageError> {
        if self.committer.is_closing() {
            return Err(StorageError::Stopped {
                first: "the store is being closed".to_owned(),
            });
        }
        check_room(&self.options.dir, 0)
    }

    /// Copies the pairs of a range of keys.
    fn copy(
        &self,
        old: &dyn Engine,
        fresh: &dyn Engine,
        (start, end): (&[u8], &[u8]),
        chunk_bytes: usize,
        pace: Pace,
    ) -> Result<(), StorageError> {
        let mut next = start.to_vec();
        for batches in 1.. {
            self.go_on()?;
            let begun = crate::clock::now();
            let pairs = old.scan_as_one(&next, end, chunk_bytes);
            let pairs = pairs.map_err(|error| self.unreadable(error))?;
            let Some((last, _)) = pairs.last() else {
                break;
            };
            next.clear();
            next.extend_from_slice(last);
            next.push(0);
            let ops = pairs
                .into_iter()
                .map(|(key, value)| (key, Some(value)))
                .collect();
            if batches % BATCHES_PER_SYNC == 0 {
                fresh.write(&Batch { ops })?;
            } else {
                fresh.write_lazily(&Batch { ops })?;
            }
            self.rest(begun.elapsed(), pace);
        }
        Ok(())
    }

    /// Gives the new database what the old one holds under `keys`.
    fn catch_up(
        &self,
        old: &dyn Engine,
        fresh: &dyn Engine,
        keys: &[Bytes],
    ) -> Result<(), StorageError> {
        let values = old.get_many(keys).map_err(|error| self.unreadable(error))?;
        fresh.write(&Batch {
            ops: keys.iter().cloned().zip(values).collect(),
        })
    }

    /// A copy of damage would pass for sound: the copy must hold all that was ever written, and nothing else.
    fn check_copy(&self, old: &dyn Engine, fresh: &dyn Engine) -> Result<(), StorageError> {
        let (written, copied) = (old.tally()?, fresh.tally()?);
        let (Some(written), Some(copied)) = (written, copied) else {
            return Ok(());
        };
        if written == copied {
            return Ok(());
        }
        Err(self.unreadable(StorageError::DamagedRecord {
            path: self.options.dir.clone(),
            record: "unknown".to_owned(),
            what: written.differs_from(copied),
        }))
    }

    /// The database in use cannot be read: that is no failure of the copy. Stops the store.
    fn unreadable(&self, error: StorageError) -> StorageError {
        let first = error.to_string();
        self.committer.fail(error);
        StorageError::Stopped { first }
    }
}

/// Refuses when the disk of `dir` has no room for so many bytes and the reserve.
fn check_room(dir: &Path, bytes: u64) -> Result<(), StorageError> {
    let stat = rustix::fs::statvfs(dir)
        .map_err(|error| StorageError::io("measure the disk of", dir, error.into()))?;
    let available = stat.f_bavail.saturating_mul(stat.f_frsize);
    let needed = bytes.saturating_add(RESERVE_BYTES);
    if available < needed {
        return Err(StorageError::NoRoom {
            path: dir.to_owned(),
            needed,
            available,
        });
    }
    Ok(())
}

fn take(follow: &mut Option<Follow>) -> Vec<Bytes> {
    follow
        .as_mut()
        .map(|follow| std::mem::take(&mut follow.keys))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_room_is_refused_with_the_figures() {
        let dir = tempfile::tempdir().unwrap();
        check_room(dir.path(), 0).unwrap();
        let error = check_room(dir.path(), u64::MAX / 2).unwrap_err();
        assert!(
            matches!(error, StorageError::NoRoom { needed, available, .. } if needed > available),
            "{error}"
        );
        assert!(
            error.to_string().contains("bytes are free on its disk"),
            "{error}"
        );
    }
}
