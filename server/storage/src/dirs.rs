//! Directories that are still there after a power cut.
//!
//! A name is durable when the directory that holds it was synced; some file systems promise no more than that, and then everything below a
//! directory is gone with its name.
//!
//! etcd: client/pkg/fileutil, which syncs the directory of the log and relies on the file system for those above it.

use std::fs::{DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use crate::error::StorageError;

/// Makes a directory, with those above it that are missing, and makes their names durable. Also of one that is there already: whoever made it
/// may have been stopped before the sync.
pub fn make(dir: &Path, mode: u32) -> Result<(), StorageError> {
    let missing: Vec<&Path> = dir
        .ancestors()
        .take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists())
        .collect();
    for dir in missing.iter().rev() {
        match DirBuilder::new().mode(mode).create(dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(StorageError::io("create", dir, error));
            }
            _ => sync_parent(dir)?,
        }
    }
    if !missing.is_empty() {
        return Ok(());
    }
    match sync_parent(dir) {
        // Somebody else's directory, in which we could not have made this one.
        Err(StorageError::Io { source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
            Ok(())
        }
        synced => synced,
    }
}

fn sync_parent(dir: &Path) -> Result<(), StorageError> {
    match dir.parent() {
        None => Ok(()),
        Some(parent) if parent.as_os_str().is_empty() => sync(Path::new(".")),
        Some(parent) => sync(parent),
    }
}

/// Makes renames, removals and new names in a directory survive a power cut.
pub fn sync(dir: &Path) -> Result<(), StorageError> {
    File::open(dir)
        .and_then(|file| file.sync_all())
        .map_err(|error| StorageError::io("sync", dir, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_missing_is_made_and_a_second_time_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b/c");
        make(&deep, 0o700).unwrap();
        make(&deep, 0o700).unwrap();
        assert!(deep.is_dir());
        std::fs::write(deep.join("file"), b"").unwrap();
        assert!(make(&deep.join("file/under"), 0o700).is_err());
    }
}
