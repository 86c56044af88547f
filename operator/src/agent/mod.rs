//! What runs beside the store: takes a backup, restores one, removes one.
//!
//! A store's image has one static binary and no shell. The agent is the operator's own binary,
//! copied into the pod (`install`) and run in the store's image, where it calls the store's own
//! `snapshot` commands, so that the version that wrote the data also reads it. What it adds is
//! order: look before writing, write beside and rename, verify before calling it done.

mod backup;
mod restore;

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Subcommand;
use sha2::{Digest, Sha256};

use crate::cluster::build::hex;

/// Where Kubernetes reads what a container has to say when it ends.
const TERMINATION_LOG: &str = "/dev/termination-log";
/// How much of what a program said goes into an error.
const SAID_BYTES_MAX: usize = 800;
/// etcd's snapshot ends in the SHA-256 of what comes before it.
const TRAILER_BYTES: u64 = 32;
/// The bytes before the trailer are whole sectors, which tells a snapshot from a bare database.
const SECTOR_BYTES: u64 = 512;

/// Work beside a store.
#[derive(Debug, Subcommand)]
pub enum AgentCommand {
    /// Copy this binary to where a container of another image can run it.
    Install {
        #[arg(long)]
        to: PathBuf,
    },
    /// Fetch a snapshot, verify it and report it in the termination message.
    Backup {
        #[arg(long)]
        ballast: PathBuf,
        #[arg(long)]
        endpoint: String,
        #[arg(long)]
        file: PathBuf,
        #[arg(long, default_value = TERMINATION_LOG)]
        report: PathBuf,
    },
    /// Fill a data directory from a snapshot, unless it is there.
    Restore {
        #[arg(long)]
        ballast: PathBuf,
        #[arg(long)]
        snapshot: PathBuf,
        #[arg(long)]
        sha256: String,
        #[arg(long)]
        data_dir: PathBuf,
        /// Flags of `snapshot restore`.
        #[arg(last = true)]
        flags: Vec<String>,
    },
    /// Remove a snapshot and what an interrupted attempt left of it.
    Remove {
        #[arg(long)]
        file: PathBuf,
    },
}

/// Work that was not done.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("cannot {what} {path}: {source}")]
    Io {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{command} ended with {status}: {said}")]
    Command {
        command: String,
        status: String,
        said: String,
    },
    #[error("{path} is not a snapshot: its length {length} leaves no room for a trailing hash")]
    NoTrailer { path: PathBuf, length: u64 },
    #[error("{path} is damaged: its content hashes to {found}, its trailer says {wanted}")]
    Trailer {
        path: PathBuf,
        found: String,
        wanted: String,
    },
    #[error("{path} is not the backup that was recorded: its hash is {found}, not {wanted}")]
    OtherFile {
        path: PathBuf,
        found: String,
        wanted: String,
    },
    #[error("the status of {path} cannot be read: {source}")]
    Status {
        path: PathBuf,
        source: serde_json::Error,
    },
}

/// Does what the command says. What went wrong is also left where Kubernetes reads a container's last
/// words, so that a status tells it in one sentence and not as a line of the log.
pub fn run(command: AgentCommand) -> Result<(), AgentError> {
    let last_words = match &command {
        AgentCommand::Backup { report, .. } => Some(report.clone()),
        // Outside of a container there is no such file, and none is made.
        _ => Some(PathBuf::from(TERMINATION_LOG)).filter(|path| path.exists()),
    };
    let done = act(command);
    if let (Err(error), Some(path)) = (&done, last_words) {
        // The error is returned too: a place that cannot be written to loses nothing.
        let _ = fs::write(path, error.to_string());
    }
    done
}

fn act(command: AgentCommand) -> Result<(), AgentError> {
    match command {
        AgentCommand::Install { to } => install(&to),
        AgentCommand::Backup {
            ballast,
            endpoint,
            file,
            report,
        } => {
            let written = backup::run(&ballast, &endpoint, &file)?;
            let json = serde_json::to_vec(&written).expect("a report is plain data");
            fs::write(&report, json).map_err(io_error("write", &report))
        }
        AgentCommand::Restore {
            ballast,
            snapshot,
            sha256,
            data_dir,
            flags,
        } => restore::run(&ballast, &snapshot, &sha256, &data_dir, &flags),
        AgentCommand::Remove { file } => remove(&file),
    }
}

fn install(to: &Path) -> Result<(), AgentError> {
    let me = std::env::current_exe().map_err(io_error("find", Path::new("/proc/self/exe")))?;
    fs::copy(&me, to).map_err(io_error("copy to", to))?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o755)).map_err(io_error("chmod", to))
}

fn remove(file: &Path) -> Result<(), AgentError> {
    for path in [file.to_owned(), part_of(file)] {
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other.map_err(io_error("remove", &path))?,
        }
    }
    if let Some(folder) = file.parent().filter(|p| p.exists()) {
        // The folder of a cluster goes with its last backup; any other content keeps it.
        let _ = fs::remove_dir(folder);
        if folder.exists() {
            sync_dir(folder)?;
        }
    }
    Ok(())
}

/// The name a file has until it is whole.
fn part_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".part");
    PathBuf::from(name)
}

/// Runs one command to its end and returns what it printed.
fn call(program: &Path, args: &[&str]) -> Result<String, AgentError> {
    let output = Command::new(program)
        .args(args)
        .output()
        .map_err(io_error("run", program))?;
    let said = last_of(&String::from_utf8_lossy(&output.stderr));
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words: Vec<&str> = args.iter().take(2).copied().collect();
    let command = format!("{} {}", program.display(), words.join(" "));
    Err(AgentError::Command {
        command,
        status: output.status.to_string(),
        said,
    })
}

/// The end of what a program said: that is where it says why it ended.
fn last_of(said: &str) -> String {
    let said = said.trim();
    let mut start = said.len().saturating_sub(SAID_BYTES_MAX);
    while !said.is_char_boundary(start) {
        start += 1;
    }
    said[start..].trim().to_owned()
}

/// The whole file's hash, after its trailer was checked against its content, and its length.
fn verified_hash(path: &Path) -> Result<(String, u64), AgentError> {
    let mut file = File::open(path).map_err(io_error("open", path))?;
    let length = file.metadata().map_err(io_error("stat", path))?.len();
    if length <= TRAILER_BYTES || !(length - TRAILER_BYTES).is_multiple_of(SECTOR_BYTES) {
        return Err(AgentError::NoTrailer {
            path: path.to_owned(),
            length,
        });
    }
    let mut content = Sha256::new();
    let mut rest = length - TRAILER_BYTES;
    let mut buffer = vec![0_u8; 1 << 20];
    while rest > 0 {
        let want = usize::try_from(rest)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        file.read_exact(&mut buffer[..want])
            .map_err(io_error("read", path))?;
        content.update(&buffer[..want]);
        rest -= want as u64;
    }
    file.seek(SeekFrom::End(-(TRAILER_BYTES as i64)))
        .map_err(io_error("seek in", path))?;
    let mut trailer = [0_u8; TRAILER_BYTES as usize];
    file.read_exact(&mut trailer)
        .map_err(io_error("read", path))?;
    let mut whole = content.clone();
    whole.update(trailer);
    let found = hex(&content.finalize());
    let wanted = hex(&trailer);
    if found != wanted {
        return Err(AgentError::Trailer {
            path: path.to_owned(),
            found,
            wanted,
        });
    }
    Ok((hex(&whole.finalize()), length))
}

/// Makes a rename or a removal in the folder last.
fn sync_dir(folder: &Path) -> Result<(), AgentError> {
    File::open(folder)
        .and_then(|f| f.sync_all())
        .map_err(io_error("sync", folder))
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AgentError + use<> {
    let path = path.to_owned();
    move |source| AgentError::Io { what, path, source }
}
