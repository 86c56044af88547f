//! The only folder that names openraft. Above it there are commands and positions, below it the log and the transport.
//!
//! etcd: server/etcdserver/raft.go and the raft library.

mod barrier;
pub mod command;
mod forward;
mod leadership;
mod lease_read;
pub mod log_store;
pub mod members;
pub mod node;
pub mod open;
mod receive;
pub(crate) mod snapshot;
pub mod state_machine;
#[cfg(test)]
mod tests;
mod transfer;
pub mod transport;
mod wire;

pub use command::{Nodes, PeerNode};
pub use node::{End, ProposeError, RaftNode, RaftOptions, RaftStatus, StartError};
