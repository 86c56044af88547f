//! The suites beyond `cargo test`: what they are, in which order, how long each may take, and how the last run ended.
//!
//! Promises: a suite that overruns its budget is ended with everything it started in its process group, and counts as failed; with
//! `--full` a suite that passed on the same commit and tree is not run again, so an interrupted run resumes where it stopped.
//! Not here: what the suites test (`e2e/tests`, `peers`).

use std::fmt::Write as _;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use crate::cluster::Cluster;
use crate::progress::Progress;
use crate::up::say;
use crate::{packages, paths, tools, wait};

/// Which part of the product a suite needs running.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Group {
    /// A server on loopback and etcd's own tools.
    Wire,
    /// Other projects' suites against our server.
    Peers,
    /// The Kubernetes of `make up`.
    Kube,
}

impl Group {
    /// Builds and installs what its suites use. It takes minutes on a fresh machine, which no suite's budget has room for.
    fn prepare(self, progress: &Progress) -> Result<()> {
        match self {
            Group::Wire => {
                packages::ensure_named(&["iproute2", "libfaketime", "nftables"])?;
                tools::ensure(&["etcd", "boltcheck", "linearize"], progress)
            }
            Group::Peers => tools::ensure(&["etcd"], progress),
            Group::Kube => {
                packages::ensure(progress)?;
                tools::ensure(&["pods", "etcd", "kubernetes", "coredns", "helm"], progress)
            }
        }
    }
}

/// One suite of the run.
#[derive(Clone, Copy, Debug)]
struct Suite {
    name: &'static str,
    group: Group,
    /// More than it takes on two busy cores, less than what would hide a hang.
    budget_secs: u64,
    /// Only in `make test-full`.
    full_only: bool,
    run: Run,
}

#[derive(Clone, Copy, Debug)]
enum Run {
    /// `e2e/tests/<name>.rs`.
    Test,
    /// The test of this name, with more rounds.
    Long(&'static str),
    /// A subcommand of this binary.
    Own(&'static [&'static str]),
    /// A target of the Makefile: what is measured is built for it.
    Make(&'static [&'static str]),
}

const fn test(name: &'static str, group: Group, budget_secs: u64) -> Suite {
    Suite {
        name,
        group,
        budget_secs,
        full_only: false,
        run: Run::Test,
    }
}

/// A suite of `make test` again, for as long as the issue asks.
const fn long(name: &'static str, test: &'static str, budget_secs: u64) -> Suite {
    Suite {
        name,
        group: Group::Wire,
        budget_secs,
        full_only: true,
        run: Run::Long(test),
    }
}

/// The budget covers compiling the suite too, once; the suite's own budget covers its run.
const fn own(
    name: &'static str,
    group: Group,
    budget_secs: u64,
    arguments: &'static [&'static str],
) -> Suite {
    Suite {
        name,
        group,
        budget_secs,
        full_only: false,
        run: Run::Own(arguments),
    }
}

const fn full_only(suite: Suite) -> Suite {
    Suite {
        full_only: true,
        ..suite
    }
}

const SUITES: &[Suite] = &[
    test("wire_etcdctl", Group::Wire, 180),
    test("wire_metrics", Group::Wire, 120),
    test("wire_names", Group::Wire, 180),
    test("wire_tls", Group::Wire, 180),
    test("wire_snapshot", Group::Wire, 420),
    test("cases", Group::Wire, 240),
    test("cases_cluster", Group::Wire, 240),
    full_only(test("cluster_growth", Group::Wire, 300)),
    own(
        "nemesis_short",
        Group::Wire,
        300,
        &["nemesis", "--minutes", "1"],
    ),
    full_only(own(
        "nemesis_lease_reads",
        Group::Wire,
        900,
        &["nemesis", "--minutes", "5", "--flag=--leader-lease-reads"],
    )),
    full_only(own(
        "nemesis",
        Group::Wire,
        4_500,
        &["nemesis", "--minutes", "60"],
    )),
    test("diff_kv", Group::Wire, 240),
    full_only(own(
        "diff",
        Group::Wire,
        3_000,
        &["diff", "--seeds", "50", "--ops", "2000"],
    )),
    full_only(own("planted", Group::Wire, 7_200, &["planted", "--resume"])),
    test("fault_kill", Group::Wire, 300),
    long("fault_kill_long", "fault_kill", 1_800),
    test("fault_power_cut", Group::Wire, 300),
    long("fault_power_cut_long", "fault_power_cut", 1_800),
    test("fault_convert", Group::Wire, 240),
    long("fault_convert_long", "fault_convert", 1_200),
    long("fault_lease_storm", "fault_lease_storm", 300),
    test("fault_log_tail", Group::Wire, 240),
    test("fault_disk", Group::Wire, 400),
    long("fault_disk_long", "fault_disk", 900),
    test("fault_flip", Group::Wire, 300),
    long("fault_flip_long", "fault_flip", 1_800),
    test("fault_clock", Group::Wire, 240),
    test("snapshot_hundred", Group::Wire, 240),
    long("snapshot_hundred_long", "snapshot_hundred", 1_800),
    // Standing a cluster up takes half a minute when the machine is idle, and three when it is not.
    test("kube_objects", Group::Kube, 300),
    test("kube_compaction", Group::Kube, 400),
    test("kube_leader_kill", Group::Kube, 400),
    test("kube_pods", Group::Kube, 400),
    test("operator_storecluster", Group::Kube, 1_000),
    own("etcd-common", Group::Peers, 900, &["peers", "etcd-common"]),
    own("etcd-e2e", Group::Peers, 900, &["peers", "etcd-e2e"]),
    full_only(own(
        "etcd-common-long",
        Group::Peers,
        3_000,
        &["peers", "etcd-common", "--long"],
    )),
    full_only(own(
        "etcd-e2e-long",
        Group::Peers,
        3_000,
        &["peers", "etcd-e2e", "--long"],
    )),
    own(
        "k8s-storage",
        Group::Peers,
        1_500,
        &["peers", "k8s-storage"],
    ),
    // Two builds that are optimised, then about a quarter of an hour.
    Suite {
        full_only: true,
        run: Run::Make(&["latency", "LATENCY_TABLE="]),
        ..own("latency", Group::Wire, 3_600, &[])
    },
];

/// Of a commit, in the report.
const COMMIT_DIGITS: usize = 10;

const ROUNDS_VARIABLE: &str = "BALLAST_ROUNDS";

/// How many rounds a suite does: the first number, or the second in `make test-full`.
pub fn rounds(short: usize, long: usize) -> usize {
    match std::env::var(ROUNDS_VARIABLE).as_deref() {
        Ok("long") => long,
        Ok(number) => number.parse().unwrap_or(short),
        Err(_) => short,
    }
}

/// What to run.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only the suites of this group.
    #[arg(long)]
    only: Option<Group>,
    /// Only the suites whose name contains this.
    #[arg(long)]
    name: Option<String>,
    /// Also what does not fit into CI; suites that passed on this very tree are not run again.
    #[arg(long)]
    full: bool,
    /// Write the result there, as Markdown.
    #[arg(long)]
    report: Option<PathBuf>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Outcome {
    suite: String,
    passed: bool,
    secs: u64,
    /// Commit and state of the tree it ran on.
    tree: String,
}

/// Runs the suites one after the other and prints `N passed, N failed` at the end.
pub fn run(args: &Args) -> Result<()> {
    let root = root()?;
    // Asked before any suite is compiled: that may link this program anew, and the file it was started from is then gone.
    let program = std::env::current_exe()?;
    let tree = tree_id(&root)?;
    let cache = paths::cache()?;
    std::fs::create_dir_all(&cache).with_context(|| format!("make {}", cache.display()))?;
    let record = Record(cache.join("suites.json"));
    let known = record.read()?;
    let mut outcomes = Vec::new();
    let mut prepared = Vec::new();
    for suite in SUITES.iter().filter(|s| {
        (args.full || !s.full_only)
            && args.only.is_none_or(|g| g == s.group)
            && args.name.as_deref().is_none_or(|n| s.name.contains(n))
    }) {
        let before = known
            .iter()
            .find(|o| o.suite == suite.name && o.tree == tree && o.passed);
        if let (true, Some(before)) = (args.full, before) {
            say(&format!(
                "== {}: passed before on this tree, {} s",
                suite.name, before.secs
            ));
            outcomes.push(before.clone());
            continue;
        }
        if !prepared.contains(&suite.group) {
            suite.group.prepare(&Progress::new())?;
            prepared.push(suite.group);
        }
        let outcome = run_one(suite, &program, &root, &tree)?;
        record.add(&outcome)?;
        outcomes.push(outcome);
    }
    let failed = outcomes.iter().filter(|o| !o.passed).count();
    if let Some(path) = &args.report {
        std::fs::write(path, report(&record.read()?))
            .with_context(|| format!("write {}", path.display()))?;
    }
    for outcome in &outcomes {
        let word = if outcome.passed { "passed" } else { "FAILED" };
        say(&format!(
            "{word} {:<24} {:>5} s",
            outcome.suite, outcome.secs
        ));
    }
    say(&format!(
        "suites: {} passed, {failed} failed",
        outcomes.len() - failed
    ));
    if outcomes.is_empty() {
        bail!("no suite matches");
    }
    if failed > 0 {
        bail!("{failed} of {} suites failed", outcomes.len());
    }
    Ok(())
}

/// The last outcome of every suite on this machine. Two runs may go on at once.
struct Record(PathBuf);

impl Record {
    fn read(&self) -> Result<Vec<Outcome>> {
        let bytes = match std::fs::read(&self.0) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).with_context(|| format!("read {}", self.0.display())),
        };
        serde_json::from_slice(&bytes)
            .with_context(|| format!("make sense of {}", self.0.display()))
    }

    fn add(&self, outcome: &Outcome) -> Result<()> {
        let lock = File::create(self.0.with_extension("lock"))?;
        lock.lock()?;
        let mut known = self.read()?;
        known.retain(|o| o.suite != outcome.suite);
        known.push(outcome.clone());
        let new = self.0.with_extension("new");
        std::fs::write(&new, serde_json::to_vec_pretty(&known)?)
            .with_context(|| format!("write {}", new.display()))?;
        std::fs::rename(&new, &self.0).with_context(|| format!("write {}", self.0.display()))
    }
}

fn run_one(suite: &Suite, program: &Path, root: &Path, tree: &str) -> Result<Outcome> {
    say(&format!(
        "== {} (budget {} s)",
        suite.name, suite.budget_secs
    ));
    let mut command = match suite.run {
        Run::Test | Run::Long(_) => {
            let mut command = Command::new("cargo");
            // The whole workspace, so that features resolve as in `make check` and nothing is compiled twice.
            command.args([
                "test",
                "--workspace",
                "--locked",
                "--test",
                match suite.run {
                    Run::Long(test) => test,
                    _ => suite.name,
                },
                "--",
            ]);
            if let Run::Long(_) = suite.run {
                command.env(ROUNDS_VARIABLE, "long");
            }
            command.args(["--nocapture", "--test-threads=1"]);
            command
        }
        Run::Own(arguments) => {
            let mut command = Command::new(program);
            command.args(arguments);
            command
        }
        Run::Make(arguments) => {
            let mut command = Command::new("make");
            command.args(arguments);
            command
        }
    };
    command
        .current_dir(root)
        .stdin(Stdio::null())
        .process_group(0);
    let begun = wait::now();
    let mut child = command
        .spawn()
        .with_context(|| format!("start {}", suite.name))?;
    let group = rustix::process::Pid::from_child(&child);
    let deadline = begun + Duration::from_secs(suite.budget_secs);
    let passed = loop {
        if let Some(status) = child.try_wait()? {
            break status.success();
        }
        if wait::now() >= deadline {
            say(&format!(
                "{}: over its budget of {} s",
                suite.name, suite.budget_secs
            ));
            rustix::process::kill_process_group(group, rustix::process::Signal::KILL)?;
            child.wait()?;
            if suite.group == Group::Kube {
                remove_clusters();
            }
            break false;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    Ok(Outcome {
        suite: suite.name.to_owned(),
        passed,
        secs: begun.elapsed().as_secs(),
        tree: tree.to_owned(),
    })
}

/// A suite that was killed could not take its cluster down, and the next would share the machine
/// with it.
fn remove_clusters() {
    for name in ["objects", "compaction", "members", "pods", "operator"] {
        if let Err(error) = Cluster::down_by_name(name) {
            say(&format!("taking {name} down: {error:#}"));
        }
    }
}

/// Of every suite the last outcome on this machine, whenever it ran.
fn report(known: &[Outcome]) -> String {
    let mut text = String::from(
        "# The last full run\n\nWritten by `make test-full`, which leaves out what passed before on the same tree. Each row says of which commit it is; a `+` stands for \
         changes beside it.\n\n| suite | result | seconds | commit |\n|---|---|---|---|\n",
    );
    for suite in SUITES {
        let Some(o) = known.iter().find(|o| o.suite == suite.name) else {
            let _ = writeln!(text, "| {} | not run | | |", suite.name);
            continue;
        };
        let word = if o.passed { "passed" } else { "failed" };
        let (commit, changes) = o.tree.split_once('+').unwrap_or((&o.tree, ""));
        let short = &commit[..commit.len().min(COMMIT_DIGITS)];
        let mark = if changes.is_empty() { "" } else { "+" };
        let _ = writeln!(
            text,
            "| {} | {word} | {} | {short}{mark} |",
            o.suite, o.secs
        );
    }
    text
}

/// The commit and, if the tree differs from it, a hash of the difference.
pub fn tree_id(root: &Path) -> Result<String> {
    let git = |arguments: &[&str]| -> Result<Vec<u8>> {
        let output = Command::new("git")
            .args(arguments)
            .current_dir(root)
            .output()?;
        if !output.status.success() {
            bail!(
                "git {}: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(output.stdout)
    };
    let head = String::from_utf8(git(&["rev-parse", "HEAD"])?)?
        .trim()
        .to_owned();
    let difference = git(&["diff", "HEAD"])?;
    if difference.is_empty() {
        return Ok(head);
    }
    Ok(format!(
        "{head}+{}",
        hex::encode(sha2::Sha256::digest(&difference))
    ))
}

fn root() -> Result<PathBuf> {
    // The manifest's folder at build time would be wrong for a binary used from another clone.
    let mut folder = std::env::current_dir()?;
    loop {
        if folder.join("Cargo.toml").exists() && folder.join("e2e").is_dir() {
            return Ok(folder);
        }
        if !folder.pop() {
            bail!("run this inside a clone of the project");
        }
    }
}
