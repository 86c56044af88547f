//! The whole file system in memory: names and files, live and on the disk.
//!
//! Promises: after [`Tree::cut`] there is exactly what a disk could have kept: every synced byte, every name whose change was made
//! durable, and of everything else a random part. Changes of names reach the disk in their order.
//! Not here: the kernel's side (`mount.rs`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::io::Errno;

use super::content::{File, Losses, Mood};

pub(super) type Ino = u64;

pub(super) const ROOT: Ino = 1;

/// When a name that was made, renamed or removed is on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Names {
    /// At the next sync of anything, as ext4's journal does it.
    #[default]
    Journal,
    /// Only at a sync of its directory: all that POSIX promises.
    Strict,
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    /// None for a directory.
    pub(super) file: Option<File>,
    pub(super) mode: u32,
    pub(super) owner: (u32, u32),
    opens: u32,
}

type Directories = HashMap<Ino, BTreeMap<OsString, Ino>>;

/// Part of a change of names.
#[derive(Clone, Debug)]
struct Edit {
    dir: Ino,
    name: OsString,
    to: Option<Ino>,
}

#[derive(Debug)]
pub(super) struct Tree {
    names: Names,
    nodes: HashMap<Ino, Node>,
    live: Directories,
    durable: Directories,
    /// Changes of names that are not durable; the edits of one are there together or not at all.
    pending: Vec<Vec<Edit>>,
    next: Ino,
    /// Bytes of blocks there are.
    pub(super) capacity: u64,
}

/// What it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Held {
    pub files: u64,
    pub used_bytes: u64,
    pub dirty_sectors: u64,
    pub pending_names: u64,
}

impl Tree {
    pub(super) fn new(names: Names) -> Self {
        let root = Node {
            file: None,
            mode: 0o755,
            owner: (0, 0),
            opens: 0,
        };
        Self {
            names,
            nodes: HashMap::from([(ROOT, root)]),
            live: HashMap::from([(ROOT, BTreeMap::new())]),
            durable: HashMap::new(),
            pending: Vec::new(),
            next: ROOT + 1,
            capacity: u64::MAX,
        }
    }

    pub(super) fn node(&self, ino: Ino) -> Result<&Node, Errno> {
        self.nodes.get(&ino).ok_or(Errno::NOENT)
    }

    pub(super) fn node_mut(&mut self, ino: Ino) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(&ino).ok_or(Errno::NOENT)
    }

    pub(super) fn file(&self, ino: Ino) -> Result<&File, Errno> {
        self.node(ino)?.file.as_ref().ok_or(Errno::ISDIR)
    }

    fn file_mut(&mut self, ino: Ino) -> Result<&mut File, Errno> {
        self.node_mut(ino)?.file.as_mut().ok_or(Errno::ISDIR)
    }

    pub(super) fn entries(&self, dir: Ino) -> Result<&BTreeMap<OsString, Ino>, Errno> {
        self.live.get(&dir).ok_or(Errno::NOTDIR)
    }

    pub(super) fn lookup(&self, dir: Ino, name: &OsStr) -> Result<Ino, Errno> {
        self.entries(dir)?.get(name).copied().ok_or(Errno::NOENT)
    }

    /// By its path below the root.
    pub(super) fn find(&self, path: &str) -> Result<Ino, Errno> {
        path.split('/')
            .filter(|part| !part.is_empty())
            .try_fold(ROOT, |dir, name| self.lookup(dir, OsStr::new(name)))
    }

    /// Its name, without the folders above it.
    pub(super) fn name_of(&self, ino: Ino) -> Option<&str> {
        let mut all = self.live.values().flatten();
        all.find_map(|(name, &to)| (to == ino).then(|| name.to_str())?)
    }

    pub(super) fn make(
        &mut self,
        dir: Ino,
        name: &OsStr,
        mode: u32,
        owner: (u32, u32),
        directory: bool,
    ) -> Result<Ino, Errno> {
        if self.entries(dir)?.contains_key(name) {
            return Err(Errno::EXIST);
        }
        let ino = self.next;
        self.next += 1;
        let file = (!directory).then(File::default);
        let node = Node {
            file,
            mode: mode & 0o7777,
            owner,
            opens: 0,
        };
        self.nodes.insert(ino, node);
        if directory {
            self.live.insert(ino, BTreeMap::new());
        }
        self.change(vec![edit(dir, name, Some(ino))]);
        Ok(ino)
    }

    pub(super) fn remove(&mut self, dir: Ino, name: &OsStr, directory: bool) -> Result<(), Errno> {
        let ino = self.lookup(dir, name)?;
        self.check_removable(ino, directory)?;
        self.change(vec![edit(dir, name, None)]);
        Ok(())
    }

    fn check_removable(&self, ino: Ino, directory: bool) -> Result<(), Errno> {
        match (self.live.get(&ino), directory) {
            (None, true) => Err(Errno::NOTDIR),
            (Some(_), false) => Err(Errno::ISDIR),
            (Some(entries), true) if !entries.is_empty() => Err(Errno::NOTEMPTY),
            _ => Ok(()),
        }
    }

    pub(super) fn rename(
        &mut self,
        from: (Ino, &OsStr),
        to: (Ino, &OsStr),
        replace: bool,
    ) -> Result<(), Errno> {
        let ino = self.lookup(from.0, from.1)?;
        if let Ok(there) = self.lookup(to.0, to.1) {
            if !replace {
                return Err(Errno::EXIST);
            }
            if there == ino {
                return Ok(());
            }
            self.check_removable(there, self.live.contains_key(&ino))?;
        }
        self.change(vec![
            edit(from.0, from.1, None),
            edit(to.0, to.1, Some(ino)),
        ]);
        Ok(())
    }

    fn change(&mut self, edits: Vec<Edit>) {
        apply(&mut self.live, &edits);
        self.pending.push(edits);
        self.sweep();
    }

    pub(super) fn opened(&mut self, ino: Ino) -> Result<(), Errno> {
        self.node_mut(ino)?.opens += 1;
        Ok(())
    }

    pub(super) fn closed(&mut self, ino: Ino) {
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.opens = node.opens.saturating_sub(1);
            if node.opens == 0 {
                self.sweep();
            }
        }
    }

    pub(super) fn write(&mut self, ino: Ino, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let needs = self.file(ino)?.needs(offset, data.len());
        self.check_space(needs)?;
        self.file_mut(ino)?.write(offset, data);
        Ok(())
    }

    pub(super) fn set_len(&mut self, ino: Ino, len: u64) -> Result<(), Errno> {
        self.file_mut(ino)?.set_len(len);
        Ok(())
    }

    pub(super) fn reserve(&mut self, ino: Ino, end: u64, keep_len: bool) -> Result<(), Errno> {
        let needs = self.file(ino)?.reserve_needs(end);
        self.check_space(needs)?;
        self.file_mut(ino)?.reserve(end, keep_len);
        Ok(())
    }

    fn check_space(&self, needs: u64) -> Result<(), Errno> {
        if needs > 0 && self.used() + needs > self.capacity {
            return Err(Errno::NOSPC);
        }
        Ok(())
    }

    /// Bytes of blocks taken by what has a name or is open.
    pub(super) fn used(&self) -> u64 {
        let named: BTreeSet<Ino> = self
            .live
            .values()
            .flat_map(BTreeMap::values)
            .copied()
            .collect();
        self.nodes
            .iter()
            .filter(|(ino, node)| node.opens > 0 || named.contains(ino))
            .filter_map(|(_, node)| node.file.as_ref())
            .map(|file| file.live.allocated())
            .sum()
    }

    pub(super) fn held(&self) -> Held {
        let files = self.nodes.values().filter_map(|node| node.file.as_ref());
        Held {
            files: files.clone().count() as u64,
            used_bytes: self.used(),
            dirty_sectors: files.map(File::dirty_sectors).sum(),
            pending_names: self.pending.len() as u64,
        }
    }

    pub(super) fn sync(&mut self, ino: Ino) -> Result<(), Errno> {
        self.file_mut(ino)?.sync();
        if self.names == Names::Journal {
            self.commit_names();
        }
        Ok(())
    }

    pub(super) fn forget(&mut self, ino: Ino) -> Result<(), Errno> {
        self.file_mut(ino)?.forget();
        Ok(())
    }

    pub(super) fn sync_dir(&mut self, dir: Ino) {
        match self.names {
            Names::Journal => self.commit_names(),
            Names::Strict => {
                for edits in &mut self.pending {
                    let (now, later): (Vec<Edit>, Vec<Edit>) =
                        edits.drain(..).partition(|edit| edit.dir == dir);
                    apply(&mut self.durable, &now);
                    *edits = later;
                }
                self.pending.retain(|edits| !edits.is_empty());
            }
        }
    }

    fn commit_names(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        for edits in std::mem::take(&mut self.pending) {
            apply(&mut self.durable, &edits);
        }
        self.sweep();
    }

    /// Lets go of what no name, live or durable, and no program knows any more.
    fn sweep(&mut self) {
        let mut known: BTreeSet<Ino> = BTreeSet::from([ROOT]);
        for directories in [&self.live, &self.durable] {
            known.extend(directories.values().flat_map(BTreeMap::values));
        }
        known.extend(self.pending.iter().flatten().filter_map(|edit| edit.to));
        self.nodes
            .retain(|ino, node| node.opens > 0 || known.contains(ino));
        self.live.retain(|ino, _| known.contains(ino));
        self.durable.retain(|ino, _| known.contains(ino));
    }

    pub(super) fn flip(&mut self, path: &str, offset: u64, bit: u8) -> Result<Ino, Errno> {
        let ino = self.find(path)?;
        let file = self.file_mut(ino)?;
        if offset >= file.live.len {
            return Err(Errno::INVAL);
        }
        file.flip(offset, bit);
        Ok(ino)
    }

    /// The power goes and comes back. Every file gets a new number, so that nothing the kernel has cached is taken for it.
    pub(super) fn cut(&mut self, seed: u64) -> Losses {
        let random = &mut StdRng::seed_from_u64(seed);
        // Some cuts lose everything, some nothing, most something.
        let mood = match random.random_range(0..8) {
            0 => Mood {
                keep: 0.0,
                tear: 0.0,
            },
            1 => Mood {
                keep: 1.0,
                tear: 0.0,
            },
            _ => Mood {
                keep: random.random_range(0.0..1.0),
                tear: [0.0, 0.05, 0.3][random.random_range(0..3)],
            },
        };
        let mut losses = Losses::default();
        if self.names == Names::Journal {
            let kept = random.random_range(0..=self.pending.len());
            losses.names_kept = kept as u64;
            for edits in self.pending.drain(..kept) {
                apply(&mut self.durable, &edits);
            }
        }
        losses.names_dropped = self.pending.len() as u64;
        self.pending.clear();

        let mut nodes = HashMap::new();
        let mut directories = Directories::new();
        let mut todo = vec![(ROOT, ROOT)];
        while let Some((old, new)) = todo.pop() {
            let Some(mut node) = self.nodes.remove(&old) else {
                continue;
            };
            node.opens = 0;
            if let Some(file) = &mut node.file {
                file.cut(mood, random, &mut losses);
            } else {
                let entries = directories.entry(new).or_default();
                for (name, old) in self.durable.remove(&old).unwrap_or_default() {
                    entries.insert(name, self.next);
                    todo.push((old, self.next));
                    self.next += 1;
                }
            }
            nodes.insert(new, node);
        }
        self.nodes = nodes;
        self.durable = directories.clone();
        self.live = directories;
        losses
    }
}

fn edit(dir: Ino, name: &OsStr, to: Option<Ino>) -> Edit {
    Edit {
        dir,
        name: name.to_owned(),
        to,
    }
}

fn apply(directories: &mut Directories, edits: &[Edit]) {
    for Edit { dir, name, to } in edits {
        let entries = directories.entry(*dir).or_default();
        match to {
            Some(ino) => entries.insert(name.clone(), *ino),
            None => entries.remove(name),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(tree: &mut Tree, name: &str) -> Ino {
        tree.make(ROOT, OsStr::new(name), 0o600, (0, 0), false)
            .expect("it can be made")
    }

    fn names(tree: &Tree) -> Vec<&str> {
        let entries = tree.entries(ROOT).expect("the root is a directory");
        entries.keys().filter_map(|name| name.to_str()).collect()
    }

    /// A seed whose cut does this to the names.
    fn cut(mut tree: Tree, kept: u64) -> Tree {
        for seed in 0.. {
            let mut copy = Tree {
                nodes: tree.nodes.clone(),
                live: tree.live.clone(),
                durable: tree.durable.clone(),
                pending: tree.pending.clone(),
                ..tree
            };
            if copy.cut(seed).names_kept == kept {
                tree = copy;
                break;
            }
        }
        tree
    }

    #[test]
    fn a_name_without_a_sync_may_be_gone_and_one_with_is_there() {
        let mut tree = Tree::new(Names::Journal);
        let first = make(&mut tree, "first");
        tree.sync(first).expect("a file");
        make(&mut tree, "second");
        make(&mut tree, "third");
        assert_eq!(names(&cut(tree, 1)), ["first", "second"]);
    }

    #[test]
    fn strict_names_wait_for_their_directory() {
        for sync in [false, true] {
            let mut tree = Tree::new(Names::Strict);
            let first = make(&mut tree, "first");
            tree.sync(first).expect("a file");
            if sync {
                tree.sync_dir(ROOT);
            }
            tree.cut(1);
            assert_eq!(names(&tree), if sync { &["first"][..] } else { &[] });
        }
    }

    #[test]
    fn a_rename_is_whole_or_not_at_all() {
        for kept in [0, 1] {
            let mut tree = Tree::new(Names::Journal);
            for (name, bytes) in [("old", b"1"), ("new", b"2")] {
                let ino = make(&mut tree, name);
                tree.write(ino, 0, bytes).expect("there is space");
                tree.sync(ino).expect("a file");
            }
            let (from, to) = (OsStr::new("new"), OsStr::new("old"));
            tree.rename((ROOT, from), (ROOT, to), true)
                .expect("both are files");
            let tree = cut(tree, kept);
            let expected: &[&str] = if kept == 0 { &["new", "old"] } else { &["old"] };
            assert_eq!(names(&tree), expected);
            let old = tree.find("old").expect("it is there");
            let bytes = tree.file(old).expect("a file").live.read(0, 1);
            assert_eq!(bytes, if kept == 0 { b"1" } else { b"2" });
        }
    }

    #[test]
    fn a_full_disk_refuses_and_takes_again_what_was_freed() {
        let mut tree = Tree::new(Names::Journal);
        tree.capacity = 8_192;
        let ino = make(&mut tree, "first");
        tree.write(ino, 0, &[1; 8_192]).expect("there is space");
        assert_eq!(tree.write(ino, 8_192, &[1]), Err(Errno::NOSPC));
        tree.write(ino, 0, &[2; 8_192])
            .expect("the blocks are there");
        tree.remove(ROOT, OsStr::new("first"), false)
            .expect("a file");
        let ino = make(&mut tree, "second");
        tree.reserve(ino, 8_192, false)
            .expect("there is space again");
        assert_eq!(tree.reserve(ino, 8_193, false), Err(Errno::NOSPC));
    }
}
