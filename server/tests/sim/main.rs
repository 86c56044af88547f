//! The replicated store simulated: real members, with their logs, databases and connections, on one thread, in an order that follows from a seed.
//!
//!     disk.rs      when the log and the database are written     net.rs       members and clients over turmoil's TCP
//!     member.rs    a member as a host's software                 clients.rs   load, and what it was told
//!     faults.rs    what goes wrong and when                      run.rs       one run from its beginning to its judgement
//!     findings.rs  one log, one leader a term; the trace         history.rs   nothing lost, nothing stale, nothing twice
//!
//!     BALLAST_SIM_SEED=7      that run alone, its trace in full when it fails
//!     BALLAST_SIM_SEEDS=500   so many runs, from a seed drawn at random, which is printed
//!     BALLAST_SIM_LOG=info    what the members log, on the standard error
//!
//! Simulated are network, time and the moments at which the disk writes. Where something is random by itself, in the library, a `select!` or a hash map,
//! `ballast_seeded` gives it the seed; and since some of that counts what the process did before, each run has a process of its own.
//! Not here: watches, leases and compaction; what a power cut leaves of a write under way (`fault_power_cut`).

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test tells what it did"
)]

mod clients;
mod disk;
mod faults;
mod findings;
mod history;
mod member;
mod net;
mod run;

use std::num::NonZero;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use run::{Counts, Outcome};

/// Of a run that went wrong, the end of its trace.
const LINES_MAX: usize = 60;
/// In `make check`: the same ones each time, so that it does not fail one day and pass the next.
const SEEDS: [u64; 3] = [1, 2, 3];
/// From so many runs on, each kind of thing has happened in one of them.
const MANY: usize = 20;
/// A run takes seconds; one that stands still is ended.
const RUN_MAX: Duration = Duration::from_secs(300);
/// To the process of a run: its seed, and the file for what became of it.
const SEED_OF_RUN: &str = "BALLAST_SIM_RUN";
const FILE_OF_RUN: &str = "BALLAST_SIM_FILE";

/// The run of a seed, in a process of its own.
fn simulate(seed: u64) -> Outcome {
    let file = tempfile::NamedTempFile::new().unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_run_for_the_process_that_asked_for_it",
            "--nocapture",
        ])
        .env(SEED_OF_RUN, seed.to_string())
        .env(FILE_OF_RUN, file.path())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "the process of seed {seed}: {status}");
    serde_json::from_slice(&std::fs::read(file.path()).unwrap()).unwrap()
}

/// Does nothing when nobody asked.
#[test]
fn a_run_for_the_process_that_asked_for_it() {
    let Some(seed) = from_environment(SEED_OF_RUN) else {
        return;
    };
    if let Ok(filter) = std::env::var("BALLAST_SIM_LOG") {
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .without_time()
            .init();
    }
    std::thread::spawn(move || {
        std::thread::sleep(RUN_MAX);
        eprintln!("seed {seed} stands still");
        std::process::exit(1);
    });
    let running = std::thread::spawn(move || {
        ballast_seeded::seed_thread(seed);
        run::run(seed)
    });
    let outcome = serde_json::to_vec(&running.join().unwrap()).unwrap();
    std::fs::write(std::env::var_os(FILE_OF_RUN).unwrap(), outcome).unwrap();
}

fn from_environment(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name} is a number")),
    )
}

/// As many at once as there are cores.
fn simulate_all(seeds: &[u64]) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = simulate(*seed);
                    println!("seed {seed}: {} {:?}", outcome.digest(), outcome.counts);
                    outcomes.lock().unwrap().push(outcome);
                }
            });
        }
    });
    outcomes.into_inner().unwrap()
}

#[test]
fn members_are_one_store_whatever_happens_to_them() {
    let one = from_environment("BALLAST_SIM_SEED");
    let seeds = match (one, from_environment("BALLAST_SIM_SEEDS")) {
        (Some(seed), _) => vec![seed],
        (None, Some(count)) => {
            let first: u64 = u64::from(rand::random::<u32>());
            (first..first + count).collect()
        }
        (None, None) => SEEDS.to_vec(),
    };
    println!("seeds {} to {}", seeds[0], seeds[seeds.len() - 1]);
    let outcomes = simulate_all(&seeds);
    let mut bad = Vec::new();
    for outcome in outcomes
        .iter()
        .filter(|outcome| !outcome.violations.is_empty())
    {
        let skipped = match one {
            Some(_) => 0,
            None => outcome.trace.len().saturating_sub(LINES_MAX),
        };
        println!("seed {}, the trace from line {skipped}:", outcome.seed);
        for line in &outcome.trace[skipped..] {
            println!("  {line}");
        }
        bad.push(format!(
            "BALLAST_SIM_SEED={}: {}",
            outcome.seed,
            outcome.violations.join("; ")
        ));
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    if one.is_none() {
        was_worth_it(&outcomes);
    }
}

/// A simulation in which nothing happens passes too.
fn was_worth_it(outcomes: &[Outcome]) {
    let sum = |count: fn(&Counts) -> usize| -> usize {
        outcomes.iter().map(|outcome| count(&outcome.counts)).sum()
    };
    let runs = outcomes.len();
    let (requests, answered) = (sum(|c| c.requests), sum(|c| c.answered));
    assert!(answered > 100 * runs, "{answered} of {requests} answered");
    assert!(sum(|c| c.terms) > runs, "hardly anybody was elected");
    assert!(sum(|c| c.crashes) > runs, "hardly anybody crashed");
    if runs >= MANY {
        assert!(sum(|c| c.snapshots) > 0, "nobody needed a snapshot");
        assert!(sum(|c| c.grown) > 0, "no group changed its members");
        let sizes = [3, 5].map(|size| outcomes.iter().any(|o| o.counts.members == size));
        assert_eq!(sizes, [true, true], "three and five members");
    }
}

/// What is printed for a seed would be worth nothing otherwise.
#[test]
fn a_seed_is_one_run() {
    let [once, again] = &simulate_all(&[7, 7])[..] else {
        panic!("two runs");
    };
    for (line, (one, two)) in once.trace.iter().zip(&again.trace).enumerate() {
        assert_eq!(one, two, "line {line}");
    }
    assert_eq!(once.digest(), again.digest());
    let other = simulate(8);
    assert_ne!(once.digest(), other.digest());
}
