//! The images pods use here, each made from a program that was built before.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::image::Image;
use crate::{paths, tools};

/// Holds a pod's namespaces.
pub const PAUSE: &str = "ballast.dev/e2e/pause:1";
/// Answers HTTP and looks things up from inside a pod.
pub const WEB: &str = "ballast.dev/e2e/web:1";
/// The store and the operator, as a chart of this release names them.
pub const STORE_REPOSITORY: &str = "ballast";
pub const OPERATOR_REPOSITORY: &str = "ballast-operator";
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// The cluster's name server.
pub const COREDNS: &str = "ballast.dev/e2e/coredns:v1.14.7";

/// Writes the images every cluster needs, and returns their archives.
pub fn base() -> Result<Vec<PathBuf>> {
    let pods = tools::path("pods")?;
    let coredns = tools::path("coredns")?;
    Ok(vec![
        cached(
            "pause",
            &Image::of_program(PAUSE, &pods, &["pause"])?,
            &pods,
        )?,
        cached("web", &Image::of_program(WEB, &pods, &["web"])?, &pods)?,
        // It binds port 53, which an ordinary user may not.
        cached(
            "coredns",
            &Image::of_program(COREDNS, &coredns, &[])?.user("0:0"),
            &coredns,
        )?,
    ])
}

/// Writes the images of this project's own programs.
pub fn products() -> Result<Vec<PathBuf>> {
    let product = |repository: &str, program: PathBuf| {
        // What a pod calls `name:tag` containerd knows by its full reference.
        let reference = format!("docker.io/library/{repository}:{RELEASE}");
        let small = stripped(&program, repository)?;
        cached(
            repository,
            &Image::of_program(&reference, &small, &[])?,
            &small,
        )
    };
    Ok(vec![
        product(STORE_REPOSITORY, paths::server_binary())?,
        product(OPERATOR_REPOSITORY, paths::operator_binary())?,
    ])
}

/// A copy without debug information, which is most of the program and of no use in a pod.
fn stripped(program: &Path, name: &str) -> Result<PathBuf> {
    let folder = paths::cache()?.join("images");
    fs::create_dir_all(&folder)?;
    let copy = folder.join(name);
    if newer(&copy, program)? {
        return Ok(copy);
    }
    let fresh = folder.join(format!("{name}.new-{}", std::process::id()));
    let output = Command::new("strip")
        .arg("--strip-debug")
        .arg("-o")
        .arg(&fresh)
        .arg(program)
        .output()
        .context("strip")?;
    if !output.status.success() {
        bail!("strip: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    fs::rename(&fresh, &copy)?;
    Ok(copy)
}

/// An archive in the cache, written again when its program is newer.
fn cached(name: &str, image: &Image, program: &Path) -> Result<PathBuf> {
    let folder = paths::cache()?.join("images");
    fs::create_dir_all(&folder)?;
    let tag = image.reference.replace(['/', ':'], "_");
    let archive = folder.join(format!("{name}-{tag}.tar"));
    if newer(&archive, program)? {
        return Ok(archive);
    }
    image.write(&archive)?;
    Ok(archive)
}

/// Whether a file is there and was written after its source.
fn newer(file: &Path, source: &Path) -> Result<bool> {
    let modified = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified());
    let source = modified(source).with_context(|| source.display().to_string())?;
    Ok(modified(file).is_ok_and(|written| written > source))
}
