//! What a member's metrics want to know of the store. Called from the store's own threads, after the fact.

use std::time::Duration;

/// Each method is told of one thing that happened, and may do nothing.
pub trait StoreObserver: Send + Sync + std::fmt::Debug {
    /// The engine took a batch.
    fn committed(&self, _took: Duration) {}

    /// A compaction cut the history of all keys in memory.
    fn index_compacted(&self, _took: Duration) {}

    /// A compaction went over some records of the engine.
    fn compaction_stepped(&self, _took: Duration) {}

    /// A compaction ended, and so many records are gone.
    fn compacted(&self, _took: Duration, _records: usize) {}

    /// A defragmentation begins; [`Self::defragmented`] follows, however it ends.
    fn defragmenting(&self) {}

    fn defragmented(&self, _took: Duration) {}
}

/// Observes nothing.
#[derive(Clone, Copy, Debug)]
pub struct Unobserved;

impl StoreObserver for Unobserved {}
