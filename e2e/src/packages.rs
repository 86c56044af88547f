//! The Debian packages a node is made of. Nothing is touched when all are there.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::progress::Progress;

/// What a one-node cluster needs beyond a bare Debian 12.
const PACKAGES: [&str; 8] = [
    "containerd",
    "runc",
    "containernetworking-plugins",
    "nftables",
    "iptables",
    "conntrack",
    "iproute2",
    "util-linux",
];

/// Installs what is missing of a node's packages. Needs root; starts no service of theirs, since none is needed.
pub fn ensure(progress: &Progress) -> Result<()> {
    install(&PACKAGES, progress)
}

/// Installs what is missing of these, for a suite that needs more than a node does.
pub fn ensure_named(packages: &[&str]) -> Result<()> {
    install(packages, &Progress::new())
}

fn install(packages: &[&str], progress: &Progress) -> Result<()> {
    let installed = installed(packages)?;
    let missing: Vec<&str> = packages
        .iter()
        .copied()
        .filter(|package| !installed.contains(*package))
        .collect();
    if missing.is_empty() {
        progress.detail("all packages are installed");
        return Ok(());
    }
    progress.detail(&format!("apt-get install {}", missing.join(" ")));
    apt(&["update", "-qq"])?;
    let mut arguments = vec!["install", "-y", "-qq", "--no-install-recommends"];
    arguments.extend(&missing);
    apt(&arguments)
}

/// Those of the packages that are there.
fn installed(packages: &[&str]) -> Result<BTreeSet<String>> {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f=${db:Status-Status} ${Package}\\n"])
        .args(packages)
        .output()
        .context("dpkg-query: this harness runs on Debian 12")?;
    // It fails when it does not know one of them, and still tells of the others.
    let text = String::from_utf8_lossy(&output.stdout);
    let there = text
        .lines()
        .filter_map(|line| line.strip_prefix("installed "));
    Ok(there.map(str::to_owned).collect())
}

fn apt(arguments: &[&str]) -> Result<()> {
    let output = Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .output()
        .context("apt-get: this harness runs on Debian 12")?;
    if !output.status.success() {
        bail!(
            "apt-get {} failed:\n{}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
