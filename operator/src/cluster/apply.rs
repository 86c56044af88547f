//! Carries out one step, through Kubernetes or through the store.
//!
//! Objects are written by server-side apply with a fixed field manager, so that fields others own
//! stay theirs. Pods and StoreBackups are created, never patched: they are replaced, not changed.
//! Every deletion names the UID that was observed, so that an object that came in its place lives.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::build::pod::build_pod;
use super::build::service::{build_client_service, build_peer_service};
use super::build::volume::{build_backup_volume, build_data_volume};
use super::build::{CLUSTER_LABEL, CLUSTER_UID_LABEL, MANAGER};
use super::observe::{Observed, pod_endpoint};
use super::plan::{SCHEDULED_AT_ANNOTATION, SCHEDULED_LABEL, ServiceKind, Step};
use super::validate::Desired;
use crate::clock;
use crate::crd::{ClusterRef, StoreBackup, StoreBackupSpec};
use crate::store_client::{StoreClient, StoreError};

/// A step that was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("{what}: {source}")]
    Kube {
        what: String,
        source: Box<kube::Error>,
    },
    #[error("defragmentation: {0}")]
    Defragment(StoreError),
    #[error("disarming NOSPACE: {0}")]
    Disarm(StoreError),
    #[error("{0} was gone before the step began")]
    Vanished(&'static str),
}

impl ApplyError {
    /// Whether Kubernetes refused the request itself, so that asking again will not help.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Kube { source, .. }
            if matches!(&**source, kube::Error::Api(status)
                if matches!(status.code, 400 | 403 | 405 | 422)))
    }
}

/// What a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Nothing,
    /// Something was changed; the sentence is the event's note.
    Changed(String),
    Defragmented {
        before: i64,
        after: i64,
    },
    BackupCreated {
        name: String,
        due: i64,
    },
}

/// Carries out the step.
pub async fn apply(
    client: &Client,
    store: &dyn StoreClient,
    desired: &Desired,
    observed: &Observed,
    step: &Step,
) -> Result<Outcome, ApplyError> {
    let writer = Writer {
        client,
        namespace: &desired.namespace,
    };
    match step {
        Step::Idle | Step::Wait(_) => Ok(Outcome::Nothing),
        Step::ApplyService(kind) => {
            let service = match kind {
                ServiceKind::Client => build_client_service(desired),
                ServiceKind::Peer => build_peer_service(desired),
            };
            writer.server_side_apply::<Service>(&service).await
        }
        Step::CreateVolume | Step::UpdateVolume => {
            writer
                .server_side_apply::<PersistentVolumeClaim>(&build_data_volume(desired))
                .await
        }
        Step::CreateBackupVolume => {
            let built = desired
                .backup
                .as_ref()
                .and_then(|b| build_backup_volume(desired, b));
            let volume = built.ok_or(ApplyError::Vanished("the backup volume's spec"))?;
            writer
                .server_side_apply::<PersistentVolumeClaim>(&volume)
                .await
        }
        Step::CreatePod(start) => writer.create::<Pod>(&build_pod(desired, start)).await,
        Step::DeletePod(fault) => {
            let pod = observed
                .pod
                .as_ref()
                .ok_or(ApplyError::Vanished("the pod"))?;
            writer.delete::<Pod>(pod, &format!("{fault:?}")).await
        }
        Step::Defragment(_) => defragment(store, observed).await,
        Step::DisarmNoSpace => {
            let (endpoint, report) = answering(observed)?;
            store
                .disarm_no_space(&endpoint, report.member_id)
                .await
                .map_err(ApplyError::Disarm)?;
            Ok(Outcome::Changed(
                "NOSPACE lifted: the database is below 90% of its quota".into(),
            ))
        }
        Step::CreateBackup { name, due } => {
            let backup = build_scheduled_backup(desired, name, *due);
            writer.create::<StoreBackup>(&backup).await?;
            Ok(Outcome::BackupCreated {
                name: name.clone(),
                due: *due,
            })
        }
        Step::DeleteBackup { name } => {
            let backup = observed.backups.iter().find(|b| b.name_any() == *name);
            let backup = backup.ok_or(ApplyError::Vanished("the StoreBackup"))?;
            writer
                .delete::<StoreBackup>(backup, "beyond retention")
                .await
        }
    }
}

async fn defragment(store: &dyn StoreClient, observed: &Observed) -> Result<Outcome, ApplyError> {
    let (endpoint, report) = answering(observed)?;
    store
        .defragment(&endpoint)
        .await
        .map_err(ApplyError::Defragment)?;
    let after = store
        .report(&endpoint)
        .await
        .map_err(ApplyError::Defragment)?;
    Ok(Outcome::Defragmented {
        before: report.db_size,
        after: after.db_size,
    })
}

fn answering(
    observed: &Observed,
) -> Result<(String, &crate::store_client::StoreReport), ApplyError> {
    let endpoint = observed.pod.as_ref().and_then(pod_endpoint);
    endpoint
        .zip(observed.store.report())
        .ok_or(ApplyError::Vanished("the store"))
}

/// The StoreBackup of one moment of the schedule. Not owned by the StoreCluster: backups are what is
/// left when it is gone.
pub fn build_scheduled_backup(desired: &Desired, name: &str, due: i64) -> StoreBackup {
    let spec = StoreBackupSpec {
        cluster_ref: ClusterRef {
            name: desired.name.clone(),
        },
    };
    let mut backup = StoreBackup::new(name, spec);
    backup.metadata.namespace = Some(desired.namespace.clone());
    backup.metadata.labels = Some(
        [
            (CLUSTER_LABEL.to_owned(), desired.name.clone()),
            (CLUSTER_UID_LABEL.to_owned(), desired.uid.clone()),
            (SCHEDULED_LABEL.to_owned(), "true".to_owned()),
        ]
        .into(),
    );
    let moment = clock::at(due).0.to_string();
    backup.metadata.annotations = Some([(SCHEDULED_AT_ANNOTATION.to_owned(), moment)].into());
    backup
}

/// Writes to one namespace. Shared with the pipeline of StoreBackups.
pub struct Writer<'a> {
    pub client: &'a Client,
    pub namespace: &'a str,
}

impl Writer<'_> {
    fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), self.namespace)
    }

    /// Writes our fields and leaves the others.
    pub async fn server_side_apply<K>(&self, object: &K) -> Result<Outcome, ApplyError>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + Serialize
            + DeserializeOwned,
    {
        let name = object.name_any();
        self.api::<K>()
            .patch(
                &name,
                &PatchParams::apply(MANAGER).force(),
                &Patch::Apply(object),
            )
            .await
            .map_err(|source| failed::<K>("apply", &name, source))?;
        Ok(changed::<K>("applied", &name))
    }

    /// Creates; one that is there already is what an earlier pass created.
    pub async fn create<K>(&self, object: &K) -> Result<Outcome, ApplyError>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + Serialize
            + DeserializeOwned,
    {
        let name = object.name_any();
        let params = PostParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PostParams::default()
        };
        match self.api::<K>().create(&params, object).await {
            Ok(_) => Ok(changed::<K>("created", &name)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Outcome::Nothing),
            Err(source) => Err(failed::<K>("create", &name, source)),
        }
    }

    /// Deletes that very object; one that is gone already is fine.
    pub async fn delete<K>(&self, object: &K, why: &str) -> Result<Outcome, ApplyError>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        let name = object.name_any();
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: object.uid(),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match self.api::<K>().delete(&name, &params).await {
            Ok(_) => Ok(changed::<K>(&format!("deleted ({why})"), &name)),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
                Ok(Outcome::Nothing)
            }
            Err(source) => Err(failed::<K>("delete", &name, source)),
        }
    }
}

fn changed<K: Resource<DynamicType = ()>>(what: &str, name: &str) -> Outcome {
    Outcome::Changed(format!("{what} {} {name}", K::kind(&())))
}

fn failed<K: Resource<DynamicType = ()>>(
    what: &str,
    name: &str,
    source: kube::Error,
) -> ApplyError {
    ApplyError::Kube {
        what: format!("cannot {what} {} {name}", K::kind(&())),
        source: Box::new(source),
    }
}
