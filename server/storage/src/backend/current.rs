//! Which database of the directory is the live one, and how another takes its place, of the same engine or another.
//!
//!     db/CURRENT            the name of the live database, "000001.redb\n"; the ending names the engine
//!     db/000001.redb        the live database: a file, or a directory (sled)
//!     db/000002.sled.new    one being made: by the first open, or by a defragmentation
//!     db/000001.index       what its first open saves time by (mvcc/index_file.rs), or nothing
//!
//! To publish: the new database is complete and synced, then CURRENT is replaced (write aside, sync, rename, sync the directory):
//! that is the moment it counts. Only then does it lose the ending `.new`. So at open
//!
//!     CURRENT names X, X.new exists  -> published, not yet renamed: rename it
//!     a `.new` nobody names          -> a crash before publishing: removed
//!     another database               -> the predecessor, whose removal a crash cut short: removed
//!     an index of another database   -> a crash before publishing: removed
//!     a database but no CURRENT      -> somebody removed CURRENT: refused, never taken for an empty store
//!
//! An engine that is open while its database is renamed or removed goes on with what it has open; none looks a name up later.
//!
//! etcd has one file, renamed over at the end of a defragmentation (server/storage/backend/backend.go).

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Kind;
use crate::error::StorageError;
use crate::files;

const CURRENT: &str = "CURRENT";
const CURRENT_ASIDE: &str = "CURRENT.new";
/// What a database is called besides until it is published. An open removes those that a crash left.
pub const UNPUBLISHED: &str = ".new";

/// The extension of the file with a new database's index.
const INDEX: &str = "index";

/// A database's engine and number. Numbers grow, whatever the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    pub kind: Kind,
    pub id: u64,
}

impl Name {
    /// The database of an empty directory.
    pub const fn first(kind: Kind) -> Self {
        Self { kind, id: 1 }
    }

    /// The one after it.
    #[must_use]
    pub const fn next(self, kind: Kind) -> Self {
        Self {
            kind,
            id: self.id + 1,
        }
    }

    fn parse(name: &str) -> Option<Self> {
        let (digits, extension) = name.split_once('.')?;
        let name_again = Self {
            kind: Kind::named(extension)?,
            id: digits.parse().ok()?,
        };
        (name_again.to_string() == name).then_some(name_again)
    }

    /// Where it lies in `dir`.
    pub fn path(self, dir: &Path) -> PathBuf {
        dir.join(self.to_string())
    }

    /// Where it is built before it is published.
    pub fn unpublished_path(self, dir: &Path) -> PathBuf {
        dir.join(self.unpublished())
    }

    fn unpublished(self) -> String {
        format!("{self}{UNPUBLISHED}")
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:06}.{}", self.id, self.kind.extension())
    }
}

/// What a directory holds.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// The live database.
    Database(Name),
    /// Nothing was ever published here.
    Nothing,
}

/// Finds the live database and clears what a crash left.
pub fn recover(dir: &Path) -> Result<Found, StorageError> {
    let current = dir.join(CURRENT);
    let named = match fs::read_to_string(&current) {
        Ok(text) => Some(text.trim_end().to_owned()),
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        Err(e) => return Err(StorageError::io("read", &current, e)),
    };
    let Some(named) = named else {
        for file in names(dir)? {
            if file.ends_with(UNPUBLISHED) || is_index(&file) {
                remove(&dir.join(&file))?;
            } else if is_database(&file) {
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
    let name = Name::parse(&named).ok_or_else(|| StorageError::Refused {
        path: current.clone(),
        why: format!("it names {named:?}, which is no database of an engine of ours"),
    })?;
    if name.unpublished_path(dir).exists() {
        finish(dir, name)?;
    }
    if !name.path(dir).exists() {
        return Err(StorageError::Refused {
            path: dir.to_owned(),
            why: format!(
                "{CURRENT} names {name}, which is not there; restore the directory or the member"
            ),
        });
    }
    let index = index_path(Path::new(&named));
    for file in names(dir)? {
        let is_left = if is_index(&file) {
            Path::new(&file) != index
        } else {
            file != named && (file.ends_with(UNPUBLISHED) || is_database(&file))
        };
        if is_left {
            tracing::info!(file, "removing what an interrupted change of database left");
            remove(&dir.join(&file))?;
        }
    }
    Ok(Found::Database(name))
}

/// The live database and where it lies, for looking at it: nothing is cleared or renamed.
pub fn find(dir: &Path) -> Result<(Kind, PathBuf), StorageError> {
    let current = dir.join(CURRENT);
    let refused = |why: String| StorageError::Refused {
        path: current.clone(),
        why,
    };
    let text = fs::read_to_string(&current).map_err(|e| StorageError::io("read", &current, e))?;
    let text = text.trim_end();
    let name = Name::parse(text)
        .ok_or_else(|| refused(format!("it names {text:?}, which is no database")))?;
    // The first: a crash came between the two steps of publishing.
    let path = [name.unpublished_path(dir), name.path(dir)]
        .into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| refused(format!("it names {name}, which is not there")))?;
    Ok((name.kind, path))
}

/// Makes the database, complete and synced at its unpublished path, the live one.
pub fn publish(dir: &Path, name: Name) -> Result<(), StorageError> {
    let aside = dir.join(CURRENT_ASIDE);
    let current = dir.join(CURRENT);
    sync_dir(dir)?; // the new database's name must outlive CURRENT's pointing to it
    let mut file = File::create(&aside).map_err(|e| StorageError::io("create", &aside, e))?;
    file.write_all(format!("{name}\n").as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(|e| StorageError::io("write", &aside, e))?;
    fs::rename(&aside, &current).map_err(|e| StorageError::io("rename", &current, e))?;
    sync_dir(dir)?;
    finish(dir, name)
}

fn finish(dir: &Path, name: Name) -> Result<(), StorageError> {
    let path = name.path(dir);
    fs::rename(name.unpublished_path(dir), &path)
        .map_err(|e| StorageError::io("rename", &path, e))?;
    sync_dir(dir)
}

/// Removes a database, published or not. One that is not there is no error.
pub fn remove_database(dir: &Path, name: Name) -> Result<(), StorageError> {
    remove(&name.unpublished_path(dir))?;
    remove(&name.path(dir))
}

/// As `remove_database`, of one that nobody has open, and slowly: `rest` says whether to go on so.
pub fn remove_slowly(
    dir: &Path,
    name: Name,
    rest: impl FnMut(Duration) -> bool,
) -> Result<(), StorageError> {
    let path = name.path(dir);
    // A database of several files, as sled's, has small ones.
    let file = path
        .is_file()
        .then(|| File::options().write(true).open(&path));
    remove_database(dir, name)?;
    if let Some(Ok(file)) = file {
        files::free(&file, rest);
    }
    Ok(())
}

fn is_database(file: &str) -> bool {
    Path::new(file)
        .extension()
        .and_then(|extension| Kind::named(extension.to_str()?))
        .is_some()
}

/// The file of its index, for a database at this path, published or not.
pub fn index_path(database: &Path) -> PathBuf {
    let mut path = database.to_owned();
    let name = database.file_name().unwrap_or_default().to_string_lossy();
    match name.strip_suffix(UNPUBLISHED) {
        Some(name) => {
            let index = Path::new(name).with_extension(INDEX);
            path.set_file_name(format!("{}{UNPUBLISHED}", index.display()));
        }
        None => {
            path.set_extension(INDEX);
        }
    }
    path
}

fn is_index(file: &str) -> bool {
    Path::new(file).extension().is_some_and(|e| e == INDEX)
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

/// A file or a directory, or neither.
pub(crate) fn remove(path: &Path) -> Result<(), StorageError> {
    let removed = if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(StorageError::io("remove", path, e)),
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

    /// A file for redb, a directory for sled.
    fn make(dir: &Path, name: &str) {
        let path = dir.join(name);
        if name.contains("sled") {
            fs::create_dir(&path).unwrap();
            fs::write(path.join("db"), b"x").unwrap();
        } else {
            fs::write(&path, b"x").unwrap();
        }
    }

    fn listed(dir: &Path) -> Vec<String> {
        let mut names = names(dir).unwrap();
        names.sort();
        names
    }

    /// For both engines and from one to the other.
    fn everywhere(test: impl Fn(&dyn Fn(&str) -> String, [Name; 2])) {
        for first in Kind::ALL {
            for second in Kind::ALL {
                let names = [Name::first(first), Name::first(first).next(second)];
                test(
                    &|text| {
                        text.replace("ONE", &names[0].to_string())
                            .replace("TWO", &names[1].to_string())
                    },
                    names,
                );
            }
        }
    }

    #[test]
    fn a_crash_at_any_step_leaves_the_old_or_the_new_database_and_no_orphan() {
        everywhere(|text, [one, two]| {
            // What is there when it crashes, what is live afterwards.
            let cases: [(&[&str], &str, Found); 7] = [
                (&["ONE.new"], "", Found::Nothing),
                (&["ONE.new"], "ONE\n", Found::Database(one)),
                (&["ONE", "TWO.new"], "ONE\n", Found::Database(one)),
                (
                    &["ONE", "TWO.new", "CURRENT.new"],
                    "TWO\n",
                    Found::Database(two),
                ),
                (&["ONE", "TWO"], "TWO\n", Found::Database(two)),
                (&["ONE.new", "000001.index"], "", Found::Nothing),
                (
                    &["ONE", "TWO.new", "000002.index", "000003.index.new"],
                    "ONE\n",
                    Found::Database(one),
                ),
            ];
            for (files, current, expected) in cases {
                let dir = tempfile::tempdir().unwrap();
                for file in files {
                    make(dir.path(), &text(file));
                }
                if !current.is_empty() {
                    fs::write(dir.path().join(CURRENT), text(current)).unwrap();
                }
                let found = recover(dir.path()).unwrap();
                assert_eq!(found, expected, "{files:?}");
                let left: Vec<String> = match found {
                    Found::Nothing => Vec::new(),
                    Found::Database(name) => vec![name.to_string(), CURRENT.to_owned()],
                };
                assert_eq!(listed(dir.path()), left, "{files:?}");
            }
        });
    }

    #[test]
    fn publishing_replaces_and_the_next_open_finds_it() {
        everywhere(|_, names| {
            let dir = tempfile::tempdir().unwrap();
            for name in names {
                make(dir.path(), &name.unpublished());
                publish(dir.path(), name).unwrap();
                assert_eq!(recover(dir.path()).unwrap(), Found::Database(name));
            }
            assert_eq!(
                listed(dir.path()),
                [names[1].to_string(), CURRENT.to_owned()]
            );
        });
    }

    #[test]
    fn what_is_not_ours_to_decide_is_refused() {
        everywhere(|text, _| {
            for (files, current) in [
                (&["ONE"][..], ""),
                (&[][..], "ONE"),
                (&["ONE"][..], "TWO"),
                (&["ONE"][..], "../elsewhere"),
                (&["ONE"][..], "../ONE"),
                (&["ONE"][..], "000001.fjall"),
            ] {
                let dir = tempfile::tempdir().unwrap();
                for file in files {
                    make(dir.path(), &text(file));
                }
                if !current.is_empty() {
                    fs::write(dir.path().join(CURRENT), text(current)).unwrap();
                }
                let error = recover(dir.path()).unwrap_err();
                assert!(matches!(error, StorageError::Refused { .. }), "{error}");
                assert!(
                    files
                        .iter()
                        .all(|file| dir.path().join(text(file)).exists())
                );
            }
        });
    }

    #[test]
    fn an_indexs_name_is_its_databases() {
        let name = |database: &str| index_path(Path::new(database)).display().to_string();
        assert_eq!(name("db/000002.redb"), "db/000002.index");
        assert_eq!(name("db/000002.sled.new"), "db/000002.index.new");
    }
}
