//! What the operator measures of itself and of the stores it looks after.
//!
//! Sizes live here and not in the status, since they move all the time. Series of a StoreCluster
//! that is gone are removed, or an alert on them would never end.

use prometheus::{
    HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::store_client::StoreReport;

/// Every metric of the operator.
pub struct Metrics {
    registry: Registry,
    reconciles: IntCounterVec,
    failures: IntCounterVec,
    steps: IntCounterVec,
    duration: HistogramVec,
    ready: IntGaugeVec,
    db_size: IntGaugeVec,
    db_in_use: IntGaugeVec,
    quota: IntGaugeVec,
    no_space: IntGaugeVec,
    last_backup: IntGaugeVec,
}

const CLUSTER: [&str; 2] = ["namespace", "name"];

impl Metrics {
    /// Registers everything in a registry of its own.
    pub fn new() -> Self {
        let registry = Registry::new();
        let counter = |name: &str, help: &str, labels: &[&str]| {
            let metric = IntCounterVec::new(Opts::new(name, help), labels);
            register(&registry, metric)
        };
        let gauge = |name: &str, help: &str| {
            let metric = IntGaugeVec::new(Opts::new(name, help), &CLUSTER);
            register(&registry, metric)
        };
        let seconds = HistogramOpts::new(
            "ballast_operator_reconcile_duration_seconds",
            "Time one pass over an object took.",
        );
        Self {
            reconciles: counter(
                "ballast_operator_reconciles_total",
                "Passes over objects, by kind.",
                &["kind"],
            ),
            failures: counter(
                "ballast_operator_reconcile_failures_total",
                "Passes that failed, by kind and stage.",
                &["kind", "stage"],
            ),
            steps: counter(
                "ballast_operator_steps_total",
                "Steps the planner chose, by name.",
                &["step"],
            ),
            duration: register(&registry, HistogramVec::new(seconds, &["kind"])),
            ready: gauge(
                "ballast_operator_cluster_ready",
                "1 while the store is Ready.",
            ),
            db_size: gauge(
                "ballast_operator_cluster_db_size_bytes",
                "Bytes of the database.",
            ),
            db_in_use: gauge(
                "ballast_operator_cluster_db_size_in_use_bytes",
                "Bytes of the database that hold live data.",
            ),
            quota: gauge(
                "ballast_operator_cluster_quota_bytes",
                "Quota the store reports.",
            ),
            no_space: gauge(
                "ballast_operator_cluster_no_space",
                "1 while the store refuses writes for want of space.",
            ),
            last_backup: gauge(
                "ballast_operator_cluster_last_backup_timestamp_seconds",
                "When the newest successful backup ended.",
            ),
            registry,
        }
    }

    pub fn reconciled(&self, kind: &str, seconds: f64) {
        self.reconciles.with_label_values(&[kind]).inc();
        self.duration.with_label_values(&[kind]).observe(seconds);
    }

    pub fn failed(&self, kind: &str, stage: &str) {
        self.failures.with_label_values(&[kind, stage]).inc();
    }

    pub fn step(&self, name: &str) {
        self.steps.with_label_values(&[name]).inc();
    }

    /// What a pass saw of a store.
    pub fn observed(
        &self,
        namespace: &str,
        name: &str,
        ready: bool,
        report: Option<&StoreReport>,
        last_backup: Option<i64>,
    ) {
        let labels = [namespace, name];
        self.ready.with_label_values(&labels).set(i64::from(ready));
        if let Some(report) = report {
            self.db_size.with_label_values(&labels).set(report.db_size);
            self.db_in_use
                .with_label_values(&labels)
                .set(report.db_size_in_use);
            self.quota.with_label_values(&labels).set(report.quota);
            self.no_space
                .with_label_values(&labels)
                .set(i64::from(report.no_space));
        }
        if let Some(time) = last_backup {
            self.last_backup.with_label_values(&labels).set(time);
        }
    }

    /// Drops the series of a StoreCluster that is gone.
    pub fn forget(&self, namespace: &str, name: &str) {
        let gauges = [
            &self.ready,
            &self.db_size,
            &self.db_in_use,
            &self.quota,
            &self.no_space,
            &self.last_backup,
        ];
        for gauge in gauges {
            // Not there is as good as removed.
            let _ = gauge.remove_label_values(&[namespace, name]);
        }
    }

    /// The text Prometheus scrapes.
    pub fn render(&self) -> String {
        TextEncoder::new()
            .encode_to_string(&self.registry.gather())
            .unwrap_or_default()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

fn register<M>(registry: &Registry, metric: prometheus::Result<M>) -> M
where
    M: prometheus::core::Collector + Clone + 'static,
{
    let metric = metric.expect("names and labels are constants");
    registry
        .register(Box::new(metric.clone()))
        .expect("names are different");
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_of_a_deleted_cluster_are_gone() {
        let metrics = Metrics::new();
        metrics.observed("ns", "a", true, Some(&StoreReport::default()), Some(7));
        assert!(metrics.render().contains("ballast_operator_cluster_ready"));
        metrics.forget("ns", "a");
        assert!(!metrics.render().contains("name=\"a\""));
    }
}
