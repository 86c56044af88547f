//! Fills the data directory of a new store from a snapshot, once.
//!
//! The directory's own name appears only when it is whole: a run that was interrupted leaves
//! `<dir>.part`, which the next one throws away.

use std::fs;
use std::path::Path;

use super::{AgentError, call, io_error, part_of, sync_dir, verified_hash};

/// Restores, unless the directory is there.
pub(super) fn run(
    ballast: &Path,
    snapshot: &Path,
    sha256: &str,
    data_dir: &Path,
    flags: &[String],
) -> Result<(), AgentError> {
    if data_dir.exists() {
        tracing::info!(dir = %data_dir.display(), "already restored");
        return Ok(());
    }
    let (found, _) = verified_hash(snapshot)?;
    if found != sha256 {
        return Err(AgentError::OtherFile {
            path: snapshot.to_owned(),
            found,
            wanted: sha256.to_owned(),
        });
    }
    let part = part_of(data_dir);
    if part.exists() {
        fs::remove_dir_all(&part).map_err(io_error("remove", &part))?;
    }
    let (from, to) = (snapshot.display().to_string(), part.display().to_string());
    let mut args = vec!["snapshot", "restore", &from, "--data-dir", &to];
    args.extend(flags.iter().map(String::as_str));
    call(ballast, &args)?;
    fs::rename(&part, data_dir).map_err(io_error("rename to", data_dir))?;
    sync_dir(data_dir.parent().unwrap_or(Path::new("/")))
}
