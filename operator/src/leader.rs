//! Leader election by a coordination Lease: of several operators, one acts.
//!
//! ```text
//! follow --(free, or its holder silent for a lease)--> lead --(renewal overdue)--> stop
//! ```
//!
//! As in client-go, the age of another holder's lease is measured by the own clock from the moment
//! its record was last seen to change, so that clocks need not agree. A leader that could not renew
//! within the deadline stops the process: what it was doing may be done by another now.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};

use crate::clock;

/// How long a silent holder keeps the lease.
const LEASE_SECS: i32 = 15;
/// How long a leader may fail to renew before it stops.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Time between two tries.
const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// A request for the lease that failed.
#[derive(Debug, thiserror::Error)]
#[error("lease {name}: {source}")]
pub struct LeaseError {
    name: String,
    source: Box<kube::Error>,
}

/// One candidate.
pub struct Candidate {
    api: Api<Lease>,
    name: String,
    identity: String,
    seen: Option<(LeaseSpec, Instant)>,
}

impl Candidate {
    /// A candidate for the lease `name` in `namespace`.
    pub fn new(client: Client, namespace: &str, name: &str, identity: &str) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity: identity.to_owned(),
            seen: None,
        }
    }

    /// Returns when this candidate leads.
    pub async fn acquire(&mut self) {
        loop {
            match self.try_once().await {
                Ok(true) => return,
                Ok(false) => tracing::debug!(lease = %self.name, "another operator leads"),
                Err(error) => tracing::warn!(%error, "cannot take the lease"),
            }
            tokio::time::sleep(RETRY_PERIOD).await;
        }
    }

    /// Renews for as long as that works; returns when leading is over.
    pub async fn keep(&mut self) {
        let mut renewed = clock::monotonic();
        loop {
            tokio::time::sleep(RETRY_PERIOD).await;
            match tokio::time::timeout(RENEW_DEADLINE, self.try_once()).await {
                Ok(Ok(true)) => renewed = clock::monotonic(),
                // A renewal that timed out here may have arrived: then the record moved, by us.
                Ok(Ok(false)) if self.holds().await => {}
                Ok(Ok(false)) => return,
                Ok(Err(error)) => tracing::warn!(%error, "cannot renew the lease"),
                Err(_) => tracing::warn!(lease = %self.name, "renewal timed out"),
            }
            if renewed.elapsed() >= RENEW_DEADLINE {
                return;
            }
        }
    }

    /// Gives the lease up, so that the next operator need not wait it out.
    pub async fn release(&mut self) -> Result<(), LeaseError> {
        let Some(mut lease) = self.get().await? else {
            return Ok(());
        };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            return Ok(());
        }
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        self.replace(&lease).await.map(|_| ())
    }

    async fn try_once(&mut self) -> Result<bool, LeaseError> {
        let now = MicroTime(clock::now_micros());
        let Some(mut lease) = self.get().await? else {
            return self.create(now).await;
        };
        let spec = lease.spec.get_or_insert_default();
        let mine = spec.holder_identity.as_deref() == Some(&self.identity);
        if !mine && !self.is_free(spec) {
            return Ok(false);
        }
        if !mine {
            spec.holder_identity = Some(self.identity.clone());
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0) + 1);
        }
        spec.lease_duration_seconds = Some(LEASE_SECS);
        spec.renew_time = Some(now);
        self.replace(&lease).await
    }

    /// Free when nobody holds it, or its record has not moved for a whole lease.
    fn is_free(&mut self, spec: &LeaseSpec) -> bool {
        if spec.holder_identity.as_deref().is_none_or(str::is_empty) {
            return true;
        }
        let now = clock::monotonic();
        let since = match &self.seen {
            Some((seen, since)) if seen == spec => *since,
            _ => {
                self.seen = Some((spec.clone(), now));
                now
            }
        };
        let secs = u64::try_from(spec.lease_duration_seconds.unwrap_or(LEASE_SECS)).unwrap_or(1);
        now.duration_since(since) >= Duration::from_secs(secs)
    }

    async fn holds(&self) -> bool {
        let lease = self.get().await.ok().flatten();
        let holder = lease.and_then(|l| l.spec?.holder_identity);
        holder.as_deref() == Some(&self.identity)
    }

    async fn get(&self) -> Result<Option<Lease>, LeaseError> {
        self.api
            .get_opt(&self.name)
            .await
            .map_err(|e| self.failed(e))
    }

    async fn create(&self, now: MicroTime) -> Result<bool, LeaseError> {
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: Some(LEASE_SECS),
                acquire_time: Some(now.clone()),
                renew_time: Some(now),
                lease_transitions: Some(0),
                ..LeaseSpec::default()
            }),
        };
        self.won(self.api.create(&PostParams::default(), &lease).await)
    }

    /// The resource version in `lease` makes this a compare-and-swap.
    async fn replace(&self, lease: &Lease) -> Result<bool, LeaseError> {
        self.won(
            self.api
                .replace(&self.name, &PostParams::default(), lease)
                .await,
        )
    }

    /// A conflict means that another candidate was quicker.
    fn won(&self, result: kube::Result<Lease>) -> Result<bool, LeaseError> {
        match result {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn failed(&self, source: kube::Error) -> LeaseError {
        LeaseError {
            name: self.name.clone(),
            source: Box::new(source),
        }
    }
}
