//! P16: a wall clock that jumps does nothing to leases, which live by the monotonic clock.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_api::etcdserverpb::{
    DefragmentRequest, LeaseGrantRequest, LeaseTimeToLiveRequest, PutRequest, RangeRequest,
};
use ballast_e2e::packages;
use ballast_e2e::store_server::{Client, Program, StoreServer};
use ballast_e2e::up::say;
use ballast_e2e::wait;

const TTL_SECS: i64 = 12;
/// A lease may be found out late, by a sweep each half second and a busy machine.
const LATE: Duration = Duration::from_secs(6);

fn library() -> Result<PathBuf> {
    packages::ensure_named(&["libfaketime"])?;
    let path = Path::new("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1");
    ensure!(path.exists(), "{} is not there", path.display());
    Ok(path.to_owned())
}

async fn remaining(client: &Client, id: i64) -> Result<i64> {
    let request = LeaseTimeToLiveRequest { id, keys: false };
    let answer = client.lease.clone().lease_time_to_live(request).await?;
    Ok(answer.into_inner().ttl)
}

/// etcd-io/etcd#12291, #13019.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_jumps_leaves_leases_alone() -> Result<()> {
    let program = Program::under_test()?;
    let mut server = StoreServer::prepare(&program, &[])?;
    let clock = server.folder().join("clock");
    let set = |offset: &str| std::fs::write(&clock, offset);
    set("+0")?;
    server.set_environment("LD_PRELOAD", library()?.to_str().context("a plain name")?);
    server.set_environment(
        "FAKETIME_TIMESTAMP_FILE",
        clock.to_str().context("a plain name")?,
    );
    server.set_environment("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    server.set_environment("FAKETIME_NO_CACHE", "1");
    server.restart().await?;
    let client = server.client()?;
    let granted = wait::now();
    let request = LeaseGrantRequest {
        ttl: TTL_SECS,
        id: 1,
    };
    client.lease.clone().lease_grant(request).await?;
    let put = PutRequest {
        key: "leased".into(),
        lease: 1,
        ..PutRequest::default()
    };
    client.kv.clone().put(put).await?;
    for (after_secs, offset) in [(2, "-3600"), (5, "+3600"), (8, "+86400")] {
        let until = granted + Duration::from_secs(after_secs);
        while wait::now() < until {
            let left = remaining(&client, 1).await?;
            let most = TTL_SECS - granted.elapsed().as_secs() as i64 + 1;
            let least = most - 3;
            ensure!(
                (least..=most).contains(&left),
                "{left} s remain, {least} to {most} are right"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        set(offset)?;
        // So that the member logs something, stamped by its wall clock.
        let mut maintenance = client.maintenance.clone();
        maintenance.defragment(DefragmentRequest {}).await?;
    }
    wait::wait_for(
        "the lease ends",
        Duration::from_secs(TTL_SECS as u64) + LATE,
        || async {
            let get = RangeRequest {
                key: "leased".into(),
                ..RangeRequest::default()
            };
            let answer = client.kv.clone().range(get).await?.into_inner();
            Ok(answer.kvs.is_empty().then_some(()))
        },
    )
    .await?;
    let took = granted.elapsed();
    let ttl = Duration::from_secs(TTL_SECS as u64);
    ensure!((ttl..ttl + LATE).contains(&took), "it ended after {took:?}");
    // The clock really jumped for the member.
    let log = server.log();
    let hours: BTreeSet<&str> = log
        .split("\"ts\":\"")
        .filter_map(|line| line.get(..13))
        .collect();
    ensure!(hours.len() >= 4, "the log knows the hours {hours:?} only");
    say(&format!(
        "hours in the member's log: {hours:?}; the lease ended after {took:?}"
    ));
    server.stop().await?;
    Ok(())
}
