//! From committed events to clients.
//!
//!     apply --notify--> ring --> dispatcher --(synced watchers)--> mailboxes --> rpc/watch.rs
//!                        |                                            ^
//!                        +--> catch-up <-- View::events (history) ----+
//!
//! `hub.rs` knows the watchers, `catch_up.rs` those that are behind, `mailbox.rs` what waits for one stream, `commit.rs` and
//! `ring.rs` the events that all of them share, `watcher_set.rs` who watches a key, `frame.rs` the bytes of a response.
//!
//! Promises: a watcher gets every event of its range from its start revision on, once, in order (invariant 4), or is told that
//! history is gone; a commit waits for no watcher; what waits for one stream is bounded.
//! Not here: the stream's requests and its life (`rpc/watch.rs`).
//!
//! etcd: server/storage/mvcc/watchable_store.go, as objects beside the store instead of around it.

mod catch_up;
mod commit;
pub(crate) mod frame;
mod hub;
mod mailbox;
mod metrics;
mod ring;
mod watcher_set;

pub(crate) use commit::Commit;
pub use frame::Speaker;
pub use hub::Hub;
pub(crate) use hub::{CreateWatch, StreamHandle, WatcherId};
pub(crate) use mailbox::{Delivery, Events};
pub use metrics::WatchMetrics;
pub(crate) use watcher_set::KeyRange;
