//! A file system that forgets what was not synced, and has other faults of a disk when told to.
//!
//!     program --FUSE--> live image --fsync--> durable image          cut: live := durable and a random part of the rest
//!
//! It is a process of its own (`ballast-e2e lossy`), told over a socket, one line a command, one line an answer:
//!
//! | command | |
//! |---|---|
//! | `off` | every request fails: the power is about to go |
//! | `cut SEED` | unsynced sectors are dropped, kept or torn at random, names that were not durable too |
//! | `remount` | requests are answered again |
//! | `stats` | counters and what is held, as JSON |
//! | `fail-sync NAME [TIMES]` | a sync of a file whose name contains NAME fails, and what it should have written is never written |
//! | `slow-sync MS` | each sync takes so much longer |
//! | `full BYTES` | so many bytes of blocks in all; `full max` for no limit |
//! | `flip FILE OFFSET [BIT]` | a bit turns over |
//!
//! The order of a power cut: `off`, kill the program, `cut`, `remount`, start it again.
//! Promises: what a sync that was answered covers is there after every cut. When the process that started it goes away, it unmounts.

mod content;
mod mount;
mod tree;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use serde::{Deserialize, Serialize};

pub use content::Losses;
pub use tree::{Held, Names};

use crate::{paths, wait};
use mount::Device;
use tree::{Ino, Tree};

const SOURCE: &str = "ballast-lossy";
const START_DEADLINE: Duration = Duration::from_secs(20);

/// `ballast-e2e lossy`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// An empty folder.
    #[arg(long)]
    mount: PathBuf,
    /// The control socket to make.
    #[arg(long)]
    socket: PathBuf,
    #[arg(long, value_enum, default_value_t)]
    names: Names,
}

/// What happened so far, as `stats` tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    pub writes: u64,
    pub syncs: u64,
    pub failed_syncs: u64,
    pub cuts: u64,
    pub files: u64,
    pub used_bytes: u64,
    pub dirty_sectors: u64,
    pub pending_names: u64,
}

/// The faults in force.
#[derive(Debug, Default)]
struct Faults {
    off: bool,
    /// Part of a name, and how often.
    fail_sync: Option<(String, u64)>,
    slow_sync: Duration,
}

#[derive(Debug)]
struct State {
    tree: Mutex<Tree>,
    faults: Mutex<Faults>,
    writes: AtomicU64,
    syncs: AtomicU64,
    failed_syncs: AtomicU64,
    cuts: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in one request is told on standard error and fails that one.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn new(names: Names) -> Self {
        Self {
            tree: Mutex::new(Tree::new(names)),
            faults: Mutex::default(),
            writes: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
            failed_syncs: AtomicU64::new(0),
            cuts: AtomicU64::new(0),
        }
    }

    fn on<T>(&self, work: impl FnOnce(&mut Tree) -> Result<T, Errno>) -> Result<T, Errno> {
        // The tree first: what is under way when the power goes is done before it.
        let mut tree = lock(&self.tree);
        if lock(&self.faults).off {
            return Err(Errno::IO);
        }
        work(&mut tree)
    }

    fn slow_sync(&self) -> Duration {
        lock(&self.faults).slow_sync
    }

    fn count_write(&self) {
        self.writes.fetch_add(1, Ordering::Relaxed);
    }

    fn closed(&self, ino: Ino) {
        lock(&self.tree).closed(ino);
    }

    fn sync(&self, ino: Ino) -> Result<(), Errno> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        self.on(|tree| {
            if self.fails(tree, ino) {
                self.failed_syncs.fetch_add(1, Ordering::Relaxed);
                tree.forget(ino)?;
                return Err(Errno::IO);
            }
            tree.sync(ino)
        })
    }

    fn fails(&self, tree: &Tree, ino: Ino) -> bool {
        let mut faults = lock(&self.faults);
        let Some((part, times)) = &mut faults.fail_sync else {
            return false;
        };
        let named = tree.name_of(ino).is_some_and(|name| name.contains(&**part));
        if !named || *times == 0 {
            return false;
        }
        *times -= 1;
        true
    }

    fn sync_dir(&self, ino: Ino) -> Result<(), Errno> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        self.on(|tree| {
            tree.sync_dir(ino);
            Ok(())
        })
    }

    fn stats(&self) -> Stats {
        let Held {
            files,
            used_bytes,
            dirty_sectors,
            pending_names,
        } = lock(&self.tree).held();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            writes: get(&self.writes),
            syncs: get(&self.syncs),
            failed_syncs: get(&self.failed_syncs),
            cuts: get(&self.cuts),
            files,
            used_bytes,
            dirty_sectors,
            pending_names,
        }
    }

    /// Obeys one line.
    fn obey(&self, line: &str, device: &Device) -> Result<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["off"] => {
                // Taken with the tree, so that no request is half way when this is answered.
                let _tree = lock(&self.tree);
                lock(&self.faults).off = true;
            }
            ["remount"] => lock(&self.faults).off = false,
            ["cut", seed] => {
                let seed = seed.parse().context("the seed is a number")?;
                ensure!(lock(&self.faults).off, "first `off`");
                self.cuts.fetch_add(1, Ordering::Relaxed);
                return Ok(serde_json::to_string(&lock(&self.tree).cut(seed))?);
            }
            ["stats"] => return Ok(serde_json::to_string(&self.stats())?),
            ["fail-sync", part] => {
                lock(&self.faults).fail_sync = Some((part.to_owned(), u64::MAX));
            }
            ["fail-sync", part, times] => {
                let times = times.parse().context("the times are a number")?;
                lock(&self.faults).fail_sync = Some((part.to_owned(), times));
            }
            ["slow-sync", ms] => {
                let ms = ms.parse().context("milliseconds are a number")?;
                lock(&self.faults).slow_sync = Duration::from_millis(ms);
            }
            ["full", "max"] => lock(&self.tree).capacity = u64::MAX,
            ["full", bytes] => {
                lock(&self.tree).capacity = bytes.parse().context("bytes are a number")?;
            }
            ["flip", file, offset] => self.flip(file, offset, "0", device)?,
            ["flip", file, offset, bit] => self.flip(file, offset, bit, device)?,
            _ => bail!("unknown command: {line}"),
        }
        Ok(String::new())
    }

    fn flip(&self, file: &str, offset: &str, bit: &str, device: &Device) -> Result<()> {
        let offset = offset.parse().context("the offset is a number")?;
        let bit = bit.parse().context("the bit is a number")?;
        let ino = lock(&self.tree)
            .flip(file, offset, bit)
            .with_context(|| format!("no byte {offset} in {file}"))?;
        // Not under the lock: the kernel may be waiting for us with the page locked.
        device.invalidate(ino);
        Ok(())
    }
}

/// Serves until the standard input ends, then unmounts.
pub fn run(args: &Args) -> Result<()> {
    let state = Arc::new(State::new(args.names));
    let device = Arc::new(Device::mount(&args.mount)?);
    let served = (Arc::clone(&device), Arc::clone(&state));
    std::thread::spawn(move || served.0.serve(&served.1));
    let listener = UnixListener::bind(&args.socket)
        .with_context(|| format!("listen on {}", args.socket.display()))?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (state, device) = (Arc::clone(&state), Arc::clone(&device));
            std::thread::spawn(move || converse(&state, &stream, &device));
        }
    });
    std::io::stdin().read_to_end(&mut Vec::new())?;
    // Lazily: a program that still has files open gets errors from now on.
    unmount(&args.mount, UnmountFlags::DETACH)?;
    Ok(())
}

fn converse(state: &State, stream: &UnixStream, device: &Device) {
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let answer = match state.obey(&line, device) {
            Ok(answer) => format!("ok {answer}\n"),
            Err(error) => format!("error {error:#}\n"),
        };
        if (&*stream).write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// A mounted one, and the process that serves it.
#[derive(Debug)]
pub struct Lossy {
    child: Child,
    folder: tempfile::TempDir,
}

impl Lossy {
    pub fn start(names: Names) -> Result<Self> {
        sweep();
        let folder = tempfile::Builder::new()
            .prefix("ballast-lossy-")
            .tempdir()?;
        let names = match names {
            Names::Journal => "journal",
            Names::Strict => "strict",
        };
        let (mount, socket) = (folder.path().join("disk"), folder.path().join("socket"));
        std::fs::create_dir(&mount)?;
        let child = Command::new(paths::harness_binary()?)
            .arg("lossy")
            .arg("--mount")
            .arg(&mount)
            .arg("--socket")
            .arg(&socket)
            .args(["--names", names])
            // It ends when this pipe does, whatever becomes of us; a kill of our group must not reach it.
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let mut lossy = Self { child, folder };
        wait::wait_for_blocking("the lossy file system", START_DEADLINE, || {
            if let Some(status) = lossy.child.try_wait()? {
                bail!("it ended with {status}");
            }
            Ok(lossy.ask("stats").ok())
        })?;
        Ok(lossy)
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    /// One command and its answer.
    pub fn ask(&self, command: &str) -> Result<String> {
        let mut stream = UnixStream::connect(self.folder.path().join("socket"))?;
        stream.write_all(format!("{command}\n").as_bytes())?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        match line
            .trim_end()
            .split_once(' ')
            .unwrap_or((line.trim_end(), ""))
        {
            ("ok", answer) => Ok(answer.to_owned()),
            (_, error) => bail!("{command}: {error}"),
        }
    }

    pub fn stats(&self) -> Result<Stats> {
        Ok(serde_json::from_str(&self.ask("stats")?)?)
    }

    /// `cut` and `remount`, after `off`. What was lost, as JSON.
    pub fn cut(&self, seed: u64) -> Result<String> {
        let losses = self.ask(&format!("cut {seed}"))?;
        self.ask("remount")?;
        Ok(losses)
    }
}

impl Drop for Lossy {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let ended = wait::wait_for_blocking("the lossy file system ends", START_DEADLINE, || {
            Ok(self.child.try_wait()?)
        });
        if ended.is_err() {
            drop(self.child.kill());
            drop(self.child.wait());
            let _ = unmount(self.path(), UnmountFlags::DETACH);
        }
    }
}

/// Unmounts what a killed process left.
fn sweep() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for line in mounts.lines() {
        let mut words = line.split(' ');
        let (Some(source), Some(path)) = (words.next(), words.next()) else {
            continue;
        };
        // A served one answers.
        if source == SOURCE && dead(Path::new(path)) {
            let _ = unmount(path, UnmountFlags::DETACH);
        }
    }
}

fn dead(path: &Path) -> bool {
    std::fs::metadata(path)
        .is_err_and(|error| error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()))
}
