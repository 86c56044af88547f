//! `up`, `down` and `status`: a cluster kept running for a person.

use std::io::Write as _;

use anyhow::{Context as _, Result};

use crate::cluster::{Cluster, Options};
use crate::control_plane::StoreKind;
use crate::progress::Progress;
use crate::{packages, paths, process, tools};

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
    progress.stage("Packages");
    packages::ensure(&progress)?;
    if let Ok(cluster) = Cluster::attach(&options.name) {
        progress.finish();
        progress.detail("the cluster is up already");
        return tell(&cluster);
    }
    let cluster = Cluster::up(
        Options {
            name: options.name,
            store: options.store,
            node: true,
            api_servers: 1,
            api_flags: Vec::new(),
        },
        &progress,
    )
    .await?;
    progress.finish();
    tell(&cluster)
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

fn tell(cluster: &Cluster) -> Result<()> {
    say("");
    status(&cluster.options.name)?;
    let kubectl = tools::path("kubectl").context("kubectl was built before")?;
    say("");
    say(&format!(
        "Try:  export KUBECONFIG={}",
        cluster.kubeconfig(0).display()
    ));
    say(&format!("      {} get nodes,pods -A", kubectl.display()));
    Ok(())
}
