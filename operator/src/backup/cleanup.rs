//! Removes the file of a StoreBackup that is being deleted, within reason: a volume or a namespace
//! that is gone took the file along, and a lost volume must not hold the object for ever.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::runtime::controller::Action;
use kube::{Api, Resource, ResourceExt};

use super::ReconcileError;
use super::build::{build_remove_pod, remove_pod_name, run_pod_name};
use crate::clock;
use crate::cluster::apply::Writer;
use crate::cluster::observe::is_going;
use crate::context::Context;
use crate::crd::{BackupLocation, PodSecurity, StoreBackup, StoreCluster};

/// Time after which the removal of a file is given up.
const REMOVAL_SECS_MAX: i64 = 300;

/// One pass towards the file's end; Ok lets the object go.
pub(super) async fn cleanup(backup: &StoreBackup, ctx: &Context) -> Result<Action, ReconcileError> {
    let namespace = backup.namespace().unwrap_or_default();
    let writer = Writer {
        client: &ctx.client,
        namespace: &namespace,
    };
    // The writer first: it would put the file back.
    if let Some(pod) = get::<Pod>(ctx, &namespace, &run_pod_name(&backup.name_any())).await? {
        if !is_going(&pod) {
            writer.delete::<Pod>(&pod, "StoreBackup deleted").await?;
        }
        return Err(ReconcileError::FileRemains);
    }
    let Some(location) = backup.status.as_ref().and_then(|s| s.location.as_ref()) else {
        return Ok(Action::await_change());
    };
    let remover = get::<Pod>(ctx, &namespace, &remove_pod_name(&backup.name_any())).await?;
    let claim = get::<PersistentVolumeClaim>(ctx, &namespace, &location.claim_name).await?;
    let phase = remover
        .as_ref()
        .and_then(|p| p.status.as_ref()?.phase.clone());
    let removed = phase.as_deref() == Some("Succeeded");
    if removed || overdue(backup) || claim.is_none_or(|c| is_going(&c)) {
        if let Some(pod) = &remover {
            writer.delete::<Pod>(pod, "file removal ended").await?;
        }
        if !removed {
            let note = format!(
                "{} on {} was not removed",
                location.path, location.claim_name
            );
            let about = backup.object_ref(&());
            ctx.events
                .warning(&about, "Remove", "FileRemains", &note)
                .await;
        }
        return Ok(Action::await_change());
    }
    match (remover, phase.as_deref()) {
        (Some(pod), Some("Failed")) if !is_going(&pod) => {
            writer.delete::<Pod>(&pod, "file removal failed").await?;
        }
        (Some(_), _) => {}
        (None, _) => {
            if !start(backup, location, &writer, ctx).await? {
                return Ok(Action::await_change());
            }
        }
    }
    Err(ReconcileError::FileRemains)
}

/// Starts the pod that removes the file. False: a namespace that is ending takes no new pods, and
/// takes the claim with it.
async fn start(
    backup: &StoreBackup,
    location: &BackupLocation,
    writer: &Writer<'_>,
    ctx: &Context,
) -> Result<bool, ReconcileError> {
    let security = security_of(backup, writer.namespace, ctx).await;
    let pod = build_remove_pod(backup, location, &security, &ctx.settings);
    match writer.create::<Pod>(&pod).await {
        Ok(_) => Ok(true),
        Err(error) if error.is_refusal() => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn overdue(backup: &StoreBackup) -> bool {
    let since = backup
        .meta()
        .deletion_timestamp
        .as_ref()
        .map_or(0, |t| t.0.as_second());
    clock::now().0.as_second() > since + REMOVAL_SECS_MAX
}

/// The user that wrote the file, as far as it is still known.
async fn security_of(backup: &StoreBackup, namespace: &str, ctx: &Context) -> PodSecurity {
    let name = &backup.spec.cluster_ref.name;
    let cluster = get::<StoreCluster>(ctx, namespace, name)
        .await
        .ok()
        .flatten();
    cluster.map(|c| c.spec.security).unwrap_or_default()
}

async fn get<K>(ctx: &Context, namespace: &str, name: &str) -> Result<Option<K>, ReconcileError>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned,
{
    Api::<K>::namespaced(ctx.client.clone(), namespace)
        .get_opt(name)
        .await
        .map_err(|error| ReconcileError::Read(format!("{} {name}", K::kind(&())), Box::new(error)))
}
