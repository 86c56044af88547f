//! Defragmentation without anyone asking: by the rule, and before the quota would be reached.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ballast_api::etcdserverpb as pb;
use tonic::Code;

use crate::harness::{Server, eventually, get, prefix, put, refused};
use crate::http::http_get;

const NO_SPACE: &str = "etcdserver: mvcc: database space exceeded";
const MIB: i64 = 1 << 20;

async fn status(server: &Server) -> pb::StatusResponse {
    let mut maintenance = server.maintenance().await;
    let told = maintenance.status(pb::StatusRequest {}).await.unwrap();
    told.into_inner()
}

/// Writes `count` values of 100 KB; gives the revision afterwards.
async fn fill(server: &Server, name: &str, count: usize) -> i64 {
    let mut kv = server.kv().await;
    let mut revision = 0;
    for i in 0..count {
        let written = kv.put(put(format!("{name}/{i:04}"), vec![b'x'; 100_000]));
        revision = written.await.unwrap().into_inner().header.unwrap().revision;
    }
    revision
}

async fn delete(server: &Server, name: &str) {
    delete_up_to(server, &format!("{name}/"), &format!("{name}0")).await;
}

/// All of what `fill` wrote but the last values: they lie at the end of the file, which keeps the engine from cutting off
/// what is free there.
async fn delete_but_five(server: &Server, name: &str, count: usize) {
    let end = format!("{name}/{:04}", count - 5);
    delete_up_to(server, &format!("{name}/"), &end).await;
}

async fn delete_up_to(server: &Server, key: &str, range_end: &str) {
    let request = pb::DeleteRangeRequest {
        key: key.to_owned().into(),
        range_end: range_end.to_owned().into(),
        prev_kv: false,
    };
    server.kv().await.delete_range(request).await.unwrap();
}

async fn compact(server: &Server) {
    let mut kv = server.kv().await;
    let head = kv.range(get("a")).await.unwrap().into_inner();
    let request = pb::CompactionRequest {
        revision: head.header.unwrap().revision,
        physical: true,
    };
    kv.compact(request).await.unwrap();
}

fn metric(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0, |value| value.trim().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_empty_database_shrinks_by_itself_while_it_is_used() {
    let server = Server::start_with(&["--auto-defrag", "size=8MiB,free=70%,interval=1s"]);
    fill(&server, "fill", 150).await;
    let before = status(&server).await.db_size;
    assert!(before > 14 * MIB, "{before}");

    let stop = Arc::new(AtomicBool::new(false));
    let written = Arc::new(AtomicU64::new(0));
    let mut kv = server.kv().await;
    let busy = tokio::spawn({
        let (stop, written) = (Arc::clone(&stop), Arc::clone(&written));
        async move {
            while !stop.load(Ordering::Relaxed) {
                let i = written.load(Ordering::Relaxed);
                let key = format!("busy/{i:06}");
                kv.put(put(key.clone(), i.to_string())).await.unwrap();
                let found = kv.range(prefix(&key)).await.unwrap().into_inner();
                assert_eq!(found.kvs[0].value, i.to_string());
                written.store(i + 1, Ordering::Relaxed);
            }
        }
    });
    delete_but_five(&server, "fill", 150).await;
    compact(&server).await;
    eventually("the file shrinks", || async {
        (status(&server).await.db_size < 8 * MIB).then_some(())
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    busy.await.unwrap();
    eventually("the run is counted", || async {
        let (_, metrics) = http_get(&server, "/metrics").await;
        let by_rule = r#"ballast_defragmentations_total{cause="rule",outcome="done"}"#;
        let ended = metric(&metrics, "etcd_disk_defrag_inflight") == 0;
        (ended && metric(&metrics, by_rule) >= 1).then_some(())
    })
    .await;

    let written = written.load(Ordering::Relaxed);
    let mut server = server;
    server.kill_and_restart();
    let mut kv = server.kv().await;
    let found = kv.range(prefix("busy/")).await.unwrap().into_inner();
    assert_eq!(found.count as u64, written);
    for (i, kv) in found.kvs.iter().enumerate() {
        assert_eq!(
            (kv.value.as_ref(), kv.version),
            (i.to_string().as_bytes(), 1)
        );
    }
}

/// The quota is reached by what compaction gave up: the put waits for the space, and there is no alarm.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_returns_space_rather_than_raise_nospace() {
    let mut server =
        Server::start_with(&["--quota-backend-bytes", "16777216", "--auto-defrag", "off"]);
    // A value takes 128 KiB of the file: all but a tenth of the quota, of which nearly all is given up.
    fill(&server, "first", 122).await;
    delete_but_five(&server, "first", 122).await;
    compact(&server).await;
    // More than is left between the file and the quota.
    let mut kv = server.kv().await;
    let large = put("large", vec![b'x'; 1_000_000]);
    kv.put(large).await.unwrap();
    // More than the quota in all.
    for round in 0..3 {
        let name = format!("round{round}");
        fill(&server, &name, 60).await;
        delete(&server, &name).await;
        compact(&server).await;
    }
    let told = status(&server).await;
    assert!(
        told.errors.is_empty() && told.db_size < 16 * MIB,
        "{told:?}"
    );
    eventually("a run is counted", || async {
        let (_, metrics) = http_get(&server, "/metrics").await;
        let for_quota = r#"ballast_defragmentations_total{cause="quota",outcome="done"}"#;
        (metric(&metrics, for_quota) >= 1).then_some(())
    })
    .await;
    server.restart();
    fill(&server, "after", 10).await;
}

/// What lives does not fit: the alarm, after a restart too, until it is disarmed.
#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_raises_the_alarm_which_outlives_a_restart() {
    let mut server = Server::start_with(&["--quota-backend-bytes", "4194304"]);
    let mut kv = server.kv().await;
    let mut written = 0;
    let refusal = loop {
        match kv
            .put(put(format!("live/{written}"), vec![b'x'; 100_000]))
            .await
        {
            Ok(_) => written += 1,
            Err(status) => break status,
        }
        assert!(written < 100, "the quota never held");
    };
    assert_eq!(
        (refusal.code(), refusal.message()),
        (Code::ResourceExhausted, NO_SPACE)
    );
    let errors = status(&server).await.errors;
    let member = status(&server).await.header.unwrap().member_id;
    assert_eq!(errors, [format!("memberID:{member} alarm:NOSPACE")]);
    // Room alone changes nothing.
    delete(&server, "live").await;
    compact(&server).await;
    let mut maintenance = server.maintenance().await;
    maintenance
        .defragment(pb::DefragmentRequest {})
        .await
        .unwrap();
    for round in ["running", "restarted", "killed"] {
        let mut kv = server.kv().await;
        refused(
            kv.put(put("a", "v")).await,
            Code::ResourceExhausted,
            NO_SPACE,
        );
        let told = status(&server).await.errors;
        // A member that was just started may not have a leader yet.
        let alarms: Vec<&String> = told.iter().filter(|text| text.contains("alarm")).collect();
        assert_eq!(alarms, [&errors[0]], "{round}");
        match round {
            "running" => server.restart(),
            _ => server.kill_and_restart(),
        }
    }
    let mut maintenance = server.maintenance().await;
    let alarm = pb::AlarmRequest {
        action: pb::alarm_request::AlarmAction::Deactivate as i32,
        member_id: member,
        alarm: pb::AlarmType::Nospace as i32,
    };
    maintenance.alarm(alarm).await.unwrap();
    server.restart();
    server.kv().await.put(put("a", "v")).await.unwrap();
}

/// etcd answers all of them, one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn defragmentations_asked_for_at_once_all_answer() {
    let server = Server::start();
    fill(&server, "fill", 50).await;
    delete(&server, "fill").await;
    compact(&server).await;
    let asked: Vec<_> = (0..8)
        .map(|_| {
            let channel = server.channel();
            async move {
                let channel = channel.await;
                let mut maintenance = pb::maintenance_client::MaintenanceClient::new(channel);
                maintenance.defragment(pb::DefragmentRequest {}).await
            }
        })
        .collect();
    for answer in futures::future::join_all(asked).await {
        assert_eq!(answer.unwrap().into_inner().header, None);
    }
    let (_, metrics) = http_get(&server, "/metrics").await;
    let runs = metric(
        &metrics,
        r#"ballast_defragmentations_total{cause="asked",outcome="done"}"#,
    );
    // Those that came while one ran shared the next.
    assert!((1..8).contains(&runs), "{runs} runs");
    assert!(status(&server).await.db_size < 2 * MIB);
}
