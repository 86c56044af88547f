//! The only folder that names openraft. Above it there are commands and positions, below it the log and the transport.
//!
//! etcd: server/etcdserver/raft.go and the raft library.

pub mod command;
pub mod log_store;
pub mod node;
pub mod state_machine;
#[cfg(test)]
mod tests;
pub mod transport;

pub use node::{ProposeError, RaftNode, RaftOptions, RaftStatus, StartError};
