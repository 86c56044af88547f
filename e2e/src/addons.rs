//! What a bare cluster lacks before ordinary workloads run on it: a default StorageClass and the
//! name server.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::tools;

/// The name of the default StorageClass.
pub const STORAGE_CLASS_NAME: &str = "node-local";
pub const STORAGE_CLASS: &str = include_str!("manifests/storage-class.yaml");
pub const COREDNS: &str = include_str!("manifests/coredns.yaml");

/// Applies a manifest as `kubectl apply` does.
pub fn apply(kubeconfig: &Path, manifest: &str) -> Result<()> {
    kubectl(
        kubeconfig,
        &["apply", "--server-side", "--force-conflicts", "-f", "-"],
        manifest,
    )
    .map(|_| ())
}

/// Runs kubectl with this input, and returns what it prints.
pub fn kubectl(kubeconfig: &Path, arguments: &[&str], input: &str) -> Result<String> {
    run(
        Command::new(tools::path("kubectl")?)
            .env("KUBECONFIG", kubeconfig)
            .args(arguments),
        input,
    )
}

/// Runs helm, and returns what it prints.
pub fn helm(kubeconfig: &Path, arguments: &[&str]) -> Result<String> {
    run(
        Command::new(tools::path("helm")?)
            .env("KUBECONFIG", kubeconfig)
            .args(arguments),
        "",
    )
}

fn run(command: &mut Command, input: &str) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{command:?}"))?;
    let mut stdin = child.stdin.take().expect("standard input is a pipe");
    // A program that ends without reading says why on its standard error.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!(
            "{command:?} failed:\n{}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
