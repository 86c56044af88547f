//! Reads, writes and transactions on whole states.

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use ballast_api::mvccpb::KeyValue;
use bytes::Bytes;
use pb::compare::{CompareResult, CompareTarget, TargetUnion};
use pb::range_request::{SortOrder, SortTarget};
use pb::request_op::Request;
use pb::response_op::Response;
use prost::Message as _;
use tonic::Status;

use super::super::script::REQUEST_BYTES_MAX;
use super::{Change, Model, Refused, State, Work, check, header};

/// Keys in the first part of a streamed range; the next ones follow the size of what came.
const STREAM_FIRST_KEYS: i64 = 10;

/// The keys of an interval as requests write it.
pub(super) fn within<'a>(
    state: &'a State,
    key: &'a [u8],
    end: &'a [u8],
) -> impl Iterator<Item = &'a KeyValue> {
    state.values().filter(move |kv| contains(key, end, &kv.key))
}

pub(super) fn contains(key: &[u8], end: &[u8], candidate: &[u8]) -> bool {
    match end {
        [] => candidate == key,
        [0] => candidate >= key,
        end => candidate >= key && candidate < end,
    }
}

impl Work {
    fn put(&mut self, request: &pb::PutRequest) -> pb::PutResponse {
        let before = self.state.get(&request.key).cloned();
        let main = self.head + 1;
        let old = before.clone().unwrap_or_default();
        let kv = KeyValue {
            key: request.key.clone(),
            create_revision: if before.is_some() {
                old.create_revision
            } else {
                main
            },
            mod_revision: main,
            version: old.version + 1,
            value: if request.ignore_value {
                old.value
            } else {
                request.value.clone()
            },
            lease: if request.ignore_lease {
                old.lease
            } else {
                request.lease
            },
        };
        self.state.insert(request.key.clone(), kv.clone());
        self.change(kv, false);
        pb::PutResponse {
            header: header(main),
            prev_kv: before.filter(|_| request.prev_kv),
        }
    }

    pub(super) fn delete(&mut self, key: &[u8], end: &[u8]) -> Vec<KeyValue> {
        let gone: Vec<KeyValue> = within(&self.state, key, end).cloned().collect();
        for kv in &gone {
            self.state.remove(&kv.key);
            let tombstone = KeyValue {
                key: kv.key.clone(),
                mod_revision: self.head + 1,
                ..KeyValue::default()
            };
            self.change(tombstone, true);
        }
        gone
    }

    fn change(&mut self, kv: KeyValue, deletion: bool) {
        self.changes.push(Change {
            main: self.head + 1,
            sub: self.changes.len() as i64,
            deletion,
            kv,
            removed: false,
        });
    }

    fn delete_range(&mut self, request: &pb::DeleteRangeRequest) -> pb::DeleteRangeResponse {
        let gone = self.delete(&request.key, &request.range_end);
        pb::DeleteRangeResponse {
            header: header(self.revision()),
            deleted: gone.len() as i64,
            prev_kvs: if request.prev_kv { gone } else { Vec::new() },
        }
    }
}

impl Model {
    pub(super) fn work(&self) -> Work {
        Work {
            state: self.state().clone(),
            changes: Vec::new(),
            head: self.head(),
        }
    }

    pub(super) fn commit(&mut self, work: Work) {
        if !work.changes.is_empty() {
            self.states.push(work.state);
            self.changes.extend(work.changes);
        }
    }

    pub(super) fn put(&mut self, request: &pb::PutRequest) -> Refused<pb::PutResponse> {
        check::put(request)?;
        self.check_put(request)?;
        let mut work = self.work();
        let response = work.put(request);
        self.commit(work);
        Ok(response)
    }

    pub(super) fn delete(
        &mut self,
        request: &pb::DeleteRangeRequest,
    ) -> Refused<pb::DeleteRangeResponse> {
        if request.key.is_empty() {
            return Err(Error::EmptyKey.into());
        }
        let mut work = self.work();
        let response = work.delete_range(request);
        self.commit(work);
        Ok(response)
    }

    fn check_put(&self, request: &pb::PutRequest) -> Result<(), Error> {
        if request.lease != 0 && !self.leases.contains_key(&request.lease) {
            return Err(Error::LeaseNotFound);
        }
        let exists = self.state().contains_key(&request.key);
        if (request.ignore_value || request.ignore_lease) && !exists {
            return Err(Error::KeyNotFound);
        }
        Ok(())
    }

    pub(super) fn range(&self, request: &pb::RangeRequest) -> Refused<pb::RangeResponse> {
        check::range(request)?;
        Ok(self.range_in(&self.work(), request)?)
    }

    /// Part by part, since a sort target without an order sorts each part for itself.
    pub(super) fn range_stream(&self, request: &pb::RangeRequest) -> Refused<pb::RangeResponse> {
        check::range(request)?;
        if !comes_in_order(request) {
            return Err(Status::unimplemented(
                "RangeStream does not support custom sort orders",
            ));
        }
        if is_filtered(request) {
            return Err(Status::unimplemented(
                "RangeStream does not support revision filters",
            ));
        }
        let work = self.work();
        if request.count_only {
            return Ok(self.range_in(&work, request)?);
        }
        let total = match request.limit {
            0 => i64::MAX,
            limit => limit,
        };
        let mut part = request.clone();
        part.limit = total.min(STREAM_FIRST_KEYS);
        let mut kvs = Vec::new();
        loop {
            let mut response = self.range_in(&work, &part)?;
            let bytes = response.encoded_len();
            kvs.append(&mut response.kvs);
            let told = kvs.len() as i64;
            let after = kvs
                .last()
                .map_or(Bytes::new(), |kv| [&kv.key[..], &b"\0"[..]].concat().into());
            if !response.more || told == total {
                response.count = told;
                if response.more {
                    part.key = after;
                    part.count_only = true;
                    response.count += self.range_in(&work, &part)?.count;
                }
                response.kvs = kvs;
                return Ok(response);
            }
            part.key = after;
            if bytes < REQUEST_BYTES_MAX / 2 {
                part.limit *= 2;
            } else if bytes > REQUEST_BYTES_MAX * 2 {
                part.limit = (part.limit / 2).max(1);
            }
            part.limit = part.limit.min(total - told);
        }
    }

    /// A range within a transaction sees what the transaction did so far.
    fn range_in(
        &self,
        work: &Work,
        request: &pb::RangeRequest,
    ) -> Result<pb::RangeResponse, Error> {
        if request.revision > work.revision() {
            return Err(Error::FutureRev);
        }
        let state = if request.revision <= 0 || request.revision > self.head() {
            &work.state
        } else if request.revision < self.compacted {
            return Err(Error::Compacted);
        } else {
            &self.states[request.revision as usize]
        };
        let mut kvs: Vec<KeyValue> = within(state, &request.key, &request.range_end)
            .cloned()
            .collect();
        let mut response = pb::RangeResponse {
            header: header(work.revision()),
            count: kvs.len() as i64,
            ..pb::RangeResponse::default()
        };
        if request.count_only {
            return Ok(response);
        }
        if request.limit > 0 && comes_in_order(request) && !is_filtered(request) {
            // One more than asked is read, and only that is sorted.
            kvs.truncate((request.limit as usize).saturating_add(1));
        }
        let [min_mod, max_mod, min_create, max_create] = filters(request);
        kvs.retain(|kv| {
            (max_mod == 0 || kv.mod_revision <= max_mod)
                && (min_mod == 0 || kv.mod_revision >= min_mod)
                && (max_create == 0 || kv.create_revision <= max_create)
                && (min_create == 0 || kv.create_revision >= min_create)
        });
        sort(&mut kvs, request);
        if request.limit > 0 && kvs.len() as i64 > request.limit {
            kvs.truncate(request.limit as usize);
            response.more = true;
        }
        if request.keys_only {
            for kv in &mut kvs {
                kv.value = Bytes::new();
                // The lease is where the value is, and who sorts by value has read it.
                if request.sort_target != SortTarget::Value as i32 {
                    kv.lease = 0;
                }
            }
        }
        response.kvs = kvs;
        Ok(response)
    }

    pub(super) fn txn(&mut self, request: &pb::TxnRequest) -> Refused<pb::TxnResponse> {
        check::txn(request)?;
        self.check_txn(request)?;
        let mut work = self.work();
        let mut response = self.execute(&mut work, request)?;
        response.header = header(work.revision());
        self.commit(work);
        Ok(response)
    }

    fn branch<'a>(&self, request: &'a pb::TxnRequest) -> (bool, &'a [pb::RequestOp]) {
        // Judged on the state before the transaction, at every depth.
        if request.compare.iter().all(|compare| self.holds(compare)) {
            (true, &request.success)
        } else {
            (false, &request.failure)
        }
    }

    fn check_txn(&self, request: &pb::TxnRequest) -> Result<(), Error> {
        for op in self.branch(request).1 {
            match &op.request {
                Some(Request::RequestRange(range)) if range.revision != 0 => {
                    if range.revision > self.head() {
                        return Err(Error::FutureRev);
                    }
                    if range.revision < self.compacted {
                        return Err(Error::Compacted);
                    }
                }
                Some(Request::RequestPut(put)) => self.check_put(put)?,
                Some(Request::RequestTxn(inner)) => self.check_txn(inner)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn execute(&self, work: &mut Work, request: &pb::TxnRequest) -> Result<pb::TxnResponse, Error> {
        let (succeeded, ops) = self.branch(request);
        let mut responses = Vec::new();
        for op in ops {
            let response = match op.request.as_ref().ok_or(Error::KeyNotFound)? {
                Request::RequestRange(range) => {
                    Response::ResponseRange(self.range_in(work, range)?)
                }
                Request::RequestPut(put) => Response::ResponsePut(work.put(put)),
                Request::RequestDeleteRange(delete) => {
                    Response::ResponseDeleteRange(work.delete_range(delete))
                }
                Request::RequestTxn(inner) => Response::ResponseTxn(self.execute(work, inner)?),
            };
            responses.push(pb::ResponseOp {
                response: Some(response),
            });
        }
        Ok(pb::TxnResponse {
            // Inside another only a shell.
            header: header(0),
            succeeded,
            responses,
        })
    }

    fn holds(&self, compare: &pb::Compare) -> bool {
        let found: Vec<&KeyValue> =
            within(self.state(), &compare.key, &compare.range_end).collect();
        if found.is_empty() {
            let by_value = compare.target == CompareTarget::Value as i32;
            return !by_value && holds_for(compare, &KeyValue::default());
        }
        found.into_iter().all(|kv| holds_for(compare, kv))
    }
}

fn is_filtered(request: &pb::RangeRequest) -> bool {
    filters(request).into_iter().any(|bound| bound != 0)
}

/// No order is the order of keys, whatever the target.
fn comes_in_order(request: &pb::RangeRequest) -> bool {
    let by_key = request.sort_target == SortTarget::Key as i32;
    request.sort_order == SortOrder::None as i32
        || (by_key && request.sort_order == SortOrder::Ascend as i32)
}

fn filters(request: &pb::RangeRequest) -> [i64; 4] {
    [
        request.min_mod_revision,
        request.max_mod_revision,
        request.min_create_revision,
        request.max_create_revision,
    ]
}

fn sort(kvs: &mut [KeyValue], request: &pb::RangeRequest) {
    let by = |a: &KeyValue, b: &KeyValue| match request.sort_target {
        1 => a.version.cmp(&b.version),
        2 => a.create_revision.cmp(&b.create_revision),
        3 => a.mod_revision.cmp(&b.mod_revision),
        4 => a.value.cmp(&b.value),
        _ => a.key.cmp(&b.key),
    };
    if request.sort_order == SortOrder::Descend as i32 {
        kvs.sort_by(|a, b| by(b, a));
    } else {
        kvs.sort_by(by);
    }
}

fn holds_for(compare: &pb::Compare, kv: &KeyValue) -> bool {
    // An operand of another target counts as zero.
    let number = |wanted: &Option<TargetUnion>| match (compare.target, wanted) {
        (0, Some(TargetUnion::Version(n)))
        | (1, Some(TargetUnion::CreateRevision(n)))
        | (2, Some(TargetUnion::ModRevision(n)))
        | (4, Some(TargetUnion::Lease(n))) => *n,
        _ => 0,
    };
    let operand = number(&compare.target_union);
    let order = match compare.target {
        0 => kv.version.cmp(&operand),
        1 => kv.create_revision.cmp(&operand),
        2 => kv.mod_revision.cmp(&operand),
        3 => match &compare.target_union {
            Some(TargetUnion::Value(value)) => kv.value.cmp(value),
            _ => kv.value.cmp(&Bytes::new()),
        },
        4 => kv.lease.cmp(&operand),
        _ => std::cmp::Ordering::Equal,
    };
    match CompareResult::try_from(compare.result) {
        Ok(CompareResult::Equal) => order.is_eq(),
        Ok(CompareResult::Greater) => order.is_gt(),
        Ok(CompareResult::Less) => order.is_lt(),
        Ok(CompareResult::NotEqual) => order.is_ne(),
        Err(_) => true,
    }
}
