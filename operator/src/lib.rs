//! Turns StoreCluster objects into running, backed-up, defragmented stores.
//!
//! ```text
//! crd/      the API                      cluster/  pipeline of a StoreCluster
//! agent/    what runs beside a store     backup/   pipeline of a StoreBackup
//! ```
//!
//! The operator decides from what it observes, never from what it remembers: every pass reads, plans
//! one step, takes it and writes down what it saw.

pub mod agent;
pub mod backup;
pub mod clock;
pub mod cluster;
pub mod context;
pub mod crd;
pub mod crdgen;
pub mod events;
pub mod http;
pub mod leader;
pub mod metrics;
pub mod quantity;
pub mod run;
pub mod schedule;
pub mod store_client;
