//! `up`, `down` and `status`: a cluster kept running for a person.

use std::io::Write as _;

use anyhow::Result;

use crate::cluster::{Cluster, Options};
use crate::control_plane::{self, StoreKind};
use crate::operator::{self, Sample};
use crate::progress::Progress;
use crate::{paths, process, tools};

/// What `up` was asked for.
pub struct UpOptions {
    pub name: String,
    pub store: StoreKind,
    /// Install the operator and the sample too.
    pub operator: bool,
}

/// Prints a line for the person at the terminal.
pub fn say(text: &str) {
    // A closed standard output is no reason to fail.
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Stands everything up and says what there is. A cluster that already runs is kept.
pub async fn up(options: UpOptions) -> Result<()> {
    let progress = Progress::new();
    let cluster = if let Ok(cluster) = Cluster::attach(&options.name) {
        progress.detail("the cluster is up already");
        cluster
    } else {
        let cluster = Options {
            name: options.name,
            store: options.store,
            store_members: 1,
            node: true,
            api_servers: 1,
            api_flags: Vec::new(),
        };
        Cluster::up(cluster, &progress).await?
    };
    let sample = if options.operator {
        Some(operator::install(&cluster, &progress).await?)
    } else {
        None
    };
    progress.finish();
    tell(&cluster, sample.as_ref())
}

/// Takes everything down.
pub fn down(name: &str) -> Result<()> {
    let progress = Progress::new();
    progress.stage(&format!("Taking {name} down"));
    Cluster::down_by_name(name)?;
    progress.finish();
    Ok(())
}

/// Says what runs.
pub fn status(name: &str) -> Result<()> {
    let processes = process::recorded(&paths::state(name)?)?;
    if processes.is_empty() {
        say(&format!("No cluster named {name} is up."));
    }
    for process in processes {
        let state = if process.alive() { "runs" } else { "has ended" };
        say(&format!(
            "{:<26} {:>7} {state:<10} {}",
            process.name(),
            process.id(),
            process.log().display()
        ));
    }
    Ok(())
}

fn tell(cluster: &Cluster, sample: Option<&Sample>) -> Result<()> {
    say("");
    status(&cluster.options.name)?;
    let bin = paths::cache()?.join("bin");
    say("");
    say(&format!(
        "A Kubernetes {} whose control plane is stored in {}:",
        tools::KUBERNETES_VERSION,
        cluster.options.store
    ));
    say(&format!("  export PATH={}:$PATH", bin.display()));
    say(&format!(
        "  export KUBECONFIG={}",
        cluster.kubeconfig(0).display()
    ));
    say("  kubectl get nodes,pods -A");
    if let Some(sample) = sample {
        say("  kubectl get storeclusters,storebackups -A");
        say(&format!("  kubectl describe storecluster {}", sample.name));
        say("");
        say(&format!(
            "A second control plane, stored in the StoreCluster {} at {}:",
            sample.name, sample.url
        ));
        say(&format!(
            "  kubectl --kubeconfig={} get namespaces",
            cluster.kubeconfig(operator::SECOND).display()
        ));
    }
    let namespace = cluster.namespace().nsenter();
    say("");
    say(
        "The store under the first, and any Service or pod address, from inside its network namespace:",
    );
    say(&format!(
        "  nsenter {namespace} etcdctl --endpoints={} endpoint status -w table",
        control_plane::store_url()
    ));
    Ok(())
}
