//! Which file of the directory is the database, and how another one takes its place.
//!
//!     db/CURRENT            the name of the live file, "000001.redb\n"
//!     db/000001.redb        the live file
//!     db/000002.redb.new    a file being made: by the first open, or by a defragmentation
//!
//! To publish: the new file is complete and synced, then CURRENT is replaced (write aside, sync, rename, sync the directory):
//! that is the moment it counts. Only then does it lose the ending `.new`. So at open
//!
//!     CURRENT names X, X.new exists  -> published, not yet renamed: rename it
//!     a `.new` nobody names          -> a crash before publishing: removed
//!     another *.redb                 -> the predecessor, whose removal a crash cut short: removed
//!     *.redb but no CURRENT          -> somebody removed CURRENT: refused, never taken for an empty store
//!
//! etcd has one file, renamed over at the end of a defragmentation (server/storage/backend/backend.go).

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use super::Kind;
use crate::error::StorageError;

const CURRENT: &str = "CURRENT";
const CURRENT_ASIDE: &str = "CURRENT.new";
const UNPUBLISHED: &str = ".new";

/// What a directory holds.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// The live file's number.
    Database(u64),
    /// Nothing was ever published here.
    Nothing,
}

/// The name of file number `id`.
pub fn file_name(kind: Kind, id: u64) -> String {
    format!("{id:06}.{}", kind.extension())
}

/// Where file number `id` is built before it is published.
pub fn unpublished_path(dir: &Path, kind: Kind, id: u64) -> PathBuf {
    dir.join(file_name(kind, id) + UNPUBLISHED)
}

/// Finds the live file and clears what a crash left.
pub fn recover(dir: &Path, kind: Kind) -> Result<Found, StorageError> {
    let current = dir.join(CURRENT);
    let named = match fs::read_to_string(&current) {
        Ok(text) => Some(text.trim_end().to_owned()),
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        Err(e) => return Err(StorageError::io("read", &current, e)),
    };
    let Some(name) = named else {
        for file in names(dir)? {
            if file.ends_with(UNPUBLISHED) {
                remove(dir, &file)?;
            } else if is_database(&file, kind) {
                return Err(StorageError::Refused {
                    path: dir.to_owned(),
                    why: format!(
                        "it holds {file} but no {CURRENT}; if {file} is the database, write its name into {CURRENT}"
                    ),
                });
            }
        }
        return Ok(Found::Nothing);
    };
    let id = name
        .strip_suffix(&format!(".{}", kind.extension()))
        .and_then(|digits| digits.parse::<u64>().ok())
        .ok_or_else(|| StorageError::Refused {
            path: current.clone(),
            why: format!(
                "it names {name:?}, which is no {} database",
                kind.extension()
            ),
        })?;
    let unpublished = unpublished_path(dir, kind, id);
    if unpublished.exists() {
        finish(dir, kind, id)?;
    }
    if !dir.join(&name).exists() {
        return Err(StorageError::Refused {
            path: dir.to_owned(),
            why: format!(
                "{CURRENT} names {name}, which is not there; restore the directory or the member"
            ),
        });
    }
    for file in names(dir)? {
        if file != name && (file.ends_with(UNPUBLISHED) || is_database(&file, kind)) {
            tracing::info!(file, "removing what an interrupted change of database left");
            remove(dir, &file)?;
        }
    }
    Ok(Found::Database(id))
}

/// Makes file number `id`, complete and synced at its unpublished path, the live one.
pub fn publish(dir: &Path, kind: Kind, id: u64) -> Result<(), StorageError> {
    let aside = dir.join(CURRENT_ASIDE);
    let current = dir.join(CURRENT);
    sync_dir(dir)?; // the new file's name must outlive CURRENT's pointing to it
    let mut file = File::create(&aside).map_err(|e| StorageError::io("create", &aside, e))?;
    file.write_all(format!("{}\n", file_name(kind, id)).as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(|e| StorageError::io("write", &aside, e))?;
    fs::rename(&aside, &current).map_err(|e| StorageError::io("rename", &current, e))?;
    sync_dir(dir)?;
    finish(dir, kind, id)
}

fn finish(dir: &Path, kind: Kind, id: u64) -> Result<(), StorageError> {
    let path = dir.join(file_name(kind, id));
    fs::rename(unpublished_path(dir, kind, id), &path)
        .map_err(|e| StorageError::io("rename", &path, e))?;
    sync_dir(dir)
}

/// Removes the file of number `id`, published or not. One that is not there is no error.
pub fn remove_file(dir: &Path, kind: Kind, id: u64) -> Result<(), StorageError> {
    let name = file_name(kind, id);
    remove(dir, &(name.clone() + UNPUBLISHED))?;
    remove(dir, &name)
}

fn is_database(file: &str, kind: Kind) -> bool {
    Path::new(file)
        .extension()
        .is_some_and(|e| e == kind.extension())
}

fn names(dir: &Path) -> Result<Vec<String>, StorageError> {
    let fail = |e| StorageError::io("list", dir, e);
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(fail)? {
        names.push(
            entry
                .map_err(fail)?
                .file_name()
                .to_string_lossy()
                .into_owned(),
        );
    }
    Ok(names)
}

fn remove(dir: &Path, file: &str) -> Result<(), StorageError> {
    let path = dir.join(file);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(StorageError::io("remove", &path, e)),
        _ => Ok(()),
    }
}

fn sync_dir(dir: &Path) -> Result<(), StorageError> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(|e| StorageError::io("sync", dir, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind::Redb;

    fn touch(dir: &Path, name: &str) {
        fs::write(dir.join(name), b"x").unwrap();
    }

    fn listed(dir: &Path) -> Vec<String> {
        let mut names = names(dir).unwrap();
        names.sort();
        names
    }

    #[test]
    fn a_crash_at_any_step_leaves_the_old_or_the_new_database_and_no_orphan() {
        // What is there when it crashes, what is live afterwards.
        let cases: [(&[&str], &str, Found); 5] = [
            (&["000001.redb.new"], "", Found::Nothing),
            (&["000001.redb.new"], "000001.redb\n", Found::Database(1)),
            (
                &["000001.redb", "000002.redb.new"],
                "000001.redb\n",
                Found::Database(1),
            ),
            (
                &["000001.redb", "000002.redb.new", "CURRENT.new"],
                "000002.redb\n",
                Found::Database(2),
            ),
            (
                &["000001.redb", "000002.redb"],
                "000002.redb\n",
                Found::Database(2),
            ),
        ];
        for (files, current, expected) in cases {
            let dir = tempfile::tempdir().unwrap();
            for file in files {
                touch(dir.path(), file);
            }
            if !current.is_empty() {
                fs::write(dir.path().join(CURRENT), current).unwrap();
            }
            let found = recover(dir.path(), KIND).unwrap();
            assert_eq!(found, expected, "{files:?}");
            let left: Vec<String> = match found {
                Found::Nothing => Vec::new(),
                Found::Database(id) => vec![file_name(KIND, id), CURRENT.to_owned()],
            };
            assert_eq!(listed(dir.path()), left, "{files:?}");
        }
    }

    #[test]
    fn publishing_replaces_and_the_next_open_finds_it() {
        let dir = tempfile::tempdir().unwrap();
        for id in [1, 2] {
            touch(dir.path(), &(file_name(KIND, id) + UNPUBLISHED));
            publish(dir.path(), KIND, id).unwrap();
            assert_eq!(recover(dir.path(), KIND).unwrap(), Found::Database(id));
        }
        assert_eq!(listed(dir.path()), ["000002.redb", CURRENT]);
    }

    #[test]
    fn what_is_not_ours_to_decide_is_refused() {
        for (files, current) in [
            (&["000001.redb"][..], ""),
            (&[][..], "000001.redb"),
            (&["000001.redb"][..], "000002.redb"),
            (&["000001.redb"][..], "../elsewhere"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            for file in files {
                touch(dir.path(), file);
            }
            if !current.is_empty() {
                fs::write(dir.path().join(CURRENT), current).unwrap();
            }
            let error = recover(dir.path(), KIND).unwrap_err();
            assert!(matches!(error, StorageError::Refused { .. }), "{error}");
            assert!(files.iter().all(|file| dir.path().join(file).exists()));
        }
    }
}
