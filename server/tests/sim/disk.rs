//! A member's disk: takes the steps of the log's writer and of the committer, each at moments that come from the seed.
//!
//! What waits between two steps is in memory only and goes with a crash: nobody may have been told that it is safe.

use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ballast_storage::runner::{Runner, Wait, Worker};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::Instant;

/// Milliseconds between two groups of the log, and between two batches of the committer.
const LOG: RangeInclusive<u64> = 2..=10;
const COMMITTER: RangeInclusive<u64> = 5..=80;
/// Now and then it takes longer, and on a slow disk always.
const HICCUP: f64 = 0.01;
const SLOWER: u64 = 30;
/// Within this a worker that was started takes its first step.
const START: Duration = Duration::from_millis(20);

pub(crate) struct Disk {
    workers: Mutex<Vec<Turns>>,
    rng: Mutex<StdRng>,
    is_slow: Arc<AtomicBool>,
}

struct Turns {
    worker: Box<dyn Worker>,
    every_millis: RangeInclusive<u64>,
    next: Instant,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk").finish_non_exhaustive()
    }
}

impl Runner for Disk {
    fn start(&self, name: &str, worker: Box<dyn Worker>) -> io::Result<Option<JoinHandle<()>>> {
        let every_millis = match name {
            "wal" => LOG,
            _ => COMMITTER,
        };
        self.workers.lock().push(Turns {
            worker,
            every_millis,
            next: Instant::now(),
        });
        Ok(None)
    }
}

impl Disk {
    pub(crate) fn new(seed: u64, is_slow: Arc<AtomicBool>) -> Arc<Self> {
        Arc::new(Self {
            workers: Mutex::default(),
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
            is_slow,
        })
    }

    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            let now = Instant::now();
            let mut next = now + START;
            self.workers.lock().retain_mut(|turns| {
                let goes_on = now < turns.next || turns.worker.step(Wait::No);
                if now >= turns.next {
                    turns.next = now + self.pause(turns.every_millis.clone());
                }
                next = next.min(turns.next);
                goes_on
            });
            tokio::time::sleep_until(next).await;
        }
    }

    fn pause(&self, every_millis: RangeInclusive<u64>) -> Duration {
        let mut rng = self.rng.lock();
        let millis = rng.random_range(every_millis);
        let is_slow = self.is_slow.load(Ordering::Relaxed) || rng.random_bool(HICCUP);
        Duration::from_millis(if is_slow { millis * SLOWER } else { millis })
    }
}
