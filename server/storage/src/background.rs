//! Work that no client waits for, on a thread that leaves the cores to those that one waits for.
//!
//! Promises: the thread's priority is lower by a fixed step than its maker's, whatever that is, and only that thread's. It may hold locks
//! that others of its kind or the committer wait for. A lock that requests wait for must not be taken here: it would be held for as long as
//! others have the cores.

use std::panic::resume_unwind;
use std::thread;

use parking_lot::Mutex;

/// How much of a core is left to the work when others want it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// About a fifth of a thread's share: a member waits for it.
    Low,
    /// About a tenth.
    Lowest,
}

impl Priority {
    /// Steps of nice.
    const fn nicer_by(self) -> i32 {
        match self {
            Priority::Low => 6,
            Priority::Lowest => 10,
        }
    }
}

/// Makes the calling thread such a one, for as long as it lives.
pub fn become_nicer(priority: Priority) {
    // Of the calling thread alone, on Linux. Without it the work is only more noticed.
    rustix::process::nice(priority.nicer_by()).ok();
}

/// Runs `work` there and waits for it. When there is no thread to be had, it is done here.
pub(crate) fn run<T: Send>(name: &str, priority: Priority, work: impl FnOnce() -> T + Send) -> T {
    let work = Mutex::new(Some(work));
    let take = || work.lock().take().expect("one of two places takes it");
    thread::scope(|scope| {
        let named = thread::Builder::new().name(name.to_owned());
        let spawned = named.spawn_scoped(scope, || {
            become_nicer(priority);
            take()()
        });
        match spawned {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => take()(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::getpriority_process;

    #[test]
    fn the_priority_nicer_and_nobody_else_is() {
        let before = getpriority_process(None).unwrap();
        for (priority, by) in [(Priority::Lowest, 10), (Priority::Low, 6)] {
            let during = run("background", priority, || {
                getpriority_process(None).unwrap()
            });
            assert_eq!(during, (before + by).min(19));
            assert_eq!(getpriority_process(None).unwrap(), before);
        }
    }

    #[test]
    #[should_panic(expected = "as it was")]
    fn a_panic_is_handed_on() {
        run("background", Priority::Lowest, || panic!("as it was"));
    }
}
