//! Names in peer URLs that resolve only later are waited for: by founders, by a member that joins, and by the others for one that joins.
//!
//! Each member has a hosts file of its own over the machine's. `BALLAST_STORE=etcd` is no use here: it gives up after half a minute.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_api::etcdserverpb as pb;
use ballast_e2e::members::{Hosts, Members, Setup};
use ballast_e2e::store_server::Program;
use ballast_e2e::wait::wait_for;
use tokio::time::timeout;

/// Without names nothing may happen, and no member may give up.
const WITHOUT: Duration = Duration::from_secs(4);
const SOON: Duration = Duration::from_secs(30);
/// A write through a member that cannot reach the leader is given up for the next member's.
const ATTEMPT: Duration = Duration::from_secs(2);

fn put(key: &str) -> pb::PutRequest {
    pb::PutRequest {
        key: key.to_owned().into(),
        value: "v".into(),
        ..pb::PutRequest::default()
    }
}

fn get(key: &str) -> pb::RangeRequest {
    pb::RangeRequest {
        key: key.to_owned().into(),
        ..pb::RangeRequest::default()
    }
}

/// The last lines of each member's log.
fn said(members: &Members) -> String {
    let tail = |index: usize| members.all[index].server.log_tail();
    members
        .present()
        .into_iter()
        .map(tail)
        .collect::<Vec<_>>()
        .join("\n")
}

async fn all_run_and_none_serves(members: &mut Members) -> Result<()> {
    tokio::time::sleep(WITHOUT).await;
    for index in members.present() {
        let status = members.status(index).await;
        ensure!(
            !status.as_ref().is_ok_and(|status| status.leader != 0),
            "member {index} has a leader: {status:?}"
        );
        let server = &mut members.all[index].server;
        ensure!(
            server.alive()?,
            "member {index} ended:\n{}",
            server.log_tail()
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_resolve_late_are_waited_for() -> Result<()> {
    let hosts = Arc::new(Hosts::new()?);
    let mut setup = Setup::new(Program::under_test()?, &[]);
    setup.hosts = Some(Arc::clone(&hosts));
    let mut members = Members::prepare(setup, 3)?;
    for member in &mut members.all {
        member.server.spawn()?;
    }
    all_run_and_none_serves(&mut members).await?;
    // Two names of three are enough; the third is found when it is told. It may lead meanwhile, since it knows the others: then they cannot pass
    // anything on to it.
    hosts.tell(&[1, 2])?;
    wait_for("two make a leader", SOON, || async {
        let mut last = None;
        for mut client in members.clients()? {
            match timeout(ATTEMPT, client.kv.put(put("two"))).await {
                Ok(Ok(_)) => return Ok(Some(())),
                Ok(Err(status)) => last = Some(status),
                Err(_) => {}
            }
        }
        last.map_or(Ok(None), |status| Err(status.into()))
    })
    .await
    .with_context(|| said(&members))?;
    hosts.tell(&[1, 2, 3])?;
    members.wait_healthy(SOON).await?;
    for client in members.clients()? {
        let read = client.kv.clone().range(get("two")).await?.into_inner();
        ensure!(read.count == 1);
    }

    // One that joins: the others are told its name late, and the snapshot or log reaches it then.
    let joining = members.add(true).await?;
    tokio::time::sleep(WITHOUT).await;
    ensure!(members.all[joining].server.alive()?);
    let text = members.all[joining].server.log();
    hosts.tell(&[1, 2, 3, 4])?;
    members.promote(joining).await.with_context(|| text)?;
    members.wait_healthy(SOON).await?;
    members.client(joining)?.kv.put(put("four")).await?;

    // After a restart of all, with no name known at first.
    for member in &mut members.all {
        member.kill()?;
    }
    hosts.tell(&[])?;
    for member in &mut members.all {
        member.server.spawn()?;
    }
    all_run_and_none_serves(&mut members).await?;
    hosts.tell(&[1, 2, 3, 4])?;
    members.wait_healthy(SOON).await?;
    let mut client = members.client(0)?;
    let read = client.kv.range(get("four")).await?.into_inner();
    ensure!(read.count == 1);
    Ok(())
}

/// A member that joins asks the others by names that it does not know yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_joins_waits_for_the_names_of_the_others() -> Result<()> {
    let hosts = Arc::new(Hosts::new()?);
    hosts.tell(&[1])?;
    let mut setup = Setup::new(Program::under_test()?, &[]);
    setup.hosts = Some(Arc::clone(&hosts));
    let mut members = Members::start(setup, 1).await?;
    let joining = members.add_unstarted(true).await?;
    hosts.tell(&[])?;
    members.all[joining].server.spawn()?;
    tokio::time::sleep(WITHOUT).await;
    let server = &mut members.all[joining].server;
    ensure!(server.alive()?, "it ended:\n{}", server.log_tail());
    let told = "no member of the cluster to join answers yet";
    ensure!(server.log().contains(told), "{}", server.log_tail());
    hosts.tell(&[1, 2])?;
    members.promote(joining).await?;
    members.wait_healthy(SOON).await
}
