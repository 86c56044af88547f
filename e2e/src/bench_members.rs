//! The benchmark of three members on one machine (`make bench MEMBERS=3`): the rows of etcd's tool over all members at once, and how long nobody
//! takes a write after the leader is killed. What a learner costs is in `bench_learner.rs`.
//!
//! Promises: as for one member: both programs in turn, fresh data, costs of all server processes together. A row during which the leader
//! changed fails.
//! Not here: the rows themselves (`bench.rs`).

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_api::etcdserverpb as pb;

use crate::bench::{self, ROWS, Row};
use crate::bench_learner;
use crate::bench_process::Cost;
use crate::bench_table::Bound::Ratio;
use crate::bench_table::{Bounds, Metric, Samples, Table};
use crate::members::{Members, Setup};
use crate::store_server::{Client, Program};
use crate::up::say;
use crate::wait;

const FAILOVER: &str = "failover";
/// Leaders killed for the median.
const FAILOVERS: u64 = 20;
/// An attempt at a write is given up for the next one.
const ATTEMPT: Duration = Duration::from_millis(500);
const RETRY: Duration = Duration::from_millis(5);
const WRITE_DEADLINE: Duration = Duration::from_secs(30);
const HEALTHY_DEADLINE: Duration = Duration::from_secs(60);
/// After all members serve, before the next leader dies.
const SETTLE: Duration = Duration::from_millis(1_500);
const IDLE_TIME: Duration = Duration::from_secs(2);
/// Further rows of the tool: by the name of the row it repeats, over followers only.
const ON_FOLLOWERS: [(&str, &str); 1] = [("range-linearizable-followers", "range-linearizable")];

const WRITES: Bounds = &[
    (Metric::Throughput, Ratio(1.2, 1.5)),
    (Metric::Cpu, Ratio(0.6, 0.4)),
];
const READS: Bounds = &[
    (Metric::Throughput, Ratio(1.2, 1.2)),
    (Metric::Cpu, Ratio(0.6, 0.4)),
];

fn bounds(row: &str) -> Bounds {
    match row {
        "put" | "txn-put" => WRITES,
        name if name.starts_with("range") => READS,
        bench_learner::ROW => bench_learner::BOUNDS,
        _ => &[],
    }
}

/// Runs the rows and gives the table.
pub async fn run(args: &bench::Args, programs: &[Program; 2]) -> Result<Table> {
    let mut table = Table::new(&programs[1].name, args.rounds, args.divide);
    let names = (ROWS.iter().map(|row| row.name))
        .chain(ON_FOLLOWERS.iter().map(|(name, _)| *name))
        .chain([FAILOVER, bench_learner::ROW]);
    let names: Vec<&str> = names
        .filter(|name| args.rows.is_empty() || args.rows.iter().any(|row| row == name))
        .collect();
    if names.is_empty() {
        bail!("no such row of several members");
    }
    for round in 1..=args.rounds {
        for name in &names {
            if *name == FAILOVER {
                if round == 1 {
                    failovers(args, programs, &mut table).await?;
                }
                continue;
            }
            for (side, program) in programs.iter().enumerate() {
                let samples = row(args, program, side, name).await;
                let samples = samples.with_context(|| format!("{name}, {}", program.name))?;
                say(&format!(
                    "round {round}, {name}, {}: {samples}",
                    program.name
                ));
                table.add(name, bounds(name), side, samples);
            }
        }
    }
    Ok(table)
}

async fn start(args: &bench::Args, program: &Program, side: usize) -> Result<Members> {
    let flags = args.flag.iter().map(String::as_str);
    let flags: Vec<&str> = flags.filter(|_| side == 1).collect();
    Members::start(Setup::new(program.clone(), &flags), args.members).await
}

async fn row(args: &bench::Args, program: &Program, side: usize, name: &str) -> Result<Samples> {
    let mut members = start(args, program, side).await?;
    if name == bench_learner::ROW {
        bench_learner::fill(&members, args.divide).await?;
        return bench_learner::measure(&mut members, args.divide).await;
    }
    tokio::time::sleep(IDLE_TIME).await;
    let leader = members.leader().await?;
    let repeats = ON_FOLLOWERS.iter().find(|(other, _)| *other == name);
    let of = repeats.map_or(name, |(_, of)| *of);
    let row: &Row = ROWS.iter().find(|row| row.name == of).context("a row")?;
    let endpoints: Vec<String> = (members.present().into_iter())
        .filter(|&index| repeats.is_none() || index != leader)
        .map(|index| members.all[index].server.endpoint())
        .collect();
    let term = members.status(leader).await?.raft_term;
    let before = cost(&members)?;
    let (total, mut samples) = bench::tool(&endpoints.join(","), row, args.divide).await?;
    samples.costs(before, cost(&members)?, total, row.cpu_per_thousand);
    let after = members.status(leader).await?.raft_term;
    ensure!(
        after == term,
        "the leader changed: term {term}, then {after}"
    );
    Ok(samples)
}

/// Of all processes together.
fn cost(members: &Members) -> Result<Cost> {
    let mut sum = Cost::default();
    for member in &members.all {
        let cost = Cost::of(member.server.pid()?)?;
        sum.cpu += cost.cpu;
        sum.written += cost.written;
        sum.rss += cost.rss;
        sum.anonymous += cost.anonymous;
        sum.rss_peak += cost.rss_peak;
    }
    Ok(sum)
}

/// Both clusters stand side by side; their leaders die in turn.
async fn failovers(args: &bench::Args, programs: &[Program; 2], table: &mut Table) -> Result<()> {
    let mut clusters = [
        start(args, &programs[0], 0).await?,
        start(args, &programs[1], 1).await?,
    ];
    let mut times = [Vec::new(), Vec::new()];
    for number in 0..(FAILOVERS / args.divide).max(3) {
        for (side, members) in clusters.iter_mut().enumerate() {
            let took = failover(members, number).await;
            let took =
                took.with_context(|| format!("{FAILOVER} {number}, {}", programs[side].name))?;
            times[side].push(took);
        }
    }
    for (side, times) in times.iter_mut().enumerate() {
        times.sort_unstable();
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let mut samples = Samples::of(Metric::P50, milliseconds(times[times.len() / 2]));
        samples.set(Metric::Max, milliseconds(*times.last().context("a time")?));
        say(&format!("{FAILOVER}, {}: {samples}", programs[side].name));
        table.add(FAILOVER, &[(Metric::P50, Ratio(1.0, 1.0))], side, samples);
    }
    Ok(())
}

/// From the kill of the leader until a write is taken.
async fn failover(members: &mut Members, number: u64) -> Result<Duration> {
    members.wait_healthy(HEALTHY_DEADLINE).await?;
    tokio::time::sleep(SETTLE).await;
    let leader = members.leader().await?;
    let others: Vec<Client> = (members.present().into_iter())
        .filter(|&index| index != leader)
        .map(|index| members.client(index))
        .collect::<Result<_>>()?;
    for client in &others {
        // So that they are connected.
        put(client, number).await?;
    }
    members.all[leader].kill()?;
    let begun = wait::now();
    let mut attempts = tokio::task::JoinSet::new();
    for client in others {
        let client = Arc::new(client);
        attempts.spawn(async move {
            loop {
                let attempt = tokio::time::timeout(ATTEMPT, put(&client, number)).await;
                if matches!(attempt, Ok(Ok(()))) {
                    return begun.elapsed();
                }
                tokio::time::sleep(RETRY).await;
            }
        });
    }
    let first = tokio::time::timeout(WRITE_DEADLINE, attempts.join_next()).await;
    let took = first
        .context("no write was taken")?
        .context("an attempt")??;
    attempts.abort_all();
    members.all[leader].server.spawn()?;
    Ok(took)
}

async fn put(client: &Client, number: u64) -> Result<()> {
    let request = pb::PutRequest {
        key: "failover".into(),
        value: number.to_string().into(),
        ..pb::PutRequest::default()
    };
    client.kv.clone().put(request).await?;
    Ok(())
}
