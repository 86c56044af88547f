//! Which backup a new store is filled from, and whether it is there yet.

use crate::cluster::build::pod::RestoreSource;
use crate::cluster::observe::is_going;
use crate::crd::{RestoreSpec, StoreBackup, conditions};

/// The source, or the sentence that says what is missing. Waiting is right in every case but one:
/// the backup may be running, or be applied after the StoreCluster.
pub fn resolve(spec: &RestoreSpec, backup: Option<&StoreBackup>) -> Result<RestoreSource, String> {
    let name = &spec.backup_ref.name;
    let Some(backup) = backup else {
        return Err(format!("StoreBackup {name} does not exist"));
    };
    if is_going(backup) {
        return Err(format!("StoreBackup {name} is being deleted"));
    }
    let status = backup.status.clone().unwrap_or_default();
    match conditions::get(&status.conditions, conditions::SUCCEEDED) {
        Some(c) if c.status == "True" => {}
        Some(c) if c.status == "False" => {
            return Err(format!("StoreBackup {name} did not succeed: {}", c.message));
        }
        _ => return Err(format!("waiting for StoreBackup {name} to succeed")),
    }
    let incomplete = || format!("StoreBackup {name} does not say where its file is");
    let location = status.location.ok_or_else(incomplete)?;
    Ok(RestoreSource {
        backup_name: name.clone(),
        claim: location.claim_name,
        path: location.path,
        sha256: status.sha256.ok_or_else(incomplete)?,
        revision: status.revision.ok_or_else(incomplete)?,
        bump_revision: spec.bump_revision,
    })
}
