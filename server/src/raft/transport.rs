//! Messages to the other members. There are none yet: a group is a single voter, and every call is refused.

use std::future::Future;

use openraft::alias::{SnapshotOf, VoteOf};
use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::impls::EmptyNode;
use openraft::network::RPCOption;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse,
};
use openraft::{OptionalSend, RaftNetworkFactory, RaftNetworkV2};

use crate::raft::command::TypeConfig;
use crate::raft::state_machine::Marker;

const WHY: &str = "this version runs single members only";

/// Makes connections to members by id.
#[derive(Clone, Copy, Debug, Default)]
pub struct Transport;

/// To one member.
#[derive(Clone, Copy, Debug)]
pub struct Peer;

fn unreachable() -> Unreachable<TypeConfig> {
    Unreachable::from_string(WHY)
}

impl RaftNetworkFactory<TypeConfig> for Transport {
    type Network = Peer;

    async fn new_client(&mut self, _target: u64, _node: &EmptyNode) -> Peer {
        Peer
    }
}

impl RaftNetworkV2<TypeConfig> for Peer {
    type SnapshotData = Marker;

    async fn append_entries(
        &mut self,
        _rpc: AppendEntriesRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(RPCError::Unreachable(unreachable()))
    }

    async fn vote(
        &mut self,
        _rpc: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(RPCError::Unreachable(unreachable()))
    }

    async fn pre_vote(
        &mut self,
        _rpc: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        // The default would grant everything.
        Err(RPCError::Unreachable(unreachable()))
    }

    async fn full_snapshot(
        &mut self,
        _vote: VoteOf<TypeConfig>,
        _snapshot: SnapshotOf<TypeConfig, Marker>,
        _cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        Err(StreamingError::Unreachable(unreachable()))
    }
}
