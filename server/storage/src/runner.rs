//! Who takes the steps of what waits for the disk: the log's writer and the committer.
//!
//! A server gives each of them a thread. A simulation takes their steps itself, on its one thread and at moments that come from its seed: with
//! threads of the operating system beside it no run would be like another.
//!
//! Not here: what a step does (`wal/writer.rs`, `committer.rs`); the compaction's thread, which a simulation gives nothing to do.

use std::fmt::Debug;
use std::io;
use std::thread::JoinHandle;

/// A loop of steps.
pub trait Worker: Send {
    /// Does what there is to do. False when there never will be anything any more.
    fn step(&mut self, wait: Wait) -> bool;

    /// Takes all steps, up to the end.
    fn run(&mut self) {
        while self.step(Wait::ForWork) {}
    }
}

/// Whether a step waits until there is something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    ForWork,
    /// Then also what is put off until things are quiet is done at once.
    No,
}

/// Starts workers.
pub trait Runner: Debug + Send + Sync {
    /// Takes the steps of `worker` from now on. Gives the thread to wait for at the end, if there is one.
    fn start(&self, name: &str, worker: Box<dyn Worker>) -> io::Result<Option<JoinHandle<()>>>;
}

/// A thread for each.
#[derive(Clone, Copy, Debug, Default)]
pub struct Threads;

impl Runner for Threads {
    fn start(&self, name: &str, mut worker: Box<dyn Worker>) -> io::Result<Option<JoinHandle<()>>> {
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(move || worker.run()).map(Some)
    }
}
