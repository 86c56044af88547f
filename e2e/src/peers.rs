//! Other projects' suites, run against the program under test: etcd's black-box tests and Kubernetes' storage tests.
//!
//! Both are Go modules, pinned by a go.mod and go.sum below `e2e/go`. They are compiled once into the cache, from a copy of the module:
//! etcd's as it is, Kubernetes' with another package to start a server. Nothing of theirs is kept in this repository.
//!
//! Promises: the outcome is held to a list in `e2e/expected`; a failure or a pass that is not on it fails the run, and so does a test on
//! the list that did not run. What the list leaves out is not run. The last line is `N passed, N failed`.
//! Not here: building etcd's tools, which the suites use (`tools`).

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::peers_list::{Expected, Extent, Outcome};
use crate::progress::Progress;
use crate::store_server::Program;
use crate::up::say;
use crate::{paths, tools, wait};

/// Which suite to run, and how.
#[derive(Debug, clap::Args)]
pub struct Args {
    suite: Suite,
    /// Also what the list calls long.
    #[arg(long)]
    long: bool,
    /// Only tests matching this pattern of `go test -run`, long or not; the rest of the list is then not asked for.
    #[arg(long)]
    run: Option<String>,
    /// Seconds after which the run is ended as failed.
    #[arg(long)]
    budget_secs: Option<u64>,
    /// Show the output of every test, not only of those that fail.
    #[arg(long)]
    verbose: bool,
    /// Rewrite the list from what happened.
    #[arg(long)]
    write_expected: bool,
}

/// The suites.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Suite {
    /// etcd's `tests/common`: black-box tests that etcd also runs within a process.
    EtcdCommon,
    /// etcd's `tests/e2e`: those that need processes.
    EtcdE2e,
    /// The tests of `k8s.io/apiserver/pkg/storage/etcd3`.
    K8sStorage,
}

/// Everything in which the suites differ.
struct Definition {
    /// Of what is compiled, in the cache.
    name: &'static str,
    /// Folder below `e2e/go`.
    module_folder: &'static str,
    expected: &'static str,
    module: &'static str,
    /// Of the test, inside the module.
    package: &'static str,
    unit: Unit,
    budget: Duration,
    /// Of everything, when that takes longer.
    long_budget: Duration,
}

/// What one line of a list names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// Test functions.
    Functions,
    /// Tests without subtests. A test that failed outside its subtests is kept beside them.
    Leaves,
}

impl Suite {
    fn definition(self) -> Definition {
        match self {
            Suite::EtcdCommon => Definition {
                name: "etcd-common",
                expected: "etcd-common.txt",
                package: "common",
                ..ETCD
            },
            Suite::EtcdE2e => Definition {
                name: "etcd-e2e",
                expected: "etcd-e2e.txt",
                package: "e2e",
                ..ETCD
            },
            Suite::K8sStorage => Definition {
                name: "k8sstorage",
                module_folder: "k8sstorage",
                expected: "k8s-storage.txt",
                module: "k8s.io/apiserver",
                package: "pkg/storage/etcd3",
                unit: Unit::Functions,
                budget: Duration::from_mins(10),
                long_budget: Duration::from_mins(10),
            },
        }
    }

    fn is_etcds(self) -> bool {
        matches!(self, Suite::EtcdCommon | Suite::EtcdE2e)
    }
}

/// What etcd's packages share.
const ETCD: Definition = Definition {
    name: "",
    module_folder: "etcdtests",
    expected: "",
    module: "go.etcd.io/etcd/tests/v3",
    package: "",
    unit: Unit::Leaves,
    budget: Duration::from_mins(7),
    long_budget: Duration::from_mins(40),
};

/// Runs one suite against the program under test.
pub fn run(args: &Args) -> Result<()> {
    tools::ensure(&["etcd"], &Progress::new())?;
    let program = Program::under_test()?;
    let definition = args.suite.definition();
    let list = paths::repository()
        .join("e2e/expected")
        .join(definition.expected);
    let text =
        std::fs::read_to_string(&list).with_context(|| format!("read {}", list.display()))?;
    let expected = Expected::parse(&text).with_context(|| list.display().to_string())?;
    let extent = match (&args.run, args.long) {
        (Some(_), _) => Extent::Some,
        (None, true) => Extent::Long,
        (None, false) => Extent::Short,
    };
    let built = build(args.suite, &definition)?;

    let bin_dir = tempfile::tempdir()?;
    symlink(&program.path, bin_dir.path().join("etcd"))?;
    for name in ["etcdctl", "etcdutl"] {
        symlink(tools::path(name)?, bin_dir.path().join(name))?;
    }
    let default = match extent {
        Extent::Short => definition.budget,
        Extent::Long | Extent::Some => definition.long_budget,
    };
    let budget = args.budget_secs.map_or(default, Duration::from_secs);
    let mut command = Command::new("go");
    command
        .args(["tool", "test2json", "-t", "-p", definition.package])
        .arg(&built.binary)
        .args(["-test.v=test2json", "-test.run"])
        .arg(args.run.as_deref().unwrap_or("."))
        .arg(format!("-test.timeout={}s", budget.as_secs()))
        .current_dir(&built.folder)
        .env("BALLAST_BIN", &program.path);
    let skips = expected.skips(extent);
    if !skips.is_empty() {
        command.arg(format!("-test.skip={skips}"));
    }
    if args.suite.is_etcds() {
        forget_data(&built.folder)?;
        if extent == Extent::Short {
            command.env("E2E_TEST_MINIMAL", "true");
        }
        command.arg("--bin-dir").arg(bin_dir.path());
    }
    say(&format!(
        "{}: {} of {}",
        program.name, definition.package, definition.module
    ));
    let mut run = watch_run(command, budget, args.verbose)?;
    run.outcomes = expected.without_hulls(definition.unit.of(run.outcomes));

    let expected = if args.write_expected {
        let text = expected.render(&run.outcomes, extent);
        std::fs::write(&list, &text)?;
        Expected::parse(&text).with_context(|| list.display().to_string())?
    } else {
        expected
    };
    let mut complaints = expected.judge(&run.outcomes, extent);
    if run.overran {
        complaints.push(format!("over its budget of {budget:?}"));
    }
    // Every failure on the list leaves the exit code at 1, so only a run that told nothing at all is judged by it.
    if run.outcomes.is_empty() {
        complaints.push("no test ran".to_owned());
    }
    for complaint in &complaints {
        say(&format!("{}: {complaint}", definition.expected));
    }
    let count = |wanted| {
        run.outcomes
            .values()
            .filter(|&&outcome| outcome == wanted)
            .count()
    };
    say(&format!(
        "{} passed, {} failed",
        count(Outcome::Pass),
        count(Outcome::Fail)
    ));
    if !complaints.is_empty() {
        bail!(
            "{}: {} differences from the list",
            definition.expected,
            complaints.len()
        );
    }
    Ok(())
}

struct Built {
    binary: PathBuf,
    /// The package's folder in the copy: its tests read files beside and above it.
    folder: PathBuf,
}

/// Compiles the suite, unless the cache holds it in its present form.
fn build(suite: Suite, definition: &Definition) -> Result<Built> {
    let source = paths::repository()
        .join("e2e/go")
        .join(definition.module_folder);
    let cache = paths::cache()?.join("peers");
    let work = cache.join(format!("{}-{}", definition.name, hash(&source)?));
    let copy = work.join("module");
    let built = Built {
        binary: work.join("suite.test"),
        folder: copy.join(definition.package),
    };
    if built.binary.is_file() {
        return Ok(built);
    }
    say(&format!("compiling {} (once)", definition.module));
    if work.exists() {
        std::fs::remove_dir_all(&work).with_context(|| format!("clear {}", work.display()))?;
    }
    std::fs::create_dir_all(&work)?;
    go(&source, &["mod", "download", definition.module])?;
    let from = go(
        &source,
        &["list", "-m", "-f", "{{.Dir}}", definition.module],
    )?;
    copy_tree(Path::new(from.trim()), &copy)?;
    match suite {
        Suite::EtcdCommon | Suite::EtcdE2e => {
            for file in ["go.mod", "go.sum"] {
                std::fs::copy(source.join(file), work.join(file))?;
            }
            let replace = format!("-replace={}=./module", definition.module);
            go(&work, &["mod", "edit", &replace])?;
            let package = format!("{}/{}", definition.module, definition.package);
            go(
                &work,
                &[
                    "test",
                    "-c",
                    "-mod=mod",
                    "-tags",
                    "e2e",
                    "-o",
                    "suite.tmp",
                    &package,
                ],
            )?;
        }
        Suite::K8sStorage => {
            let testserver = built.folder.join("testserver");
            std::fs::remove_dir_all(&testserver)?;
            copy_tree(&source.join("testserver"), &testserver)?;
            let output = work.join("suite.tmp");
            let output = output.to_str().context("the cache's path is text")?;
            go(
                &copy,
                &[
                    "test",
                    "-c",
                    "-o",
                    output,
                    &format!("./{}", definition.package),
                ],
            )?;
        }
    }
    // The name appears only with the whole file.
    std::fs::rename(work.join("suite.tmp"), &built.binary)?;
    Ok(built)
}

/// Some of etcd's tests have servers keep their data in the working directory, and begin with none.
fn forget_data(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "etcd")
        {
            std::fs::remove_dir_all(&path).with_context(|| format!("clear {}", path.display()))?;
        }
    }
    Ok(())
}

/// Over all files of the folder and the compiler's version.
fn hash(folder: &Path) -> Result<String> {
    let mut files = Vec::new();
    list_files(folder, &mut files)?;
    files.sort();
    let mut hash = Sha256::new();
    hash.update(go(folder, &["env", "GOVERSION"])?);
    for file in files {
        hash.update(file.strip_prefix(folder)?.to_string_lossy().as_bytes());
        hash.update(std::fs::read(&file)?);
    }
    Ok(hex::encode(&hash.finalize()[..8]))
}

fn list_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            list_files(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

/// Copies files by content, since the module cache's own are read-only.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let mut files = Vec::new();
    list_files(from, &mut files)?;
    for file in files {
        let target = to.join(file.strip_prefix(from)?);
        std::fs::create_dir_all(target.parent().context("a file lies in a folder")?)?;
        std::fs::write(&target, std::fs::read(&file)?)?;
    }
    Ok(())
}

fn go(folder: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("go")
        .args(arguments)
        .current_dir(folder)
        .env("CGO_ENABLED", "0")
        .env("GOWORK", "off")
        .output()
        .context("start go")?;
    if !output.status.success() {
        bail!(
            "go {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// What a run of a suite told.
struct Run {
    outcomes: BTreeMap<String, Outcome>,
    overran: bool,
}

/// One line of `go tool test2json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Event {
    action: String,
    #[serde(default)]
    test: String,
    #[serde(default)]
    output: String,
    #[serde(default)]
    elapsed: f64,
}

/// Reads the events to the end, shows what fails, and ends the process group at the deadline.
fn watch_run(mut command: Command, budget: Duration, verbose: bool) -> Result<Run> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .context("start the suite")?;
    let group = rustix::process::Pid::from_child(&child);
    let ended = Arc::new(AtomicBool::new(false));
    let overran = Arc::new(AtomicBool::new(false));
    // The suite's own timeout comes first and says which test hangs; this one is for a suite that cannot even do that.
    let deadline = wait::now() + budget + Duration::from_secs(20);
    let guard = {
        let (ended, overran) = (Arc::clone(&ended), Arc::clone(&overran));
        std::thread::spawn(move || {
            while !ended.load(Ordering::Acquire) {
                if wait::now() >= deadline {
                    overran.store(true, Ordering::Release);
                    let _ =
                        rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
                    return;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        })
    };
    let mut outcomes = BTreeMap::new();
    let mut outputs: BTreeMap<String, String> = BTreeMap::new();
    let stdout = child.stdout.take().expect("it is piped");
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        let Ok(event) = serde_json::from_str::<Event>(&line) else {
            say(&line);
            continue;
        };
        if event.action == "output" {
            if verbose || event.test.is_empty() {
                say(event.output.trim_end());
            } else {
                outputs
                    .entry(event.test)
                    .or_default()
                    .push_str(&event.output);
            }
            continue;
        }
        let outcome = match event.action.as_str() {
            "pass" => Outcome::Pass,
            "fail" => Outcome::Fail,
            "skip" => Outcome::Skip,
            _ => continue,
        };
        if event.test.is_empty() {
            continue;
        }
        let output = outputs.remove(&event.test).unwrap_or_default();
        if outcome == Outcome::Fail {
            say(&format!(
                "FAIL {} ({:.1} s)\n{}",
                event.test,
                event.elapsed,
                last_lines(&output, 40)
            ));
        }
        outcomes.insert(event.test, outcome);
    }
    child.wait()?;
    ended.store(true, Ordering::Release);
    guard.join().expect("the guard does not panic");
    Ok(Run {
        outcomes,
        overran: overran.load(Ordering::Acquire),
    })
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

impl Unit {
    fn of(self, outcomes: BTreeMap<String, Outcome>) -> BTreeMap<String, Outcome> {
        let names: Vec<String> = outcomes.keys().cloned().collect();
        let counts = |name: &str, outcome| match self {
            Unit::Functions => !name.contains('/'),
            Unit::Leaves => {
                let inside = format!("{name}/");
                outcome == Outcome::Fail || !names.iter().any(|other| other.starts_with(&inside))
            }
        };
        outcomes
            .into_iter()
            .filter(|(name, outcome)| counts(name, *outcome))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_of_a_list_is_the_subtest_or_the_function() {
        let outcomes: BTreeMap<String, Outcome> = [
            ("A", Outcome::Pass),
            ("A/x", Outcome::Pass),
            ("B", Outcome::Fail),
            ("B/x", Outcome::Pass),
            ("Bx", Outcome::Pass),
        ]
        .into_iter()
        .map(|(name, outcome)| (name.to_owned(), outcome))
        .collect();
        let names = |unit: Unit| unit.of(outcomes.clone()).into_keys().collect::<Vec<_>>();
        assert_eq!(names(Unit::Leaves), ["A/x", "B", "B/x", "Bx"]);
        assert_eq!(names(Unit::Functions), ["A", "B", "Bx"]);
    }
}
