//! Clusters of the real binary on loopback: bootstrap, failover, membership, catch-up, and who is kept out.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/authority.rs"]
mod authority;
mod corrupt;
mod failover;
mod forced;
#[path = "../common/get.rs"]
mod get;
mod harness;
mod membership;
#[path = "../common/ports.rs"]
mod ports;
mod replication;
mod rolling;
mod tls;
