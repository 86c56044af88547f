//! The differential suite: the same script on real etcd, on the program under test and on a reference model, every answer compared.
//!
//!     script (seed) --op--> etcd, server, model --text--> equal?
//!
//! Promises: what is compared is what `perform` leaves of an answer, and all of a watch that `watch` keeps. At the end, after SIGKILL and
//! after SIGTERM, and after restarts within a script, HashKV and the whole keyspace are equal. The seed of a failure is printed, with the
//! operation. Without etcd (`run_seed_alone`) the model alone says what is right.
//! Not here: what a script holds (`script`, `edges`).

pub mod counts;
pub mod edges;
pub mod model;
pub mod perform;
pub mod script;
pub mod watch;

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ballast_api::{CLUSTER_VERSION, etcdserverpb as pb};
use bytes::Bytes;
use futures::StreamExt as _;
use tokio::time::timeout;

use crate::progress::Progress;
use crate::store_server::{Client, Program, StoreServer};
use crate::tools;
use crate::up::say;
use crate::wait::{self, wait_for};

pub use counts::Counts;
use model::Model;
use perform::{Answer, perform};
pub use script::prefix_end;
use script::{Op, REQUEST_BYTES_MAX, Script, TXN_OPS_MAX};
use watch::Plan;

/// For one operation, however busy the machine: a server that does not answer is no server.
const OP_DEADLINE: Duration = Duration::from_mins(1);
const SETTLE_DEADLINE: Duration = Duration::from_secs(30);
/// From so many operations on, a run must have made every call often enough.
const FULL_OPS: usize = 100_000;
/// Texts are cut in reports: a value may be long.
const TEXT_BYTES_MAX: usize = 6_000;

/// What to run.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How many scripts, beside the one of edges.
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Operations of each.
    #[arg(long, default_value_t = 500)]
    ops: usize,
    /// The first seed; random when absent.
    #[arg(long)]
    seed: Option<u64>,
    /// Scripts at a time: starting and syncing leave the cores idle.
    #[arg(long, default_value_t = 6)]
    jobs: usize,
    /// Only random scripts.
    #[arg(long)]
    without_edges: bool,
    /// End with the first script that differs.
    #[arg(long)]
    fail_fast: bool,
    /// Goes on within a script until so many answers differed; after the first they may be consequences of it.
    #[arg(long, default_value_t = 1)]
    differences: usize,
    /// The storage engine of the server under test; its own default when absent.
    #[arg(long)]
    engine: Option<String>,
    /// Further flags of the server under test.
    #[arg(long)]
    flag: Vec<String>,
}

/// Runs the scripts of the command line.
pub async fn run(args: &Args) -> Result<()> {
    let first = args.seed.unwrap_or_else(|| rand::random::<u32>().into());
    let mut flags = args.flag.clone();
    flags.extend(args.engine.iter().map(|e| format!("--storage-engine={e}")));
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    tools::ensure(&["etcd"], &Progress::new())?;
    let program = Program::under_test()?;
    let begun = wait::now();
    let edges = (!args.without_edges).then_some(None);
    let scripts = edges
        .into_iter()
        .chain((first..first + args.seeds).map(Some));
    let total = args.seeds + u64::from(!args.without_edges);
    let mut running = futures::stream::iter(scripts)
        .map(|seed| {
            let (program, flags) = (&program, &flags);
            async move {
                let outcome = match seed {
                    None => beside_etcd(program, flags, args.differences, None).await,
                    Some(seed) => {
                        let script = Some((seed, args.ops));
                        beside_etcd(program, flags, args.differences, script).await
                    }
                };
                let name = seed.map_or("edges".to_owned(), |seed| format!("seed {seed}"));
                (name, outcome)
            }
        })
        .buffer_unordered(args.jobs.max(1));
    let (mut counts, mut failed) = (Counts::default(), 0);
    while let Some((name, outcome)) = running.next().await {
        match outcome {
            Ok(of_script) => {
                say(&format!("{name}: no difference"));
                counts.merge(of_script);
            }
            Err(error) => {
                failed += 1;
                // The message begins with the script's name.
                say(&format!("{error:#}"));
                if args.fail_fast {
                    break;
                }
            }
        }
    }
    for line in counts.lines() {
        say(&line);
    }
    let passed = total - failed;
    let secs = begun.elapsed().as_secs();
    say(&format!("{passed} passed, {failed} failed in {secs} s"));
    if failed > 0 {
        bail!("{failed} of {total} scripts differ");
    }
    if args.seeds as usize * args.ops >= FULL_OPS {
        counts.check()?;
    }
    Ok(())
}

/// One random script on two fresh members; an error names the seed and the operation.
pub async fn run_seed(program: &Program, flags: &[&str], seed: u64, ops: usize) -> Result<Counts> {
    beside_etcd(program, flags, 1, Some((seed, ops))).await
}

/// The script written by hand.
pub async fn run_edges(program: &Program, flags: &[&str]) -> Result<Counts> {
    beside_etcd(program, flags, 1, None).await
}

/// One random script on one fresh member, which the model alone judges.
pub async fn run_seed_alone(program: &Program, seed: u64, ops: usize) -> Result<Counts> {
    let run = Run::on(&[(program, &[])], 1).await?;
    run.either(Some((seed, ops))).await
}

/// The script written by hand on one fresh member, which the model alone judges.
pub async fn run_edges_alone(program: &Program) -> Result<Counts> {
    let run = Run::on(&[(program, &[])], 1).await?;
    run.either(None).await
}

async fn beside_etcd(
    program: &Program,
    flags: &[&str],
    differences_max: usize,
    script: Option<(u64, usize)>,
) -> Result<Counts> {
    let etcd = Program::etcd()?;
    let programs: [(&Program, &[&str]); 2] = [(&etcd, &[]), (program, flags)];
    let run = Run::on(&programs, differences_max).await?;
    run.either(script).await
}

fn random(seed: u64, ops: usize) -> impl FnMut(&Model) -> Option<Op> {
    let mut script = Script::new(seed);
    let mut left = ops;
    move |model| {
        left = left.checked_sub(1)?;
        Some(script.next(model))
    }
}

/// One script on some servers.
struct Run {
    servers: Vec<StoreServer>,
    clients: Vec<Client>,
    model: Model,
    counts: Counts,
    differences: Vec<anyhow::Error>,
    differences_max: usize,
}

impl Run {
    /// A random script, of a seed and so many operations, or the one written by hand.
    async fn either(self, script: Option<(u64, usize)>) -> Result<Counts> {
        match script {
            Some((seed, ops)) => {
                let script = self.script(random(seed, ops)).await;
                script.with_context(|| format!("seed {seed}"))
            }
            None => self.script(edges::edges()).await.context("edges"),
        }
    }

    async fn on(programs: &[(&Program, &[&str])], differences_max: usize) -> Result<Self> {
        let limits = [
            format!("--max-txn-ops={TXN_OPS_MAX}"),
            format!("--max-request-bytes={REQUEST_BYTES_MAX}"),
        ];
        let starting = programs.iter().map(|(program, flags)| {
            let flags: Vec<&str> = flags
                .iter()
                .copied()
                .chain(limits.iter().map(String::as_str))
                .collect();
            async move { StoreServer::start(program, &flags).await }
        });
        let servers = futures::future::try_join_all(starting).await?;
        let mut run = Self {
            servers,
            clients: Vec::new(),
            model: Model::default(),
            counts: Counts::default(),
            differences: Vec::new(),
            differences_max,
        };
        run.connect().await?;
        Ok(run)
    }

    async fn connect(&mut self) -> Result<()> {
        let clients = self.servers.iter().map(StoreServer::client);
        self.clients = clients.collect::<Result<_>>()?;
        futures::future::try_join_all(self.clients.iter().map(settle)).await?;
        Ok(())
    }

    /// The script, and then the whole store three times over.
    async fn script(mut self, mut next: impl FnMut(&Model) -> Option<Op>) -> Result<Counts> {
        let mut number = 0;
        while let Some(op) = next(&self.model) {
            let revision = self.model.head();
            let step = self.step(&op).await;
            if let Err(error) =
                step.with_context(|| format!("operation {number} at revision {revision}"))
            {
                self.differences.push(error);
                if self.differences.len() >= self.differences_max {
                    break;
                }
            }
            number += 1;
        }
        if !self.differences.is_empty() {
            let told = self.differences.iter().map(|error| format!("{error:#}"));
            bail!("{}", told.collect::<Vec<_>>().join("\n"));
        }
        self.compare_whole().await.context("at the end")?;
        for kill in [true, false] {
            self.step(&Op::Restart { kill }).await?;
            self.compare_whole()
                .await
                .with_context(|| format!("after a restart, SIGKILL: {kill}"))?;
        }
        Ok(self.counts)
    }

    async fn step(&mut self, op: &Op) -> Result<()> {
        let (expected, plan) = self.model.answer(op);
        self.counts.add(op, &expected);
        if let Op::Restart { kill } = op {
            return self.restart(*kill).await;
        }
        self.compare(op, &expected, &plan).await
    }

    async fn compare(&self, op: &Op, expected: &Answer, plan: &Plan) -> Result<()> {
        let asked = self
            .clients
            .iter()
            .zip(&self.servers)
            .map(|(client, server)| async move {
                let name = &server.program().name;
                let answer = match timeout(OP_DEADLINE, perform(client, op, plan)).await {
                    Ok(answer) => answer,
                    Err(_) => Err(anyhow::anyhow!("no answer within {OP_DEADLINE:?}")),
                };
                anyhow::Ok((name, answer.with_context(|| format!("{name}: {op:?}"))?))
            });
        let answers = futures::future::try_join_all(asked).await?;
        if answers
            .iter()
            .all(|(_, answer)| answer.text == expected.text)
        {
            return Ok(());
        }
        let mut told: Vec<(&str, &str)> = answers
            .iter()
            .map(|(name, answer)| (name.as_str(), answer.text.as_str()))
            .collect();
        told.push(("model", &expected.text));
        let told: Vec<String> = told
            .iter()
            .map(|(name, text)| format!("  {name:>8}: {}", cut(text)))
            .collect();
        bail!("{}\n{}", cut(&format!("{op:?}")), told.join("\n"))
    }

    async fn restart(&mut self, kill: bool) -> Result<()> {
        let restarting = self.servers.iter_mut().map(|server| async move {
            if kill {
                server.kill()?;
            } else {
                server.stop().await?;
            }
            server.restart().await
        });
        futures::future::try_join_all(restarting).await?;
        self.connect().await
    }

    /// HashKV, every key with all its fields, every lease with its keys, every alarm.
    async fn compare_whole(&mut self) -> Result<()> {
        let everything = pb::RangeRequest {
            key: Bytes::from_static(b"\0"),
            range_end: Bytes::from_static(b"\0"),
            ..Default::default()
        };
        let mut ops = vec![
            Op::Range(everything),
            Op::HashKv(pb::HashKvRequest { revision: 0 }),
            Op::Leases,
            Op::Alarms(pb::AlarmRequest::default()),
        ];
        ops.extend(
            self.model
                .lease_ids()
                .map(|id| Op::TimeToLive(pb::LeaseTimeToLiveRequest { id, keys: true })),
        );
        for op in ops {
            self.step(&op).await?;
        }
        Ok(())
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(TEXT_BYTES_MAX) {
        Some((at, _)) => format!("{}... ({} bytes)", &text[..at], text.len()),
        None => text.to_owned(),
    }
}

/// A new etcd reports an old storage version until it has written the present one, and a new Ballast none.
async fn settle(client: &Client) -> Result<()> {
    wait_for("the storage version", SETTLE_DEADLINE, || async {
        let status = client
            .maintenance
            .clone()
            .status(pb::StatusRequest {})
            .await?
            .into_inner();
        Ok((status.storage_version == CLUSTER_VERSION).then_some(()))
    })
    .await
}
