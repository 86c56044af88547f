//! Counters of watching, under the names that etcd's dashboards look for.
//!
//! Not here: the registry (`crate::metrics` takes these by [`WatchMetrics::register`]).

use prometheus::{IntCounter, IntGauge, Registry};

/// Cheap to clone; all clones count together.
#[derive(Clone, Debug)]
pub struct WatchMetrics {
    pub watchers: IntGauge,
    pub streams: IntGauge,
    /// Watchers that are behind: unsynced ones and those of slow streams.
    pub slow_watchers: IntGauge,
    /// Events in mailboxes, counted once for each watcher.
    pub pending_events: IntGauge,
    /// Events written to streams, counted once for each watcher.
    pub events: IntCounter,
}

impl Default for WatchMetrics {
    fn default() -> Self {
        let gauge = |name: &str, help: &str| {
            IntGauge::new(format!("etcd_debugging_mvcc_{name}"), help)
                .expect("the name is a valid metric name")
        };
        Self {
            watchers: gauge("watcher_total", "Total number of watchers."),
            streams: gauge("watch_stream_total", "Total number of watch streams."),
            slow_watchers: gauge(
                "slow_watcher_total",
                "Total number of unsynced slow watchers.",
            ),
            pending_events: gauge(
                "pending_events_total",
                "Total number of pending events to be sent.",
            ),
            events: IntCounter::new(
                "etcd_debugging_mvcc_events_total",
                "Total number of events sent by this member.",
            )
            .expect("the name is a valid metric name"),
        }
    }
}

impl WatchMetrics {
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        for gauge in [
            &self.watchers,
            &self.streams,
            &self.slow_watchers,
            &self.pending_events,
        ] {
            registry.register(Box::new(gauge.clone()))?;
        }
        registry.register(Box::new(self.events.clone()))
    }
}
