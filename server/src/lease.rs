//! Leases: what is granted, which keys hang on it, and, on the leader, when it runs out.
//!
//! Promises: what apply changes here is equal on all replicas; time is read only to decide when the leader *proposes* a revocation.
//! Not here: the records on disk (apply writes them in the batch of the entry) and the RPCs (`rpc/lease.rs`).
//!
//! etcd: server/lease.

pub mod expiry;
pub mod lessor;

pub use lessor::{Lessor, Renewal};
