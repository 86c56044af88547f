//! Compaction without anyone asking: by time or by count of revisions, on the leader only.
//!
//! etcd: server/etcdserver/api/v3compactor.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use tokio_util::sync::CancellationToken;

use crate::apply::ApplyError;
use crate::config::AutoCompaction;
use crate::rpc::Context;

/// How often the revision rule looks.
const REVISION_INTERVAL: Duration = Duration::from_mins(5);
/// Samples per period of the time rule: it compacts each of them as it falls out of the period.
const SAMPLES_PER_PERIOD: u32 = 10;
/// A period longer than this is still followed hourly.
const PERIOD_STEP_MAX: Duration = Duration::from_hours(1);

/// Follows the rule until `stop`.
pub async fn run(context: Arc<Context>, rule: AutoCompaction, stop: CancellationToken) {
    let interval = match rule {
        AutoCompaction::Off => return,
        AutoCompaction::Revision(_) => REVISION_INTERVAL,
        AutoCompaction::Periodic(period) => period.min(PERIOD_STEP_MAX) / SAMPLES_PER_PERIOD,
    };
    let mut samples = Samples::new(rule, interval);
    let mut done = 0;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
        let target = samples.next(context.store.view().revision());
        if !context.raft.is_leader() || target <= done {
            continue;
        }
        match compact(&context, target).await {
            Ok(()) => {
                tracing::info!(revision = target, "completed auto compaction");
                done = target;
            }
            Err(why) => tracing::warn!(revision = target, error = %why, "failed auto compaction"),
        }
    }
}

/// Which revision a rule lets go of.
#[derive(Debug)]
struct Samples {
    rule: AutoCompaction,
    /// Revisions seen at each interval, the oldest first.
    seen: VecDeque<i64>,
    kept: usize,
}

impl Samples {
    fn new(rule: AutoCompaction, interval: Duration) -> Self {
        let kept = match rule {
            AutoCompaction::Periodic(period) => {
                (period.as_secs_f64() / interval.as_secs_f64()).round() as usize
            }
            _ => 0,
        };
        Self {
            rule,
            seen: VecDeque::new(),
            kept,
        }
    }

    /// Takes the current revision; gives the revision to compact to, or 0.
    fn next(&mut self, revision: i64) -> i64 {
        match self.rule {
            AutoCompaction::Off => 0,
            AutoCompaction::Revision(kept) => revision - kept,
            AutoCompaction::Periodic(_) => {
                self.seen.push_back(revision);
                if self.seen.len() > self.kept {
                    self.seen.pop_front().unwrap_or(0)
                } else {
                    0
                }
            }
        }
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

    #[test]
    fn the_time_rule_keeps_one_period() {
        let period = Duration::from_mins(10);
        let mut samples = Samples::new(
            AutoCompaction::Periodic(period),
            period / SAMPLES_PER_PERIOD,
        );
        for revision in 1..=10 {
            assert_eq!(samples.next(revision), 0, "{revision}");
        }
        assert_eq!(samples.next(11), 1);
        assert_eq!(samples.next(12), 2);
    }

    #[test]
    fn the_revision_rule_keeps_its_count() {
        let mut samples = Samples::new(AutoCompaction::Revision(100), REVISION_INTERVAL);
        assert_eq!(samples.next(50), -50);
        assert_eq!(samples.next(150), 50);
    }
}
