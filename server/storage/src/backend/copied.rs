//! A database opened in a copy of it, for engines that write as soon as they open. The copy goes with the handle.
//!
//! Not here: engines.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::{Batch, Engine, EngineSize, Pairs, Tally};
use crate::error::StorageError;

/// The engine on the copy.
#[derive(Debug)]
pub(super) struct Copied<E> {
    /// None while it is dropped: it must be closed before its files go.
    engine: Option<E>,
    dir: PathBuf,
}

impl<E> Copied<E> {
    /// Copies the database at `path`, a directory, to where temporary files go, and opens it there.
    pub(super) fn open(
        path: &Path,
        open: impl FnOnce(&Path) -> Result<E, StorageError>,
    ) -> Result<Self, StorageError> {
        let name = format!("ballast-check-{:016x}", crate::wal::nonce());
        let mut copy = Self {
            engine: None,
            dir: std::env::temp_dir().join(name),
        };
        copy_dir(path, &copy.dir)?;
        copy.engine = Some(open(&copy.dir)?);
        Ok(copy)
    }

    fn engine(&self) -> &E {
        self.engine.as_ref().expect("it is there until the drop")
    }
}

fn copy_dir(from: &Path, to: &Path) -> Result<(), StorageError> {
    // What only the owner may read stays so.
    DirBuilder::new()
        .mode(0o700)
        .create(to)
        .map_err(|e| StorageError::io("create", to, e))?;
    for entry in fs::read_dir(from).map_err(|e| StorageError::io("list", from, e))? {
        let path = entry.map_err(|e| StorageError::io("list", from, e))?.path();
        let to = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_dir(&path, &to)?;
        } else {
            fs::copy(&path, &to).map_err(|e| StorageError::io("copy", &path, e))?;
        }
    }
    Ok(())
}

impl<E> Drop for Copied<E> {
    fn drop(&mut self) {
        drop(self.engine.take());
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::warn!(path = %self.dir.display(), %error, "a temporary copy stays");
        }
    }
}

impl<E: Engine> Engine for Copied<E> {
    fn write(&self, batch: &Batch) -> Result<(), StorageError> {
        self.engine().write(batch)
    }
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StorageError> {
        self.engine().get(key)
    }
    fn get_many(&self, keys: &[Bytes]) -> Result<Vec<Option<Bytes>>, StorageError> {
        self.engine().get_many(keys)
    }
    fn scan(&self, start: &[u8], end: &[u8], bytes_max: usize) -> Result<Pairs, StorageError> {
        self.engine().scan(start, end, bytes_max)
    }
    fn size(&self) -> Result<EngineSize, StorageError> {
        self.engine().size()
    }
    fn tally(&self) -> Result<Option<Tally>, StorageError> {
        self.engine().tally()
    }
}
