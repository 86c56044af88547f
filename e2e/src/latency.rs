//! What requests notice of maintenance on a large store: a put and a get are due every millisecond while the history is compacted, and
//! while the database is defragmented.
//!
//! ```text
//! each pair: write 1.5 times as many records as there are keys | quiet | compaction | quiet | Defragment
//! at the end: compaction and Defragment without load, and the same on real etcd, for the size of the file
//! ```
//!
//! Promises: latencies count from when a request was due; a disturbed run is compared with the quiet one right before it, on the same
//! data. Before a compaction all of the history is there, before a defragmentation 60 % of the file is free.
//! Not here: ratios to etcd under the same load (`bench_kube`).

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::bench::{MAINTENANCE_ASKED, MIB};
use crate::bench_kube::{Load, compact, defragment, fill, head, load_beside, milliseconds};
use crate::bench_process::{Cost, database_bytes};
use crate::load::Measured;
use crate::progress::Progress;
use crate::store_server::{Client, Program, StoreServer};
use crate::tools;
use crate::up::say;

const PREFIX: &str = "/registry/pods/ns/";
const LOAD_PERIOD: Duration = Duration::from_millis(1);
/// Above what the largest run holds, copy included.
const QUOTA: &str = "--quota-backend-bytes=17179869184";
/// The file may be so much larger than etcd's.
const FILE_RATIO_MAX: f64 = 1.1;

/// What to run.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Keys of 1 KiB.
    #[arg(long, default_value_t = 1_000_000)]
    keys: u64,
    /// Quiet and disturbed runs.
    #[arg(long, default_value_t = 3)]
    pairs: usize,
    /// Seconds of a quiet run.
    #[arg(long, default_value_t = 20)]
    quiet: u64,
    /// Milliseconds by which p99.9 may rise.
    #[arg(long, default_value_t = 10.0)]
    rise: f64,
    /// Do not run etcd for the size of its file.
    #[arg(long)]
    without_etcd: bool,
    /// Writes the table there, as Markdown.
    #[arg(long)]
    write: Option<PathBuf>,
    /// Further flags of the server under test.
    #[arg(long)]
    flag: Vec<String>,
}

/// One run beside some work, and the quiet one before it.
struct Pair {
    work: &'static str,
    took: Duration,
    quiet: [Measured; 2],
    disturbed: [Measured; 2],
}

/// Runs the pairs and fails when one rises too far.
pub async fn run(args: &Args) -> Result<()> {
    let program = Program::under_test()?;
    let mut flags = vec![QUOTA, MAINTENANCE_ASKED];
    flags.extend(args.flag.iter().map(String::as_str));
    let server = StoreServer::start(&program, &flags).await?;
    fill(&server, PREFIX, 0..args.keys).await?;
    let mut pairs = Vec::new();
    for _ in 0..args.pairs {
        let clients = [server.client()?, server.client()?];
        fill(&server, PREFIX, 0..args.keys).await?;
        fill(&server, PREFIX, 0..args.keys / 2).await?;
        let revision = head(&clients[0]).await?;
        let compaction = compact(clients[0].clone(), revision);
        pairs.push(pair("compaction", args, &clients, compaction).await?);
        let copying = defragment(clients[0].clone());
        pairs.push(pair("Defragment", args, &clients, copying).await?);
        let cost = Cost::of(server.pid()?)?;
        say(&format!(
            "memory {:.0} MiB, anonymous {:.0} MiB, peak {:.0} MiB",
            cost.rss as f64 / MIB,
            cost.anonymous as f64 / MIB,
            cost.rss_peak as f64 / MIB
        ));
    }
    let mut text = table(&pairs, args.rise);
    let mut missed = text.matches("| NO |").count();
    let ours = settled_file(&server).await?;
    drop(server);
    if !args.without_etcd {
        tools::ensure(&["etcd"], &Progress::new())?;
        let etcd = StoreServer::start(&Program::etcd()?, &[QUOTA]).await?;
        fill(&etcd, PREFIX, 0..args.keys).await?;
        let theirs = settled_file(&etcd).await?;
        let ratio = ours as f64 / theirs as f64;
        missed += usize::from(ratio > FILE_RATIO_MAX);
        let _ = writeln!(
            text,
            "\nThe file afterwards: {:.0} MiB, etcd's for the same data {:.0} MiB: {ratio:.2}x, at most {FILE_RATIO_MAX}x.",
            ours as f64 / MIB,
            theirs as f64 / MIB
        );
    }
    say(&text);
    if let Some(path) = &args.write {
        std::fs::write(path, document(args, &text))
            .with_context(|| format!("write {}", path.display()))?;
    }
    if missed > 0 {
        bail!("{missed} bounds missed");
    }
    Ok(())
}

async fn pair(
    work: &'static str,
    args: &Args,
    clients: &[Client],
    doing: impl Future<Output = Result<()>>,
) -> Result<Pair> {
    let load = Load {
        prefix: PREFIX,
        keys: args.keys,
        period: LOAD_PERIOD,
    };
    let (quiet, _) = load_beside(clients, load, async {
        tokio::time::sleep(Duration::from_secs(args.quiet)).await;
        Ok(())
    })
    .await?;
    let (disturbed, took) = load_beside(clients, load, doing).await?;
    let pair = Pair {
        work,
        took,
        quiet,
        disturbed,
    };
    say(table(std::slice::from_ref(&pair), args.rise).trim_end());
    Ok(pair)
}

/// The database's allocated bytes when nothing but the live keys is in it.
async fn settled_file(server: &StoreServer) -> Result<u64> {
    let client = server.client()?;
    compact(client.clone(), head(&client).await?).await?;
    defragment(client).await?;
    database_bytes(&server.data_dir())
}

fn table(pairs: &[Pair], rise_max: f64) -> String {
    let mut text = String::from(
        "| work | took (s) | request | quiet p99.9 (ms) | quiet slowest | p99.9 | slowest | due at (s) | p99.9 rises by | met |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    for pair in pairs {
        for (request, quiet, disturbed) in [
            ("put", &pair.quiet[0], &pair.disturbed[0]),
            ("get", &pair.quiet[1], &pair.disturbed[1]),
        ] {
            let p999 = |measured: &Measured| milliseconds(measured.quantile(0.999));
            let rise = p999(disturbed) - p999(quiet);
            let met = rise <= rise_max && disturbed.failed == 0;
            let _ = writeln!(
                text,
                "| {} | {:.1} | {request} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {rise:.1} | {} |",
                pair.work,
                pair.took.as_secs_f64(),
                p999(quiet),
                milliseconds(quiet.max()),
                p999(disturbed),
                milliseconds(disturbed.max()),
                disturbed.slowest_at.as_secs_f64(),
                if met { "yes" } else { "NO" }
            );
        }
    }
    text
}

fn document(args: &Args, table: &str) -> String {
    format!(
        "# Latency under maintenance\n\nWritten by `make latency`: {} keys of 1 KiB; before each compaction as many old records again and half of \
         that; 60 % of the file is free before each Defragment. A put and a get are due every millisecond, and a latency counts from when \
         the request was due. The load generator shares the machine's cores with the server.\n\n{table}",
        args.keys
    )
}
