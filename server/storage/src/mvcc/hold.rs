//! Keeps records in place: while somebody holds, no step of a physical compaction runs.
//!
//!     hold() ... drop(Hold)     HashKV, a snapshot: any number at a time, a snapshot for as long as its reader takes
//!     step() ... drop(Step)     compaction: waits for the last holder, and holders wait for its step
//!
//! Promises: a waiting compaction keeps no new holder out. (A lock that is fair to writers would let one slow snapshot
//! hold up every HashKV behind the compaction that waits for it.)

use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// The count of holders.
#[derive(Debug, Default)]
pub(super) struct Holds {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    holders: usize,
    stopped: bool,
}

/// Records stay until this is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    holds: Arc<Holds>,
}

/// One step of a compaction; nobody holds.
pub(super) struct Step<'a> {
    _state: MutexGuard<'a, State>,
}

impl Holds {
    /// Waits for a step under way, which is short.
    pub(super) fn hold(self: &Arc<Self>) -> Hold {
        self.state.lock().holders += 1;
        Hold {
            holds: Arc::clone(self),
        }
    }

    pub(super) fn is_held(&self) -> bool {
        self.state.lock().holders > 0
    }

    /// Waits until nobody holds. None when the store stops.
    pub(super) fn step(&self) -> Option<Step<'_>> {
        let mut state = self.state.lock();
        while state.holders > 0 && !state.stopped {
            self.changed.wait(&mut state);
        }
        (!state.stopped).then_some(Step { _state: state })
    }

    /// Ends every wait for a step.
    pub(super) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut state = self.holds.state.lock();
        state.holders -= 1;
        if state.holders == 0 {
            self.holds.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_step_lets_new_holders_in_and_starts_after_the_last() {
        let holds = Arc::new(Holds::default());
        let first = holds.hold();
        let stepped = std::thread::spawn({
            let holds = Arc::clone(&holds);
            move || holds.step().is_some()
        });
        // Whether or not the thread waits already, a second holder is let in.
        let second = holds.hold();
        drop(first);
        assert!(!stepped.is_finished());
        drop(second);
        assert!(stepped.join().unwrap());
    }

    #[test]
    fn a_stop_ends_the_wait() {
        let holds = Arc::new(Holds::default());
        let _hold = holds.hold();
        let stepped = std::thread::spawn({
            let holds = Arc::clone(&holds);
            move || holds.step().is_some()
        });
        holds.stop();
        assert!(!stepped.join().unwrap());
    }
}
