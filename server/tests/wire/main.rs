//! The real binary asked over the wire by a plain gRPC client. Case numbers (P01...) are those of public bug reports, whose
//! sources stand beside each test.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/authority.rs"]
mod authority;
mod cases_config;
mod cases_maintenance;
mod cases_watch;
mod compaction;
mod connection;
mod defrag;
mod effects;
#[path = "../common/get.rs"]
mod get;
mod harness;
mod http;
mod kv;
mod lease;
mod maintenance;
mod memory;
mod observe;
mod offline;
#[path = "../common/ports.rs"]
mod ports;
mod process;
mod quota;
mod spans;
mod tls;
mod txn;
