//! The bytes of a `WatchResponse` in its gRPC frame, written by hand: a small header, then copies of events encoded before.
//!
//!     | 0 (not compressed) | length: u32 BE | header (1) | watch_id (2) | ... | events (11), each a ready-made field |
//!
//! Field order and omission of zeros are protobuf's own, so that the bytes equal those of any encoder.

use bytes::{BufMut, Bytes, BytesMut};
use prost::encoding::{encode_varint, encoded_len_varint};

/// Compression flag and length.
const PREFIX_BYTES: usize = 5;

/// Who speaks: constant for the life of the member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speaker {
    pub cluster_id: u64,
    pub member_id: u64,
}

/// A response less its events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) revision: i64,
    pub(crate) term: u64,
    pub(crate) watch_id: i64,
    pub(crate) created: bool,
    pub(crate) canceled: bool,
    pub(crate) compact_revision: i64,
    pub(crate) cancel_reason: String,
    pub(crate) fragment: bool,
}

/// Appends one framed response.
pub(crate) fn write<'a>(
    out: &mut BytesMut,
    speaker: Speaker,
    head: &Head,
    events: impl Iterator<Item = &'a Bytes>,
) {
    let start = out.len();
    out.put_bytes(0, PREFIX_BYTES);
    put_head(out, speaker, head);
    for event in events {
        out.extend_from_slice(event);
    }
    let len = (out.len() - start - PREFIX_BYTES) as u32;
    out[start + 1..start + PREFIX_BYTES].copy_from_slice(&len.to_be_bytes());
}

/// Bytes of the message without its events, as protobuf counts them.
pub(crate) fn head_len(speaker: Speaker, head: &Head) -> usize {
    let header = header_len(speaker, head);
    let varint = |value: u64| {
        if value == 0 {
            0
        } else {
            1 + encoded_len_varint(value)
        }
    };
    let flag = usize::from;
    let reason = match head.cancel_reason.len() {
        0 => 0,
        n => 1 + encoded_len_varint(n as u64) + n,
    };
    1 + encoded_len_varint(header as u64)
        + header
        + varint(head.watch_id as u64)
        + 2 * (flag(head.created) + flag(head.canceled) + flag(head.fragment))
        + varint(head.compact_revision as u64)
        + reason
}

fn header_len(speaker: Speaker, head: &Head) -> usize {
    [
        speaker.cluster_id,
        speaker.member_id,
        head.revision as u64,
        head.term,
    ]
    .into_iter()
    .filter(|v| *v != 0)
    .map(|v| 1 + encoded_len_varint(v))
    .sum()
}

fn put_head(out: &mut BytesMut, speaker: Speaker, head: &Head) {
    let header = header_len(speaker, head);
    out.put_u8(0x0a);
    encode_varint(header as u64, out);
    put_varint(out, 0x08, speaker.cluster_id);
    put_varint(out, 0x10, speaker.member_id);
    put_varint(out, 0x18, head.revision as u64);
    put_varint(out, 0x20, head.term);
    put_varint(out, 0x10, head.watch_id as u64);
    put_varint(out, 0x18, u64::from(head.created));
    put_varint(out, 0x20, u64::from(head.canceled));
    put_varint(out, 0x28, head.compact_revision as u64);
    if !head.cancel_reason.is_empty() {
        out.put_u8(0x32);
        encode_varint(head.cancel_reason.len() as u64, out);
        out.put_slice(head.cancel_reason.as_bytes());
    }
    put_varint(out, 0x38, u64::from(head.fragment));
}

fn put_varint(out: &mut BytesMut, tag: u8, value: u64) {
    if value != 0 {
        out.put_u8(tag);
        encode_varint(value, out);
    }
}

#[cfg(test)]
mod tests {
    use ballast_api::etcdserverpb as pb;
    use prost::Message;

    use super::*;

    #[test]
    fn the_bytes_are_those_of_the_ordinary_encoder() {
        let speaker = Speaker {
            cluster_id: u64::MAX - 5,
            member_id: 300,
        };
        let heads = [
            Head::default(),
            Head {
                revision: 77,
                term: 3,
                watch_id: -1,
                created: true,
                canceled: true,
                compact_revision: 9,
                cancel_reason: "why".to_owned(),
                fragment: true,
            },
        ];
        for head in heads {
            let mut out = BytesMut::new();
            write(&mut out, speaker, &head, std::iter::empty());
            let expected = pb::WatchResponse {
                header: Some(pb::ResponseHeader {
                    cluster_id: speaker.cluster_id,
                    member_id: speaker.member_id,
                    revision: head.revision,
                    raft_term: head.term,
                }),
                watch_id: head.watch_id,
                created: head.created,
                canceled: head.canceled,
                compact_revision: head.compact_revision,
                cancel_reason: head.cancel_reason.clone(),
                fragment: head.fragment,
                events: Vec::new(),
            };
            assert_eq!(out[PREFIX_BYTES..], expected.encode_to_vec());
            assert_eq!(
                out[..PREFIX_BYTES],
                [&[0], &(expected.encoded_len() as u32).to_be_bytes()[..]].concat()
            );
            assert_eq!(head_len(speaker, &head), expected.encoded_len());
        }
    }
}
