//! Requests as one line of a log: which keys, how large, never a value.
//!
//! The form is etcd's: fields in the text form of protobuf, `value` replaced by `value_size`. Lines are bounded, since keys and
//! transactions are as long as clients like.
//!
//! etcd: api/etcdserverpb/raft_internal_stringer.go.

use std::fmt::Write;

use ballast_api::etcdserverpb as pb;
use pb::compare::{CompareResult, CompareTarget, TargetUnion};
use pb::request_op::Request;

/// Bytes of a description; what is longer ends in dots.
pub const DESCRIPTION_BYTES_MAX: usize = 4096;

/// A text that stops growing at its bound.
struct Line(String);

impl Line {
    fn is_full(&self) -> bool {
        self.0.len() >= DESCRIPTION_BYTES_MAX
    }

    fn add(&mut self, text: std::fmt::Arguments<'_>) {
        if !self.is_full() {
            // Writing to a string cannot fail.
            let _ = self.0.write_fmt(text);
        }
    }

    fn field(&mut self, name: &str, value: i64) {
        if value != 0 {
            self.add(format_args!("{name}:{value} "));
        }
    }

    fn flag(&mut self, name: &str, is: bool) {
        if is {
            self.add(format_args!("{name}:true "));
        }
    }

    fn bytes(&mut self, name: &str, bytes: &[u8]) {
        if !bytes.is_empty() {
            // Four characters a byte at most.
            let shown = &bytes[..bytes.len().min(DESCRIPTION_BYTES_MAX)];
            self.add(format_args!("{name}:\"{}\" ", shown.escape_ascii()));
        }
    }

    fn end(mut self) -> String {
        if self.0.len() > DESCRIPTION_BYTES_MAX {
            // The text is ASCII.
            self.0.truncate(DESCRIPTION_BYTES_MAX);
            self.0.push_str("...");
        }
        self.0.truncate(self.0.trim_end().len());
        self.0
    }
}

fn line(describe: impl FnOnce(&mut Line)) -> String {
    let mut line = Line(String::new());
    describe(&mut line);
    line.end()
}

/// What was proposed.
pub fn proposal(request: &pb::InternalRaftRequest) -> String {
    line(|out| {
        if let Some(header) = &request.header {
            out.add(format_args!("header:<ID:{} > ", header.id));
        }
        if let Some(request) = &request.put {
            nest(out, "put", |out| add_put(out, request));
        }
        if let Some(request) = &request.txn {
            nest(out, "txn", |out| add_txn(out, request));
        }
        if let Some(request) = &request.delete_range {
            nest(out, "delete_range", |out| add_delete(out, request));
        }
        if let Some(request) = &request.compaction {
            nest(out, "compaction", |out| {
                out.field("revision", request.revision);
                out.flag("physical", request.physical);
            });
        }
        if let Some(request) = &request.lease_grant {
            out.add(format_args!(
                "lease_grant:<ttl:{}-second id:{:016x}>",
                request.ttl, request.id
            ));
        }
        if let Some(request) = &request.lease_revoke {
            out.add(format_args!("lease_revoke:<id:{:016x}>", request.id));
        }
        if let Some(request) = &request.lease_checkpoint {
            out.add(format_args!(
                "lease_checkpoint:<count:{}>",
                request.checkpoints.len()
            ));
        }
        // The rest has neither keys nor values, and its kind says enough.
        if !has_known_kind(request) {
            out.add(format_args!(
                "{}:<>",
                crate::metrics::Op::of(request).name()
            ));
        }
    })
}

fn has_known_kind(request: &pb::InternalRaftRequest) -> bool {
    request.put.is_some()
        || request.txn.is_some()
        || request.delete_range.is_some()
        || request.compaction.is_some()
        || request.lease_grant.is_some()
        || request.lease_revoke.is_some()
        || request.lease_checkpoint.is_some()
}

pub fn range(request: &pb::RangeRequest) -> String {
    line(|out| add_range(out, request))
}

pub fn put(request: &pb::PutRequest) -> String {
    line(|out| add_put(out, request))
}

pub fn delete_range(request: &pb::DeleteRangeRequest) -> String {
    line(|out| add_delete(out, request))
}

pub fn txn(request: &pb::TxnRequest) -> String {
    line(|out| add_txn(out, request))
}

fn nest(out: &mut Line, name: &str, inner: impl FnOnce(&mut Line)) {
    if !out.is_full() {
        out.add(format_args!("{name}:<"));
        inner(out);
        out.add(format_args!("> "));
    }
}

fn add_range(out: &mut Line, request: &pb::RangeRequest) {
    out.bytes("key", &request.key);
    out.bytes("range_end", &request.range_end);
    out.field("limit", request.limit);
    out.field("revision", request.revision);
    out.field("sort_order", request.sort_order.into());
    out.field("sort_target", request.sort_target.into());
    out.flag("serializable", request.serializable);
    out.flag("keys_only", request.keys_only);
    out.flag("count_only", request.count_only);
    out.field("min_mod_revision", request.min_mod_revision);
    out.field("max_mod_revision", request.max_mod_revision);
    out.field("min_create_revision", request.min_create_revision);
    out.field("max_create_revision", request.max_create_revision);
}

fn add_put(out: &mut Line, request: &pb::PutRequest) {
    out.bytes("key", &request.key);
    out.add(format_args!("value_size:{} ", request.value.len()));
    out.field("lease", request.lease);
    out.flag("prev_kv", request.prev_kv);
    out.flag("ignore_value", request.ignore_value);
    out.flag("ignore_lease", request.ignore_lease);
}

fn add_delete(out: &mut Line, request: &pb::DeleteRangeRequest) {
    out.bytes("key", &request.key);
    out.bytes("range_end", &request.range_end);
    out.flag("prev_kv", request.prev_kv);
}

fn add_txn(out: &mut Line, request: &pb::TxnRequest) {
    for compare in &request.compare {
        nest(out, "compare", |out| add_compare(out, compare));
    }
    for (name, ops) in [("success", &request.success), ("failure", &request.failure)] {
        for op in ops {
            nest(out, name, |out| match &op.request {
                Some(Request::RequestRange(inner)) => {
                    nest(out, "request_range", |out| add_range(out, inner));
                }
                Some(Request::RequestPut(inner)) => {
                    nest(out, "request_put", |out| add_put(out, inner));
                }
                Some(Request::RequestDeleteRange(inner)) => {
                    nest(out, "request_delete_range", |out| add_delete(out, inner));
                }
                Some(Request::RequestTxn(inner)) => {
                    nest(out, "request_txn", |out| add_txn(out, inner));
                }
                None => {}
            });
        }
    }
}

fn add_compare(out: &mut Line, compare: &pb::Compare) {
    let target = CompareTarget::try_from(compare.target).map_or("?", |target| target.as_str_name());
    let result = CompareResult::try_from(compare.result).map_or("?", |result| result.as_str_name());
    out.add(format_args!("target:{target} result:{result} "));
    out.bytes("key", &compare.key);
    out.bytes("range_end", &compare.range_end);
    match &compare.target_union {
        Some(TargetUnion::Value(value)) => out.add(format_args!("value_size:{} ", value.len())),
        Some(TargetUnion::Version(n)) => out.add(format_args!("version:{n} ")),
        Some(TargetUnion::CreateRevision(n)) => out.add(format_args!("create_revision:{n} ")),
        Some(TargetUnion::ModRevision(n)) => out.add(format_args!("mod_revision:{n} ")),
        Some(TargetUnion::Lease(n)) => out.add(format_args!("lease:{n} ")),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put_of(key: &'static str, value: Vec<u8>) -> pb::PutRequest {
        pb::PutRequest {
            key: key.into(),
            value: value.into(),
            lease: 7,
            ..Default::default()
        }
    }

    #[test]
    fn values_are_told_by_their_size() {
        let inner = pb::TxnRequest {
            compare: vec![pb::Compare {
                target: CompareTarget::Value as i32,
                key: "c\"\n\u{ff}".into(),
                target_union: Some(TargetUnion::Value("hidden".into())),
                ..Default::default()
            }],
            success: vec![pb::RequestOp {
                request: Some(Request::RequestPut(put_of("k", b"hidden".to_vec()))),
            }],
            ..Default::default()
        };
        let request = pb::InternalRaftRequest {
            header: Some(pb::RequestHeader {
                id: 9,
                ..Default::default()
            }),
            txn: Some(pb::TxnRequest {
                failure: vec![pb::RequestOp {
                    request: Some(Request::RequestTxn(inner)),
                }],
                ..Default::default()
            }),
            ..Default::default()
        };
        let text = proposal(&request);
        assert!(
            text.starts_with("header:<ID:9 > txn:<failure:<request_txn:<"),
            "{text}"
        );
        assert!(
            text.contains(r#"key:"c\"\n\xc3\xbf" value_size:6"#),
            "{text}"
        );
        assert!(
            text.contains(r#"request_put:<key:"k" value_size:6 lease:7"#),
            "{text}"
        );
        assert!(!text.contains("hidden"), "{text}");
    }

    #[test]
    fn long_requests_are_cut() {
        let mut request = pb::TxnRequest::default();
        for _ in 0..1000 {
            request.success.push(pb::RequestOp {
                request: Some(Request::RequestPut(put_of("a key", vec![0; 9]))),
            });
        }
        let text = txn(&request);
        assert!(text.len() <= DESCRIPTION_BYTES_MAX + 3, "{}", text.len());
        assert!(text.ends_with("..."));
        let long = pb::RangeRequest {
            key: vec![0xff; 1 << 20].into(),
            ..Default::default()
        };
        assert!(range(&long).len() <= DESCRIPTION_BYTES_MAX + 3);
    }
}
