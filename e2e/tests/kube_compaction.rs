//! Three kube-apiservers on one store elect their compactor by a compare-and-swap on
//! `compact_rev_key`. Budget: four minutes.
//!
//! The key's version is the servers' clock: it must rise once per interval whatever their number,
//! go on when the one that raises it is killed, and the revisions below must be gone.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_e2e::cluster::{Cluster, Guard, Options, api_server_name};
use ballast_e2e::control_plane::etcdctl;
use ballast_e2e::progress::Progress;
use ballast_e2e::wait::{now, wait_for};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams, PostParams};

const BUDGET: Duration = Duration::from_mins(4);
const SERVERS: u16 = 3;
const INTERVAL: Duration = Duration::from_secs(10);

#[tokio::test]
async fn three_api_servers_compact_once_per_interval_and_survive_the_compactors_death() -> Result<()>
{
    let _guard = Guard("compaction".to_owned());
    tokio::time::timeout(BUDGET, run())
        .await
        .context("over the budget")?
}

async fn run() -> Result<()> {
    let mut options = Options::api_only("compaction", SERVERS)?;
    options.api_flags = vec![
        format!("--etcd-compaction-interval={}s", INTERVAL.as_secs()),
        // The line that says who compacted is written at this level.
        "--vmodule=compact=4".to_owned(),
    ];
    let cluster = Cluster::up(options, &Progress::new()).await?;
    let old_page = begin_paging(&cluster).await?;
    let old_revision = revision(&cluster)?;

    // The servers start seconds apart and first agree on the clock.
    wait_for("the first compaction", 6 * INTERVAL, || async {
        Ok(compactors(&cluster)?
            .iter()
            .any(|&count| count > 0)
            .then_some(()))
    })
    .await?;

    let before = compactors(&cluster)?;
    let rises = observe(&cluster, 4 * INTERVAL).await?;
    ensure!(
        (3..=5).contains(&rises.len()),
        "in four intervals the version rose at {rises:?}"
    );
    for pair in rises.windows(2) {
        let gap = pair[1].saturating_sub(pair[0]);
        ensure!(
            gap >= INTERVAL.mul_f64(0.8) && gap <= INTERVAL.mul_f64(1.5),
            "the version rises at {rises:?}, not once per interval"
        );
    }
    let after = compactors(&cluster)?;
    let active: Vec<u16> = (0..SERVERS)
        .filter(|&index| after[usize::from(index)] > before[usize::from(index)])
        .collect();
    let [compactor] = active[..] else {
        bail!("{active:?} compacted in the same four intervals")
    };

    answers_compacted(&cluster, old_revision, &old_page, (compactor + 1) % SERVERS).await?;

    let version = compact_version(&cluster)?;
    cluster.process(&api_server_name(compactor))?.kill()?;
    wait_for("another server compacts", 4 * INTERVAL, || async {
        let others = compactors(&cluster)?;
        let took_over = (0..SERVERS).any(|index| {
            index != compactor && others[usize::from(index)] > after[usize::from(index)]
        });
        Ok((took_over && compact_version(&cluster)? > version).then_some(()))
    })
    .await?;
    let rises = observe(&cluster, 3 * INTERVAL).await?;
    ensure!(
        (2..=4).contains(&rises.len()),
        "after the death the version rose at {rises:?}"
    );
    Ok(())
}

/// Writes a few objects and reads the first page of them: the token of the second.
async fn begin_paging(cluster: &Cluster) -> Result<String> {
    let objects: Api<ConfigMap> = Api::namespaced(cluster.client(0).await?, "kube-system");
    for index in 0..5 {
        let object = serde_json::json!({ "metadata": { "name": format!("page-{index}") } });
        let object = serde_json::from_value(object)?;
        wait_for(
            "the namespace takes objects",
            Duration::from_secs(30),
            || async {
                Ok(objects
                    .create(&PostParams::default(), &object)
                    .await
                    .map(Some)?)
            },
        )
        .await?;
    }
    let page = objects.list(&ListParams::default().limit(2)).await?;
    page.metadata
        .continue_
        .context("five objects are more than one page of two")
}

/// An old revision is refused by the store, and by an API server that did not compact itself.
async fn answers_compacted(
    cluster: &Cluster,
    revision: i64,
    token: &str,
    server: u16,
) -> Result<()> {
    let read = etcdctl(
        cluster.namespace(),
        &[
            "get",
            "/registry/",
            "--prefix",
            "--limit=1",
            &format!("--rev={revision}"),
        ],
    );
    let error = format!("{:#}", read.err().context("an old revision was readable")?);
    ensure!(
        error.contains("required revision has been compacted"),
        "etcdctl says: {error}"
    );

    let objects: Api<ConfigMap> = Api::namespaced(cluster.client(server).await?, "kube-system");
    let parameters = ListParams::default().limit(2).continue_token(token);
    wait_for("the old page has expired", 2 * INTERVAL, || async {
        match objects.list(&parameters).await {
            Err(kube::Error::Api(status)) if status.code == 410 => Ok(Some(())),
            Err(other) => Err(other.into()),
            Ok(_) => Ok(None),
        }
    })
    .await
}

/// The moments, counted from the start, at which the key's version rose by one.
async fn observe(cluster: &Cluster, time: Duration) -> Result<Vec<Duration>> {
    let start = now();
    let mut version = compact_version(cluster)?;
    let mut rises = Vec::new();
    while start.elapsed() < time {
        let seen = compact_version(cluster)?;
        if seen > version {
            ensure!(
                seen == version + 1,
                "the version went from {version} to {seen} at once"
            );
            rises.push(start.elapsed());
            version = seen;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(rises)
}

/// How often each server has compacted, by its own log.
fn compactors(cluster: &Cluster) -> Result<Vec<usize>> {
    (0..SERVERS)
        .map(|index| {
            let log = cluster
                .state()
                .join("log")
                .join(format!("{}.log", api_server_name(index)));
            Ok(fs::read_to_string(&log)?
                .matches("etcd: compacted rev")
                .count())
        })
        .collect()
}

fn compact_version(cluster: &Cluster) -> Result<i64> {
    let answer = etcdctl(
        cluster.namespace(),
        &["get", "compact_rev_key", "--write-out=json"],
    )?;
    let answer: serde_json::Value = serde_json::from_str(&answer)?;
    Ok(answer["kvs"][0]["version"].as_i64().unwrap_or(0))
}

fn revision(cluster: &Cluster) -> Result<i64> {
    let answer = etcdctl(cluster.namespace(), &["get", "nothing", "--write-out=json"])?;
    let answer: serde_json::Value = serde_json::from_str(&answer)?;
    answer["header"]["revision"]
        .as_i64()
        .context("an answer has a revision")
}
