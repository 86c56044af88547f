//! `ballast defrag --data-dir DIR [--storage-engine KIND]`: rewrites the database of a member that does not run, into another engine if told so.
//!
//! Promises: a directory in use, or without a database, is refused. A crash leaves the old database or the new one.
//! Not here: the rewriting (`ballast_storage`), and that of a running member, which needs no pause (the Defragment RPC).
//!
//! etcd: etcdutl/etcdutl/defrag_command.go.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use ballast_storage::StorageError;
use ballast_storage::backend::Kind;
use ballast_storage::backend::current::{self, Found};
use ballast_storage::mvcc::{DefragReport, Pace, Store, StoreOptions};
use clap::Parser;
use tracing_subscriber::filter::LevelFilter;

use crate::data_dir::{DataDir, DataDirError};
use crate::logging::{self, LogFormat, Outputs};

/// Of the engine; nothing is kept in memory beside.
const ENGINE_CACHE_BYTES: u64 = 64 << 20;

#[derive(Debug, Parser)]
#[command(
    name = "ballast defrag",
    about = "Rewrites the database of a member that does not run",
    long_about = "Rewrites the database of a member that does not run, which returns unused space to the disk.\n\n\
        It needs room for the copy. A crash leaves the old database or the new one. A running member does it without\n\
        a pause, when asked (etcdctl defrag) and by itself (--auto-defrag)."
)]
struct Args {
    /// The data directory, not in use.
    #[arg(long)]
    data_dir: PathBuf,
    /// The engine of the new database: redb or sled. The present one's when not given.
    #[arg(long, value_parser = super::storage_engine)]
    storage_engine: Option<Kind>,
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("it holds no database")]
    NoDatabase,
}

/// Runs `ballast defrag` with what follows on the command line.
pub(super) fn run(args: &[String]) -> ExitCode {
    let args = match super::parse::<Args>("ballast defrag", args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    logging::start(LevelFilter::INFO, LogFormat::Json, Outputs::stderr());
    let dir = args.data_dir.display();
    match defragment(&args.data_dir, args.storage_engine) {
        Ok(report) => {
            super::print(&format!(
                "defragmented {dir}: {} bytes before ({}), {} after ({})\n",
                report.before.allocated, report.from, report.after.allocated, report.to
            ));
            ExitCode::SUCCESS
        }
        Err(error) => {
            super::complain(&format!("Error: Failed to defragment {dir} ({error})"));
            ExitCode::FAILURE
        }
    }
}

fn defragment(dir: &Path, engine: Option<Kind>) -> Result<DefragReport, Failure> {
    if !dir.join("member/db/CURRENT").exists() {
        return Err(Failure::NoDatabase);
    }
    let data_dir = DataDir::open(dir, None)?;
    let engine = match (engine, current::recover(&data_dir.db)?) {
        (Some(engine), _) => engine,
        (None, Found::Database(name)) => name.kind,
        (None, Found::Nothing) => return Err(Failure::NoDatabase),
    };
    let store = Store::open(StoreOptions {
        dir: data_dir.db.clone(),
        engine,
        value_cache_bytes: 0,
        engine_cache_bytes: ENGINE_CACHE_BYTES,
        compaction_batch_limit: 1_000,
        compaction_sleep: Duration::ZERO,
        batch_interval: Duration::ZERO,
        batch_limit: 1,
    })?;
    let report = store.defragment(Pace::Urgent)?;
    store.close()?;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_a_database_is_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let error = defragment(dir.path(), None).unwrap_err();
        assert_eq!(error.to_string(), "it holds no database");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
