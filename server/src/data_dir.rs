//! The data directory: whose it is, and that only one process has it.
//!
//!     DIR/member/lock   held while a server runs
//!     DIR/member/db     the database
//!     DIR/member/wal    the log, unless --wal-dir says otherwise
//!     DIR/member.restoring   a restore under way, or one that was cut short
//!
//! Promises: a directory that is not ours is refused with a sentence that says what to do, and not touched.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use ballast_storage::wal::foreign;
use ballast_storage::{StorageError, dirs};
use rustix::fs::{FlockOperation, flock};

/// Only the owner may read the store.
const DIR_MODE: u32 = 0o700;

/// Where a restore builds what becomes `member`.
pub const RESTORING: &str = "member.restoring";

/// True when a restore may make the directory: it is not there, or holds nothing but an earlier attempt.
pub fn is_free(dir: &Path) -> bool {
    match fs::read_dir(dir) {
        Ok(entries) => entries.into_iter().all(|entry| {
            // A fresh volume has the latter.
            entry.is_ok_and(|entry| {
                let name = entry.file_name();
                name == RESTORING || name == "lost+found"
            })
        }),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    #[error("{op} {path}: {source}")]
    Io {
        op: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "{path} is in use by another process: stop that server, or give this one another --data-dir"
    )]
    InUse { path: PathBuf },
    /// Whose it is, and what to do.
    #[error(transparent)]
    Foreign(#[from] StorageError),
    #[error(
        "{path} holds a restore that was cut short: restore again, or remove {RESTORING} in it to begin with an empty store"
    )]
    HalfRestored { path: PathBuf },
}

/// A locked data directory.
#[derive(Debug)]
pub struct DataDir {
    pub db: PathBuf,
    pub wal: PathBuf,
    /// The lock ends with the file.
    _lock: File,
}

impl DataDir {
    /// Makes the directory if need be and locks it.
    pub fn open(dir: &Path, wal_dir: Option<&Path>) -> Result<Self, DataDirError> {
        let member = dir.join("member");
        foreign::check_data_dir(dir)?;
        if dir.join(RESTORING).exists() && !member.exists() {
            return Err(DataDirError::HalfRestored {
                path: dir.to_owned(),
            });
        }
        dirs::make(dir, DIR_MODE)?;
        dirs::make(&member, DIR_MODE)?;
        let path = member.join("lock");
        let lock = fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(io("open", &path))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            if error == rustix::io::Errno::WOULDBLOCK {
                DataDirError::InUse {
                    path: dir.to_owned(),
                }
            } else {
                io("lock", &path)(error.into())
            }
        })?;
        Ok(Self {
            db: member.join("db"),
            wal: wal_dir.map_or_else(|| member.join("wal"), Path::to_owned),
            _lock: lock,
        })
    }
}

fn io(op: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> DataDirError {
    let path = path.to_owned();
    move |source| DataDirError::Io { op, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_server() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataDir::open(dir.path(), None).unwrap();
        assert!(matches!(
            DataDir::open(dir.path(), None),
            Err(DataDirError::InUse { .. })
        ));
        drop(first);
        assert!(DataDir::open(dir.path(), None).is_ok());
    }

    #[test]
    fn a_restore_cut_short_is_no_empty_store() {
        let dir = tempfile::tempdir().unwrap();
        assert!(is_free(dir.path()) && is_free(&dir.path().join("absent")));
        fs::create_dir(dir.path().join(RESTORING)).unwrap();
        assert!(is_free(dir.path()));
        assert!(matches!(
            DataDir::open(dir.path(), None),
            Err(DataDirError::HalfRestored { .. })
        ));
        assert!(!dir.path().join("member").exists());
        fs::create_dir(dir.path().join("member")).unwrap();
        assert!(!is_free(dir.path()));
        assert!(DataDir::open(dir.path(), None).is_ok());
    }

    #[test]
    fn a_directory_of_etcd_is_refused_and_untouched() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("member/snap")).unwrap();
        let mut page = [0; 20];
        page[16..].copy_from_slice(&0xED0C_DAED_u32.to_le_bytes());
        fs::write(dir.path().join("member/snap/db"), page).unwrap();
        let error = DataDir::open(dir.path(), None).unwrap_err();
        assert!(
            error.to_string().contains("ballast snapshot restore"),
            "{error}"
        );
        assert!(!dir.path().join("member/lock").exists());
    }
}
