//! The revisioned key space.
//!
//! Put, range and delete by key; every change a new revision. Readers hold a [`View`], an immutable picture published once per applied
//! entry, and never wait for the writer. There is one writer: [`Store::begin`].
//!
//! etcd: server/storage/mvcc.

mod census;
mod compact;
mod defrag;
mod hash;
pub mod history;
mod hold;
mod index_file;
mod install;
pub mod key_index;
mod pages;
mod read;
mod recover;
pub mod restore;
pub mod revision;
pub mod snapshot;
pub mod store;
pub mod tree;
mod values;
mod write;

pub use pages::{PageStream, Pages};
pub use recover::FORMAT_VERSION;
pub use restore::{RestoreOptions, RestoreReport, restore};
pub use snapshot::SnapshotStream;
pub use store::{
    Committed, Compaction, DefragReport, Event, EventKind, HashKv, InstallOptions, Pace,
    RangeOptions, RangeResult, Receiving, Sizes, Store, StoreOptions, Touched, View, WriteTxn,
};
