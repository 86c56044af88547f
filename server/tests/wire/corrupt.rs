//! One of three members has other data than the rest, with checksums that are right: every check finds it, and only it.

use ballast_api::{etcdserverpb as pb, mvccpb};
use ballast_storage::backend::{Batch, current};
use ballast_storage::schema::Table;
use bytes::Bytes;
use pb::alarm_request::AlarmAction;
use prost::Message as _;
use tonic::Code;

use crate::harness::{eventually, get, put, refused};
use crate::three::Three;

const AT_START: &str = "--feature-gates=InitialCorruptCheck=true";

/// Writes another value for `key` into the database of a member that does not run, as a faulty disk or program could: the engine
/// makes the checksums that belong to it.
fn alter(three: &Three, member: usize, key: &str) {
    let dir = three.data_dir(member).join("member/db");
    let (kind, path) = current::find(&dir).unwrap();
    let engine = kind.open(&path, 1 << 20).unwrap();
    let (start, end) = ([Table::Key.prefix()], [Table::Key.prefix() + 1]);
    let records = engine.scan(&start, &end, usize::MAX).unwrap();
    let mut batch = Batch::default();
    for (at, stored) in records {
        let Ok(mut kv) = mvccpb::KeyValue::decode(stored) else {
            continue;
        };
        if kv.key == key {
            kv.value = Bytes::from_static(b"altered");
            batch.put(at, kv.encode_to_vec());
        }
    }
    assert!(!batch.ops.is_empty(), "no record of {key}");
    engine.write(&batch).unwrap();
}

async fn write_some(three: &Three) {
    let mut kv = three.kv(0).await;
    for i in 0..20 {
        kv.put(put(format!("k{i}"), "right")).await.unwrap();
    }
}

fn alarm(action: AlarmAction, member_id: u64) -> pb::AlarmRequest {
    pb::AlarmRequest {
        action: action as i32,
        member_id,
        alarm: pb::AlarmType::Corrupt as i32,
    }
}

async fn alarmed(three: &Three, asked: usize) -> Vec<u64> {
    let mut maintenance = three.maintenance(asked).await;
    let told = maintenance.alarm(alarm(AlarmAction::Get, 0)).await.unwrap();
    let alarms = told.into_inner().alarms;
    alarms.into_iter().map(|alarm| alarm.member_id).collect()
}

async fn until_alarmed(three: &Three) -> Vec<u64> {
    eventually("an alarm is raised", || async {
        Some(alarmed(three, 0).await).filter(|ids| !ids.is_empty())
    })
    .await
}

#[tokio::test]
async fn altered_data_refuses_the_start_and_is_found_at_intervals() {
    let mut three = Three::start("http", &["--corrupt-check-time=1s".to_owned()]);
    write_some(&three).await;
    let wrong = three.member_id(2).await;
    three.stop(2);
    alter(&three, 2, "k7");
    let output = three.fail_to_start(2, &[AT_START]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        told.contains(&format!("{wrong:x} found data inconsistency with peers")),
        "{told}"
    );
    // Without the check it starts, and the leader finds it.
    three.restart(2, &[]);
    assert_eq!(until_alarmed(&three).await, [wrong]);
    // What the alarm means: nothing is written, reads go on.
    let mut kv = three.kv(0).await;
    let answer = kv.put(put("k", "v")).await;
    refused(answer, Code::DataLoss, "etcdserver: corrupt cluster");
    kv.range(get("k7")).await.unwrap();
    // A member that most agree with starts whatever the third has.
    three.stop(1);
    three.restart(1, &[AT_START]);
}

#[tokio::test]
async fn altered_data_is_found_at_a_compaction_also_when_the_leader_has_it() {
    let mut three = Three::start(
        "http",
        &[
            "--feature-gates=CompactHashCheck=true".to_owned(),
            "--compact-hash-check-time=1s".to_owned(),
        ],
    );
    write_some(&three).await;
    let wrong = three.member_id(2).await;
    three.stop(2);
    alter(&three, 2, "k7");
    three.restart(2, &[]);
    let leader = eventually("there is a leader", || async {
        let leader = three.status(0).await.leader;
        (leader != 0).then_some(leader)
    })
    .await;
    if leader != wrong {
        let mut leading = 0;
        while three.member_id(leading).await != leader {
            leading += 1;
        }
        let moving = pb::MoveLeaderRequest { target_id: wrong };
        let mut maintenance = three.maintenance(leading).await;
        maintenance.move_leader(moving).await.unwrap();
    }
    let compaction = pb::CompactionRequest {
        revision: 15,
        physical: true,
    };
    three.kv(0).await.compact(compaction).await.unwrap();
    assert_eq!(until_alarmed(&three).await, [wrong]);
}
