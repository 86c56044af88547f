//! The library's messages as those of `peer.proto`, and back.
//!
//! An entry travels in the bytes that lie in the log. Positions count from 1, as everywhere outside this folder.

use ballast_api::ballastpeerpb as pb;
use ballast_storage::LogPosition;
use ballast_storage::wal::WalEntry;
use openraft::impls::leader_id_std::LeaderId;
use openraft::raft::{
    AppendEntriesRequest, StreamAppendError, StreamAppendResult, TransferLeaderRequest,
    VoteRequest, VoteResponse,
};

use crate::raft::command::{
    CommandError, LogId, TypeConfig, Vote, decode_entry, encode_entry, log_id, position,
};

/// A message lacks what every message of its kind has.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error("a message without a vote")]
    NoVote,
    #[error(transparent)]
    Entry(#[from] CommandError),
}

pub(crate) fn position_out(at: Option<&LogId>) -> Option<pb::LogPosition> {
    let at = position(at?);
    Some(pb::LogPosition {
        term: at.term,
        index: at.index,
    })
}

pub(crate) fn position_in(at: Option<pb::LogPosition>) -> Option<LogId> {
    let at = at?;
    log_id(LogPosition {
        term: at.term,
        index: at.index,
    })
}

pub(crate) fn vote_out(vote: &Vote) -> pb::Vote {
    pb::Vote {
        term: vote.leader_id.term,
        voted_for: vote.leader_id.voted_for,
        committed: vote.committed,
    }
}

pub(crate) fn vote_in(vote: Option<pb::Vote>) -> Result<Vote, WireError> {
    let vote = vote.ok_or(WireError::NoVote)?;
    Ok(Vote {
        leader_id: LeaderId {
            term: vote.term,
            voted_for: vote.voted_for,
        },
        committed: vote.committed,
    })
}

pub(crate) fn append_out(request: &AppendEntriesRequest<TypeConfig>) -> pb::AppendRequest {
    let entry = |entry| {
        let WalEntry {
            position,
            kind,
            payload,
        } = encode_entry(entry);
        pb::Entry {
            term: position.term,
            index: position.index,
            kind: u32::from(kind),
            payload,
        }
    };
    pb::AppendRequest {
        vote: Some(vote_out(&request.vote)),
        previous: position_out(request.prev_log_id.as_ref()),
        committed: position_out(request.leader_commit.as_ref()),
        entries: request.entries.iter().map(entry).collect(),
    }
}

pub(crate) fn append_in(
    request: pb::AppendRequest,
) -> Result<AppendEntriesRequest<TypeConfig>, WireError> {
    let entry = |entry: pb::Entry| {
        decode_entry(&WalEntry {
            position: LogPosition {
                term: entry.term,
                index: entry.index,
            },
            // A kind beyond is one that no version knows.
            kind: u8::try_from(entry.kind).unwrap_or(u8::MAX),
            payload: entry.payload,
        })
    };
    Ok(AppendEntriesRequest {
        vote: vote_in(request.vote)?,
        prev_log_id: position_in(request.previous),
        leader_commit: position_in(request.committed),
        entries: request
            .entries
            .into_iter()
            .map(entry)
            .collect::<Result<_, _>>()?,
    })
}

pub(crate) fn append_reply_out(result: &StreamAppendResult<TypeConfig>) -> pb::AppendReply {
    match result {
        Ok(matching) => pb::AppendReply {
            matching: position_out(matching.as_ref()),
            ..Default::default()
        },
        Err(StreamAppendError::Conflict(at)) => pb::AppendReply {
            conflict: position_out(Some(at)),
            ..Default::default()
        },
        Err(StreamAppendError::HigherVote(vote)) => pb::AppendReply {
            higher_vote: Some(vote_out(vote)),
            ..Default::default()
        },
    }
}

pub(crate) fn append_reply_in(
    reply: pb::AppendReply,
) -> Result<StreamAppendResult<TypeConfig>, WireError> {
    if reply.higher_vote.is_some() {
        let vote = vote_in(reply.higher_vote)?;
        return Ok(Err(StreamAppendError::HigherVote(vote)));
    }
    Ok(match position_in(reply.conflict) {
        Some(at) => Err(StreamAppendError::Conflict(at)),
        None => Ok(position_in(reply.matching)),
    })
}

pub(crate) fn vote_request_out(request: &VoteRequest<TypeConfig>) -> pb::VoteRequest {
    pb::VoteRequest {
        vote: Some(vote_out(&request.vote)),
        last: position_out(request.last_log_id.as_ref()),
        leadership_transfer: request.leadership_transfer,
    }
}

pub(crate) fn vote_request_in(
    request: pb::VoteRequest,
) -> Result<VoteRequest<TypeConfig>, WireError> {
    let mut asked = VoteRequest::new(vote_in(request.vote)?, position_in(request.last));
    asked.leadership_transfer = request.leadership_transfer;
    Ok(asked)
}

pub(crate) fn vote_reply_out(reply: &VoteResponse<TypeConfig>) -> pb::VoteReply {
    pb::VoteReply {
        vote: Some(vote_out(&reply.vote)),
        last: position_out(reply.last_log_id.as_ref()),
        granted: reply.vote_granted,
    }
}

pub(crate) fn vote_reply_in(reply: pb::VoteReply) -> Result<VoteResponse<TypeConfig>, WireError> {
    Ok(VoteResponse::new(
        vote_in(reply.vote)?,
        position_in(reply.last),
        reply.granted,
    ))
}

pub(crate) fn transfer_out(
    request: &TransferLeaderRequest<TypeConfig>,
) -> pb::TransferLeaderRequest {
    pb::TransferLeaderRequest {
        from: Some(vote_out(request.from_leader())),
        to: *request.to_node_id(),
        last: position_out(request.last_log_id()),
    }
}

pub(crate) fn transfer_in(
    request: pb::TransferLeaderRequest,
) -> Result<TransferLeaderRequest<TypeConfig>, WireError> {
    Ok(TransferLeaderRequest::new(
        vote_in(request.from)?,
        request.to,
        position_in(request.last),
    ))
}
