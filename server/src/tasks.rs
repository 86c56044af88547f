//! The tasks of a member, so that its end can wait for theirs.

use tokio::sync::mpsc;

/// Spawns tasks that [`All::ended`] waits for. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tasks {
    /// Held by each task until it ends.
    open: mpsc::Sender<()>,
}

/// Knows when all tasks have ended.
#[derive(Debug)]
pub struct All(mpsc::Receiver<()>);

pub fn tasks() -> (Tasks, All) {
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
    pub async fn ended(&mut self) {
        while self.0.recv().await.is_some() {}
    }
}
