//! One of three members has other data than the rest, with checksums that are right: every check finds it and only it, and it is
//! rebuilt from the leader.

use std::process::{Command, Output};

use ballast_api::{etcdserverpb as pb, mvccpb};
use ballast_storage::backend::{Batch, current};
use ballast_storage::schema::Table;
use bytes::Bytes;
use pb::alarm_request::AlarmAction;
use prost::Message as _;
use tonic::Code;

use crate::harness::{Cluster, Member, eventually};

const AT_START: &str = "--feature-gates=InitialCorruptCheck=true";
const WRONG: usize = 2;

/// Writes another value for `key` into the database of a member that does not run, as a faulty disk or program could: the engine
/// makes the checksums that belong to it.
fn alter(member: &Member, key: &str) {
    let dir = member.data_dir().join("member/db");
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

/// Three members, the last of them stopped and altered. Gives its id.
async fn altered(flags: &[&str]) -> (Cluster, u64) {
    let mut cluster = Cluster::start(3, flags).await;
    for i in 0..20 {
        let writer = &cluster.members[0];
        writer.put_eventually(&format!("k{i}"), "right").await;
    }
    cluster.agree().await;
    let id = cluster.members[WRONG].id().await;
    cluster.stop(WRONG).await;
    alter(&cluster.members[WRONG], "k7");
    (cluster, id)
}

fn alarm(action: AlarmAction, member_id: u64) -> pb::AlarmRequest {
    pb::AlarmRequest {
        action: action as i32,
        member_id,
        alarm: pb::AlarmType::Corrupt as i32,
    }
}

async fn alarmed(member: &Member) -> Vec<u64> {
    let told = member.maintenance().alarm(alarm(AlarmAction::Get, 0)).await;
    let alarms = told.map(|told| told.into_inner().alarms);
    let alarms = alarms.unwrap_or_default();
    alarms.into_iter().map(|alarm| alarm.member_id).collect()
}

async fn until_alarmed(cluster: &Cluster) -> Vec<u64> {
    eventually("an alarm", || async {
        Some(alarmed(&cluster.members[0]).await).filter(|ids| !ids.is_empty())
    })
    .await
}

fn rebuild(cluster: &Cluster, at: usize) -> Output {
    let member = &cluster.members[at];
    Command::new(env!("CARGO_BIN_EXE_ballast"))
        .env_clear()
        .arg("rebuild")
        .arg(format!("--name={}", member.name))
        .arg(format!("--data-dir={}", member.data_dir().display()))
        .output()
        .unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test]
async fn altered_data_refuses_the_start_is_found_at_intervals_and_is_rebuilt() {
    let (mut cluster, wrong) = altered(&["--corrupt-check-time=1s", AT_START]).await;
    cluster.run(WRONG, "new");
    let status = cluster.members[WRONG].ended().await;
    assert_eq!(status.code(), Some(1));
    let refused = format!("{wrong:x} found data inconsistency with peers");
    cluster.members[WRONG].logged(&refused).await;
    // Without the check it starts, and the leader finds it.
    cluster.add_flag("--feature-gates=InitialCorruptCheck=false");
    cluster.run(WRONG, "new");
    assert_eq!(until_alarmed(&cluster).await, [wrong]);
    // What the alarm means: nothing is written, reads go on.
    let refusal = cluster.members[0].put("k", "v").await.unwrap_err();
    let expected = (Code::DataLoss, "etcdserver: corrupt cluster");
    assert_eq!((refusal.code(), refusal.message()), expected);
    let read = cluster.members[0].get("k7").await.unwrap();
    assert_eq!(read.as_deref(), Some("right"));
    // A member that most agree with starts, whatever the third has.
    cluster.add_flag(AT_START);
    cluster.stop(1).await;
    cluster.run(1, "new");
    cluster.members[1]
        .logged("ready to serve client requests")
        .await;
    // While it runs it is not rebuilt.
    let output = rebuild(&cluster, WRONG);
    assert!(stderr(&output).contains("in use by another process"));
    cluster.stop(WRONG).await;
    let output = rebuild(&cluster, WRONG);
    assert!(output.status.success(), "{}", stderr(&output));
    cluster.run(WRONG, "new");
    cluster.members[WRONG]
        .logged("initial corruption checking passed")
        .await;
    assert_eq!(cluster.members[WRONG].id().await, wrong);
    let disarming = alarm(AlarmAction::Deactivate, wrong);
    let mut maintenance = cluster.members[0].maintenance();
    maintenance.alarm(disarming).await.unwrap();
    cluster.members[WRONG].put_eventually("k", "again").await;
    cluster.agree().await;
    let read = cluster.members[WRONG].get_serializable("k7").await.unwrap();
    assert_eq!(read.as_deref(), Some("right"));
    // It is checked again, and nothing is found.
    let leader = cluster.leader().await;
    let before = checks(&cluster.members[leader]);
    eventually("two more checks", || async {
        (checks(&cluster.members[leader]) >= before + 2).then_some(())
    })
    .await;
    assert!(alarmed(&cluster.members[0]).await.is_empty());
}

fn checks(member: &Member) -> usize {
    member
        .log()
        .matches("finished peer corruption check")
        .count()
}

#[tokio::test]
async fn altered_data_is_found_at_a_compaction_also_when_the_leader_has_it() {
    let flags = [
        "--feature-gates=CompactHashCheck=true",
        "--compact-hash-check-time=1s",
    ];
    let (mut cluster, wrong) = altered(&flags).await;
    cluster.run(WRONG, "new");
    cluster.members[WRONG]
        .logged("ready to serve client requests")
        .await;
    eventually("the altered member leads", || async {
        let leader = cluster.leader().await;
        if leader == WRONG {
            return Some(());
        }
        let moving = pb::MoveLeaderRequest { target_id: wrong };
        let mut maintenance = cluster.members[leader].maintenance();
        let _ = maintenance.move_leader(moving).await;
        None
    })
    .await;
    let compaction = pb::CompactionRequest {
        revision: 15,
        physical: true,
    };
    let mut kv = cluster.members[0].kv();
    kv.compact(compaction).await.unwrap();
    assert_eq!(until_alarmed(&cluster).await, [wrong]);
    // Nobody rebuilds from a leader that most others contradict.
    cluster.stop(1).await;
    let output = rebuild(&cluster, 1);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("most members do not agree with the leader"),
        "{}",
        stderr(&output)
    );
}
