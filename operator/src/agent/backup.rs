//! Takes a backup. The final name appears only when the file is whole, verified and synced, so that
//! a second run after a crash can trust what it finds there.

use std::fs::{self, File};
use std::path::Path;

use serde::Deserialize;

use super::{AgentError, call, io_error, part_of, sync_dir, verified_hash};
use crate::backup::plan::BackupReport;

/// What `snapshot status -w json` prints, in etcd's words.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SnapshotStatus {
    revision: i64,
    total_key: i64,
}

/// Fetches, verifies, renames; or verifies what an earlier run left.
pub(super) fn run(ballast: &Path, endpoint: &str, file: &Path) -> Result<BackupReport, AgentError> {
    if !file.exists() {
        fetch(ballast, endpoint, file)?;
    }
    describe(ballast, file)
}

fn fetch(ballast: &Path, endpoint: &str, file: &Path) -> Result<(), AgentError> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder).map_err(io_error("create", folder))?;
    let part = part_of(file);
    if part.exists() {
        fs::remove_file(&part).map_err(io_error("remove", &part))?;
    }
    let target = part.display().to_string();
    let endpoints = format!("--endpoints={endpoint}");
    call(ballast, &["snapshot", "save", &target, &endpoints])?;
    describe(ballast, &part)?;
    File::open(&part)
        .and_then(|f| f.sync_all())
        .map_err(io_error("sync", &part))?;
    fs::rename(&part, file).map_err(io_error("rename to", file))?;
    sync_dir(folder)
}

fn describe(ballast: &Path, file: &Path) -> Result<BackupReport, AgentError> {
    let (sha256, length) = verified_hash(file)?;
    let path = file.display().to_string();
    let printed = call(ballast, &["snapshot", "status", &path, "-w", "json"])?;
    let status: SnapshotStatus =
        serde_json::from_str(&printed).map_err(|source| AgentError::Status {
            path: file.to_owned(),
            source,
        })?;
    Ok(BackupReport {
        revision: status.revision,
        total_keys: status.total_key,
        size_bytes: i64::try_from(length).unwrap_or(i64::MAX),
        sha256,
    })
}
