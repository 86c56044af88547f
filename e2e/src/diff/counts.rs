//! How often each call was made, with what, and how often it was refused.
//!
//! Promises: operations inside transactions and watch sessions count under their own names ("txn.put"), so that the first column is of
//! calls over the wire. Not here: what scripts hold.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use ballast_api::etcdserverpb as pb;
use pb::request_op::Request;

use super::perform::Answer;
use super::script::{Op, Step};

/// What a full run makes each call at least.
pub const CALLS_MIN: u64 = 200;

/// The calls that a full run must make.
const CALLS: [&str; 20] = [
    "Range",
    "RangeStream",
    "Put",
    "DeleteRange",
    "Txn",
    "Compact",
    "LeaseGrant",
    "LeaseRevoke",
    "LeaseKeepAlive",
    "LeaseTimeToLive",
    "LeaseLeases",
    "Watch",
    "HashKV",
    "Hash",
    "Status",
    "Alarm",
    "Snapshot",
    "Defragment",
    "MemberList",
    "Downgrade",
];

#[derive(Clone, Debug, Default)]
pub struct Counts {
    calls: BTreeMap<&'static str, u64>,
    /// By call and what was asked or answered.
    options: BTreeMap<(&'static str, String), u64>,
}

impl Counts {
    pub fn add(&mut self, op: &Op, answer: &Answer) {
        let call = self.op(op);
        if !answer.code.is_empty() {
            self.option(call, format!("-> {}", answer.code));
        }
    }

    pub fn merge(&mut self, other: Self) {
        for (call, count) in other.calls {
            *self.calls.entry(call).or_default() += count;
        }
        for (option, count) in other.options {
            *self.options.entry(option).or_default() += count;
        }
    }

    /// One line a call: how often, then the options.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (call, count) in &self.calls {
            let options = self.options.iter().filter(|((of, _), _)| of == call);
            let told: Vec<String> = options
                .map(|((_, option), count)| format!("{option} {count}"))
                .collect();
            lines.push(format!("{call:<16} {count:>7}  {}", told.join(", ")));
        }
        lines
    }

    /// An error when a call was made too seldom.
    pub fn check(&self) -> Result<()> {
        for call in CALLS {
            let count = self.calls.get(call).copied().unwrap_or(0);
            if count < CALLS_MIN {
                bail!("{call} was called {count} times, less than {CALLS_MIN}");
            }
        }
        Ok(())
    }

    fn option(&mut self, call: &'static str, option: impl Into<String>) {
        *self.options.entry((call, option.into())).or_default() += 1;
    }

    fn options_if(&mut self, call: &'static str, options: &[(bool, &str)]) {
        for (set, option) in options {
            if *set {
                self.option(call, *option);
            }
        }
    }

    fn call(&mut self, call: &'static str) -> &'static str {
        *self.calls.entry(call).or_default() += 1;
        call
    }

    fn op(&mut self, op: &Op) -> &'static str {
        match op {
            Op::Range(request) => self.range("Range", request),
            Op::RangeStream(request) => self.range("RangeStream", request),
            Op::Put(request) => self.put("Put", request),
            Op::Delete(request) => self.delete("DeleteRange", request),
            Op::Txn(request) => {
                let call = self.call("Txn");
                self.txn(call, request, 1);
                call
            }
            Op::Compact(request) => {
                let call = self.call("Compact");
                self.options_if(call, &[(request.physical, "physical")]);
                call
            }
            Op::Grant(_) => self.call("LeaseGrant"),
            Op::ShortLease(_) => {
                self.call("LeaseRevoke");
                let call = self.call("LeaseGrant");
                self.option(call, "below the minimum");
                call
            }
            Op::Revoke(_) => self.call("LeaseRevoke"),
            Op::KeepAlive(ids) => {
                let call = self.call("LeaseKeepAlive");
                self.option(call, format!("{} on a stream", ids.len()));
                call
            }
            Op::TimeToLive(request) => {
                let call = self.call("LeaseTimeToLive");
                self.options_if(call, &[(request.keys, "keys")]);
                call
            }
            Op::Leases => self.call("LeaseLeases"),
            Op::HashKv(request) => {
                let call = self.call("HashKV");
                self.options_if(call, &[(request.revision != 0, "revision")]);
                call
            }
            Op::Hash => self.call("Hash"),
            Op::Status => self.call("Status"),
            Op::Alarms(request) => {
                let call = self.call("Alarm");
                self.option(call, format!("kind {}", request.alarm));
                call
            }
            Op::Snapshot => self.call("Snapshot"),
            Op::Defragment => self.call("Defragment"),
            Op::Members(request) => {
                let call = self.call("MemberList");
                self.options_if(call, &[(request.linearizable, "linearizable")]);
                call
            }
            Op::Downgrade(_) => self.call("Downgrade"),
            Op::Watch(steps) => self.watch(steps),
            Op::Restart { kill } => {
                let call = self.call("(restart)");
                self.option(call, if *kill { "SIGKILL" } else { "SIGTERM" });
                call
            }
        }
    }

    fn interval(&mut self, call: &'static str, key: &[u8], end: &[u8]) {
        let kind = match (key, end) {
            ([], _) => "empty key",
            (_, []) => "one key",
            ([0], [0]) => "all keys",
            (_, [0]) => "from key",
            (key, end) if end <= key => "empty interval",
            _ => "interval",
        };
        self.option(call, kind);
    }

    fn range(&mut self, call: &'static str, request: &pb::RangeRequest) -> &'static str {
        self.call(call);
        self.interval(call, &request.key, &request.range_end);
        if (request.sort_target, request.sort_order) != (0, 0) {
            let target = request.sort_target().as_str_name();
            let order = request.sort_order().as_str_name();
            self.option(call, format!("sort {target} {order}"));
        }
        self.options_if(
            call,
            &[
                (request.limit > 0, "limit"),
                (request.limit < 0, "limit below 0"),
                (request.revision > 0, "revision"),
                (request.revision < 0, "revision below 0"),
                (request.serializable, "serializable"),
                (request.keys_only, "keys_only"),
                (request.count_only, "count_only"),
                (request.min_mod_revision != 0, "min_mod_revision"),
                (request.max_mod_revision != 0, "max_mod_revision"),
                (request.min_create_revision != 0, "min_create_revision"),
                (request.max_create_revision != 0, "max_create_revision"),
            ],
        );
        call
    }

    fn put(&mut self, call: &'static str, request: &pb::PutRequest) -> &'static str {
        self.call(call);
        self.options_if(
            call,
            &[
                (request.key.is_empty(), "empty key"),
                (request.value.is_empty(), "empty value"),
                (request.value.len() > 10_000, "large value"),
                (request.lease != 0, "lease"),
                (request.prev_kv, "prev_kv"),
                (request.ignore_value, "ignore_value"),
                (request.ignore_lease, "ignore_lease"),
            ],
        );
        call
    }

    fn delete(&mut self, call: &'static str, request: &pb::DeleteRangeRequest) -> &'static str {
        self.call(call);
        self.interval(call, &request.key, &request.range_end);
        self.options_if(call, &[(request.prev_kv, "prev_kv")]);
        call
    }

    fn txn(&mut self, call: &'static str, request: &pb::TxnRequest, depth: usize) {
        if depth == 1 {
            let ops = || request.success.iter().chain(&request.failure);
            let ranges = ops().filter(|op| matches!(op.request, Some(Request::RequestRange(_))));
            self.options_if(call, &[(ranges.count() == ops().count(), "read-only")]);
        }
        for compare in &request.compare {
            let target = compare.target().as_str_name();
            let result = compare.result().as_str_name();
            self.option(call, format!("{target} {result}"));
            self.options_if(
                call,
                &[(!compare.range_end.is_empty(), "compare of a range")],
            );
        }
        for op in request.success.iter().chain(&request.failure) {
            match &op.request {
                Some(Request::RequestRange(inner)) => {
                    self.range("  txn.range", inner);
                }
                Some(Request::RequestPut(inner)) => {
                    self.put("  txn.put", inner);
                }
                Some(Request::RequestDeleteRange(inner)) => {
                    self.delete("  txn.delete", inner);
                }
                Some(Request::RequestTxn(inner)) => {
                    let inner_call = self.call("  txn.txn");
                    self.option(inner_call, format!("depth {}", (depth + 1).min(5)));
                    self.txn(inner_call, inner, depth + 1);
                }
                None => self.option(call, "empty operation"),
            }
        }
    }

    fn watch(&mut self, steps: &[Step]) -> &'static str {
        let call = self.call("Watch");
        for step in steps {
            match step {
                Step::Create(request) => self.create(request),
                Step::Cancel(_) => {
                    self.call("  watch.cancel");
                }
                Step::Progress => {
                    self.call("  watch.progress");
                }
                // It may be left out.
                Step::Write(Op::Compact(_)) => {}
                Step::Write(op) => {
                    self.op(op);
                    self.option(call, "write meanwhile");
                }
            }
        }
        call
    }

    fn create(&mut self, request: &pb::WatchCreateRequest) {
        let call = self.call("  watch.create");
        self.interval(call, &request.key, &request.range_end);
        self.options_if(
            call,
            &[
                (request.start_revision > 0, "start_revision"),
                (request.start_revision < 0, "start_revision below 0"),
                (request.prev_kv, "prev_kv"),
                (request.fragment, "fragment"),
                (request.progress_notify, "progress_notify"),
                (request.watch_id != 0, "watch_id"),
                (request.filters.contains(&0), "NOPUT"),
                (request.filters.contains(&1), "NODELETE"),
            ],
        );
    }
}
