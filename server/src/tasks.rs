//! The tasks of a member, so that its end can wait for theirs; and work that waits for the disk.

use std::io;
use std::time::Duration;

use ballast_storage::background::{self, Priority};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Tasks that are told to end together, and waited for.
#[derive(Debug)]
pub struct Group {
    pub stop: CancellationToken,
    pub tasks: Tasks,
    all: All,
}

impl Default for Group {
    fn default() -> Self {
        let (tasks, all) = tasks();
        Self {
            stop: CancellationToken::new(),
            tasks,
            all,
        }
    }
}

impl Group {
    /// Tells all to end; false when some had not after `patience`.
    pub async fn end(mut self, patience: Duration) -> bool {
        self.stop.cancel();
        drop(self.tasks);
        let ended = tokio::time::timeout(patience, self.all.ended()).await;
        ended.is_ok()
    }
}

/// Spawns tasks that [`All::ended`] waits for. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tasks {
    /// Held by each task until it ends.
    open: mpsc::Sender<()>,
}

/// Knows when all tasks have ended.
#[derive(Debug)]
struct All(mpsc::Receiver<()>);

fn tasks() -> (Tasks, All) {
    let (open, all) = mpsc::channel(1);
    (Tasks { open }, All(all))
}

impl Tasks {
    pub fn spawn<F>(&self, task: F)
    where
        F: Future + Send + 'static,
        F::Output: Send,
    {
        let open = self.open.clone();
        tokio::spawn(async move {
            task.await;
            drop(open);
        });
    }
}

impl All {
    /// Resolves once every task has ended and every [`Tasks`] is gone.
    async fn ended(&mut self) {
        while self.0.recv().await.is_some() {}
    }
}

/// A thread for work in pieces that must not be noticed: it leaves the cores to those that somebody waits for. It ends with this. In a simulation
/// there is none, as for [`blocking`].
#[derive(Debug)]
pub struct Aside(Option<std::sync::mpsc::Sender<Piece>>);

type Piece = Box<dyn FnOnce() + Send>;

impl Aside {
    pub fn new(name: &str) -> io::Result<Self> {
        if is_simulated() {
            return Ok(Self(None));
        }
        let (pieces, all) = std::sync::mpsc::channel::<Piece>();
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                background::become_nicer(Priority::Low);
                for piece in all {
                    piece();
                }
            })?;
        Ok(Self(Some(pieces)))
    }

    /// One piece, and what comes of it.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let Some(pieces) = &self.0 else {
            return Ok(work());
        };
        let (answer, answered) = tokio::sync::oneshot::channel();
        let piece = move || {
            // Nobody may want it any more.
            let _ = answer.send(work());
        };
        let ended = || io::Error::other("the thread has ended");
        pieces.send(Box::new(piece)).map_err(|_| ended())?;
        answered.await.map_err(|_| ended())
    }
}

fn is_simulated() -> bool {
    Handle::current().runtime_flavor() == RuntimeFlavor::CurrentThread
}

/// Runs what waits for the disk where it holds nobody up. A runtime of one thread is a simulation's: there it is done at once, since a thread beside
/// it would make each run another one.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    if is_simulated() {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)
}
