//! The pipeline of a StoreCluster, on one screen.
//!
//! ```text
//! validate -> observe -> plan -> build + apply -> status
//! ```
//!
//! One pass does one step. Everything a pass knows it has just read; the status is the only thing
//! that outlives it. A pass over a store that needs nothing writes nothing.

pub mod apply;
pub mod build;
pub mod observe;
pub mod plan;
pub mod status;
pub mod validate;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolumeClaim, Pod};
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::controller::Action;
use kube::runtime::finalizer::{self, Event};
use kube::{Api, Resource, ResourceExt};
use serde_json::json;

use self::apply::{ApplyError, Outcome, Writer};
use self::build::volume::build_data_volume;
use self::build::{CLUSTER_UID_LABEL, MANAGER};
use self::observe::{ObserveError, is_going};
use self::plan::{Decision, Step};
use self::validate::Desired;
use crate::clock;
use crate::context::Context;
use crate::crd::conditions::{self, DEGRADED, NO_SPACE, READY};
use crate::crd::{StoreCluster, StoreClusterStatus, WhenDeleted};
use crate::quantity::human;

/// Keeps a StoreCluster until its pods are gone.
pub const FINALIZER: &str = "ballast.dev/cluster";
const KIND: &str = "StoreCluster";

/// A pass that failed, by stage.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error(transparent)]
    Observe(#[from] ObserveError),
    #[error(transparent)]
    Apply(#[from] ApplyError),
    #[error("cannot write the status: {0}")]
    Status(Box<kube::Error>),
    #[error("waiting until {0} pods are gone")]
    PodsRemain(usize),
    #[error(transparent)]
    Finalizer(Box<finalizer::Error<ReconcileError>>),
}

impl ReconcileError {
    fn stage(&self) -> &'static str {
        match self {
            Self::Observe(_) => "observe",
            Self::Apply(_) => "apply",
            Self::Status(_) => "status",
            Self::PodsRemain(_) => "cleanup",
            Self::Finalizer(_) => "finalizer",
        }
    }
}

/// One pass over one StoreCluster.
pub async fn reconcile(
    guard: Arc<DeserializeGuard<StoreCluster>>,
    ctx: Arc<Context>,
) -> Result<Action, ReconcileError> {
    let started = clock::monotonic();
    let result = match &guard.0 {
        Ok(cluster) => Box::pin(guarded(cluster, &ctx)).await,
        Err(invalid) => {
            let name = invalid.metadata.name.as_deref();
            tracing::warn!(name, error = %invalid.error, "StoreCluster cannot be read");
            Ok(Action::await_change())
        }
    };
    ctx.metrics
        .reconciled(KIND, started.elapsed().as_secs_f64());
    result
}

/// What follows a failed pass: a little patience, then another.
#[expect(clippy::needless_pass_by_value, reason = "the controller's signature")]
pub fn error_policy(
    guard: Arc<DeserializeGuard<StoreCluster>>,
    error: &ReconcileError,
    ctx: Arc<Context>,
) -> Action {
    if let ReconcileError::Finalizer(inner) = error
        && let finalizer::Error::CleanupFailed(ReconcileError::PodsRemain(_)) = &**inner
    {
        return Action::requeue(Duration::from_secs(1));
    }
    let inner = match error {
        ReconcileError::Finalizer(inner) => match &**inner {
            finalizer::Error::ApplyFailed(inner) | finalizer::Error::CleanupFailed(inner) => inner,
            _ => error,
        },
        _ => error,
    };
    ctx.metrics.failed(KIND, inner.stage());
    tracing::warn!(cluster = %guard.name_any(), stage = inner.stage(), %error, "pass failed");
    Action::requeue(ctx.retry_after)
}

/// The controller's copy may be older than the status the last pass wrote; a pass that believed it
/// would write that status back, and forget what was done in between.
async fn guarded(seen: &StoreCluster, ctx: &Context) -> Result<Action, ReconcileError> {
    let namespace = seen.namespace().unwrap_or_default();
    let name = seen.name_any();
    let api: Api<StoreCluster> = Api::namespaced(ctx.client.clone(), &namespace);
    let live = api
        .get_opt(&name)
        .await
        .map_err(|source| ObserveError::Read {
            kind: KIND.to_owned(),
            name,
            source: Box::new(source),
        })?;
    let Some(cluster) = live.map(Arc::new) else {
        return Ok(Action::await_change());
    };
    finalizer::finalizer(&api, FINALIZER, cluster, |event| async {
        match event {
            Event::Apply(cluster) => Box::pin(pass(&cluster, ctx)).await,
            Event::Cleanup(cluster) => cleanup(&cluster, ctx).await,
        }
    })
    .await
    .map_err(|error| ReconcileError::Finalizer(Box::new(error)))
}

async fn pass(cluster: &StoreCluster, ctx: &Context) -> Result<Action, ReconcileError> {
    let old = cluster.status.clone().unwrap_or_default();
    let desired = match validate::validate(cluster, &ctx.settings) {
        Ok(desired) => desired,
        Err(error) => {
            let new = status::invalid(&old, cluster.meta().generation, &error);
            write_status(cluster, &old, &new, ctx).await?;
            return Ok(Action::await_change());
        }
    };
    let store = ctx.store.as_ref();
    let now = clock::now().0.as_second();
    let observed = observe::observe(&ctx.client, store, cluster, &desired, now).await?;
    let decision = plan::plan(&desired, &observed);
    ctx.metrics.step(decision.step.name());
    let result = apply::apply(&ctx.client, store, &desired, &observed, &decision.step).await;
    announce(&desired, &decision, &result, ctx).await;

    let new = status::compute(&desired, &observed, &decision, result.as_ref());
    let ready = conditions::is_true(&new.conditions, READY);
    let last = new.last_backup.as_ref().map(|b| b.time.0.as_second());
    let report = observed.store.report();
    ctx.metrics
        .observed(&desired.namespace, &desired.name, ready, report, last);
    write_status(cluster, &old, &new, ctx).await?;
    result?;
    Ok(Action::requeue(again(&decision, ctx)))
}

fn again(decision: &Decision, ctx: &Context) -> Duration {
    let wanted = Duration::from_secs(u64::try_from(decision.again_secs).unwrap_or(1));
    wanted.min(ctx.resync)
}

/// Tells what was done, and logs it.
async fn announce(
    desired: &Desired,
    decision: &Decision,
    result: &Result<Outcome, ApplyError>,
    ctx: &Context,
) {
    let step = decision.step.name();
    let about = &desired.reference;
    let note = match result {
        Ok(Outcome::Nothing) => {
            tracing::debug!(cluster = %desired.name, namespace = %desired.namespace, step, "pass");
            return;
        }
        Ok(Outcome::Changed(what)) => what.clone(),
        Ok(Outcome::Defragmented { before, after }) => {
            format!(
                "database shrank from {} to {}",
                human(*before),
                human(*after)
            )
        }
        Ok(Outcome::BackupCreated { name, .. }) => format!("created StoreBackup {name}"),
        Err(error) => {
            ctx.events
                .warning(about, step, &format!("{step}Failed"), &error.to_string())
                .await;
            return;
        }
    };
    tracing::info!(cluster = %desired.name, namespace = %desired.namespace, step, note, "step");
    let reason = if matches!(decision.step, Step::Defragment(_)) {
        "Defragmented"
    } else {
        step
    };
    ctx.events.result(about, step, reason, &note).await;
}

/// Pods end before the StoreCluster does; what has no owner by policy stays.
async fn cleanup(cluster: &StoreCluster, ctx: &Context) -> Result<Action, ReconcileError> {
    let namespace = cluster.namespace().unwrap_or_default();
    let uid = cluster.uid().unwrap_or_default();
    let pods: Api<Pod> = Api::namespaced(ctx.client.clone(), &namespace);
    let selector = ListParams::default().labels(&format!("{CLUSTER_UID_LABEL}={uid}"));
    let found = pods
        .list(&selector)
        .await
        .map_err(|source| ObserveError::List {
            kind: "Pod".to_owned(),
            source: Box::new(source),
        })?;
    let writer = Writer {
        client: &ctx.client,
        namespace: &namespace,
    };
    for pod in found.items.iter().filter(|pod| !is_going(*pod)) {
        writer.delete::<Pod>(pod, "StoreCluster deleted").await?;
    }
    if !found.items.is_empty() {
        return Err(ReconcileError::PodsRemain(found.items.len()));
    }
    keep_volume(cluster, &writer, ctx).await?;
    ctx.metrics.forget(&namespace, &cluster.name_any());
    tracing::info!(cluster = %cluster.name_any(), %namespace, "store removed");
    Ok(Action::await_change())
}

/// A volume that is to stay must not have an owner when its owner goes. The planner sees to that, but
/// a deletion may follow at once on the change of policy.
async fn keep_volume(
    cluster: &StoreCluster,
    writer: &Writer<'_>,
    ctx: &Context,
) -> Result<(), ReconcileError> {
    if cluster.spec.storage.when_deleted == WhenDeleted::Delete {
        return Ok(());
    }
    let Ok(desired) = validate::validate(cluster, &ctx.settings) else {
        return Ok(());
    };
    let volumes: Api<PersistentVolumeClaim> =
        Api::namespaced(ctx.client.clone(), &desired.namespace);
    let name = desired.volume_name();
    let live = volumes
        .get_opt(&name)
        .await
        .map_err(|source| ObserveError::Read {
            kind: "PersistentVolumeClaim".to_owned(),
            name,
            source: Box::new(source),
        })?;
    let owned = live.is_some_and(|v| v.owner_references().iter().any(|o| o.uid == desired.uid));
    if owned {
        writer
            .server_side_apply::<PersistentVolumeClaim>(&build_data_volume(&desired))
            .await?;
    }
    Ok(())
}

/// Writes the status if it says something new, and tells of conditions that changed.
async fn write_status(
    cluster: &StoreCluster,
    old: &StoreClusterStatus,
    new: &StoreClusterStatus,
    ctx: &Context,
) -> Result<(), ReconcileError> {
    if old == new && cluster.status.is_some() {
        return Ok(());
    }
    let resource = ApiResource::erase::<StoreCluster>(&());
    let namespace = cluster.namespace().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(ctx.client.clone(), &namespace, &resource);
    let body = json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "status": new,
    });
    api.patch_status(
        &cluster.name_any(),
        &PatchParams::apply(MANAGER).force(),
        &Patch::Apply(body),
    )
    .await
    .map_err(|source| ReconcileError::Status(Box::new(source)))?;
    tell_changes(&cluster.object_ref(&()), old, new, ctx).await;
    Ok(())
}

async fn tell_changes(
    about: &ObjectReference,
    old: &StoreClusterStatus,
    new: &StoreClusterStatus,
    ctx: &Context,
) {
    for (type_, bad) in [(READY, false), (NO_SPACE, true), (DEGRADED, true)] {
        let was = conditions::is_true(&old.conditions, type_);
        let Some(condition) = conditions::get(&new.conditions, type_) else {
            continue;
        };
        let is = condition.status == "True";
        if was == is {
            continue;
        }
        let reason = &condition.reason;
        if is == bad {
            // A store that was never ready has nothing to complain about yet.
            ctx.events
                .warning(about, type_, reason, &condition.message)
                .await;
        } else {
            ctx.events
                .result(about, type_, reason, &condition.message)
                .await;
        }
    }
}
