//! The tasks of a member, so that its end can wait for theirs; and work that waits for the disk.

use std::io;
use std::time::Duration;

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

/// Runs what waits for the disk where it holds nobody up. A runtime of one thread is a simulation's: there it is done at once, since a thread beside
/// it would make each run another one.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    if Handle::current().runtime_flavor() == RuntimeFlavor::CurrentThread {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)
}
