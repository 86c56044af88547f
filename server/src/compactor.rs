//! Compaction without anyone asking: by time or by count of revisions, on the leader only.
//!
//! By time, with a period P and a step of min(P, 1 h) / 10: each step the current revision is noted. For the first P nothing is
//! compacted; then, every min(P, 1 h), to the revision of P ago. What fails is tried again a step later.
//! By count: every five minutes, to that many revisions ago.
//!
//! etcd: server/etcdserver/api/v3compactor.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_api::etcdserverpb as pb;
use tokio_util::sync::CancellationToken;

use crate::apply::ApplyError;
use crate::clock::Clock;
use crate::config::AutoCompaction;
use crate::rpc::Context;

/// How often the revision rule looks.
const REVISION_INTERVAL: Duration = Duration::from_mins(5);
/// Steps of the time rule in a period, or in an hour of a longer one.
const STEPS: u32 = 10;
/// A longer period is still compacted this often.
const PERIODIC_INTERVAL_MAX: Duration = Duration::from_hours(1);

/// Follows the rule until `stop`.
pub async fn run(context: Arc<Context>, rule: AutoCompaction, stop: CancellationToken) {
    let clock = Clock::default();
    let Some(mut follower) = Follower::new(rule, clock.now()) else {
        return;
    };
    loop {
        follower.note(context.store.view().revision());
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(follower.step()) => {}
        }
        // A member that does not lead goes on noting revisions: it may lead next time.
        if !context.raft.is_leader() {
            continue;
        }
        let Some(revision) = follower.due(clock.now(), context.store.view().revision()) else {
            continue;
        };
        let kind = follower.kind();
        tracing::info!(revision, "starting auto {kind} compaction");
        let started = clock.now();
        match compact(&context, revision).await {
            Ok(()) => {
                let now = clock.now();
                tracing::info!(revision, took = ?(now - started), "completed auto {kind} compaction");
                follower.done(now, revision);
            }
            Err(why) => {
                tracing::warn!(revision, retry_interval = ?follower.step(), error = %why, "failed auto {kind} compaction");
            }
        }
    }
}

/// Which revision a rule lets go of, and when. Pure: time and revisions are told.
#[derive(Debug)]
enum Follower {
    Periodic(Periodic),
    Revision { kept: i64, last: i64 },
}

#[derive(Debug)]
struct Periodic {
    period: Duration,
    /// Revisions noted at each step, the oldest first: it is that of one period ago.
    noted: VecDeque<i64>,
    last: i64,
    last_success: Instant,
    /// What must have passed since: the period at first, then the interval.
    wait: Duration,
}

impl Follower {
    fn new(rule: AutoCompaction, now: Instant) -> Option<Self> {
        match rule {
            AutoCompaction::Off => None,
            AutoCompaction::Revision(kept) => Some(Self::Revision { kept, last: 0 }),
            AutoCompaction::Periodic(period) => Some(Self::Periodic(Periodic {
                period,
                noted: VecDeque::new(),
                last: 0,
                last_success: now,
                wait: period,
            })),
        }
    }

    const fn kind(&self) -> &'static str {
        match self {
            Self::Periodic(_) => "periodic",
            Self::Revision { .. } => "revision",
        }
    }

    /// The time between two looks.
    fn step(&self) -> Duration {
        match self {
            Self::Periodic(periodic) => periodic.interval() / STEPS,
            Self::Revision { .. } => REVISION_INTERVAL,
        }
    }

    /// Before each step.
    fn note(&mut self, revision: i64) {
        if let Self::Periodic(periodic) = self {
            periodic.noted.push_back(revision);
            if periodic.noted.len() > periodic.kept() {
                periodic.noted.pop_front();
            }
        }
    }

    /// After each step: what to compact to.
    fn due(&mut self, now: Instant, revision: i64) -> Option<i64> {
        match self {
            Self::Revision { kept, last } => {
                let target = revision - *kept;
                (target > 0 && target != *last).then_some(target)
            }
            Self::Periodic(periodic) => {
                let target = *periodic.noted.front()?;
                if now - periodic.last_success < periodic.wait || target == periodic.last {
                    return None;
                }
                periodic.wait = periodic.interval();
                Some(target)
            }
        }
    }

    fn done(&mut self, now: Instant, revision: i64) {
        match self {
            Self::Revision { last, .. } => *last = revision,
            Self::Periodic(periodic) => {
                periodic.last = revision;
                periodic.last_success = now;
            }
        }
    }
}

impl Periodic {
    fn interval(&self) -> Duration {
        self.period.min(PERIODIC_INTERVAL_MAX)
    }

    /// A period's worth of steps, both ends included.
    fn kept(&self) -> usize {
        let step = (self.interval() / STEPS).as_nanos().max(1);
        (self.period.as_nanos() / step) as usize + 1
    }
}

async fn compact(context: &Context, revision: i64) -> Result<(), String> {
    let request = pb::InternalRaftRequest {
        header: Some(context.ids.header()),
        compaction: Some(pb::CompactionRequest {
            revision,
            physical: false,
        }),
        ..Default::default()
    };
    let applied = context
        .raft
        .propose(request)
        .await
        .map_err(|error| error.to_string())?;
    match applied.result {
        // Somebody else compacted further.
        Ok(_) | Err(ApplyError::Mvcc(ballast_storage::MvccError::Compacted { .. })) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets `steps` steps pass, the revision being the step's number plus one; each compaction succeeds unless told. Gives
    /// (step, revision) of each.
    fn run(
        rule: AutoCompaction,
        steps: i64,
        mut succeeds: impl FnMut(i64) -> bool,
    ) -> Vec<(i64, i64)> {
        let start = Clock::default().now();
        let mut follower = Follower::new(rule, start).unwrap();
        let mut now = start;
        let mut seen = Vec::new();
        for step in 1..=steps {
            follower.note(step);
            now += follower.step();
            if let Some(revision) = follower.due(now, step) {
                seen.push((step, revision));
                if succeeds(step) {
                    follower.done(now, revision);
                }
            }
        }
        seen
    }

    const HOUR: Duration = Duration::from_secs(3600);

    /// etcd's TestPeriodicHourly, TestPeriodicMinutes and the like: the first after one period, then one each interval.
    #[test]
    fn the_time_rule_compacts_to_a_period_ago() {
        for (period, step, expected) in [
            // An hour: steps of six minutes.
            (HOUR, HOUR / 10, vec![(10, 1), (20, 10), (30, 20)]),
            // Five minutes: steps of thirty seconds.
            (HOUR / 12, HOUR / 120, vec![(10, 1), (20, 10), (30, 20)]),
            // Two hours: steps of six minutes, the first after 20, then hourly.
            (2 * HOUR, HOUR / 10, vec![(20, 1), (30, 10)]),
        ] {
            let rule = AutoCompaction::Periodic(period);
            assert_eq!(
                Follower::new(rule, Clock::default().now()).unwrap().step(),
                step
            );
            assert_eq!(run(rule, 30, |_| true), expected, "{period:?}");
        }
    }

    #[test]
    fn a_failed_compaction_is_tried_again_a_step_later() {
        let rule = AutoCompaction::Periodic(HOUR);
        let seen = run(rule, 24, |step| step >= 12);
        assert_eq!(seen, [(10, 1), (11, 1), (12, 2), (22, 12)]);
    }

    #[test]
    fn nothing_is_compacted_twice_to_the_same_revision() {
        let start = Clock::default().now();
        let mut follower = Follower::new(AutoCompaction::Periodic(HOUR), start).unwrap();
        let mut compactions = 0;
        for step in 1..=40 {
            follower.note(7);
            let now = start + HOUR / 10 * step;
            if let Some(revision) = follower.due(now, 7) {
                follower.done(now, revision);
                compactions += 1;
            }
        }
        assert_eq!(compactions, 1);
    }

    #[test]
    fn the_revision_rule_keeps_its_count() {
        let mut follower =
            Follower::new(AutoCompaction::Revision(100), Clock::default().now()).unwrap();
        assert_eq!(follower.step(), Duration::from_secs(300));
        let now = Clock::default().now();
        for (revision, expected) in [
            (50, None),
            (100, None),
            (150, Some(50)),
            // It failed: the same again, and more.
            (150, Some(50)),
            (160, Some(60)),
        ] {
            assert_eq!(follower.due(now, revision), expected, "{revision}");
        }
        follower.done(now, 60);
        assert_eq!(follower.due(now, 160), None);
        assert_eq!(follower.due(now, 161), Some(61));
    }
}
