//! The benchmark: the same load on real etcd and on the program under test, as ratios.
//!
//! Promises: both are measured in one run, in turn (A B A B), each time on fresh data; the table shows medians with minimum and maximum over
//! the rounds, whatever they are. Costs are the server's own: CPU time, memory and written bytes of its process, without the client's.
//! Not here: rows on a filled store (`bench_kube`), the table's form (`bench_table`).

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;

use crate::bench_process::Cost;
use crate::bench_table::Bound::Ratio;
use crate::bench_table::{Bounds, Metric, Samples, Table};
use crate::load::{self, Kind, Plan};
use crate::progress::Progress;
use crate::store_server::{Program, StoreServer};
use crate::tools;
use crate::up::say;
use crate::wait;
use crate::{bench_kube, bench_members, bench_objects};

/// Bytes in the table's unit of memory.
pub const MIB: f64 = 1_048_576.0;

/// Of the server under test: whatever is measured beside a defragmentation begins it itself.
pub const MAINTENANCE_ASKED: &str = "--auto-defrag=off";

/// What to run.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Interleaved rounds.
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Of each cluster; with more than one, the rows are those of etcd's tool, and `failover`.
    #[arg(long, default_value_t = 1)]
    pub members: usize,
    /// Only these rows, by name; `kube` names the rows on a filled store, `objects` those that write as kube-apiserver does.
    #[arg(long, value_delimiter = ',')]
    pub rows: Vec<String>,
    /// Divides the number of requests and keys, for a quick look.
    #[arg(long, default_value_t = 1)]
    pub divide: u64,
    /// Writes the table there, as Markdown.
    #[arg(long)]
    write: Option<PathBuf>,
    /// Further flags of the server under test.
    #[arg(long)]
    pub flag: Vec<String>,
}

/// One workload of etcd's `benchmark` tool.
pub struct Row {
    pub name: &'static str,
    connections: &'static str,
    arguments: &'static [&'static str],
    /// Number of requests, which `--divide` divides; passed as `--total` or `--put-total`.
    total: (&'static str, u64),
    /// The heading of the summary that counts, where the tool prints several.
    heading: Option<&'static str>,
    /// Shown per 1,000 of the requests, or as a whole.
    pub cpu_per_thousand: bool,
    bounds: Bounds,
}

const MANY: &str = "--conns=100 --clients=1000";
const READ_BOUNDS: Bounds = &[
    (Metric::Throughput, Ratio(1.3, 1.7)),
    (Metric::Cpu, Ratio(0.6, 0.45)),
];

pub const ROWS: [Row; 8] = [
    Row {
        name: "put-1-client",
        connections: "--conns=1 --clients=1",
        arguments: &["put", "--key-size=8", "--sequential-keys", "--val-size=256"],
        total: ("--total", 3_000),
        heading: None,
        cpu_per_thousand: true,
        bounds: &[(Metric::P50, Ratio(1.0, 0.8))],
    },
    Row {
        name: "put",
        connections: MANY,
        arguments: &["put", "--key-size=8", "--sequential-keys", "--val-size=256"],
        total: ("--total", 60_000),
        heading: None,
        cpu_per_thousand: true,
        bounds: &[
            (Metric::Throughput, Ratio(1.3, 2.0)),
            (Metric::Cpu, Ratio(0.7, 0.4)),
            (Metric::P99, Ratio(1.0, 1.0)),
            (Metric::Written, Ratio(2.0, 1.2)),
        ],
    },
    Row {
        name: "txn-put",
        connections: MANY,
        arguments: &[
            "txn-put",
            "--txn-ops=1",
            "--key-size=8",
            "--val-size=256",
            "--key-space-size=100000",
        ],
        total: ("--total", 40_000),
        heading: None,
        cpu_per_thousand: true,
        bounds: &[
            (Metric::Throughput, Ratio(1.3, 2.0)),
            (Metric::Cpu, Ratio(0.7, 0.4)),
            (Metric::P99, Ratio(1.0, 1.0)),
        ],
    },
    Row {
        name: "range-linearizable",
        connections: MANY,
        arguments: &["range", "foo", "--consistency=l"],
        total: ("--total", 80_000),
        heading: None,
        cpu_per_thousand: true,
        bounds: READ_BOUNDS,
    },
    Row {
        name: "range-serializable",
        connections: MANY,
        arguments: &["range", "foo", "--consistency=s"],
        total: ("--total", 80_000),
        heading: None,
        cpu_per_thousand: true,
        bounds: READ_BOUNDS,
    },
    Row {
        name: "lease-keepalive",
        connections: MANY,
        arguments: &["lease-keepalive"],
        total: ("--total", 60_000),
        heading: None,
        cpu_per_thousand: true,
        bounds: READ_BOUNDS,
    },
    Row {
        name: "watch",
        connections: "--conns=10 --clients=10",
        arguments: &[
            "watch",
            "--streams=10",
            "--watch-per-stream=100",
            "--watched-key-total=100",
        ],
        total: ("--put-total", 2_000),
        heading: Some("Watch events received summary:"),
        cpu_per_thousand: false,
        bounds: &[
            (Metric::Throughput, Ratio(1.0, 1.0)),
            (Metric::Cpu, Ratio(0.7, 0.3)),
        ],
    },
    Row {
        name: "watch-latency",
        connections: "--conns=1 --clients=1",
        arguments: &[
            "watch-latency",
            "--put-rate=500",
            "--streams=10",
            "--watchers-per-stream=10",
        ],
        total: ("--put-total", 2_000),
        heading: Some("Watch events summary:"),
        cpu_per_thousand: true,
        bounds: &[
            (Metric::P99, Ratio(0.8, 0.5)),
            (Metric::Cpu, Ratio(1.0, 0.3)),
        ],
    },
];

/// Names of the rows of the open-loop generator: requests a second, and whether they read.
const OPEN_ROWS: [(&str, u32, bool); 2] = [
    ("open-put-2000/s", 2_000, false),
    ("open-get-4000/s", 4_000, true),
];
const OPEN_TIME: Duration = Duration::from_secs(6);
const OPEN_CONNECTIONS: usize = 8;
/// The row that sends the load of all others to one server, for its memory.
const MEMORY_ROW: &str = "memory-after-all";
/// After its start a member settles before its idle memory is read.
const IDLE_TIME: Duration = Duration::from_secs(2);

/// Runs the rows and prints the table.
pub async fn run(args: &Args) -> Result<()> {
    tools::ensure(&["etcd", "benchmark"], &Progress::new())?;
    if args.members > 1 {
        let programs = [Program::etcd()?, Program::under_test()?];
        let table = bench_members::run(args, &programs).await?;
        say(&table.markdown());
        say(&format!("{} bounds missed", table.missed()));
        if let Some(path) = &args.write {
            let of = format!("# Benchmark of {} members", args.members);
            let text = table.document().replacen("# Benchmark", &of, 1);
            std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
        }
        return Ok(());
    }
    let names = ROWS.iter().map(|row| row.name);
    let names: Vec<&str> = names
        .chain(OPEN_ROWS.iter().map(|(name, ..)| *name))
        .chain([MEMORY_ROW, "objects", "kube"])
        .collect();
    if let Some(unknown) = args.rows.iter().find(|row| !names.contains(&row.as_str())) {
        bail!("no row {unknown}; there are {}", names.join(", "));
    }
    let programs = [Program::etcd()?, Program::under_test()?];
    let begun = wait::now();
    let mut table = Table::new(&programs[1].name, args.rounds, args.divide);
    let mut failures = Vec::new();
    for round in 1..=args.rounds {
        for name in &names {
            if !args.rows.is_empty() && !args.rows.iter().any(|row| row == name) {
                continue;
            }
            for (side, program) in programs.iter().enumerate() {
                let flags = std::iter::once(MAINTENANCE_ASKED);
                let flags = flags.chain(args.flag.iter().map(String::as_str));
                let flags: Vec<&str> = flags.filter(|_| side == 1).collect();
                let rows = match twice(name, program, &flags, args.divide).await {
                    Ok(rows) => rows,
                    Err(error) => {
                        failures.push(format!(
                            "round {round}, {name}, {}: {error:#}",
                            program.name
                        ));
                        continue;
                    }
                };
                for (name, bounds, samples) in rows {
                    say(&format!(
                        "round {round}, {name}, {}: {samples}",
                        program.name
                    ));
                    table.add(name, bounds, side, samples);
                }
            }
        }
    }
    say(&table.markdown());
    say(&format!(
        "{} bounds missed; {} s",
        table.missed(),
        begun.elapsed().as_secs()
    ));
    if let Some(path) = &args.write {
        std::fs::write(path, table.document())
            .with_context(|| format!("write {}", path.display()))?;
    }
    if !failures.is_empty() {
        bail!("without a result: {}", failures.join("; "));
    }
    Ok(())
}

/// Once more if it fails: a run of all rows is too long to be lost to one hiccup. Both failures are told.
async fn twice(name: &str, program: &Program, flags: &[&str], divide: u64) -> Result<Rows> {
    match one(name, program, flags, divide).await {
        Ok(rows) => Ok(rows),
        Err(error) => {
            say(&format!("{name}, {}: {error:#}; once more", program.name));
            one(name, program, flags, divide).await
        }
    }
}

/// A row's name, its bounds and what was measured.
pub type Rows = Vec<(&'static str, Bounds, Samples)>;

/// The row of this name, or all rows of the group, on one server.
async fn one(name: &str, program: &Program, flags: &[&str], divide: u64) -> Result<Rows> {
    if let Some(row) = ROWS.iter().find(|row| row.name == name) {
        let samples = tool_row(program, flags, row, divide).await?;
        return Ok(vec![(row.name, row.bounds, samples)]);
    }
    if let Some((name, rate, reads)) = OPEN_ROWS.iter().find(|(open, ..)| *open == name) {
        let samples = open_row(program, flags, *rate, *reads).await?;
        return Ok(vec![(name, &[], samples)]);
    }
    match name {
        MEMORY_ROW => memory_row(program, flags, divide).await,
        "objects" => bench_objects::run(program, flags, divide).await,
        _ => bench_kube::run(program, flags, divide).await,
    }
}

/// All of the tool's load on one server, one workload after the other.
async fn memory_row(program: &Program, flags: &[&str], divide: u64) -> Result<Rows> {
    let server = StoreServer::start(program, flags).await?;
    tokio::time::sleep(IDLE_TIME).await;
    let idle = Cost::of(server.pid()?)?;
    for row in &ROWS {
        tool(&server.endpoint(), row, divide).await?;
    }
    let after = Cost::of(server.pid()?)?;
    let mut samples = Samples::of(Metric::IdleRss, idle.rss as f64 / MIB);
    samples.set(Metric::Rss, after.rss as f64 / MIB);
    let bounds: Bounds = &[
        (Metric::IdleRss, Ratio(1.5, 1.0)),
        (Metric::Rss, Ratio(1.5, 1.0)),
    ];
    Ok(vec![(MEMORY_ROW, bounds, samples)])
}

async fn tool_row(program: &Program, flags: &[&str], row: &Row, divide: u64) -> Result<Samples> {
    let server = StoreServer::start(program, flags).await?;
    tokio::time::sleep(IDLE_TIME).await;
    let before = Cost::of(server.pid()?)?;
    let (total, mut samples) = tool(&server.endpoint(), row, divide).await?;
    let after = Cost::of(server.pid()?)?;
    samples.costs(before, after, total, row.cpu_per_thousand);
    Ok(samples)
}

/// Runs etcd's tool once: how many requests it sent, and what it says of them.
pub async fn tool(endpoints: &str, row: &Row, divide: u64) -> Result<(u64, Samples)> {
    let total = (row.total.1 / divide).max(10);
    let mut command = Command::new(tools::path("benchmark")?);
    command
        .arg(format!("--endpoints={endpoints}"))
        .arg("--precise")
        .args(row.connections.split(' '))
        .args(row.arguments)
        .arg(format!("{}={total}", row.total.0))
        .stdin(Stdio::null());
    let output = tokio::task::spawn_blocking(move || command.output()).await??;
    let text = String::from_utf8(output.stdout)?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{}: {}", output.status, tail(&errors, 5));
    }
    let summary = Summary::parse(&text, row.heading)
        .with_context(|| format!("the tool ended with:\n{}", tail(&text, 12)))?;
    Ok((total, summary.samples()))
}

/// The last lines of a text.
fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

async fn open_row(program: &Program, flags: &[&str], rate: u32, reads: bool) -> Result<Samples> {
    let server = StoreServer::start(program, flags).await?;
    let clients = (0..OPEN_CONNECTIONS)
        .map(|_| server.client())
        .collect::<Result<Vec<_>>>()
        .context("connect")?;
    let prefix = "/registry/open/".to_owned();
    let (keys, value) = (1_000, Bytes::from(vec![b'v'; 256]));
    let fill = Plan {
        kind: Kind::Put {
            prefix: prefix.clone(),
            keys,
            value: value.clone(),
        },
        period: Duration::from_millis(1),
    };
    load::run_for(&clients, &fill, Duration::from_millis(1_200)).await?;
    let kind = if reads {
        Kind::Get { prefix, keys }
    } else {
        Kind::Put {
            prefix,
            keys,
            value,
        }
    };
    let plan = Plan {
        kind,
        period: Duration::from_secs(1) / rate,
    };
    let before = Cost::of(server.pid()?)?;
    let measured = load::run_for(&clients, &plan, OPEN_TIME).await?;
    let after = Cost::of(server.pid()?)?;
    if measured.failed > 0 {
        bail!(
            "{} of {} requests failed",
            measured.failed,
            measured.count() + measured.failed
        );
    }
    let mut samples = Samples::default();
    samples.set(Metric::P50, measured.quantile(0.5).as_secs_f64() * 1e3);
    samples.set(Metric::P99, measured.quantile(0.99).as_secs_f64() * 1e3);
    samples.costs(before, after, measured.count() as u64, true);
    Ok(samples)
}

/// A load of puts and gets beside something else; the two results when `stop` is set.
pub async fn beside(
    clients: &[crate::store_server::Client],
    plans: [Plan; 2],
    stop: Arc<AtomicBool>,
) -> Result<[load::Measured; 2]> {
    let [put, get] = plans;
    let (puts, gets) = tokio::try_join!(
        load::run(clients, &put, Arc::clone(&stop)),
        load::run(clients, &get, Arc::clone(&stop))
    )?;
    stop.store(true, Ordering::Release);
    Ok([puts, gets])
}

/// One summary of etcd's `benchmark`.
#[derive(Debug, Default)]
struct Summary {
    throughput: f64,
    p50: f64,
    p99: f64,
}

impl Summary {
    /// Reads the summary below `heading`, or the last one.
    fn parse(text: &str, heading: Option<&str>) -> Result<Self> {
        let part = match heading {
            Some(heading) => {
                text.split_once(heading)
                    .with_context(|| format!("no {heading:?} in the output"))?
                    .1
            }
            None => {
                text.rsplit_once("Summary:")
                    .context("no summary in the output")?
                    .1
            }
        };
        let value = |label: &str| -> Result<f64> {
            let line = part
                .lines()
                .find(|line| line.trim_start().starts_with(label))
                .with_context(|| format!("no {label} in the summary"))?;
            line.trim_start()[label.len()..]
                .split_whitespace()
                .find_map(|word| word.parse().ok())
                .with_context(|| format!("no number in {line:?}"))
        };
        Ok(Self {
            throughput: value("Requests/sec:")?,
            p50: value("50% in")? * 1e3,
            p99: value("99% in")? * 1e3,
        })
    }

    fn samples(&self) -> Samples {
        let mut samples = Samples::default();
        samples.set(Metric::Throughput, self.throughput);
        samples.set(Metric::P50, self.p50);
        samples.set(Metric::P99, self.p99);
        samples
    }
}

impl Samples {
    /// The difference of two readings of the server's process.
    pub fn costs(&mut self, before: Cost, after: Cost, requests: u64, per_thousand: bool) {
        let cpu = after.cpu.saturating_sub(before.cpu).as_secs_f64();
        let thousands = requests as f64 / 1_000.0;
        self.set(
            Metric::Cpu,
            if per_thousand { cpu / thousands } else { cpu },
        );
        self.set(Metric::Rss, after.rss as f64 / MIB);
        let written = after.written.saturating_sub(before.written) as f64 / 1_024.0;
        // Reads write nothing; a few bytes are the housekeeping's.
        if written > requests as f64 / 100.0 {
            self.set(Metric::Written, written / requests as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "Watch creation summary:\n\nSummary:\n  Requests/sec:\t1.5\n\nLatency distribution:\n  50% in 0.5 secs.\n  \
                          99% in 0.9 secs.\nWatch events received summary:\n\nSummary:\n  Requests/sec:\t75819.8\n\nLatency \
                          distribution:\n  50% in 6.21e-07 secs.\n  99% in 0.004 secs.\n  99.9% in 0.0059 secs.\n";

    #[test]
    fn the_summary_under_its_heading_is_read() {
        let summary = Summary::parse(OUTPUT, Some("Watch creation summary:")).expect("it is there");
        assert!((summary.throughput - 1.5).abs() < 1e-9 && (summary.p99 - 900.0).abs() < 1e-9);
        let last = Summary::parse(OUTPUT, None).expect("it is there");
        assert!((last.throughput - 75_819.8).abs() < 1e-9 && (last.p50 - 6.21e-4).abs() < 1e-9);
        assert!((last.p99 - 4.0).abs() < 1e-9);
        assert!(Summary::parse("nothing", None).is_err());
    }
}
