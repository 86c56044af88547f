//! The pipeline of a StoreBackup: one file, written once, verified, recorded, removed with its
//! object.
//!
//! ```text
//! read -> plan -> apply -> status
//! ```
//!
//! The bytes never pass through the operator: a pod beside the store fetches them (`agent/`), and
//! says in its termination message what it wrote.

pub mod build;
mod cleanup;
pub mod plan;
pub mod status;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::controller::Action;
use kube::runtime::finalizer::{self, Event};
use kube::{Api, Resource, ResourceExt};
use serde_json::json;

use self::build::{build_backup_pod, run_pod_name};
use self::plan::{BackupStep, View};
use crate::clock;
use crate::cluster::apply::{ApplyError, Writer};
use crate::cluster::build::MANAGER;
use crate::context::Context;
use crate::crd::{StoreBackup, StoreBackupStatus, StoreCluster};

/// Keeps a StoreBackup until its file is gone.
pub const FINALIZER: &str = "ballast.dev/backup";
const KIND: &str = "StoreBackup";

/// A pass that failed.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error("cannot read {0}: {1}")]
    Read(String, Box<kube::Error>),
    #[error(transparent)]
    Apply(#[from] ApplyError),
    #[error("cannot write the status: {0}")]
    Status(Box<kube::Error>),
    #[error("waiting until the file is removed")]
    FileRemains,
    #[error(transparent)]
    Finalizer(Box<finalizer::Error<ReconcileError>>),
}

/// One pass over one StoreBackup.
pub async fn reconcile(
    guard: Arc<DeserializeGuard<StoreBackup>>,
    ctx: Arc<Context>,
) -> Result<Action, ReconcileError> {
    let started = clock::monotonic();
    let result = match &guard.0 {
        Ok(backup) => guarded(backup, &ctx).await,
        Err(invalid) => {
            let name = invalid.metadata.name.as_deref();
            tracing::warn!(name, error = %invalid.error, "StoreBackup cannot be read");
            Ok(Action::await_change())
        }
    };
    ctx.metrics
        .reconciled(KIND, started.elapsed().as_secs_f64());
    result
}

/// What follows a failed pass.
#[expect(clippy::needless_pass_by_value, reason = "the controller's signature")]
pub fn error_policy(
    guard: Arc<DeserializeGuard<StoreBackup>>,
    error: &ReconcileError,
    ctx: Arc<Context>,
) -> Action {
    if let ReconcileError::Finalizer(inner) = error
        && let finalizer::Error::CleanupFailed(ReconcileError::FileRemains) = &**inner
    {
        return Action::requeue(Duration::from_secs(1));
    }
    ctx.metrics.failed(KIND, "pass");
    tracing::warn!(backup = %guard.name_any(), %error, "pass failed");
    Action::requeue(ctx.retry_after)
}

/// Works on the live object: the controller's copy may be older than the status written last.
async fn guarded(seen: &StoreBackup, ctx: &Context) -> Result<Action, ReconcileError> {
    let namespace = seen.namespace().unwrap_or_default();
    let name = seen.name_any();
    let api: Api<StoreBackup> = Api::namespaced(ctx.client.clone(), &namespace);
    let live = api.get_opt(&name).await;
    let live = live.map_err(|e| ReconcileError::Read(format!("{KIND} {name}"), Box::new(e)))?;
    let Some(backup) = live.map(Arc::new) else {
        return Ok(Action::await_change());
    };
    finalizer::finalizer(&api, FINALIZER, backup, |event| async {
        match event {
            Event::Apply(backup) => pass(&backup, ctx).await,
            Event::Cleanup(backup) => cleanup::cleanup(&backup, ctx).await,
        }
    })
    .await
    .map_err(|error| ReconcileError::Finalizer(Box::new(error)))
}

async fn pass(backup: &StoreBackup, ctx: &Context) -> Result<Action, ReconcileError> {
    let view = read(backup, ctx).await?;
    let step = plan::plan(&view);
    let writer = Writer {
        client: &ctx.client,
        namespace: &view.namespace,
    };
    match &step {
        BackupStep::DeletePod | BackupStep::Retry { .. } => {
            if let Some(pod) = &view.pod {
                writer.delete::<Pod>(pod, "the backup pod ended").await?;
            }
        }
        BackupStep::CreatePod => {
            if let Some(pod) = build_backup_pod(&view, &ctx.settings) {
                writer.create::<Pod>(&pod).await?;
            }
        }
        BackupStep::Done
        | BackupStep::Wait { .. }
        | BackupStep::Begin { .. }
        | BackupStep::Complete(_)
        | BackupStep::Fail { .. } => {}
    }
    write_status(backup, &status::compute(&view, &step), ctx).await?;
    tell(backup, &step, ctx).await;
    Ok(match step {
        BackupStep::Done => Action::await_change(),
        BackupStep::Wait { .. } => Action::requeue(Duration::from_secs(5).min(ctx.resync)),
        _ => Action::requeue(Duration::from_secs(1)),
    })
}

async fn read(backup: &StoreBackup, ctx: &Context) -> Result<View, ReconcileError> {
    let namespace = backup.namespace().unwrap_or_default();
    let failed = |what: String| move |e: kube::Error| ReconcileError::Read(what, Box::new(e));
    let clusters: Api<StoreCluster> = Api::namespaced(ctx.client.clone(), &namespace);
    let cluster_name = &backup.spec.cluster_ref.name;
    let cluster = clusters
        .get_opt(cluster_name)
        .await
        .map_err(failed(format!("StoreCluster {cluster_name}")))?;
    let pods: Api<Pod> = Api::namespaced(ctx.client.clone(), &namespace);
    let pod_name = run_pod_name(&backup.name_any());
    let pod = pods
        .get_opt(&pod_name)
        .await
        .map_err(failed(format!("Pod {pod_name}")))?;
    let all: Api<DeserializeGuard<StoreBackup>> = Api::namespaced(ctx.client.clone(), &namespace);
    let listed = all.list(&ListParams::default()).await;
    let others = listed
        .map_err(failed("StoreBackups".to_owned()))?
        .items
        .into_iter()
        .filter_map(|guard| guard.0.ok())
        .filter(|other| other.spec.cluster_ref.name == *cluster_name && other.uid() != backup.uid())
        .collect();
    let now = clock::now().0.as_second();
    Ok(View {
        now,
        namespace,
        backup: backup.clone(),
        cluster,
        pod,
        others,
    })
}

async fn write_status(
    backup: &StoreBackup,
    new: &StoreBackupStatus,
    ctx: &Context,
) -> Result<(), ReconcileError> {
    if backup.status.as_ref() == Some(new) {
        return Ok(());
    }
    let resource = ApiResource::erase::<StoreBackup>(&());
    let namespace = backup.namespace().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(ctx.client.clone(), &namespace, &resource);
    let body = json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "status": new,
    });
    let params = PatchParams::apply(MANAGER).force();
    api.patch_status(&backup.name_any(), &params, &Patch::Apply(body))
        .await
        .map(|_| ())
        .map_err(|source| ReconcileError::Status(Box::new(source)))
}

async fn tell(backup: &StoreBackup, step: &BackupStep, ctx: &Context) {
    let about = backup.object_ref(&());
    let name = backup.name_any();
    match step {
        BackupStep::Complete(report) => {
            let note = format!("{name} holds revision {}", report.revision);
            tracing::info!(backup = %name, revision = report.revision, "backup succeeded");
            ctx.events
                .result(&about, "Backup", "BackupSucceeded", &note)
                .await;
        }
        BackupStep::Fail { reason, message } => {
            tracing::warn!(backup = %name, reason, message, "backup failed");
            ctx.events
                .warning(&about, "Backup", "BackupFailed", message)
                .await;
        }
        BackupStep::Retry { message } => {
            ctx.events
                .warning(&about, "Backup", "BackupAttemptFailed", message)
                .await;
        }
        _ => {}
    }
}
