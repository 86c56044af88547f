//! The nemesis: a cluster under load from clients on all its members, one fault after the other, and judges of everything that clients saw.
//!
//! ```text
//!  window: load on -> fault -> undone -> all members healthy -> load off -> everything told to watchers -> judged
//!  judges: porcupine (linearizability), watches, serializable reads, leases, HashKV of all members
//! ```
//!
//! Promises: which fault strikes whom follows from a printed seed; what is judged wrong, or not judged at all, fails the run and leaves the
//! history, the members' logs and porcupine's picture behind. The members are real etcd's, or the program under test.
//! Not here: the members (`members.rs`), their network (`lab.rs`), their disks (`lossy.rs`).

pub mod faults;
pub mod record;
pub mod reference;
pub mod run;
pub mod stale;
pub mod summary;
pub mod traffic;
pub mod watch_check;
pub mod watching;

pub use run::{Args, run};
