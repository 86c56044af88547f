//! Planted bugs: patches against the server, each of which some suite must find.
//!
//!     tree --copy--> cache/planted/tree --patch--> build --> the suite named in it --> must fail
//!
//! A patch is `e2e/planted/NAME.patch`: a line `Bug: what is wrong`, a line `Caught-by: SUITE, ...`, then a unified diff. SUITE is `diff`,
//! `nemesis`, or the name of a test in `e2e/tests`; each of them must find it. For the nemesis a line `Faults: ...` says with which faults.
//!
//! Promises: the tree itself is never touched; a patch that no longer applies or compiles fails the run, as does one whose bug nobody
//! finds, or whose suite ends before it compared anything. The copy and its target folder stay, so that the next patch builds quickly.
//! Not here: the suites.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use crate::progress::Progress;
use crate::up::say;
use crate::{paths, suites, tools, wait};

/// What `diff` gets to find a bug: scripts, and operations of each.
const DIFF_SEEDS: &str = "10";
const DIFF_OPS: &str = "1000";
/// A suite that has found nothing by then has not found it.
const SUITE_DEADLINE: Duration = Duration::from_mins(20);
/// The nemesis has found it within this.
const NEMESIS_MINUTES: &str = "10";
const SHOWN_BYTES_MAX: usize = 4_000;
const REPORT_HEAD: &str = "# Planted bugs

Written by `make planted`: each patch of `e2e/planted` is applied to the server alone, and the suites named must find it. `diff` looks twice: with
the edges written by hand, and with random scripts of 1000 operations from seed 1 on. The nemesis has ten minutes.

";

/// What to plant.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only patches whose name contains this.
    #[arg(long)]
    name: Option<String>,
    /// Leave out those that were found in this very tree.
    #[arg(long)]
    resume: bool,
    /// Write the table there, as Markdown.
    #[arg(long)]
    report: Option<PathBuf>,
}

/// One patch.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Plant {
    name: String,
    #[serde(skip)]
    path: PathBuf,
    bug: String,
    caught_by: String,
    /// Of the nemesis.
    #[serde(default)]
    faults: Option<String>,
}

/// How a suite found it: for each way it was looked for, when.
type Found = Vec<(String, Option<String>)>;

/// What became of a patch, kept so that a run of one of them does not forget the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Outcome {
    plant: Plant,
    /// What the patch was planted into.
    tree: String,
    found: Found,
    failure: Option<String>,
}

impl Outcome {
    /// By all that were named; of the ways of `diff`, one is enough.
    fn caught(&self) -> bool {
        let by = |suite: &str| {
            (self.found.iter()).any(|(way, when)| when.is_some() && way_of(suite, way))
        };
        self.failure.is_none() && self.plant.suites().all(by)
    }

    fn text(&self) -> String {
        if let Some(failure) = &self.failure {
            let line = failure.lines().next().unwrap_or_default();
            return format!("FAILED: {line}");
        }
        let told: Vec<String> = self
            .found
            .iter()
            .map(|(way, when)| format!("{way}: {}", when.as_deref().unwrap_or("not found")))
            .collect();
        told.join("; ")
    }
}

impl Plant {
    fn suites(&self) -> impl Iterator<Item = &str> {
        self.caught_by.split(',').map(str::trim)
    }
}

/// Whether the suite looks in this way.
fn way_of(suite: &str, way: &str) -> bool {
    match suite {
        "diff" => ["edges", "random"].contains(&way),
        _ => suite == way,
    }
}

/// Plants every bug, one at a time, and prints who found it.
pub fn run(args: &Args) -> Result<()> {
    let root = paths::repository();
    if plants(&root, args.name.as_deref())?.is_empty() {
        bail!("no patch matches");
    }
    tools::ensure(&["etcd"], &Progress::new())?;
    let folder = paths::cache()?.join("planted");
    fs::create_dir_all(&folder)?;
    let tree = suites::tree_id(&root)?;
    let record = folder.join("outcomes.json");
    let mut outcomes: Vec<Outcome> = fs::read(&record)
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let mut missed = Vec::new();
    for plant in plants(&root, args.name.as_deref())? {
        let known = outcomes
            .iter()
            .find(|o| o.plant.name == plant.name && o.tree == tree && o.caught());
        if let (true, Some(known)) = (args.resume, known) {
            say(&format!("{}: known: {}", plant.name, known.text()));
            continue;
        }
        say(&format!("== {}: {}", plant.name, plant.bug));
        let (found, failure) = match find(&root, &folder, &plant) {
            Ok(found) => (found, None),
            Err(error) => (Vec::new(), Some(format!("{error:#}"))),
        };
        let outcome = Outcome {
            plant,
            tree: tree.clone(),
            found,
            failure,
        };
        if let Some(failure) = &outcome.failure {
            say(failure);
        }
        say(&format!("{}: {}", outcome.plant.name, outcome.text()));
        if !outcome.caught() {
            missed.push(outcome.plant.name.clone());
        }
        outcomes.retain(|o| o.plant.name != outcome.plant.name);
        outcomes.push(outcome);
        fs::write(&record, serde_json::to_vec_pretty(&outcomes)?)?;
    }
    // Nothing of the last patch stays behind.
    copy(&root, &folder.join("tree"))?;
    let present = plants(&root, None)?;
    outcomes.retain(|o| present.iter().any(|plant| plant.name == o.plant.name));
    outcomes.sort_by(|a, b| a.plant.name.cmp(&b.plant.name));
    let table = table(&outcomes);
    say(&table);
    if let Some(path) = &args.report {
        let text = format!("{REPORT_HEAD}{table}");
        fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    if !missed.is_empty() {
        bail!("not found: {}", missed.join(", "));
    }
    Ok(())
}

fn plants(root: &Path, name: Option<&str>) -> Result<Vec<Plant>> {
    let folder = root.join("e2e/planted");
    let mut plants = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path
            .extension()
            .is_none_or(|extension| extension != "patch")
        {
            continue;
        }
        let stem = path.file_stem().context("a patch has a name")?;
        let text = fs::read_to_string(&path)?;
        let field = |field: &str| {
            let mut lines = text.lines();
            let found = lines.find_map(|line| line.strip_prefix(field));
            let found = found.with_context(|| format!("{}: no {field}", path.display()))?;
            anyhow::Ok(found.trim().to_owned())
        };
        let plant = Plant {
            name: stem.to_string_lossy().into_owned(),
            bug: field("Bug:")?,
            caught_by: field("Caught-by:")?,
            faults: field("Faults:").ok(),
            path: path.clone(),
        };
        if name.is_none_or(|name| plant.name.contains(name)) {
            plants.push(plant);
        }
    }
    plants.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(plants)
}

fn find(root: &Path, folder: &Path, plant: &Plant) -> Result<Found> {
    let tree = folder.join("tree");
    copy(root, &tree)?;
    let mut apply = Command::new("git");
    apply
        .arg("apply")
        .arg(&plant.path)
        .current_dir(&tree)
        // The copy must not be taken for a part of whatever repository the cache may lie in.
        .env("GIT_CEILING_DIRECTORIES", folder);
    finish(apply, "the patch does not apply")?;
    let target = folder.join("target");
    let mut build = Command::new("cargo");
    build
        // The whole workspace's features, so that dependencies are those of every other build.
        .args(["build", "--workspace", "--locked", "--bin", "ballast"])
        .current_dir(&tree)
        .env("CARGO_TARGET_DIR", &target);
    finish(build, "the planted server does not compile")?;
    let server = target.join("debug/ballast");
    let mut found = Found::new();
    for suite in plant.suites() {
        match suite {
            "diff" => found.extend(by_diff(&server)?),
            "nemesis" => {
                let mut nemesis = Command::new(std::env::current_exe()?);
                nemesis.args(["nemesis", "--minutes", NEMESIS_MINUTES]);
                if let Some(faults) = &plant.faults {
                    nemesis.args(["--fault", faults]);
                }
                let begun = wait::now();
                let when = suite_fails(nemesis, &server, "window ")?;
                let when = when.map(|when| format!("{when}, {} s", begun.elapsed().as_secs()));
                found.push((suite.to_owned(), when));
            }
            test => {
                let mut suite = Command::new("cargo");
                suite
                    .args(["test", "--workspace", "--locked", "--test", test])
                    .args(["--", "--nocapture", "--test-threads=1"])
                    .current_dir(root);
                let when = suite_fails(suite, &server, "round ")?;
                found.push((test.to_owned(), when));
            }
        }
    }
    Ok(found)
}

fn by_diff(server: &Path) -> Result<Found> {
    let diff = |arguments: &[&str]| -> Result<Option<String>> {
        let mut suite = Command::new(std::env::current_exe()?);
        suite
            .args(["diff", "--fail-fast", "--jobs=1", "--seed=1"])
            .args(arguments);
        suite_fails(suite, server, "operation ")
    };
    Ok(vec![
        ("edges".to_owned(), diff(&["--seeds=0"])?),
        (
            "random".to_owned(),
            diff(&["--without-edges", "--seeds", DIFF_SEEDS, "--ops", DIFF_OPS])?,
        ),
    ])
}

/// None when the suite passes; else where it failed, which it tells as a number after `unit`, or in words of its own.
fn suite_fails(mut suite: Command, server: &Path, unit: &str) -> Result<Option<String>> {
    let (reader, writer) = std::io::pipe()?;
    let mut child = suite
        .env("BALLAST_BIN", server)
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .process_group(0)
        .spawn()?;
    // The writing ends of the command would keep the pipe open.
    drop(suite);
    let reading = std::thread::spawn(move || std::io::read_to_string(reader));
    let end = wait::now() + SUITE_DEADLINE;
    let group = rustix::process::Pid::from_child(&child);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if wait::now() >= end {
            rustix::process::kill_process_group(group, rustix::process::Signal::KILL)?;
            child.wait()?;
            bail!("the suite did not end within {SUITE_DEADLINE:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let output = reading
        .join()
        .map_err(|_| anyhow::anyhow!("reading the suite's output failed"))??;
    if status.success() {
        return Ok(None);
    }
    let shown: String = output.chars().take(SHOWN_BYTES_MAX).collect();
    say(&shown);
    let told = output.lines().rev().find_map(|line| place(line, unit));
    match told {
        Some(place) => Ok(Some(place)),
        None if output.contains("panicked at") => Ok(Some("yes".to_owned())),
        None => bail!("the suite failed before it compared anything"),
    }
}

/// "seed 3, operation 71" of a line of a report.
fn place(line: &str, unit: &str) -> Option<String> {
    for phrase in ["at the end", "after a restart"] {
        if line.contains(phrase) && (line.contains("seed ") || line.contains("edges")) {
            return Some(phrase.to_owned());
        }
    }
    let number = |unit: &str| -> Option<String> {
        let rest = line.split_once(unit)?.1;
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        (!digits.is_empty()).then(|| format!("{unit}{digits}"))
    };
    let found = number(unit)?;
    Some(match number("seed ") {
        Some(seed) => format!("{seed}, {found}"),
        None => found,
    })
}

fn finish(mut command: Command, what: &str) -> Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        bail!("{what}:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Makes `tree` equal to the files of the repository; those that are equal already keep their time, so that nothing is built in vain.
fn copy(root: &Path, tree: &Path) -> Result<()> {
    let list = |folder: &Path, arguments: &[&str]| -> Result<BTreeSet<PathBuf>> {
        let output = Command::new("git")
            .args(arguments)
            .current_dir(folder)
            .output()?;
        if !output.status.success() {
            bail!("git: {}", String::from_utf8_lossy(&output.stderr));
        }
        let text = String::from_utf8(output.stdout)?;
        let names = text.split('\0').filter(|name| !name.is_empty());
        Ok(names.map(PathBuf::from).collect())
    };
    let wanted = list(
        root,
        &[
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
    )?;
    fs::create_dir_all(tree)?;
    for name in &wanted {
        let from = root.join(name);
        // Deleted, and not yet committed so.
        let Ok(bytes) = fs::read(&from) else { continue };
        let to = tree.join(name);
        if fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        fs::create_dir_all(to.parent().context("a file lies in a folder")?)?;
        fs::write(&to, bytes).with_context(|| to.display().to_string())?;
        fs::set_permissions(&to, fs::metadata(&from)?.permissions())?;
    }
    let mut folders = vec![tree.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
            } else if let Ok(name) = path.strip_prefix(tree)
                && !(wanted.contains(name) && root.join(name).exists())
            {
                fs::remove_file(&path)?;
            }
        }
    }
    Ok(())
}

fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::from("| bug | what is wrong | caught by | found |\n|---|---|---|---|\n");
    for outcome in outcomes {
        let Plant {
            name,
            bug,
            caught_by,
            ..
        } = &outcome.plant;
        let found = outcome.text();
        let _ = writeln!(text, "| {name} | {bug} | {caught_by} | {found} |");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_suite_that_is_named_must_find_it() {
        let plant = Plant {
            name: "x".to_owned(),
            path: PathBuf::new(),
            bug: "x".to_owned(),
            caught_by: "diff, nemesis".to_owned(),
            faults: None,
        };
        let outcome = |found: &[(&str, Option<&str>)]| Outcome {
            plant: plant.clone(),
            tree: String::new(),
            found: (found.iter())
                .map(|(way, when)| ((*way).to_owned(), when.map(str::to_owned)))
                .collect(),
            failure: None,
        };
        let edges = ("edges", None);
        let random = ("random", Some("operation 7"));
        assert!(outcome(&[edges, random, ("nemesis", Some("window 3"))]).caught());
        assert!(!outcome(&[edges, random, ("nemesis", None)]).caught());
        assert!(!outcome(&[edges, random]).caught());
    }

    #[test]
    fn a_place_is_read_from_a_report() {
        let line = "seed 3: operation 71 at revision 40: Put(..)";
        assert_eq!(
            place(line, "operation "),
            Some("seed 3, operation 71".to_owned())
        );
        assert_eq!(
            place("round 12: lost", "round "),
            Some("round 12".to_owned())
        );
        assert_eq!(
            place("seed 4: at the end: x", "operation "),
            Some("at the end".to_owned())
        );
        assert_eq!(place("nothing", "operation "), None);
    }
}
