//! Long-running programs: started into a namespace with a log file, recorded on disk, and stopped
//! by the recorded process.
//!
//! A record holds the process's start time beside its id, so that a later `down` never signals
//! another process that got the same id.

use std::fs::{self, File, OpenOptions};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde::{Deserialize, Serialize};

use crate::netns::NetworkNamespace;
use crate::wait::wait_for_blocking;

/// A program to keep running.
pub struct Program {
    pub name: String,
    pub path: PathBuf,
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub namespace: Option<NetworkNamespace>,
}

impl Program {
    pub fn new(name: &str, path: PathBuf) -> Self {
        Self {
            name: name.to_owned(),
            path,
            arguments: Vec::new(),
            environment: Vec::new(),
            namespace: None,
        }
    }

    #[must_use]
    pub fn argument(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    #[must_use]
    pub fn arguments<I: IntoIterator<Item = S>, S: Into<String>>(mut self, arguments: I) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    #[must_use]
    pub fn inside(mut self, namespace: &NetworkNamespace) -> Self {
        self.namespace = Some(namespace.clone());
        self
    }

    /// Starts it. Its output goes to `<state>/log/<name>.log`, its record to `<state>/run/`.
    ///
    /// One of the same name that runs still is ended first: its record is overwritten, and nobody would end it any more.
    pub fn start(&self, state: &Path) -> Result<Process> {
        for older in recorded(state)? {
            if older.name() == self.name && older.alive() {
                older.kill()?;
            }
        }
        let logs = state.join("log");
        let records = state.join("run");
        fs::create_dir_all(&logs)?;
        fs::create_dir_all(&records)?;
        let log = logs.join(format!("{}.log", self.name));
        let output = OpenOptions::new().create(true).append(true).open(&log)?;
        let mut command = self.command();
        command
            .envs(self.environment.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            // A Ctrl-C at the terminal is for the harness, not for what it keeps running.
            .process_group(0);
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", self.path.display()))?;
        let record = Record {
            name: self.name.clone(),
            pid: child.id(),
            started: start_time(child.id()).context("the program ended at once")?,
        };
        let path = records.join(format!("{}.json", self.name));
        serde_json::to_writer(File::create(&path)?, &record)?;
        Ok(Process {
            record,
            record_path: path,
            log,
        })
    }

    fn command(&self) -> Command {
        let mut command = if let Some(namespace) = &self.namespace {
            // nsenter replaces itself by the program: the process id stays the program's.
            let mut command = Command::new("nsenter");
            command.arg(namespace.nsenter()).arg("--").arg(&self.path);
            command
        } else {
            Command::new(&self.path)
        };
        command.args(&self.arguments);
        command
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Record {
    name: String,
    pid: u32,
    started: u64,
}

/// A program that was started, by this run or by an earlier one.
#[derive(Clone, Debug)]
pub struct Process {
    record: Record,
    record_path: PathBuf,
    log: PathBuf,
}

impl Process {
    pub fn name(&self) -> &str {
        &self.record.name
    }

    pub fn id(&self) -> u32 {
        self.record.pid
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    pub fn alive(&self) -> bool {
        // The parent reaps; another run's call finds no child of that id, which is fine.
        let _ = waitpid(Some(self.pid()), WaitOptions::NOHANG);
        start_time(self.record.pid) == Some(self.record.started)
    }

    /// An error that shows the end of the log when the program has ended.
    pub fn check(&self) -> Result<()> {
        if self.alive() {
            return Ok(());
        }
        bail!(
            "{} has ended; {}:\n{}",
            self.record.name,
            self.log.display(),
            tail(&self.log)
        )
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        if self.alive() {
            kill_process(self.pid(), signal)
                .with_context(|| format!("signalling {}", self.record.name))?;
        }
        Ok(())
    }

    /// Asks it to end, insists after the grace period, and forgets it.
    pub fn stop(&self, grace: Duration) -> Result<()> {
        self.signal(Signal::TERM)?;
        let gone = || Ok((!self.alive()).then_some(()));
        if wait_for_blocking(&format!("{} ends", self.record.name), grace, gone).is_err() {
            return self.kill();
        }
        self.forget()
    }

    /// Kills it at once, as a crash would, and forgets it.
    pub fn kill(&self) -> Result<()> {
        self.signal(Signal::KILL)?;
        wait_for_blocking(
            &format!("{} is gone", self.record.name),
            Duration::from_secs(20),
            || Ok((!self.alive()).then_some(())),
        )?;
        self.forget()
    }

    fn forget(&self) -> Result<()> {
        match fs::remove_file(&self.record_path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.record.pid.cast_signed()).expect("a recorded process id is not zero")
    }
}

/// Everything that was recorded under this state folder, whether it still runs or not.
pub fn recorded(state: &Path) -> Result<Vec<Process>> {
    let mut processes = Vec::new();
    let entries = match fs::read_dir(state.join("run")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(processes),
        Err(error) => return Err(error.into()),
    };
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        // A record cut short by a crash names nothing that could be stopped.
        let Ok(record) = serde_json::from_slice::<Record>(&fs::read(&path)?) else {
            continue;
        };
        let log = state.join("log").join(format!("{}.log", record.name));
        processes.push(Process {
            record,
            record_path: path,
            log,
        });
    }
    processes.sort_by_key(|process| process.record.started);
    Ok(processes)
}

/// The process's start in clock ticks since boot; nothing when it is gone or only a zombie.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; the fields after it are plain.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// The last lines of a log, for an error message.
pub fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_program_is_found_again_and_stopped() {
        let state = tempfile::tempdir().expect("a temporary folder");
        let started = Program::new("sleeper", "/bin/sleep".into())
            .argument("60")
            .start(state.path())
            .expect("sleep starts");
        let found = recorded(state.path()).expect("the records can be read");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].id(), started.id());
        assert!(found[0].alive());
        found[0].stop(Duration::from_secs(5)).expect("sleep stops");
        assert!(!started.alive());
        assert!(
            recorded(state.path())
                .expect("the records can be read")
                .is_empty()
        );
    }

    #[test]
    fn a_record_of_another_start_time_is_not_taken_for_the_program() {
        let state = tempfile::tempdir().expect("a temporary folder");
        let started = Program::new("sleeper", "/bin/sleep".into())
            .argument("60")
            .start(state.path())
            .expect("sleep starts");
        let mut other = started.clone();
        other.record.started += 1;
        assert!(!other.alive());
        other
            .signal(Signal::KILL)
            .expect("a signal to nobody is no error");
        assert!(started.alive());
        started.kill().expect("sleep can be killed");
    }
}
