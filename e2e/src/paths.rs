//! Where the harness keeps its things: a cache that outlives everything, and one folder of state
//! per cluster that `down` deletes.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Built tools and images, kept between runs: `$BALLAST_CACHE`, or `~/.cache/ballast`.
pub fn cache() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("BALLAST_CACHE") {
        return Ok(dir.into());
    }
    let home = std::env::var_os("HOME").context("neither BALLAST_CACHE nor HOME is set")?;
    Ok(Path::new(&home).join(".cache/ballast"))
}

/// The folder above all clusters' state: `$BALLAST_STATE`, or `/var/tmp/ballast-e2e`.
pub fn state_root() -> PathBuf {
    std::env::var_os("BALLAST_STATE").map_or_else(|| "/var/tmp/ballast-e2e".into(), PathBuf::from)
}

/// The state of the cluster of this name.
pub fn state(name: &str) -> Result<PathBuf> {
    let dir = state_root().join(name);
    // A node mounts its own folders over these, which would hide the state from it.
    for hidden in ["/tmp", "/run", "/var/lib", "/var/log"] {
        if dir.starts_with(hidden) {
            bail!(
                "the state folder {} must not be below {hidden}: set BALLAST_STATE",
                dir.display()
            );
        }
    }
    Ok(dir)
}

/// The root of the project's sources: Go modules, charts and samples are read from it at run time.
/// It is the clone the caller stands in, or else the one this program was built from.
pub fn repository() -> PathBuf {
    let here = std::env::current_dir().unwrap_or_default();
    let clone = here
        .ancestors()
        .find(|folder| folder.join("e2e/go").is_dir());
    let built_from = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    clone.map_or_else(built_from, Path::to_path_buf)
}

/// The `ballast-e2e` binary: this program, or the one built beside the test that is running.
pub fn harness_binary() -> Result<PathBuf> {
    let me = std::env::current_exe().context("the path of this program")?;
    let folder = me.parent().context("a program lies in a folder")?;
    let candidates = [folder.join("ballast-e2e"), folder.join("../ballast-e2e")];
    for candidate in candidates {
        if candidate.is_file() {
            return candidate
                .canonicalize()
                .with_context(|| candidate.display().to_string());
        }
    }
    bail!(
        "no ballast-e2e beside {}: build it with `cargo build -p ballast-e2e`",
        me.display()
    )
}

/// The server under test: `$BALLAST_BIN`, or the release build's.
pub fn server_binary() -> PathBuf {
    std::env::var_os("BALLAST_BIN").map_or_else(|| release_binary("ballast"), PathBuf::from)
}

/// The operator: beside the server.
pub fn operator_binary() -> PathBuf {
    server_binary().with_file_name("ballast-operator")
}

fn release_binary(name: &str) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| repository().join("target"), |dir| repository().join(dir));
    target.join("release").join(name)
}
