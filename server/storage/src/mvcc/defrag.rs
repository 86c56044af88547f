//! Defragmentation without a pause: the live records are copied into a fresh file, which then takes the old one's place.
//!
//!     1 follow   from here on the committer notes which keys it writes to the old file
//!     2 copy     all pairs of the old file, in order, in chunks
//!     3 catch up the noted keys: their present value in the old file, or a delete; again until few are left
//!     4 swap     between two batches of the committer: the last noted keys, then CURRENT
//!
//! Reads go on throughout (an old file that was removed stays readable while it is open), writes wait in the overlay for
//! step 4 only, and the apply path touches neither file. A key that changes while it is copied is among the noted ones, so that what the new
//! file holds at step 4 is what the old one holds; before it, it counts for nothing. A crash leaves one or the other
//! (backend/current.rs). An error while writing the new file, a full disk say, removes it and leaves the store as it was.
//!
//! etcd: server/storage/backend/backend.go's defrag, which stops everything.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::backend::{Batch, Engine, current};
use crate::committer::Follow;
use crate::error::StorageError;
use crate::mvcc::store::{Shared, Sizes, Store};

/// Bytes copied per batch of the new file.
const COPY_BYTES: usize = 4 << 20;
/// Keys caught up per batch.
const CATCH_UP_KEYS: usize = 4096;
/// So few noted keys are left for the swap, during which the committer waits.
const SWAP_KEYS_MAX: usize = 512;
/// Rounds of catching up before the swap is made with whatever is left: a writer that is faster than the copy must not prolong it for ever.
const CATCH_UP_ROUNDS_MAX: usize = 20;

#[derive(Clone, Copy, Debug)]
pub struct DefragReport {
    pub before: Sizes,
    pub after: Sizes,
    pub took: Duration,
}

impl Store {
    /// Rewrites the database into a fresh file and swaps it in. Blocking for the caller only.
    pub fn defragment(&self) -> Result<DefragReport, StorageError> {
        let shared = &self.shared;
        let started = crate::clock::now();
        let mut database = shared.database.lock();
        let before = shared.sizes();
        let next = *database + 1;
        let result = shared.rewrite(next);
        // Whatever happened, nobody follows any more.
        shared.committer.between_batches(|follow, _| *follow = None);
        let dir = &shared.options.dir;
        if let Err(error) = result {
            if let Err(error) = current::remove_file(dir, shared.kind, next) {
                tracing::warn!(%error, "an unfinished copy of the database stays until the next start");
            }
            return Err(error);
        }
        let old = std::mem::replace(&mut *database, next);
        if let Err(error) = current::remove_file(dir, shared.kind, old) {
            tracing::warn!(%error, "the old database file stays until the next start");
        }
        let report = DefragReport {
            before,
            after: shared.sizes(),
            took: started.elapsed(),
        };
        tracing::info!(
            before = report.before.allocated,
            after = report.after.allocated,
            took = ?report.took,
            "finished defragmentation"
        );
        Ok(report)
    }
}

impl Shared {
    fn rewrite(&self, id: u64) -> Result<(), StorageError> {
        let dir = &self.options.dir;
        current::remove_file(dir, self.kind, id)?; // of an earlier attempt in this run
        let path = current::unpublished_path(dir, self.kind, id);
        let fresh = self.kind.open(&path, self.options.engine_cache_bytes)?;
        let old = self.committer.between_batches(|follow, _| {
            *follow = Some(Follow::default());
            self.committer.engine()
        });
        copy_all(&*old, &*fresh)?;
        for _ in 0..CATCH_UP_ROUNDS_MAX {
            let keys = self.committer.between_batches(|follow, _| take(follow));
            catch_up(&*old, &*fresh, &keys)?;
            if keys.len() <= SWAP_KEYS_MAX {
                break;
            }
        }
        self.committer.between_batches(|follow, swap| {
            catch_up(&*old, &*fresh, &take(follow))?;
            current::publish(dir, self.kind, id)?;
            swap(Arc::clone(&fresh));
            Ok(())
        })
    }
}

fn take(follow: &mut Option<Follow>) -> Vec<Bytes> {
    follow
        .as_mut()
        .map(|follow| std::mem::take(&mut follow.keys))
        .unwrap_or_default()
}

fn copy_all(old: &dyn Engine, fresh: &dyn Engine) -> Result<(), StorageError> {
    let mut next = Vec::new();
    loop {
        // No table has this prefix, so it is beyond all keys.
        let pairs = old.scan(&next, &[u8::MAX], COPY_BYTES)?;
        let Some((last, _)) = pairs.last() else {
            return Ok(());
        };
        next.clear();
        next.extend_from_slice(last);
        next.push(0);
        let ops = pairs
            .into_iter()
            .map(|(key, value)| (key, Some(value)))
            .collect();
        fresh.write(&Batch { ops })?;
    }
}

/// Gives the new file what the old one holds under `keys`.
fn catch_up(old: &dyn Engine, fresh: &dyn Engine, keys: &[Bytes]) -> Result<(), StorageError> {
    for keys in keys.chunks(CATCH_UP_KEYS) {
        let values = old.get_many(keys)?;
        fresh.write(&Batch {
            ops: keys.iter().cloned().zip(values).collect(),
        })?;
    }
    Ok(())
}
