//! A run: window after window until the time is up, and the report.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_api::etcdserverpb as pb;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};
use serde::Deserialize;
use tokio::task::JoinSet;

use super::faults::{ALL, Around, Fault, strike};
use super::record::{Clock, Kind, Kv, Op, Window};
use super::reference::Reference;
use super::stale::{Leases, serializable};
use super::summary::Summary;
use super::traffic::{self, Shared};
use super::watch_check::Session;
use super::watching::Watching;
use crate::lab::Lab;
use crate::members::{Members, Setup};
use crate::progress::Progress;
use crate::store_server::{Client, Program};
use crate::up::say;
use crate::{packages, tools, wait};

/// Few entries are kept, so that a member that was away for a window needs a snapshot.
const FLAGS: [&str; 2] = ["--snapshot-count=300", "--snapshot-catchup-entries=100"];
/// From the end of a fault until all members serve.
const RECOVERY_DEADLINE: Duration = Duration::from_secs(60);
/// From the end of the load until every watcher was told everything.
const TOLD_DEADLINE: Duration = Duration::from_secs(30);
/// For a lease that is left alone to run out while no leader changes: several times its time to live.
const RUN_OUT_DEADLINE: Duration = Duration::from_secs(15);
const HASH_DEADLINE: Duration = Duration::from_secs(20);
const WINDOW_DEADLINE: Duration = Duration::from_mins(4);
const CALM: Duration = Duration::from_millis(400);
/// A request of unknown outcome may be done so many windows later.
const UNKNOWN_WINDOWS: usize = 3;
/// Histories at porcupine at once.
const JUDGES: usize = 1;

/// What to run.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(long, default_value_t = 1.0)]
    pub minutes: f64,
    /// Of which fault strikes whom; a random one by default.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Real etcd instead of the program under test.
    #[arg(long)]
    pub etcd: bool,
    /// Another build, to upgrade to and back.
    #[arg(long)]
    pub other: Option<PathBuf>,
    /// Only these faults.
    #[arg(long, value_delimiter = ',')]
    pub fault: Vec<Fault>,
    /// Not these.
    #[arg(long, value_delimiter = ',')]
    pub without: Vec<Fault>,
    #[arg(long, default_value_t = 3)]
    pub members: usize,
    /// Further flags of the members.
    #[arg(long)]
    pub flag: Vec<String>,
    /// Put the report into this document.
    #[arg(long)]
    pub report: Option<PathBuf>,
}

/// Runs it; an error tells the first thing that was wrong.
pub fn run(args: &Args) -> Result<()> {
    tools::ensure(&["etcd", "linearize"], &Progress::new())?;
    let program = if args.etcd {
        Program::etcd()?
    } else {
        packages::ensure_named(&["libfaketime"])?;
        Program::under_test()?
    };
    let seed = args.seed.unwrap_or_else(|| rand::rng().random());
    say(&format!("{}: seed {seed}", program.name));
    let folder = tempfile::Builder::new()
        .prefix("ballast-nemesis-")
        .tempdir()?;
    test_the_judge(folder.path())?;
    let flags: Vec<&str> = (FLAGS.into_iter())
        .chain(args.flag.iter().map(String::as_str))
        .collect();
    let mut setup = Setup::new(program.clone(), &flags);
    setup.lossy = true;
    // Real etcd is linked statically.
    setup.clocks = !args.etcd;
    let outcome = Lab::run(|lab| async {
        setup.lab = Some(lab);
        let members = Members::start(setup, args.members).await?;
        let mut nemesis = Nemesis::new(members, seed, args, folder.path())?;
        let outcome = nemesis.run(args).await;
        if outcome.is_err() {
            nemesis.members.keep_logs(&folder.path().join("logs"))?;
        }
        outcome
    });
    match outcome {
        Ok(summary) => {
            say(&summary.line());
            if let Some(path) = &args.report {
                summary.write(path)?;
            }
            Ok(())
        }
        Err(error) => {
            let folder = folder.keep();
            Err(error.context(format!(
                "the nemesis of seed {seed}; all of it is in {}",
                folder.display()
            )))
        }
    }
}

struct Nemesis {
    members: Members,
    builds: Vec<Program>,
    random: StdRng,
    clock: Clock,
    next: Arc<AtomicU64>,
    reference: Reference,
    leases: Leases,
    /// Of unknown outcome, with the window they were sent in.
    unknown: Vec<(usize, Op)>,
    summary: Summary,
    folder: PathBuf,
    judges: JoinSet<Result<Verdict>>,
}

impl Nemesis {
    fn new(members: Members, seed: u64, args: &Args, folder: &Path) -> Result<Self> {
        let program = members.program().clone();
        let other = if let Some(path) = &args.other {
            path.canonicalize()?
        } else {
            // The same build by another name: what is left is one restart after the other.
            let copy = folder.join(format!("{}-other", program.name));
            std::fs::copy(&program.path, &copy)?;
            copy
        };
        let other = Program {
            name: program.name.clone(),
            path: other,
        };
        Ok(Self {
            summary: Summary {
                program: program.name.clone(),
                seed,
                ..Summary::default()
            },
            members,
            builds: vec![program, other],
            random: StdRng::seed_from_u64(seed),
            clock: Clock::start(),
            next: Arc::new(AtomicU64::new(1)),
            reference: Reference::default(),
            leases: Leases::default(),
            unknown: Vec::new(),
            folder: folder.to_owned(),
            judges: JoinSet::new(),
        })
    }

    async fn run(&mut self, args: &Args) -> Result<Summary> {
        let faults: Vec<Fault> = ALL
            .into_iter()
            .filter(|fault| args.fault.is_empty() || args.fault.contains(fault))
            .filter(|fault| !args.without.contains(fault))
            .filter(|fault| !args.etcd || *fault != Fault::ClockJump)
            .collect();
        ensure!(!faults.is_empty(), "no fault is left");
        let begun = wait::now();
        let time = Duration::from_secs_f64(args.minutes * 60.0);
        let mut number = 0;
        let mut turn = Vec::new();
        while begun.elapsed() < time {
            if turn.is_empty() {
                turn.clone_from(&faults);
                turn.shuffle(&mut self.random);
            }
            let fault = turn.pop().context("a fault is left")?;
            let window = self.window(number, fault);
            tokio::time::timeout(WINDOW_DEADLINE, window)
                .await
                .with_context(|| format!("does not end within {WINDOW_DEADLINE:?}"))
                .and_then(|done| done)
                .with_context(|| format!("window {number} ({})", fault.name()))?;
            number += 1;
            self.collect(JUDGES).await?;
        }
        self.collect(0).await?;
        self.summary.time = begun.elapsed();
        self.summary.leases = self.leases.judged;
        self.summary.revisions = self.reference.head();
        Ok(std::mem::take(&mut self.summary))
    }

    async fn window(&mut self, number: usize, fault: Fault) -> Result<()> {
        let before = self.reference.head();
        let state: Vec<Kv> = self.reference.state().values().cloned().collect();
        let begun = self.clock.now_ns();
        let clients = self.members.clients()?;
        let shared = Arc::new(Shared::new(self.clock, Arc::clone(&self.next), before));
        let seed = self.random.random();
        let watching = Watching::start(&shared, &clients, before, seed);
        let load = tokio::spawn({
            let (shared, clients) = (Arc::clone(&shared), clients.clone());
            async move { traffic::run(&shared, &clients, seed).await }
        });
        tokio::time::sleep(CALM).await;
        let around = Around {
            shared: &shared,
            watching: &watching,
            builds: &self.builds,
        };
        let struck = strike(fault, &mut self.members, &mut self.random, &around).await?;
        let undone = wait::now();
        self.members.wait_healthy(RECOVERY_DEADLINE).await?;
        let recovered = undone.elapsed();
        tokio::time::sleep(CALM).await;
        shared.stop.store(true, Ordering::Release);
        load.await?;

        let head = self.head(&clients).await?;
        self.wait_told(&watching, head).await?;
        let sessions = watching.end().await;
        self.take_in(&sessions, head)?;
        let (ops, expiring) = shared.take();
        let mut complaints = std::mem::take(&mut self.reference.complaints);
        for (_, session) in &sessions {
            complaints.extend(session.judge(&self.reference));
        }
        complaints.extend(serializable(&ops, &self.reference));
        complaints.extend(self.leases.judge(number, expiring, &self.reference));
        for key in std::mem::take(&mut self.leases.overdue) {
            if let Err(error) = wait_gone(&clients[0], &key).await {
                complaints.push(format!("{error:#}"));
            }
        }
        let window = Window {
            number,
            fault: fault.name(),
            revision: before,
            kvs: state,
            ops: (self.unknown.iter().map(|(_, op)| op.clone()))
                .chain(ops.clone())
                .collect(),
            events: (self.reference.between(before, self.reference.head()))
                .flat_map(|(_, events)| events.clone())
                .collect(),
            begun,
            ended: self.clock.now_ns(),
        };
        let file = self.folder.join(format!("window-{number}.json"));
        std::fs::write(&file, serde_json::to_vec(&window)?)?;
        if !complaints.is_empty() {
            let text = complaints.join("\n");
            std::fs::write(self.folder.join("sessions.txt"), format!("{sessions:#?}"))?;
            bail!("{struck}\n{}", text.chars().take(6_000).collect::<String>());
        }
        self.same_hashes(&clients).await?;
        self.judges.spawn_blocking(move || linearize(&file, true));
        self.count(fault, &shared, &sessions, &window);
        self.keep_unknown(number, ops, &window);
        say(&format!(
            "window {number}: {}, {struck}; healthy after {:.1} s; {} requests, {} changes",
            fault.name(),
            recovered.as_secs_f64(),
            window.ops.len(),
            window.events.len()
        ));
        Ok(())
    }

    /// The revision of a linearizable read.
    async fn head(&self, clients: &[Client]) -> Result<i64> {
        let request = pb::RangeRequest {
            key: "health".into(),
            ..pb::RangeRequest::default()
        };
        let answer = clients[0].kv.clone().range(request).await?.into_inner();
        Ok(answer.header.context("an answer has a header")?.revision)
    }

    async fn wait_told(&self, watching: &Watching, head: i64) -> Result<()> {
        let what = format!("all watchers are told up to {head}");
        wait::wait_for(&what, TOLD_DEADLINE, || {
            let told = watching.told();
            async move {
                ensure!(told.iter().all(|&told| told >= head), "told {told:?}");
                Ok(Some(()))
            }
        })
        .await
    }

    /// Puts what the watchers of everything were told into the one history.
    fn take_in(&mut self, sessions: &[(bool, Session)], head: i64) -> Result<()> {
        for (_, session) in sessions.iter().filter(|(everything, _)| *everything) {
            for response in &session.responses {
                for events in response
                    .events
                    .chunk_by(|a, b| a.kv.modified == b.kv.modified)
                {
                    self.reference.add(events[0].kv.modified, events);
                    for event in events {
                        self.leases.told(event, response.at);
                    }
                }
            }
        }
        ensure!(
            self.reference.head() >= head,
            "no watcher was told revision {}, the head is {head}",
            self.reference.head() + 1
        );
        Ok(())
    }

    async fn same_hashes(&mut self, clients: &[Client]) -> Result<()> {
        let revision = self.reference.head();
        wait::wait_for("HashKV of all members", HASH_DEADLINE, || async {
            let mut hashes = Vec::new();
            for client in clients {
                let request = pb::HashKvRequest { revision };
                let answer = client.maintenance.clone().hash_kv(request).await?;
                let answer = answer.into_inner();
                hashes.push((answer.hash, answer.compact_revision, answer.hash_revision));
            }
            let same = hashes.iter().all(|hash| *hash == hashes[0]);
            ensure!(same, "HashKV differs at revision {revision}: {hashes:?}");
            Ok(Some(()))
        })
        .await?;
        self.summary.hashes += 1;
        Ok(())
    }

    fn count(
        &mut self,
        fault: Fault,
        shared: &Shared,
        sessions: &[(bool, Session)],
        window: &Window,
    ) {
        let summary = &mut self.summary;
        summary.windows += 1;
        *summary.faults.entry(fault).or_default() += 1;
        for ((kind, known), count) in shared.counts() {
            let (answered, lost) = summary.requests.entry(kind).or_default();
            *(if known { answered } else { lost }) += count;
        }
        summary.sessions += sessions.len() as u64;
        let responses = sessions.iter().flat_map(|(_, session)| &session.responses);
        summary.events += responses
            .map(|response| response.events.len() as u64)
            .sum::<u64>();
        let mut answers: Vec<i64> = (window.ops.iter())
            .filter(|op| op.known && matches!(op.kind, Kind::Put | Kind::Pair))
            .map(|op| op.back)
            .collect();
        answers.sort_unstable();
        let gap = answers.windows(2).map(|pair| pair[1] - pair[0]).max();
        let gap = Duration::from_nanos(gap.unwrap_or_default().unsigned_abs());
        summary.longest_gap = summary.longest_gap.max(gap);
    }

    /// Those that may still be done, or may have been and cannot be told from others.
    fn keep_unknown(&mut self, number: usize, ops: Vec<Op>, window: &Window) {
        let done: HashSet<&str> = (window.events.iter())
            .map(|event| event.kv.value.as_str())
            .collect();
        self.unknown.extend(ops.into_iter().map(|op| (number, op)));
        self.unknown.retain(|(since, op)| {
            op.may_write_unseen()
                && since + UNKNOWN_WINDOWS > number
                && !done.contains(op.value.as_str())
        });
    }

    /// Waits until no more than `left` histories are being judged.
    async fn collect(&mut self, left: usize) -> Result<()> {
        while self.judges.len() > left {
            let Some(verdict) = self.judges.join_next().await else {
                break;
            };
            let verdict = verdict??;
            ensure!(
                verdict.result == "ok",
                "{}: {}: {}",
                verdict.window(),
                verdict.result,
                verdict.message
            );
            self.summary.linearizable += 1;
            self.summary.judged_steps += verdict.operations;
            std::fs::remove_file(&verdict.file)?;
        }
        Ok(())
    }
}

/// One line of `linearize`.
#[derive(Debug, Deserialize)]
struct Verdict {
    file: PathBuf,
    result: String,
    operations: u64,
    message: String,
}

impl Verdict {
    fn window(&self) -> String {
        let name = self.file.file_stem().unwrap_or_default();
        name.to_string_lossy().replace('-', " ")
    }
}

/// Has porcupine judge a history. With `nice` it leaves the machine to the members.
fn linearize(file: &Path, nice: bool) -> Result<Verdict> {
    let judge = tools::path("linearize")?;
    let mut command = if nice {
        let mut command = Command::new("nice");
        command.arg("-n10").arg(judge);
        command
    } else {
        Command::new(judge)
    };
    let output = command.arg(file).stdin(Stdio::null()).output()?;
    serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "linearize {}: {}",
            file.display(),
            String::from_utf8_lossy(&output.stderr)
        )
    })
}

/// A judge that lets everything pass is none: it is shown histories of which it must find all but the first wrong.
fn test_the_judge(folder: &Path) -> Result<()> {
    for (name, window) in known_histories() {
        let file = folder.join(format!("known-{name}.json"));
        std::fs::write(&file, serde_json::to_vec(&window)?)?;
        let verdict = linearize(&file, false)?;
        let expected = if name.starts_with("sound") {
            "ok"
        } else {
            "illegal"
        };
        ensure!(
            verdict.result == expected,
            "the judge calls the history `{name}` {}: {}",
            verdict.result,
            verdict.message
        );
    }
    Ok(())
}

/// Two puts of one key and a read after both, and what can be wrong with that.
fn known_histories() -> BTreeMap<&'static str, Window> {
    let kv = |value: &str, modified: i64, version: i64| Kv {
        key: "k/1".to_owned(),
        value: value.to_owned(),
        create: 2,
        modified,
        version,
        lease: 0,
    };
    let op = |kind, call: i64, revision| {
        let mut op = Op::new(0, 0, kind, "k/1");
        (op.call, op.back, op.known, op.revision) = (call, call + 5, true, revision);
        op
    };
    let mut first = op(Kind::Put, 0, 2);
    "v1".clone_into(&mut first.value);
    let mut second = op(Kind::Put, 10, 3);
    "v2".clone_into(&mut second.value);
    let mut read = op(Kind::Read, 20, 3);
    read.kvs = vec![kv("v2", 3, 2)];
    let event = |kv: Kv| super::record::Event {
        deleted: false,
        kv,
        prev: None,
    };
    let sound = Window {
        number: 0,
        fault: "none".to_owned(),
        revision: 1,
        kvs: Vec::new(),
        ops: vec![first, second, read],
        events: vec![event(kv("v1", 2, 1)), event(kv("v2", 3, 2))],
        begun: 0,
        ended: 100,
    };
    let with = |change: &dyn Fn(&mut Window)| {
        let mut window = sound.clone();
        change(&mut window);
        window
    };
    BTreeMap::from([
        (
            "sound, though one answer was lost",
            with(&|window| window.ops[1].known = false),
        ),
        (
            "a stale read",
            with(&|window| {
                window.ops[2].revision = 2;
                window.ops[2].kvs = vec![kv("v1", 2, 1)];
            }),
        ),
        (
            "a lost write",
            with(&|window| {
                window.ops[2].kvs.clear();
            }),
        ),
        (
            "one revision twice",
            with(&|window| window.ops[1].revision = 2),
        ),
        (
            "a write nobody made",
            with(&|window| {
                window.ops.remove(1);
            }),
        ),
        ("sound", sound.clone()),
    ])
}

/// Until the key of a lease that is left to run out is gone.
async fn wait_gone(client: &Client, key: &str) -> Result<()> {
    let what = format!("the lease of {key} runs out");
    wait::wait_for(&what, RUN_OUT_DEADLINE, || async {
        let request = pb::RangeRequest {
            key: key.to_owned().into(),
            count_only: true,
            ..pb::RangeRequest::default()
        };
        let answer = client.kv.clone().range(request).await?.into_inner();
        ensure!(answer.count == 0, "the key is there");
        Ok(Some(()))
    })
    .await
}
