//! The differential suite: the same script on real etcd and on the program under test, every answer compared.
//!
//! Promises: all fields are compared but ids of cluster and member, Raft's counters, sizes, and what is left of a lease's time; errors by
//! code and text; watches as the sequence of events of each watch and its control replies, not by framing. At the end, and again after
//! each side was killed and started, HashKV and the whole keyspace are equal. The seed of a failure is printed, with the operation.
//! Not here: what a script holds (`diff_script`).

use std::fmt::{Debug, Write as _};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ballast_api::etcdserverpb::watch_request::RequestUnion;
use ballast_api::etcdserverpb::{
    AlarmRequest, HashKvRequest, LeaseLeasesRequest, RangeRequest, ResponseHeader, ResponseOp,
    StatusRequest, TxnResponse, WatchCreateRequest, WatchProgressRequest, WatchRequest,
    WatchResponse, response_op,
};
use bytes::Bytes;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};

use crate::diff_script::{Op, Script, Seen};
use crate::progress::Progress;
use crate::store_server::{Client, Program, StoreServer};
use crate::tools;
use crate::up::say;
use crate::wait::wait_for;

/// How long a watch may take to bring what is there already.
const WATCH_DEADLINE: Duration = Duration::from_secs(20);
const SETTLE_DEADLINE: Duration = Duration::from_secs(30);
/// etcd leaves a progress request unanswered while a watch of the stream is behind, so it is asked again.
const PROGRESS_PERIOD: Duration = Duration::from_millis(20);

/// What to run.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How many scripts.
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Operations of each.
    #[arg(long, default_value_t = 500)]
    ops: usize,
    /// The first seed; random when absent.
    #[arg(long)]
    seed: Option<u64>,
    /// Further flags of the server under test.
    #[arg(long)]
    flag: Vec<String>,
}

/// Runs the scripts of the command line.
pub async fn run(args: &Args) -> Result<()> {
    let first = args.seed.unwrap_or_else(|| rand::random::<u32>().into());
    let flags: Vec<&str> = args.flag.iter().map(String::as_str).collect();
    tools::ensure(&["etcd"], &Progress::new())?;
    let program = Program::under_test()?;
    let mut failed = 0;
    for seed in first..first + args.seeds {
        match run_seed(&program, &flags, seed, args.ops).await {
            Ok(()) => say(&format!(
                "seed {seed}: {} operations, no difference",
                args.ops
            )),
            Err(error) => {
                failed += 1;
                say(&format!("seed {seed}: {error:#}"));
            }
        }
    }
    say(&format!("{} passed, {failed} failed", args.seeds - failed));
    if failed > 0 {
        bail!("{failed} of {} scripts differ", args.seeds);
    }
    Ok(())
}

/// One script on two fresh members; an error names the seed and the operation.
pub async fn run_seed(program: &Program, flags: &[&str], seed: u64, ops: usize) -> Result<()> {
    let etcd = Program::etcd()?;
    let (mut left, mut right) = tokio::try_join!(
        StoreServer::start(&etcd, &[]),
        StoreServer::start(program, flags)
    )?;
    let clients = (left.client()?, right.client()?);
    tokio::try_join!(settle(&clients.0), settle(&clients.1))?;
    let mut script = Script::new(seed);
    let mut seen = Seen {
        head: 1,
        compacted: 0,
    };
    for number in 0..ops {
        let op = script.next(seen);
        let (expected, got) = tokio::join!(perform(&clients.0, &op), perform(&clients.1, &op));
        let expected = expected.with_context(|| format!("operation {number}, etcd: {op:?}"))?;
        let got = got.with_context(|| format!("operation {number}, {}: {op:?}", program.name))?;
        if expected.text != got.text {
            bail!(
                "seed {seed}, operation {number} at revision {}: {op:?}\n  etcd:    {}\n  {}: {}",
                seen.head,
                expected.text,
                program.name,
                got.text
            );
        }
        seen.head = seen.head.max(expected.revision);
        if let (Op::Compact(request), true) = (&op, expected.ok) {
            seen.compacted = request.revision;
        }
    }
    compare_whole(&left, &right, "at the end").await?;
    for server in [&mut left, &mut right] {
        server.kill()?;
    }
    tokio::try_join!(left.restart(), right.restart())?;
    compare_whole(&left, &right, "after kill -9").await?;
    for server in [&mut left, &mut right] {
        server.stop().await?;
    }
    tokio::try_join!(left.restart(), right.restart())?;
    compare_whole(&left, &right, "after a clean stop").await
}

/// A new etcd reports an old storage version until it has written the present one.
async fn settle(client: &Client) -> Result<()> {
    wait_for("the storage version", SETTLE_DEADLINE, || async {
        let status = client
            .maintenance
            .clone()
            .status(StatusRequest {})
            .await?
            .into_inner();
        Ok((!status.storage_version.starts_with("3.5.")).then_some(()))
    })
    .await
}

/// HashKV, every key and every lease.
async fn compare_whole(left: &StoreServer, right: &StoreServer, when: &str) -> Result<()> {
    let everything = RangeRequest {
        key: Bytes::from_static(b"\0"),
        range_end: Bytes::from_static(b"\0"),
        ..Default::default()
    };
    let clients = (left.client()?, right.client()?);
    for op in [
        Op::Range(everything),
        Op::HashKv(HashKvRequest { revision: 0 }),
        Op::Leases,
        Op::Alarms,
    ] {
        let (expected, got) = tokio::try_join!(perform(&clients.0, &op), perform(&clients.1, &op))?;
        if expected.text != got.text {
            bail!(
                "{when}: {op:?}\n  etcd:    {}\n  {}: {}",
                expected.text,
                right.program().name,
                got.text
            );
        }
    }
    Ok(())
}

/// An answer with everything left out that may differ.
struct Answer {
    text: String,
    /// Of the header, 0 when there is none.
    revision: i64,
    ok: bool,
}

/// Sends one operation. An error here is a broken connection or a watch that never ended, not an answer.
async fn perform(client: &Client, op: &Op) -> Result<Answer> {
    let Client {
        mut kv,
        mut lease,
        mut maintenance,
        ..
    } = client.clone();
    match op.clone() {
        Op::Range(request) => answer(kv.range(request).await, |response| {
            header(&mut response.header)
        }),
        Op::Put(request) => answer(kv.put(request).await, |response| {
            header(&mut response.header)
        }),
        Op::Delete(request) => answer(kv.delete_range(request).await, |response| {
            header(&mut response.header)
        }),
        Op::Txn(request) => answer(kv.txn(request).await, txn),
        Op::Compact(request) => answer(kv.compact(request).await, |response| {
            header(&mut response.header)
        }),
        Op::Grant(request) => answer(lease.lease_grant(request).await, |response| {
            header(&mut response.header)
        }),
        Op::Revoke(request) => answer(lease.lease_revoke(request).await, |response| {
            header(&mut response.header)
        }),
        Op::KeepAlive(request) => {
            let stream = lease.lease_keep_alive(tokio_stream::once(request)).await;
            match stream {
                Ok(stream) => match stream.into_inner().next().await {
                    Some(response) => answer(response.map(Response::new), |response| {
                        header(&mut response.header)
                    }),
                    None => bail!("the keepalive stream ended without an answer"),
                },
                Err(status) => answer(Err::<Response<()>, _>(status), |()| 0),
            }
        }
        Op::TimeToLive(request) => answer(lease.lease_time_to_live(request).await, |response| {
            // A second may have passed on one side only.
            response.ttl = response.ttl.min(0);
            response.keys.sort();
            header(&mut response.header)
        }),
        Op::Leases => answer(
            lease.lease_leases(LeaseLeasesRequest {}).await,
            |response| {
                response.leases.sort_by_key(|lease| lease.id);
                header(&mut response.header)
            },
        ),
        Op::HashKv(request) => answer(maintenance.hash_kv(request).await, |response| {
            header(&mut response.header)
        }),
        Op::Status => answer(maintenance.status(StatusRequest {}).await, |response| {
            response.db_size = response.db_size.min(1);
            response.db_size_in_use = response.db_size_in_use.min(1);
            response.leader = response.leader.min(1);
            (
                response.raft_index,
                response.raft_term,
                response.raft_applied_index,
            ) = (0, 0, 0);
            header(&mut response.header)
        }),
        Op::Alarms => answer(
            maintenance.alarm(AlarmRequest::default()).await,
            |response| {
                for alarm in &mut response.alarms {
                    alarm.member_id = 0;
                }
                header(&mut response.header)
            },
        ),
        Op::Watch(requests) => tokio::time::timeout(WATCH_DEADLINE, watch(client, requests))
            .await
            .context("a watch did not reach the head in time")?,
    }
}

/// Clears what may differ with `clear`, which returns the header's revision.
fn answer<T: Debug>(
    result: Result<Response<T>, Status>,
    clear: impl FnOnce(&mut T) -> i64,
) -> Result<Answer> {
    match result {
        Ok(response) => {
            let mut response = response.into_inner();
            let revision = clear(&mut response);
            Ok(Answer {
                text: format!("{response:?}"),
                revision,
                ok: true,
            })
        }
        Err(status) if status.code() == tonic::Code::Unavailable => {
            bail!("unavailable: {}", status.message())
        }
        Err(status) => Ok(Answer {
            text: format!("{:?}: {}", status.code(), status.message()),
            revision: 0,
            ok: false,
        }),
    }
}

fn header(header: &mut Option<ResponseHeader>) -> i64 {
    match header {
        Some(header) => {
            (header.cluster_id, header.member_id, header.raft_term) = (0, 0, 0);
            header.revision
        }
        None => 0,
    }
}

fn txn(response: &mut TxnResponse) -> i64 {
    for inner in &mut response.responses {
        inner_header(inner);
    }
    header(&mut response.header)
}

fn inner_header(response: &mut ResponseOp) {
    match &mut response.response {
        Some(response_op::Response::ResponseRange(inner)) => header(&mut inner.header),
        Some(response_op::Response::ResponsePut(inner)) => header(&mut inner.header),
        Some(response_op::Response::ResponseDeleteRange(inner)) => header(&mut inner.header),
        Some(response_op::Response::ResponseTxn(inner)) => txn(inner),
        None => 0,
    };
}

/// Reads each watch up to the head. A stream of which a watch was canceled may never tell its progress, on etcd: the others
/// are then opened again without it.
async fn watch(client: &Client, requests: Vec<WatchCreateRequest>) -> Result<Answer> {
    let head = client
        .kv
        .clone()
        .range(RangeRequest {
            key: "head".into(),
            ..Default::default()
        })
        .await?
        .into_inner()
        .header
        .map_or(0, |header| header.revision);
    let mut texts = vec![String::new(); requests.len()];
    let mut left: Vec<(usize, WatchCreateRequest)> = requests.into_iter().enumerate().collect();
    while !left.is_empty() {
        let stream =
            watch_stream(client, left.iter().map(|(_, create)| create.clone()), head).await?;
        let canceled = stream.watches.iter().any(|watch| watch.canceled);
        for ((at, _), watch) in left.iter().zip(&stream.watches) {
            if watch.canceled || !canceled {
                texts[*at].clone_from(&watch.text);
            }
        }
        let mut told = stream.watches.iter();
        left.retain(|_| canceled && told.next().is_some_and(|watch| !watch.canceled));
    }
    Ok(Answer {
        text: texts.join("\n    "),
        revision: head,
        ok: true,
    })
}

/// Opens the watches on one stream and reads until a progress reply tells that all events up to the head are here, or until the
/// first cancellation.
async fn watch_stream(
    client: &Client,
    requests: impl ExactSizeIterator<Item = WatchCreateRequest>,
    head: i64,
) -> Result<Watched> {
    let mut seen = Watched::new(requests.len());
    let (sender, receiver) = tokio::sync::mpsc::channel(requests.len() + 1);
    let request = |union| WatchRequest {
        request_union: Some(union),
    };
    for create in requests {
        sender
            .send(request(RequestUnion::CreateRequest(create)))
            .await?;
    }
    let channel = ReceiverStream::new(receiver);
    let mut stream = client.watch.clone().watch(channel).await?.into_inner();
    let mut tick = tokio::time::interval(PROGRESS_PERIOD);
    while !seen.complete(head) {
        tokio::select! {
            response = stream.next() => match response {
                Some(response) => seen.take(&response?)?,
                None => bail!("the watch stream ended"),
            },
            _ = tick.tick(), if seen.created.len() == seen.watches.len() => {
                // A full queue holds a request already.
                let _ = sender.try_send(request(RequestUnion::ProgressRequest(WatchProgressRequest {})));
            }
        }
    }
    Ok(seen)
}

/// What one watch has told.
#[derive(Clone, Default)]
struct One {
    text: String,
    canceled: bool,
}

/// What the watches of one stream have told.
struct Watched {
    /// In the order of the requests.
    watches: Vec<One>,
    /// The id of each watch that was answered so far; those that were refused have none.
    created: Vec<Option<i64>>,
    progress: i64,
}

impl Watched {
    fn new(count: usize) -> Self {
        Self {
            watches: vec![One::default(); count],
            created: Vec::new(),
            progress: 0,
        }
    }

    fn take(&mut self, response: &WatchResponse) -> Result<()> {
        let revision = response.header.as_ref().map_or(0, |header| header.revision);
        if response.created {
            // Answers to requests come in their order.
            let watch = self
                .watches
                .get_mut(self.created.len())
                .context("more watches than were asked for")?;
            self.created
                .push((response.watch_id >= 0).then_some(response.watch_id));
            write!(watch.text, "created at {revision};")?;
            if response.canceled {
                watch.canceled = true;
                write!(watch.text, " refused: {}", response.cancel_reason)?;
            }
            return Ok(());
        }
        if response.watch_id < 0 {
            self.progress = self.progress.max(revision);
            return Ok(());
        }
        let at = self
            .created
            .iter()
            .position(|&id| id == Some(response.watch_id))
            .with_context(|| format!("no watch has the id {}", response.watch_id))?;
        let watch = &mut self.watches[at];
        for event in &response.events {
            if event
                .kv
                .as_ref()
                .is_some_and(|kv| kv.mod_revision > revision)
            {
                bail!("an event is newer than the header of its response: {response:?}");
            }
            write!(watch.text, " {event:?}")?;
        }
        if response.canceled {
            watch.canceled = true;
            let (at, why) = (response.compact_revision, &response.cancel_reason);
            write!(watch.text, " canceled, compacted at {at}: {why}")?;
        }
        Ok(())
    }

    fn complete(&self, head: i64) -> bool {
        let answered = self.created.len() == self.watches.len();
        answered && (self.progress >= head || self.watches.iter().any(|watch| watch.canceled))
    }
}
