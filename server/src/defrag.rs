//! Who defragments, and when: somebody asks, the rule of `--auto-defrag` holds, the quota is near and space could be returned, or
//! the engine shall be another.
//!
//!     asked (RPC) ------+
//!     rule -------------+--> one at a time --> Store::defragment, which serves reads and writes meanwhile
//!     quota, engine ----+
//!
//! Promises: never two at once; those who ask while one runs share the next. A caller who goes away leaves it running. Each member
//! looks after itself: the size of its file is nobody else's business.
//! Not here: the rewriting, and whether the disk has room for it (`ballast_storage`).

mod rule;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ballast_storage::mvcc::{DefragReport, Pace, Sizes, Store};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::config::AutoDefrag;
use crate::metrics;
use rule::Pause;

/// How often the rule is compared with the sizes, which are at hand.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// At this share of the quota a member returns what it can, so that hardly any write has to wait for it.
const QUOTA_NEAR_PERCENT: u64 = 90;
/// What must come back for the quota's sake, as a share of it: or a member at its limit would do nothing else.
const QUOTA_GAIN_PERCENT: u64 = 5;
/// What fewer live bytes waste says nothing of more.
const TELLING_BYTES: u64 = 1 << 20;
/// Between two looks that found nothing to do, however often the quota is reported near.
const POKED_INTERVAL: Duration = Duration::from_secs(1);
/// While a compaction is still deleting, what it will leave is not known.
const COMPACTION_LOOK: Duration = Duration::from_millis(20);

/// Why one runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Asked,
    Rule,
    Quota,
    /// The database has another engine than it should.
    Engine,
}

impl Cause {
    const fn name(self) -> &'static str {
        match self {
            Cause::Asked => "asked",
            Cause::Rule => "rule",
            Cause::Quota => "quota",
            Cause::Engine => "engine",
        }
    }

    const fn pace(self) -> Pace {
        match self {
            Cause::Asked | Cause::Rule | Cause::Engine => Pace::Background,
            Cause::Quota => Pace::Urgent,
        }
    }
}

/// Why one failed. The database is as it was.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct DefragError(String);

type Outcome = Result<DefragReport, DefragError>;

/// Runs defragmentations, one at a time.
#[derive(Debug)]
pub struct Defragmenter {
    store: Arc<Store>,
    clock: Clock,
    quota_bytes: Option<u64>,
    /// Held while one runs, by the task that runs it.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// How many were begun.
    begun: AtomicU64,
    last: Mutex<Last>,
    /// The quota is near.
    poked: Notify,
}

#[derive(Clone, Debug, Default)]
struct Last {
    outcome: Option<Outcome>,
    /// Bytes of the file per thousand live ones, after the last good one: what no defragmentation returns.
    permille: Option<u64>,
}

impl Defragmenter {
    pub fn new(store: Arc<Store>, clock: Clock, quota_bytes: Option<u64>) -> Self {
        Self {
            store,
            clock,
            quota_bytes,
            turn: Arc::default(),
            begun: AtomicU64::new(0),
            last: Mutex::default(),
            poked: Notify::new(),
        }
    }

    /// Rewrites the database, or waits for a run that began after this call.
    pub async fn run(self: &Arc<Self>, cause: Cause) -> Outcome {
        let seen = self.begun.load(Ordering::Acquire);
        let turn = Arc::clone(&self.turn).lock_owned().await;
        if self.begun.load(Ordering::Acquire) > seen
            && let Some(outcome) = self.last.lock().outcome.clone()
        {
            return outcome;
        }
        self.begun.fetch_add(1, Ordering::AcqRel);
        let this = Arc::clone(self);
        let running = tokio::task::spawn_blocking(move || {
            let outcome = this.run_now(cause);
            drop(turn);
            outcome
        });
        running
            .await
            .unwrap_or_else(|error| Err(DefragError(error.to_string())))
    }

    fn is_running(&self) -> bool {
        self.turn.try_lock().is_err()
    }

    fn run_now(&self, cause: Cause) -> Outcome {
        let before = self.store.sizes();
        tracing::info!(
            cause = cause.name(),
            size_bytes = before.allocated,
            size_in_use_bytes = before.in_use,
            "starting defragment"
        );
        let outcome = self
            .store
            .defragment(cause.pace())
            .map_err(|error| DefragError(error.to_string()));
        metrics::count_defrag(cause.name(), outcome.is_ok());
        let mut last = self.last.lock();
        match &outcome {
            Ok(report) => {
                let after = report.after;
                last.permille = (after.in_use >= TELLING_BYTES)
                    .then(|| after.allocated.saturating_mul(1000) / after.in_use);
                tracing::info!(
                    cause = cause.name(),
                    size_bytes_before = report.before.allocated,
                    size_bytes_after = after.allocated,
                    size_in_use_bytes = after.in_use,
                    took = ?report.took,
                    "finished defragment"
                );
            }
            // The old database is still in place: a full disk must not stop the member.
            Err(error) => {
                tracing::warn!(cause = cause.name(), error = %error, "failed to defragment");
            }
        }
        last.outcome = Some(outcome.clone());
        outcome
    }

    /// About what the file would take after one.
    fn expected_bytes(&self, sizes: Sizes) -> u64 {
        let permille = self.last.lock().permille.unwrap_or(1000).max(1000);
        (sizes.in_use / 1000)
            .saturating_mul(permille)
            .min(sizes.allocated)
    }

    /// Whether the file has come near the quota while a good part of it could be returned.
    fn should_make_room(&self) -> bool {
        let Some(quota) = self.quota_bytes else {
            return false;
        };
        let sizes = self.store.sizes();
        let gain = sizes.allocated - self.expected_bytes(sizes).min(sizes.allocated);
        sizes.allocated * 100 >= quota.saturating_mul(QUOTA_NEAR_PERCENT)
            && gain * 100 >= quota.saturating_mul(2 * QUOTA_GAIN_PERCENT)
    }

    /// Tells that the file has come near the quota.
    pub fn look_at_quota(&self, allocated: u64, quota: u64) {
        let near = allocated.saturating_mul(100) >= quota.saturating_mul(QUOTA_NEAR_PERCENT);
        if near && self.should_make_room() {
            self.poked.notify_one();
        }
    }

    /// Makes room for `cost` bytes within the quota by returning unused space, when that can be enough. The caller looks again.
    pub async fn make_room(self: &Arc<Self>, quota: u64, cost: u64) {
        // What is being deleted right now counts as live until it is gone. A compaction that waits for a snapshot's reader may
        // wait long; the present sizes count then.
        while self.store.is_compacting() && !self.store.is_held() && !self.fits(quota, cost) {
            tokio::time::sleep(COMPACTION_LOOK).await;
        }
        if self.fits(quota, cost) {
            // It fails when the disk has no room; the alarm is raised then, and the log says why.
            let _ = self.run(Cause::Quota).await;
        }
    }

    fn fits(&self, quota: u64, cost: u64) -> bool {
        let expected = self.expected_bytes(self.store.sizes());
        let gain = quota.saturating_mul(QUOTA_GAIN_PERCENT) / 100;
        expected.saturating_add(cost).saturating_add(gain) < quota
    }
}

/// Follows the rule, and looks after the quota, until `stop`.
pub async fn follow(
    defragmenter: Arc<Defragmenter>,
    rule: Option<AutoDefrag>,
    stop: CancellationToken,
) {
    let interval = rule.map_or(AutoDefrag::default().interval, |rule| rule.interval);
    let mut pause = Pause::new(interval);
    let mut quota_pause = Pause::new(interval);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK_INTERVAL.min(interval)) => {}
            () = defragmenter.poked.notified() => {}
        }
        if defragmenter.is_running() || defragmenter.store.is_compacting() {
            continue;
        }
        let now = defragmenter.clock.now();
        let sizes = defragmenter.store.sizes();
        let expected = defragmenter.expected_bytes(sizes);
        let by_rule = rule.is_some_and(|rule| rule::holds(rule, sizes.allocated, expected));
        let cause = if by_rule && pause.is_over(now) {
            Cause::Rule
        } else if defragmenter.should_make_room() && quota_pause.is_over(now) {
            Cause::Quota
        } else {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(POKED_INTERVAL.min(interval)) => continue,
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            _ = defragmenter.run(cause) => {}
        }
        let end = defragmenter.clock.now();
        match cause {
            Cause::Quota => quota_pause.begin(now, end),
            _ => pause.begin(now, end),
        }
    }
}
