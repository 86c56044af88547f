//! The Ballast server: etcd's v3 API over openraft and the MVCC store.
//!
//! A put passes `rpc -> raft -> apply -> storage`; its events leave upwards to `watch`. ARCHITECTURE.md draws it.

pub mod apply;
pub mod bootstrap;
pub mod cli;
pub mod clock;
pub mod cluster;
pub mod compactor;
pub mod config;
pub mod corrupt;
pub mod data_dir;
pub mod defrag;
pub mod gather;
pub mod health;
pub mod lease;
pub mod loggable;
pub mod logging;
pub mod metrics;
pub mod node;
pub mod peer;
pub mod raft;
pub mod rpc;
pub mod serve;
pub mod spans;
pub mod tasks;
pub mod tls;
pub mod version;
pub mod watch;
