//! The script written by hand: what random operations meet seldom or never.
//!
//! Groups are made up one after the other, each with the model as it then is, so that revisions can be told relative to the head.

use std::collections::VecDeque;

use ballast_api::etcdserverpb as pb;
use bytes::Bytes;
use pb::compare::{CompareResult, CompareTarget, TargetUnion};
use pb::range_request::SortTarget;
use pb::request_op::Request;

use super::model::Model;
use super::script::{Op, Step, TXN_OPS_MAX, op};

const LARGEST: i64 = 9_000_000_000;

/// The whole script, operation by operation.
pub fn edges() -> impl FnMut(&Model) -> Option<Op> {
    let mut groups = VecDeque::from(GROUPS);
    let mut queue = VecDeque::new();
    move |model| {
        while queue.is_empty() {
            queue.extend(groups.pop_front()?(model));
        }
        queue.pop_front()
    }
}

const GROUPS: [fn(&Model) -> Vec<Op>; 17] = [
    empty_store,
    compacting_nothing,
    odd_keys,
    odd_intervals,
    sorting,
    limits,
    streams,
    leases,
    a_lease_moves,
    what_a_put_keeps,
    written_twice,
    nested,
    compares,
    compaction_on_a_deletion,
    compacting_everything_away,
    watches,
    sizes,
];

fn get(key: impl Into<Bytes>, range_end: impl Into<Bytes>) -> pb::RangeRequest {
    pb::RangeRequest {
        key: key.into(),
        range_end: range_end.into(),
        ..pb::RangeRequest::default()
    }
}

fn all() -> pb::RangeRequest {
    get(&b"\0"[..], &b"\0"[..])
}

fn at(revision: i64) -> pb::RangeRequest {
    pb::RangeRequest { revision, ..all() }
}

fn put(key: impl Into<Bytes>, value: impl Into<Bytes>) -> pb::PutRequest {
    pb::PutRequest {
        key: key.into(),
        value: value.into(),
        prev_kv: true,
        ..pb::PutRequest::default()
    }
}

fn leased(key: &'static str, lease: i64) -> Op {
    Op::Put(pb::PutRequest {
        lease,
        ..put(key, "leased")
    })
}

fn delete(key: impl Into<Bytes>, range_end: impl Into<Bytes>) -> pb::DeleteRangeRequest {
    pb::DeleteRangeRequest {
        key: key.into(),
        range_end: range_end.into(),
        prev_kv: true,
    }
}

fn delete_all() -> Op {
    Op::Delete(delete(&b"\0"[..], &b"\0"[..]))
}

fn compact(revision: i64) -> Op {
    Op::Compact(pb::CompactionRequest {
        revision,
        physical: true,
    })
}

fn hash(revision: i64) -> Op {
    Op::HashKv(pb::HashKvRequest { revision })
}

fn txn(success: Vec<Request>) -> pb::TxnRequest {
    pb::TxnRequest {
        success: success.into_iter().map(op).collect(),
        ..pb::TxnRequest::default()
    }
}

fn watch(
    key: &'static str,
    range_end: &'static str,
    start_revision: i64,
) -> pb::WatchCreateRequest {
    pb::WatchCreateRequest {
        key: key.into(),
        range_end: range_end.into(),
        start_revision,
        prev_kv: true,
        ..pb::WatchCreateRequest::default()
    }
}

fn empty_store(_: &Model) -> Vec<Op> {
    let mut ops: Vec<Op> = [0, 1, 2, -1, i64::MIN, i64::MAX]
        .into_iter()
        .flat_map(|revision| [Op::Range(at(revision)), Op::RangeStream(at(revision))])
        .collect();
    ops.extend([0, 1, 2].map(hash));
    ops.extend([
        delete_all(),
        Op::Txn(pb::TxnRequest::default()),
        Op::Txn(txn(vec![Request::RequestDeleteRange(delete("none", ""))])),
        Op::Status,
        Op::Hash,
        Op::Members(pb::MemberListRequest { linearizable: true }),
        Op::Leases,
        Op::Snapshot,
        Op::Defragment,
    ]);
    ops
}

/// etcd-io/etcd#6567 and its like: the first compactions there can be.
fn compacting_nothing(_: &Model) -> Vec<Op> {
    let mut ops: Vec<Op> = [-1, 2, i64::MAX, 0, 0, 1, 1].map(compact).to_vec();
    ops.extend([hash(0), hash(1), Op::Range(at(1)), Op::Range(at(0))]);
    ops.push(Op::Watch(vec![
        Step::Create(watch("x", "", 1)),
        Step::Write(Op::Put(put("x", "1"))),
    ]));
    ops
}

/// P04: etcd-io/etcd#9833, #4697.
fn odd_keys(_: &Model) -> Vec<Op> {
    let keys: [&[u8]; 5] = [b"\0", b"p\xfe", b"p\xff", b"p\xff\xff", b"q"];
    let mut ops: Vec<Op> = keys.map(|key| Op::Put(put(key, "v"))).to_vec();
    ops.extend(
        [
            get("", ""),
            get("", &b"\0"[..]),
            all(),
            get(&b"p\xff"[..], "q"),
            get(&b"\xff"[..], &b"\0"[..]),
            get(&b"\0"[..], ""),
            get(&b"\0"[..], &b"\0\0"[..]),
        ]
        .into_iter()
        .flat_map(|range| [Op::Range(range.clone()), Op::RangeStream(range)]),
    );
    ops.extend([
        Op::Put(put("", "v")),
        Op::Delete(delete("", "")),
        Op::Delete(delete("", &b"\0"[..])),
        Op::Watch(vec![
            Step::Create(watch("", "\0", 1)),
            Step::Create(watch("", "", 1)),
            Step::Create(watch("", "b", 1)),
        ]),
    ]);
    ops
}

fn odd_intervals(_: &Model) -> Vec<Op> {
    let pairs = [
        ("q", "p"),
        ("q", "q"),
        ("q", "q\0"),
        ("zz", "\0"),
        ("a", "b"),
    ];
    let mut ops = Vec::new();
    for (key, end) in pairs {
        for count_only in [false, true] {
            ops.push(Op::Range(pb::RangeRequest {
                count_only,
                ..get(key, end)
            }));
        }
        ops.push(Op::RangeStream(get(key, end)));
        ops.push(Op::Watch(vec![Step::Create(watch(key, end, 2))]));
    }
    // Nothing is deleted, and the revision stays.
    ops.extend(
        [("q", "p"), ("p", "p"), ("zz", "\0")].map(|(key, end)| Op::Delete(delete(key, end))),
    );
    ops
}

fn sorting(model: &Model) -> Vec<Op> {
    let mut ops: Vec<Op> = [
        ("s/a", "2"),
        ("s/b", "1"),
        ("s/c", "2"),
        ("s/b", "2"),
        ("s/d", ""),
    ]
    .map(|(key, value)| Op::Put(put(key, value)))
    .to_vec();
    let head = model.head();
    for sort_order in -1..4 {
        for sort_target in -1..6 {
            let request = pb::RangeRequest {
                sort_order,
                sort_target,
                ..get("s/", "s0")
            };
            let few = pb::RangeRequest {
                limit: 2,
                keys_only: true,
                ..request.clone()
            };
            ops.extend([Op::Range(request.clone()), Op::Range(few)]);
            ops.push(Op::RangeStream(request));
        }
    }
    // Bounds that contradict each other, are negative, or are met exactly.
    for (min, max) in [
        (head + 2, head + 2),
        (head + 3, head + 1),
        (-1, -1),
        (0, head + 1),
    ] {
        ops.push(Op::Range(pb::RangeRequest {
            min_mod_revision: min,
            max_mod_revision: max,
            limit: 1,
            ..get("s/", "s0")
        }));
        ops.push(Op::Range(pb::RangeRequest {
            min_create_revision: min,
            max_create_revision: max,
            count_only: true,
            ..get("s/", "s0")
        }));
    }
    ops
}

fn limits(_: &Model) -> Vec<Op> {
    let mut ops = Vec::new();
    for limit in [0, 1, 3, 4, 5, -1, i64::MIN, i64::MAX] {
        for keys_only in [false, true] {
            let request = pb::RangeRequest {
                limit,
                keys_only,
                ..get("s/", "s0")
            };
            ops.extend([Op::Range(request.clone()), Op::RangeStream(request)]);
        }
    }
    ops
}

/// More keys than the first part of a stream has. With a sort target and no order each part is sorted for itself, and what is counted behind the
/// last part begins at its last key. By nothing of which keys have the same: so many equal ones come from etcd in an order of its own.
fn streams(_: &Model) -> Vec<Op> {
    const KEYS: usize = 40;
    let mut ops: Vec<Op> = (0..KEYS)
        .map(|n| Op::Put(put(format!("st/{n:02}"), format!("{:02}", KEYS - n))))
        .collect();
    for limit in [0, 9, 10, 11, 29, 30, 31, 39, 40] {
        for sort_target in [
            SortTarget::Key,
            SortTarget::Create,
            SortTarget::Mod,
            SortTarget::Value,
        ] {
            ops.push(Op::RangeStream(pb::RangeRequest {
                limit,
                sort_target: sort_target.into(),
                ..get("st/", "st0")
            }));
        }
    }
    ops
}

/// P17: etcd-io/etcd#9374, #14857, #19261.
fn leases(_: &Model) -> Vec<Op> {
    let grant = |id, ttl| Op::Grant(pb::LeaseGrantRequest { id, ttl });
    let revoke = |id| Op::Revoke(pb::LeaseRevokeRequest { id });
    let ttl = |id, keys| Op::TimeToLive(pb::LeaseTimeToLiveRequest { id, keys });
    let mut ops: Vec<Op> = [1, 0, -5, 2]
        .map(|ttl| Op::ShortLease(pb::LeaseGrantRequest { id: 40, ttl }))
        .to_vec();
    ops.extend([
        grant(41, LARGEST),
        grant(43, LARGEST + 1),
        grant(43, 86_400_000_000_000),
        grant(42, 1_000),
        grant(42, 1_000),
        // What is wrong with the time is told before what is wrong with the id.
        grant(42, LARGEST + 1),
        grant(-42, 1_000),
        grant(i64::MAX, 1_000),
        Op::Leases,
        ttl(777, false),
        ttl(777, true),
        ttl(0, true),
        ttl(-42, true),
        Op::KeepAlive(vec![777, 42, 0, -42, 42]),
        revoke(777),
        revoke(0),
        revoke(-42),
        revoke(-42),
        Op::TimeToLive(pb::LeaseTimeToLiveRequest {
            id: 42,
            keys: false,
        }),
        leased("l/none", 777),
        leased("l/none", -1),
        leased("l/zero", 0),
    ]);
    ops
}

/// P18: etcd-io/etcd#6102, #14758.
fn a_lease_moves(_: &Model) -> Vec<Op> {
    let grant = |id| Op::Grant(pb::LeaseGrantRequest { id, ttl: 10_000 });
    let ttl = |id| Op::TimeToLive(pb::LeaseTimeToLiveRequest { id, keys: true });
    let revoke = |id| Op::Revoke(pb::LeaseRevokeRequest { id });
    let keep = |key| {
        Op::Put(pb::PutRequest {
            ignore_lease: true,
            ..put(key, "again")
        })
    };
    let mut ops = vec![grant(1), grant(2)];
    ops.extend([
        leased("la/x", 1),
        leased("la/x", 0),
        leased("la/y", 1),
        leased("la/y", 2),
        leased("la/z", 1),
        keep("la/z"),
        leased("la/w", 1),
        Op::Delete(delete("la/w", "")),
        leased("la/w", 0),
        leased("la/v", 2),
        ttl(1),
        ttl(2),
        Op::Restart { kill: true },
        ttl(1),
        ttl(2),
        Op::Restart { kill: false },
        ttl(1),
        revoke(1),
        Op::Range(get("la/", "la0")),
        revoke(2),
        Op::Range(get("la/", "la0")),
        ttl(1),
        // The same id once more holds nothing.
        grant(1),
        ttl(1),
        revoke(1),
    ]);
    ops
}

fn what_a_put_keeps(_: &Model) -> Vec<Op> {
    let keep = |key: &'static str, value, lease, flags: (bool, bool)| {
        Op::Put(pb::PutRequest {
            lease,
            ignore_value: flags.0,
            ignore_lease: flags.1,
            ..put(key, value)
        })
    };
    vec![
        keep("keep", "", 0, (true, false)),
        keep("keep", "", 0, (false, true)),
        Op::Put(put("keep", "1")),
        keep("keep", "x", 0, (true, false)),
        keep("keep", "", 42, (false, true)),
        keep("keep", "", 777, (true, false)),
        keep("keep", "", 42, (true, false)),
        keep("keep", "2", 0, (false, true)),
        keep("keep", "", 0, (true, true)),
        keep("keep", "", 0, (true, false)),
        Op::Range(get("keep", "")),
        Op::Delete(delete("keep", "")),
        keep("keep", "", 0, (true, true)),
        // A key that comes again begins anew.
        Op::Put(put("keep", "3")),
        Op::Range(get("keep", "")),
    ]
}

fn written_twice(_: &Model) -> Vec<Op> {
    let p = |key: &'static str| Request::RequestPut(put(key, "w"));
    let d = |key: &'static str, end: &'static str| Request::RequestDeleteRange(delete(key, end));
    let n = |then: Vec<Request>, otherwise: Vec<Request>| {
        Request::RequestTxn(pb::TxnRequest {
            failure: otherwise.into_iter().map(op).collect(),
            ..txn(then)
        })
    };
    let lists = vec![
        vec![p("w/a"), p("w/b")],
        vec![p("w/a"), p("w/a")],
        vec![p("w/a"), d("w/a", "")],
        vec![d("w/a", ""), p("w/a")],
        vec![p("w/b"), d("w/a", "w/c")],
        vec![p("w/c"), d("w/a", "w/c")],
        vec![p("w/a"), d("w/a", "w/a")],
        vec![p("w/b"), d("w/c", "w/a")],
        // "To the end" is not seen by the check; here it deletes nothing.
        vec![d("zzz", "\0"), p("zzzz")],
        vec![d("w/a", "w/c"), d("w/b", "w/d")],
        vec![p("w/a"), n(vec![p("w/a")], vec![])],
        vec![n(vec![p("w/a")], vec![p("w/a")])],
        vec![n(vec![p("w/a")], vec![]), n(vec![], vec![p("w/a")])],
        vec![n(vec![p("w/e")], vec![]), n(vec![d("w/e", "")], vec![])],
        vec![n(vec![d("w/e", "")], vec![]), n(vec![p("w/e")], vec![])],
        vec![d("w/a", ""), n(vec![], vec![p("w/a")])],
        vec![p("w/b"), n(vec![d("w/a", "w/c")], vec![])],
        vec![n(
            vec![n(vec![p("w/f")], vec![])],
            vec![n(vec![p("w/f")], vec![])],
        )],
        vec![n(vec![p("w/f"), n(vec![p("w/f")], vec![])], vec![])],
        vec![Request::RequestPut(pb::PutRequest {
            ignore_lease: true,
            ..put("w/none", "")
        })],
        vec![p("w/g"), Request::RequestPut(put("", "v"))],
        vec![p("w/g"), d("", "")],
        vec![p("w/g"), Request::RequestRange(get("", ""))],
        vec![
            p("w/g"),
            Request::RequestPut(pb::PutRequest {
                lease: 777,
                ..put("w/h", "")
            }),
        ],
    ];
    let mut ops = Vec::new();
    for list in lists {
        ops.push(Op::Txn(txn(list.clone())));
        ops.push(Op::Txn(pb::TxnRequest {
            compare: vec![pb::Compare {
                key: "w/none".into(),
                target: CompareTarget::Version.into(),
                result: CompareResult::Greater.into(),
                ..pb::Compare::default()
            }],
            success: Vec::new(),
            failure: list.into_iter().map(op).collect(),
        }));
    }
    ops.push(Op::Txn(pb::TxnRequest {
        success: vec![pb::RequestOp { request: None }],
        ..pb::TxnRequest::default()
    }));
    ops.push(Op::Range(get("w/", "w0")));
    ops
}

fn nested(model: &Model) -> Vec<Op> {
    let p = |n: usize| Request::RequestPut(put(format!("n/{n:02}"), "v"));
    let range = |revision| {
        Request::RequestRange(pb::RangeRequest {
            revision,
            ..get("n/", "n0")
        })
    };
    let mut ops = Vec::new();
    // Depth takes one of the operations allowed each time.
    for depth in [
        TXN_OPS_MAX - 2,
        TXN_OPS_MAX - 1,
        TXN_OPS_MAX,
        TXN_OPS_MAX + 1,
        40,
    ] {
        let mut deep = txn(vec![p(0)]);
        for _ in 0..depth {
            deep = txn(vec![Request::RequestTxn(deep)]);
        }
        ops.push(Op::Txn(deep));
    }
    for count in [TXN_OPS_MAX, TXN_OPS_MAX + 1] {
        ops.push(Op::Txn(txn((0..count).map(p).collect())));
        ops.push(Op::Txn(txn(vec![Request::RequestTxn(txn((1..count)
            .map(p)
            .collect()))])));
    }
    // Reads between writes, at revisions before, at and after the transaction's own.
    let head = model.head();
    for revision in [0, -1, 1, head, head + 1_000] {
        ops.push(Op::Txn(txn(vec![
            range(revision),
            Request::RequestDeleteRange(delete("n/", "n0")),
            range(revision),
            Request::RequestTxn(txn(vec![p(50), range(revision)])),
            p(51),
            range(revision),
        ])));
        ops.push(Op::Txn(txn(vec![range(revision)])));
    }
    ops.push(Op::Delete(delete("n/", "n0")));
    ops
}

/// P01: etcd-io/etcd#19678, and the like.
fn compares(_: &Model) -> Vec<Op> {
    let mut ops = vec![Op::Put(put("c/a", "")), Op::Put(put("c/b", "1"))];
    let operands = [
        None,
        Some(TargetUnion::Version(1)),
        Some(TargetUnion::CreateRevision(1)),
        Some(TargetUnion::ModRevision(-1)),
        Some(TargetUnion::Value("".into())),
        Some(TargetUnion::Value("1".into())),
        Some(TargetUnion::Lease(0)),
    ];
    for (key, range_end) in [
        ("c/none", ""),
        ("c/a", ""),
        ("c/a", "c0"),
        ("c/c", "c/a"),
        ("c/", "\0"),
    ] {
        for target in -1..6 {
            for result in -1..5 {
                let compare = operands.clone().map(|target_union| pb::Compare {
                    result,
                    target,
                    key: key.into(),
                    range_end: range_end.into(),
                    target_union,
                });
                // One transaction for each operand would be many: nested ones answer each for itself.
                let each = compare.map(|compare| {
                    Request::RequestTxn(pb::TxnRequest {
                        compare: vec![compare],
                        ..pb::TxnRequest::default()
                    })
                });
                ops.push(Op::Txn(txn(each.to_vec())));
            }
        }
    }
    ops.push(Op::Txn(pb::TxnRequest {
        compare: vec![pb::Compare::default()],
        ..pb::TxnRequest::default()
    }));
    ops.push(Op::Delete(delete("c/", "c0")));
    ops
}

/// P07, P12, P13, P14: etcd-io/etcd#18089, #6567, #14325; kine#215.
fn compaction_on_a_deletion(model: &Model) -> Vec<Op> {
    let head = model.head();
    let gone = head + 3;
    let mut ops = vec![
        Op::Put(put("kb/a", "1")),
        Op::Put(put("kb/b", "1")),
        Op::Delete(delete("kb/a", "")),
        hash(gone),
        hash(gone - 1),
        compact(gone),
    ];
    let look = |ops: &mut Vec<Op>| {
        ops.push(Op::Watch(vec![
            Step::Create(watch("kb/", "kb0", gone)),
            Step::Create(watch("kb/", "kb0", gone - 1)),
            Step::Create(watch("kb/", "kb0", gone + 1)),
        ]));
        for revision in [gone - 1, gone, gone + 1, 0] {
            ops.push(Op::Range(at(revision)));
            ops.push(Op::RangeStream(at(revision)));
            ops.push(Op::Txn(txn(vec![Request::RequestRange(at(revision))])));
        }
        ops.extend([hash(0), hash(gone - 1), hash(gone + 1)]);
    };
    ops.push(hash(gone));
    look(&mut ops);
    ops.extend([compact(gone), compact(gone - 1), compact(gone + 1)]);
    ops.push(Op::Restart { kill: false });
    look(&mut ops);
    ops.push(Op::Restart { kill: true });
    look(&mut ops);
    // A revision before that of a key that is still there.
    ops.extend([
        Op::Put(put("kb/b", "2")),
        Op::Put(put("kb/b", "3")),
        compact(gone + 1),
        Op::Range(at(gone + 1)),
        Op::Watch(vec![Step::Create(watch("kb/b", "", gone + 1))]),
        hash(0),
    ]);
    ops
}

/// A store of which nothing is left: hashes count what the compaction before it kept.
fn compacting_everything_away(model: &Model) -> Vec<Op> {
    let gone = model.head() + 1;
    vec![
        delete_all(),
        hash(0),
        compact(gone),
        hash(0),
        hash(gone),
        Op::Range(all()),
        Op::Put(put("e/1", "v")),
        Op::Delete(delete("e/1", "")),
        compact(gone + 1),
        hash(0),
        compact(gone + 2),
        hash(gone + 1),
        hash(0),
        Op::Restart { kill: true },
        hash(0),
        Op::Range(at(gone + 2)),
        Op::Range(at(gone + 1)),
        Op::Put(put("e/1", "v")),
    ]
}

fn watches(model: &Model) -> Vec<Op> {
    let head = model.head();
    let create = |watch: pb::WatchCreateRequest| Step::Create(watch);
    let with_id = |watch_id| pb::WatchCreateRequest {
        watch_id,
        ..watch("o/", "o0", 0)
    };
    let filtered = |filters: &[i32]| pb::WatchCreateRequest {
        filters: filters.to_vec(),
        ..watch("o/", "o0", head)
    };
    let write = |key: &'static str| Step::Write(Op::Put(put(key, "v")));
    let erase = |key: &'static str| Step::Write(Op::Delete(delete(key, "")));
    vec![
        // Ids that are chosen, taken, given back and taken again.
        Op::Watch(vec![
            create(with_id(0)),
            create(with_id(1)),
            create(with_id(0)),
            create(with_id(1)),
            create(with_id(-7)),
            create(with_id(i64::MAX)),
            write("o/a"),
            Step::Cancel(1),
            Step::Cancel(1),
            Step::Cancel(99),
            create(with_id(1)),
            create(with_id(0)),
            erase("o/a"),
            Step::Progress,
            write("o/a"),
        ]),
        // Filters, of both kinds, doubled, unknown; live and from history.
        Op::Watch(vec![
            create(filtered(&[])),
            create(filtered(&[0])),
            create(filtered(&[1])),
            create(filtered(&[0, 1])),
            create(filtered(&[1, 1])),
            create(filtered(&[7])),
            write("o/b"),
            erase("o/b"),
            erase("o/none"),
        ]),
        // Starts: refused, compacted, now, of the future, and never.
        Op::Watch(vec![
            create(watch("o/", "o0", -1)),
            create(watch("o/", "o0", i64::MIN)),
            create(watch("o/", "o0", 1)),
            create(watch("o/", "o0", model.compacted())),
            create(watch("o/", "o0", model.compacted() - 1)),
            create(watch("o/", "o0", head + 6)),
            create(watch("o/", "o0", head + 9)),
            create(watch("o/", "o0", i64::MAX)),
            create(watch("o/z", "o/a", 0)),
            create(watch("o/z", "o/z", 0)),
            write("o/c"),
            write("o/c"),
            write("o/c"),
            write("o/c"),
            Step::Cancel(0),
            Step::Cancel(1),
        ]),
        // A compaction while watches are open takes nothing from who was told already.
        Op::Watch(vec![
            create(watch("o/", "o0", 0)),
            write("o/d"),
            write("o/d"),
            Step::Write(compact(model.compacted() + 1)),
            create(watch("o/", "o0", model.compacted())),
            create(watch("o/", "o0", model.compacted() + 1)),
            write("o/d"),
        ]),
        // One transaction is one revision, whatever it writes.
        Op::Watch(vec![
            create(watch("o/", "o0", 0)),
            create(watch("o/e", "", 0)),
            Step::Write(Op::Txn(txn(vec![
                Request::RequestPut(put("o/e", "1")),
                Request::RequestPut(put("o/f", "1")),
                Request::RequestDeleteRange(delete("o/c", "o/e")),
            ]))),
            Step::Write(Op::Txn(txn(vec![
                Request::RequestTxn(txn(vec![Request::RequestPut(put("o/g", "1"))])),
                Request::RequestTxn(txn(vec![Request::RequestDeleteRange(delete("o/g", ""))])),
            ]))),
            create(watch("o/", "o0", head + 1)),
        ]),
    ]
}

/// P05: etcd-io/etcd#10749.
fn sizes(_: &Model) -> Vec<Op> {
    let of = |bytes: usize| put("size", vec![b's'; bytes]);
    let mut ops: Vec<Op> = [60_000, 70_000, 500_000, 620_000, 3_000_000]
        .into_iter()
        .flat_map(|bytes| {
            [
                Op::Put(of(bytes)),
                Op::Txn(txn(vec![Request::RequestPut(of(bytes))])),
                // What is wrong in itself is told before what is too large.
                Op::Put(pb::PutRequest {
                    ignore_value: true,
                    ..of(bytes)
                }),
            ]
        })
        .collect();
    ops.extend([Op::Range(get("size", "")), Op::Delete(delete("size", ""))]);
    ops
}
