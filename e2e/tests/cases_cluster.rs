//! Public bug reports that need several members: P15, P21 to P23, and what of P08, P09, P11, P14, P16 and P17 one member cannot show.
//!
//! `BALLAST_STORE=etcd` runs them on real etcd. The halves for one member are in `cases.rs` and `server/tests/wire`; docs/cases.md lists all.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_api::etcdserverpb as pb;
use ballast_e2e::lab::{Lab, Links};
use ballast_e2e::members::{Members, Setup};
use ballast_e2e::nemesis::traffic::keep_alive;
use ballast_e2e::packages;
use ballast_e2e::slow_reader::SlowReader;
use ballast_e2e::store_server::{Client, Program};
use ballast_e2e::up::say;
use ballast_e2e::wait::{self, wait_for};
use bytes::Bytes;
use pb::watch_request::RequestUnion;
use tokio::sync::mpsc::UnboundedSender;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Status, Streaming};

const SOON: Duration = Duration::from_secs(20);
/// Of a request whose answer may never come.
const ASK: Duration = Duration::from_secs(3);

fn put(key: impl Into<Bytes>, value: impl Into<Bytes>) -> pb::PutRequest {
    pb::PutRequest {
        key: key.into(),
        value: value.into(),
        ..pb::PutRequest::default()
    }
}

fn get(key: &str, serializable: bool) -> pb::RangeRequest {
    pb::RangeRequest {
        key: key.to_owned().into(),
        serializable,
        ..pb::RangeRequest::default()
    }
}

async fn three(flags: &[&str]) -> Result<Members> {
    Members::start(Setup::new(Program::chosen()?, flags), 3).await
}

fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code, text: &str) -> Result<()> {
    let status = answer.expect_err("it must be refused");
    ensure!(
        status.code() == code && status.message() == text,
        "{status:?} instead of {code:?} {text:?}"
    );
    Ok(())
}

/// Puts `count` keys, many at a time, over all members.
async fn put_many(
    clients: &[Client],
    count: usize,
    request: impl Fn(usize) -> pb::PutRequest + Copy + Send + 'static,
) -> Result<()> {
    const WRITERS: usize = 32;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let mut kv = clients[writer % clients.len()].kv.clone();
        writers.spawn(async move {
            for n in (writer..count).step_by(WRITERS) {
                kv.put(request(n)).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = writers.join_next().await {
        done??;
    }
    Ok(())
}

fn create(key: &str, end: &str) -> pb::WatchRequest {
    let request = pb::WatchCreateRequest {
        key: key.to_owned().into(),
        range_end: end.to_owned().into(),
        prev_kv: true,
        ..pb::WatchCreateRequest::default()
    };
    pb::WatchRequest {
        request_union: Some(RequestUnion::CreateRequest(request)),
    }
}

struct Watching {
    requests: UnboundedSender<pb::WatchRequest>,
    told: Streaming<pb::WatchResponse>,
}

impl Watching {
    /// With a first watch: etcd answers a stream only then.
    async fn open(client: &Client, leader: bool, (key, end): (&str, &str)) -> Result<Self, Status> {
        let (requests, receiver) = tokio::sync::mpsc::unbounded_channel();
        let _ = requests.send(create(key, end));
        let mut request = tonic::Request::new(UnboundedReceiverStream::new(receiver));
        if leader {
            let value = "true".parse().expect("a plain word");
            request.metadata_mut().insert("hasleader", value);
        }
        let told = client.watch.clone().watch(request).await?.into_inner();
        Ok(Self { requests, told })
    }

    fn ask(&self, union: RequestUnion) -> Result<()> {
        Ok(self.requests.send(pb::WatchRequest {
            request_union: Some(union),
        })?)
    }

    async fn next(&mut self) -> Result<pb::WatchResponse> {
        let next = tokio::time::timeout(SOON, self.told.message());
        next.await.context("nothing was told")??.context("it ended")
    }
}

/// P08, etcd-io/etcd#17529, on a member that only follows: a reader that does not read is told all of it in order, or of the compaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p08_a_slow_reader_on_a_follower_is_never_skipped() -> Result<()> {
    const WATCHERS: usize = 20;
    const REVISIONS: i64 = 3_000;
    let members = three(&[]).await?;
    let follower = members.follower().await?;
    let mut slow = Watching::open(&members.client(follower)?, false, ("s/", "s0")).await?;
    for _ in 1..WATCHERS {
        slow.requests.send(create("s/", "s0"))?;
    }
    for _ in 0..WATCHERS {
        ensure!(slow.next().await?.created);
    }
    put_many(&members.clients()?, REVISIONS as usize, |n| {
        put(format!("s/{:02}", n % 50), vec![b'x'; 1024])
    })
    .await?;
    let head = 1 + REVISIONS;
    let compaction = pb::CompactionRequest {
        revision: head - 5,
        physical: false,
    };
    // Over another connection: nobody reads the first one's.
    members.client(follower)?.kv.compact(compaction).await?;
    let mut judge = SlowReader::new(WATCHERS, head);
    while !judge.is_done() {
        judge.told(slow.next().await?)?;
    }
    say(&format!(
        "p08: {} told of the compaction, {} told everything",
        judge.canceled, judge.whole
    ));
    Ok(())
}

/// P09, etcd-io/etcd#15220, on every member at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p09_progress_agrees_with_the_events_around_it_on_every_member() -> Result<()> {
    const WRITES: usize = 600;
    let members = three(&[]).await?;
    let mut watchers = tokio::task::JoinSet::new();
    for client in members.clients()? {
        let mut watching = Watching::open(&client, false, ("pr/", "pr0")).await?;
        ensure!(watching.next().await?.created);
        watchers.spawn(async move {
            let (mut seen, mut told, mut answers) = (1, 1, 0);
            let mut tick = tokio::time::interval(Duration::from_millis(5));
            while seen < WRITES as i64 + 1 || answers == 0 {
                let response = tokio::select! {
                    _ = tick.tick() => {
                        watching.ask(RequestUnion::ProgressRequest(pb::WatchProgressRequest {}))?;
                        continue;
                    }
                    response = watching.next() => response?,
                };
                let header = response.header.context("a header")?.revision;
                if response.events.is_empty() {
                    ensure!(header >= seen, "told {header} after an event of {seen}");
                    told = told.max(header);
                    answers += 1;
                }
                for event in response.events {
                    let revision = event.kv.context("a record")?.mod_revision;
                    ensure!(revision > told, "an event of {revision} after told {told}");
                    ensure!(revision == seen + 1, "{revision} after {seen}");
                    seen = revision;
                }
            }
            Ok(())
        });
    }
    put_many(&members.clients()?, WRITES, |n| {
        put(format!("pr/{}", n % 7), n.to_string())
    })
    .await?;
    while let Some(watched) = watchers.join_next().await {
        watched??;
    }
    Ok(())
}

/// P11, etcd-io/etcd#10743, #10819: what a stream is told when two of three members are gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p11_without_a_quorum_a_stream_that_requires_a_leader_ends() -> Result<()> {
    let mut members = three(&[]).await?;
    let client = members.client(0)?;
    let mut strict = Watching::open(&client, true, ("jk/1", "")).await?;
    let mut patient = Watching::open(&client, false, ("jk/1", "")).await?;
    for watching in [&mut strict, &mut patient] {
        ensure!(watching.next().await?.created);
    }
    members.all[1].kill()?;
    members.all[2].kill()?;
    let gone = wait::now();
    let ended = tokio::time::timeout(SOON, strict.told.message()).await;
    let status = ended.context("the stream stays open")?.err();
    let status = status.context("the stream ended without saying why")?;
    let took = gone.elapsed();
    ensure!(
        status.code() == Code::Unavailable && status.message() == "etcdserver: no leader",
        "{status:?}"
    );
    ensure!(
        took < Duration::from_secs(8),
        "it ended after {took:?}, three elections are 3 s"
    );
    // A stream asked for now is refused at once, or as soon as it watches.
    let again = async {
        let mut late = Watching::open(&client, true, ("jk/1", "")).await?;
        while late.told.message().await?.is_some() {}
        Ok::<_, Status>(())
    };
    let refusal = tokio::time::timeout(SOON, again).await?;
    refused(refusal, Code::Unavailable, "etcdserver: no leader")?;
    // The other one is open, and told what happens when there is a quorum again.
    for index in [1, 2] {
        members.all[index].server.spawn()?;
    }
    members.wait_healthy(SOON).await?;
    client.clone().kv.put(put("jk/1", "v")).await?;
    ensure!(patient.next().await?.events.len() == 1);
    Ok(())
}

async fn hash(client: &Client, revision: i64) -> Result<pb::HashKvResponse, Status> {
    let request = pb::HashKvRequest { revision };
    Ok(client
        .maintenance
        .clone()
        .hash_kv(request)
        .await?
        .into_inner())
}

/// P14, etcd-io/etcd PR#14457, #18337: three members hash alike around a compacted deletion, one of them restarted in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p14_members_hash_alike_around_a_compacted_delete() -> Result<()> {
    const KEYS: i64 = 50;
    let mut members = three(&[]).await?;
    let mut kv = members.client(0)?.kv;
    for n in 0..KEYS {
        kv.put(put(format!("h/{n:02}"), n.to_string())).await?;
    }
    members.all[1].kill()?;
    for n in 0..KEYS {
        let delete = pb::DeleteRangeRequest {
            key: format!("h/{n:02}").into(),
            ..pb::DeleteRangeRequest::default()
        };
        wait_for("a quorum deletes", SOON, || {
            let (mut kv, delete) = (kv.clone(), delete.clone());
            async move { Ok(Some(kv.delete_range(delete).await?)) }
        })
        .await?;
    }
    members.all[1].server.restart().await?;
    let head = 1 + 2 * KEYS;
    // A delete in the middle of them.
    let compacted = 1 + KEYS + KEYS / 2;
    kv.compact(pb::CompactionRequest {
        revision: compacted,
        physical: true,
    })
    .await?;
    for round in 0..2 {
        for revision in [compacted, head] {
            let same = || async {
                let mut found = BTreeMap::new();
                for client in members.clients()? {
                    let answer = hash(&client, revision).await?;
                    let hash = (answer.hash, answer.hash_revision);
                    // A member that has compacted remembers its hash at that revision, of all since the compaction before; one that
                    // was restarted since does not.
                    let first = found.entry(answer.compact_revision).or_insert(hash);
                    ensure!(*first == hash, "{found:?} and {hash:?} at {revision}");
                }
                let kinds = if revision == compacted { 2 } else { 1 };
                ensure!(found.len() <= kinds, "{found:?} at {revision}");
                Ok(Some(()))
            };
            wait_for("equal hashes", SOON, same).await?;
        }
        for client in members.clients()? {
            refused(
                hash(&client, compacted - 1).await,
                Code::OutOfRange,
                "etcdserver: mvcc: required revision has been compacted",
            )?;
            refused(
                hash(&client, head + 1).await,
                Code::OutOfRange,
                "etcdserver: mvcc: required revision is a future revision",
            )?;
        }
        if round == 0 {
            members.all[2].kill()?;
            members.all[2].server.restart().await?;
        }
    }
    Ok(())
}

/// P15, etcd-io/etcd#15247, #12528: a leader that stood still, while its followers' clients kept a lease alive, is cut off when it wakes. It
/// neither takes the lease's key nor acknowledges a keepalive by itself.
#[test]
fn p15_a_leader_that_stood_still_takes_no_lease_that_others_kept() -> Result<()> {
    const TTL: i64 = 6;
    Lab::run(|lab| async move {
        let mut setup = Setup::new(Program::chosen()?, &[]);
        setup.lab = Some(lab);
        let mut members = Members::start(setup, 3).await?;
        let leader = members.leader().await?;
        let others: Vec<usize> = (0..3).filter(|&index| index != leader).collect();
        let mut first = members.client(others[0])?;
        let grant = pb::LeaseGrantRequest { ttl: TTL, id: 15 };
        first.lease.lease_grant(grant).await?;
        let leased = pb::PutRequest {
            lease: 15,
            ..put("st/1", "v")
        };
        first.kv.put(leased).await?;
        let beat = async |members: &Members, secs: u64| -> Result<usize> {
            let mut kept = 0;
            for n in 0..secs {
                let mut client = members.client(others[n as usize % 2])?;
                let answer = tokio::time::timeout(ASK, keep_alive(&mut client, 15)).await;
                if let Ok(Ok(ttl)) = answer {
                    ensure!(ttl == TTL, "a keepalive was answered with {ttl}");
                    kept += 1;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            Ok(kept)
        };
        members.all[leader].pause()?;
        let kept = beat(&members, 10).await?;
        ensure!(kept >= 4, "only {kept} keepalives were answered");
        // It wakes with nobody to ask.
        let number = members.all[leader].number()?;
        let mut links = Links::default();
        for &index in &others {
            links.cut_both(number, members.all[index].number()?);
        }
        members.lab()?.set(&links)?;
        members.all[leader].resume()?;
        let mut old = members.client(leader)?;
        let mut kv = old.kv.clone();
        let (alone, read, beaten) = tokio::join!(
            tokio::time::timeout(ASK, keep_alive(&mut old, 15)),
            tokio::time::timeout(ASK, kv.range(get("st/1", false))),
            beat(&members, 4)
        );
        beaten?;
        ensure!(
            !matches!(alone, Ok(Ok(ttl)) if ttl > 0),
            "a leader alone acknowledged a keepalive: {alone:?}"
        );
        ensure!(
            !matches!(read, Ok(Ok(_))),
            "a leader alone answered a linearizable read: {read:?}"
        );
        members.lab()?.set(&Links::default())?;
        members.wait_healthy(SOON).await?;
        beat(&members, 3).await?;
        for client in members.clients()? {
            let read = client
                .kv
                .clone()
                .range(get("st/1", false))
                .await?
                .into_inner();
            ensure!(read.count == 1, "the key is gone");
            let revision = read.header.context("a header")?.revision;
            ensure!(revision == 2, "the store is at revision {revision}");
        }
        wait_for("the lease ends", SOON, || async {
            let read = first.kv.clone().range(get("st/1", false)).await?;
            Ok((read.into_inner().count == 0).then_some(()))
        })
        .await
    })
}

/// P16, etcd-io/etcd#12291, #13019: the clocks of the leader and of the next one jump; a lease lives as long as it was promised.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p16_clocks_that_jump_leave_leases_alone_whoever_leads() -> Result<()> {
    const TTL: i64 = 10;
    let program = Program::chosen()?;
    if program.is_etcd() {
        // It is linked statically, so that its clock cannot be set.
        return Ok(());
    }
    packages::ensure_named(&["libfaketime"])?;
    let mut setup = Setup::new(program, &[]);
    setup.clocks = true;
    let members = Members::start(setup, 3).await?;
    let mut client = members.client(0)?;
    let granted = wait::now();
    let grant = pb::LeaseGrantRequest { ttl: TTL, id: 16 };
    client.lease.lease_grant(grant).await?;
    let leased = pb::PutRequest {
        lease: 16,
        ..put("cj/1", "v")
    };
    client.kv.put(leased).await?;
    let leader = members.leader().await?;
    members.all[leader].set_clock("+86400")?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let next = (leader + 1) % 3;
    members.all[next].set_clock("-3600")?;
    members.move_leader(next).await?;
    let moved = wait::now();
    tokio::time::sleep(Duration::from_secs(2)).await;
    members.all[next].set_clock("+3600")?;
    let ttl = Duration::from_secs(TTL.unsigned_abs());
    wait_for("the lease ends", ttl + SOON, || async {
        let mut kv = client.kv.clone();
        let answer = kv.range(get("cj/1", false)).await?.into_inner();
        if granted.elapsed() + Duration::from_secs(1) < ttl {
            ensure!(answer.count == 1, "it ended after {:?}", granted.elapsed());
        }
        Ok((answer.count == 0).then_some(()))
    })
    .await?;
    ensure!(granted.elapsed() >= ttl, "{:?}", granted.elapsed());
    // A new leader begins it anew at most.
    let late = moved.elapsed().saturating_sub(ttl);
    ensure!(late < Duration::from_secs(6), "{late:?} late");
    Ok(())
}

/// P17, etcd-io/etcd#9374, #14857, #19261, PR#5197, asked of a member that only follows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p17_odd_times_have_etcds_answers_from_a_follower_too() -> Result<()> {
    let members = three(&[]).await?;
    let mut client = members.client(members.follower().await?)?;
    let grant = |ttl, id| pb::LeaseGrantRequest { ttl, id };
    for ttl in [1, 0, -5] {
        let answer = client.lease.lease_grant(grant(ttl, 0)).await?.into_inner();
        ensure!(answer.ttl == 2 && answer.id > 0, "{ttl}: {answer:?}");
    }
    client.lease.lease_grant(grant(9_000_000_000, 0)).await?;
    refused(
        client.lease.lease_grant(grant(9_000_000_001, 0)).await,
        Code::OutOfRange,
        "etcdserver: too large lease TTL",
    )?;
    client.lease.lease_grant(grant(100, 42)).await?;
    refused(
        client.lease.lease_grant(grant(100, 42)).await,
        Code::FailedPrecondition,
        "etcdserver: lease already exists",
    )?;
    ensure!(keep_alive(&mut client, 42).await? == 100);
    ensure!(keep_alive(&mut client, 777).await? == 0);
    let unknown = pb::LeaseTimeToLiveRequest {
        id: 777,
        keys: true,
    };
    ensure!(
        client
            .lease
            .lease_time_to_live(unknown)
            .await?
            .into_inner()
            .ttl
            == -1
    );
    let known = pb::LeaseTimeToLiveRequest { id: 42, keys: true };
    let told = client.lease.lease_time_to_live(known).await?.into_inner();
    ensure!(told.granted_ttl == 100 && told.ttl >= 98, "{told:?}");
    refused(
        client
            .lease
            .lease_revoke(pb::LeaseRevokeRequest { id: 777 })
            .await,
        Code::NotFound,
        "etcdserver: requested lease not found",
    )
}

async fn listed(client: &Client, linearizable: bool) -> Result<Vec<pb::Member>> {
    let mut cluster = client.cluster.clone();
    let asked = cluster.member_list(pb::MemberListRequest { linearizable });
    let answer = tokio::time::timeout(ASK, asked)
        .await
        .context("no answer")?;
    Ok(answer?.into_inner().members)
}

/// P21, etcd-io/etcd#11633, #19557: who may be promoted, and that it lasts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p21_a_learner_is_promoted_once_it_is_in_sync_and_stays_promoted() -> Result<()> {
    let mut members = Members::start(Setup::new(Program::chosen()?, &[]), 1).await?;
    let mut client = members.client(0)?;
    let joining = members.add_unstarted(true).await?;
    let all = listed(&client, true).await?;
    let id = all
        .iter()
        .find(|member| member.is_learner)
        .context("a learner is listed")?
        .id;
    let promote = |id| pb::MemberPromoteRequest { id };
    refused(
        client.cluster.member_promote(promote(id)).await,
        Code::FailedPrecondition,
        "etcdserver: can only promote a learner member which is in sync with leader",
    )?;
    refused(
        client.cluster.member_promote(promote(1)).await,
        Code::NotFound,
        "etcdserver: member not found",
    )?;
    members.all[joining].server.spawn()?;
    members.promote(joining).await?;
    members.wait_healthy(SOON).await?;
    refused(
        client.cluster.member_promote(promote(id)).await,
        Code::FailedPrecondition,
        "etcdserver: can only promote a learner member",
    )?;
    for member in &mut members.all {
        member.kill()?;
    }
    for member in &mut members.all {
        member.server.spawn()?;
    }
    members.wait_healthy(SOON).await?;
    for client in members.clients()? {
        let all = listed(&client, true).await?;
        ensure!(
            all.len() == 2 && all.iter().all(|member| !member.is_learner),
            "{all:?}"
        );
    }
    members.add_unstarted(true).await?;
    refused(
        client
            .cluster
            .member_add(pb::MemberAddRequest {
                peer_ur_ls: vec!["http://127.0.0.1:9".to_owned()],
                is_learner: true,
            })
            .await,
        Code::FailedPrecondition,
        "etcdserver: too many learner members in cluster",
    )
}

/// P22, etcd-io/etcd#15243, #7134, the store's half. On etcd a voter that never starts takes the quorum away, and what needs none goes on;
/// here it votes only once it has caught up, so that everything goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p22_a_voter_that_never_starts_takes_nothing_away() -> Result<()> {
    let members = Members::start(Setup::new(Program::chosen()?, &[]), 1).await?;
    let mut client = members.client(0)?;
    client.kv.put(put("k", "v")).await?;
    client
        .cluster
        .member_add(pb::MemberAddRequest {
            peer_ur_ls: vec!["http://127.0.0.1:9".to_owned()],
            is_learner: false,
        })
        .await?;
    let quorum_stays = !members.program().is_etcd();
    if !quorum_stays {
        // The leader steps down an election later.
        wait_for("the quorum is gone", SOON, || async {
            Ok(listed(&client, true).await.is_err().then_some(()))
        })
        .await?;
    }
    for _ in 0..3 {
        ensure!(listed(&client, true).await.is_ok() == quorum_stays);
        ensure!(listed(&client, false).await?.len() == 2);
        let read = client.kv.range(get("k", true)).await?.into_inner();
        ensure!(read.count == 1);
        let read = tokio::time::timeout(ASK, client.kv.range(get("k", false))).await;
        ensure!(matches!(read, Ok(Ok(_))) == quorum_stays, "{read:?}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    Ok(())
}

/// P23, openstack-experimental/keystone#1329, databendlabs/openraft#1808: members that join after the log was purged catch up by a snapshot,
/// whoever leads when, and know the members the snapshot knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p23_a_learner_catches_up_by_snapshot_though_the_leader_dies() -> Result<()> {
    const PUTS: usize = 5_000;
    let flags = ["--snapshot-count=100", "--snapshot-catchup-entries=50"];
    let mut members = three(&flags).await?;
    put_many(&members.clients()?, PUTS, |n| {
        put(format!("sn/{n:04}"), vec![b'x'; 1024])
    })
    .await?;
    for round in 0..2 {
        let joining = members.add(true).await?;
        let leader = members.leader().await?;
        members.all[leader].kill()?;
        members.all[leader].server.spawn()?;
        // The leader among the others, one of whom may still be starting.
        members.promote(joining).await?;
        members.wait_healthy(SOON).await?;
        wait_for("the same index on all", SOON, || async {
            let mut applied = BTreeSet::new();
            for index in members.present() {
                let status = members.status(index).await?;
                applied.insert((status.raft_applied_index, status.is_learner));
            }
            ensure!(applied.len() == 1, "{applied:?}");
            Ok(Some(()))
        })
        .await?;
        let mut lists = BTreeSet::new();
        for client in members.clients()? {
            let list = listed(&client, true).await?;
            let mut ids: Vec<(u64, bool)> = list.iter().map(|m| (m.id, m.is_learner)).collect();
            ids.sort_unstable();
            lists.insert(ids);
            let all = pb::RangeRequest {
                range_end: "sn0".into(),
                count_only: true,
                ..get("sn/", true)
            };
            let count = client.kv.clone().range(all).await?.into_inner().count;
            ensure!(count == PUTS as i64, "{count} keys");
        }
        ensure!(lists.len() == 1, "{lists:x?}");
        ensure!(lists.iter().all(|list| list.len() == 4), "{lists:x?}");
        let id = members.id(joining).await?;
        members.remove(joining, id).await?;
        say(&format!("p23: round {round}, a snapshot to {id:x}"));
        put_many(&members.clients()?, 300, |n| put(format!("sn/{n:04}"), "y")).await?;
    }
    Ok(())
}
