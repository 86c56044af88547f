//! Five hundred objects through a kube-apiserver: created, watched, listed in pages, deleted.
//! Budget: three minutes.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_e2e::cluster::{Cluster, Guard, Options};
use ballast_e2e::progress::Progress;
use ballast_e2e::wait::wait_for;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::{Api, DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};

const BUDGET: Duration = Duration::from_mins(3);
const OBJECTS: usize = 500;
const PAGE: u32 = 100;

#[tokio::test]
async fn five_hundred_objects_are_created_watched_listed_in_pages_and_deleted() -> Result<()> {
    let _guard = Guard("objects".to_owned());
    tokio::time::timeout(BUDGET, run())
        .await
        .context("over the budget")?
}

async fn run() -> Result<()> {
    let cluster = Cluster::up(Options::api_only("objects", 1)?, &Progress::new()).await?;
    let client = cluster.client(0).await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    wait_for("the default namespace", Duration::from_mins(1), || async {
        Ok(namespaces.get_opt("default").await?.map(|_| ()))
    })
    .await?;

    let objects: Api<ConfigMap> = Api::namespaced(client, "default");
    let names: BTreeSet<String> = (0..OBJECTS)
        .map(|index| format!("object-{index:03}"))
        .collect();
    let start = objects.list(&ListParams::default()).await?;
    let start = start
        .metadata
        .resource_version
        .context("a list has a revision")?;
    let parameters = WatchParams::default().labels("suite=objects");
    let mut events = std::pin::pin!(objects.watch(&parameters, &start).await?);

    for_each(&names, |name| {
        let objects = objects.clone();
        async move {
            Ok(objects
                .create(&PostParams::default(), &object(&name))
                .await
                .map(|_| ())?)
        }
    })
    .await?;
    let mut added = BTreeSet::new();
    while added.len() < OBJECTS {
        match events.next().await.context("the watch ended early")?? {
            WatchEvent::Added(object) => {
                let name = object.metadata.name.context("a name")?;
                ensure!(added.insert(name.clone()), "{name} was added twice");
            }
            other => bail!("while objects were created the watch told {other:?}"),
        }
    }
    ensure!(
        added == names,
        "the watch told other names than were created"
    );

    pages(&objects, &names).await?;

    for_each(&names, |name| {
        let objects = objects.clone();
        async move {
            Ok(objects
                .delete(&name, &DeleteParams::default())
                .await
                .map(|_| ())?)
        }
    })
    .await?;
    let mut deleted = BTreeSet::new();
    while deleted.len() < OBJECTS {
        match events.next().await.context("the watch ended early")?? {
            WatchEvent::Deleted(object) => {
                deleted.extend(object.metadata.name);
            }
            other => bail!("while objects were deleted the watch told {other:?}"),
        }
    }
    let left = objects
        .list(&ListParams::default().labels("suite=objects"))
        .await?;
    ensure!(
        left.items.is_empty(),
        "{} objects are left",
        left.items.len()
    );
    Ok(())
}

/// Reads all pages: each full, counting down, and all of the first one's revision, although
/// something is written in between.
async fn pages(objects: &Api<ConfigMap>, names: &BTreeSet<String>) -> Result<()> {
    let mut seen = BTreeSet::new();
    let mut parameters = ListParams::default().limit(PAGE);
    let mut revision = None;
    loop {
        let page = objects.list(&parameters).await?;
        let expected = revision.get_or_insert_with(|| page.metadata.resource_version.clone());
        ensure!(
            page.metadata.resource_version == *expected,
            "the pages are of different revisions"
        );
        seen.extend(
            page.items
                .into_iter()
                .filter_map(|object| object.metadata.name),
        );
        let Some(token) = page.metadata.continue_.filter(|token| !token.is_empty()) else {
            break;
        };
        let remaining = page
            .metadata
            .remaining_item_count
            .context("more pages, so a count")?;
        // The namespace's own root certificates are not ours, and no controller made them here.
        ensure!(
            seen.len() + usize::try_from(remaining)? == OBJECTS,
            "{} seen and {remaining} remaining are not {OBJECTS}",
            seen.len()
        );
        parameters = ListParams::default().limit(PAGE).continue_token(&token);
        let late = format!("zz-late-{}", seen.len());
        objects
            .create(&PostParams::default(), &late_object(&late))
            .await?;
    }
    ensure!(
        seen == *names,
        "the pages hold {} names, not the {OBJECTS} created",
        seen.len()
    );
    Ok(())
}

fn object(name: &str) -> ConfigMap {
    serde_json::from_value(serde_json::json!({
        "metadata": { "name": name, "labels": { "suite": "objects" } },
        "data": { "text": name.repeat(20) },
    }))
    .expect("the literal is a ConfigMap")
}

/// An object that comes too late for a list that has begun, and that the watch does not select.
fn late_object(name: &str) -> ConfigMap {
    serde_json::from_value(serde_json::json!({ "metadata": { "name": name } }))
        .expect("the literal is a ConfigMap")
}

async fn for_each<F, Fut>(names: &BTreeSet<String>, work: F) -> Result<()>
where
    F: Fn(String) -> Fut,
    Fut: Future<Output = Result<()>>,
{
    stream::iter(names.iter().cloned())
        .map(work)
        .buffer_unordered(20)
        .try_collect()
        .await
}
