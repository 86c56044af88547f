//! `ballast check DIR`: is this member's data sound? Changes nothing.
//!
//! Promises: nothing is opened for writing; each problem names its place; exit code 0 means that none was found. A directory in use
//! is refused, since its files change while they are read.
//! Not here: what is checked (`ballast_storage::check`, `ballast_storage::wal::inspect`).

use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ballast_storage::check::{self, DatabaseFacts, Problems};
use ballast_storage::wal::{self, LogFacts, foreign};
use clap::Parser;
use rustix::fs::{FlockOperation, flock};

use crate::data_dir::{DataDirError, RESTORING};

#[derive(Debug, Parser)]
#[command(
    name = "ballast check",
    about = "Checks the data of a member that does not run, and changes nothing",
    long_about = "Checks the data of a member that does not run, and changes nothing.\n\n\
        Read are: the log, every record of every segment; the database, its checksums, every record, and that the records\n\
        make sense together (revisions without a gap, versions, leases, counters); and that log and database belong together.\n\
        What is wrong is printed, a line each, with its place. Exit code: 0 nothing is wrong, 1 something is."
)]
struct Args {
    /// The data directory, not in use.
    dir: PathBuf,
    /// Where the log is, if not in the data directory.
    #[arg(long)]
    wal_dir: Option<PathBuf>,
}

/// Runs `ballast check` with what follows on the command line.
pub(super) fn run(args: &[String]) -> ExitCode {
    let args = match super::parse::<Args>("ballast check", args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let dir = args.dir.display();
    let mut problems = Problems::default();
    let facts = match look(&args.dir, args.wal_dir.as_deref(), &mut problems) {
        Ok(facts) => facts,
        Err(error) => {
            super::complain(&format!("Error: cannot check {dir}: {error}"));
            return ExitCode::FAILURE;
        }
    };
    super::print(&told(&facts));
    for problem in &problems.told {
        super::print(&format!("problem: {problem}\n"));
    }
    if problems.is_empty() {
        super::print(&format!("no problems found in {dir}\n"));
        return ExitCode::SUCCESS;
    }
    super::print(&format!("{} problems found in {dir}\n", problems.len()));
    ExitCode::FAILURE
}

#[derive(Debug, Default)]
struct Facts {
    database: Option<DatabaseFacts>,
    log: Option<LogFacts>,
}

fn look(
    dir: &Path,
    wal_dir: Option<&Path>,
    problems: &mut Problems,
) -> Result<Facts, DataDirError> {
    foreign::check_data_dir(dir)?;
    let member = dir.join("member");
    if !member.is_dir() {
        return Err(if dir.join(RESTORING).exists() {
            DataDirError::HalfRestored {
                path: dir.to_owned(),
            }
        } else {
            DataDirError::Io {
                op: "open",
                path: member,
                source: std::io::ErrorKind::NotFound.into(),
            }
        });
    }
    let _lock = lock(dir, &member)?;
    let mut facts = Facts::default();
    match check::database(&member.join("db"), problems) {
        Ok(database) => facts.database = Some(database),
        Err(error) => problems.add(error.to_string()),
    }
    let wal_dir = wal_dir.map_or_else(|| member.join("wal"), Path::to_owned);
    match wal::inspect(&wal_dir) {
        Ok(log) => facts.log = log,
        Err(error) => problems.add(error.to_string()),
    }
    if let (Some(database), Some(log)) = (&facts.database, &facts.log) {
        check::together(database, log, problems);
    }
    Ok(facts)
}

/// Shared with other readers, not with a server. A copy may have no lock file.
fn lock(dir: &Path, member: &Path) -> Result<Option<File>, DataDirError> {
    let path = member.join("lock");
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(DataDirError::Io {
                op: "open",
                path,
                source,
            });
        }
    };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(DataDirError::InUse {
            path: dir.to_owned(),
        }),
        Err(error) => Err(DataDirError::Io {
            op: "lock",
            path,
            source: error.into(),
        }),
    }
}

/// What is there, a line for each part.
fn told(facts: &Facts) -> String {
    let mut text = String::new();
    if let Some(log) = &facts.log {
        let _ = write!(
            text,
            "log      {}: {} segments, entries behind {} to {}",
            log.dir.display(),
            log.segments,
            log.purged.index,
            log.last.index
        );
        if let Some((path, offset)) = &log.torn {
            let _ = write!(
                text,
                "; a torn group that nobody was told of, at byte {offset} of {}, which the next start cuts",
                path.display()
            );
        }
        text.push('\n');
    } else {
        text.push_str("log      none that can be read\n");
    }
    match &facts.database {
        Some(database) => {
            let compaction = match (database.compact_revision, database.is_compacting) {
                (-1, _) => "never compacted".to_owned(),
                (revision, false) => format!("compacted at {revision}"),
                (revision, true) => {
                    format!("compacted at {revision}, which the next start goes on with")
                }
            };
            let _ = writeln!(
                text,
                "database {}: revision {}, {compaction}, {} records, {} keys, {} leases, applied {}",
                database.path.display(),
                database.revision,
                database.records,
                database.keys,
                database.leases,
                database.applied.index
            );
        }
        None => text.push_str("database none that can be read\n"),
    }
    text
}
