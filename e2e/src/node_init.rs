//! Process 1 of a node: the hidden subcommand `node-init`, started in mount, process, host name and
//! network namespaces of its own.
//!
//! It gives the node the folders a node has at the places where they are expected, starts
//! containerd, the kubelet and what else the node runs, starts each again when it ends, and reaps.
//! When this process is killed the kernel ends everything in the node and drops its mounts: that is
//! the power switch.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive, mount_change,
    mount_move, unmount,
};
use rustix::process::{WaitOptions, wait};
use serde::{Deserialize, Serialize};

use crate::wait::now;

/// What a node is told when it starts; a JSON file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeSpec {
    pub host_name: String,
    /// The node's own folders; see [`set_up_mounts`] for what appears where.
    pub folder: PathBuf,
    /// The cgroup of the node's own programs, below each controller.
    pub cgroup: String,
    /// In the order in which they are started.
    pub programs: Vec<NodeProgram>,
}

/// A program the node keeps running.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeProgram {
    pub name: String,
    pub path: PathBuf,
    pub arguments: Vec<String>,
    /// It is started when this file exists.
    pub needs: Option<PathBuf>,
    pub log: PathBuf,
}

/// Runs the node. Returns only with an error.
pub fn run(spec: &Path) -> Result<()> {
    let spec: NodeSpec =
        serde_json::from_slice(&fs::read(spec)?).context("the node's description")?;
    rustix::system::sethostname(spec.host_name.as_bytes()).context("the host name")?;
    join_cgroups(&spec.cgroup)?;
    set_up_mounts(&spec.folder)?;
    supervise(&spec.programs)
}

fn join_cgroups(cgroup: &str) -> Result<()> {
    for controller in crate::node::cgroup_controllers()? {
        let procs = controller
            .join(cgroup.trim_start_matches('/'))
            .join("cgroup.procs");
        // Zero is the writer itself, whatever its id is called outside.
        fs::write(&procs, "0").with_context(|| procs.display().to_string())?;
    }
    Ok(())
}

/// Mounts, all private to the node: /proc and /sys of its own namespaces with the cgroups put back;
/// empty /run, /tmp, /var/lib and /var/log; in these the node's own folders.
fn set_up_mounts(folder: &Path) -> Result<()> {
    mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )
    .context("making the mounts private")?;
    let hold = folder.join("cgroup");
    fs::create_dir_all(&hold)?;
    mount_bind_recursive("/sys/fs/cgroup", &hold).context("holding the cgroups")?;
    let plain = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("sysfs", "/sys", "sysfs", plain, None).context("/sys")?;
    mount_move(&hold, "/sys/fs/cgroup").or_else(|_| -> Result<()> {
        // A kernel may refuse to move a mount with submounts; binding does the same.
        mount_bind_recursive(&hold, "/sys/fs/cgroup").context("the cgroups")?;
        unmount(&hold, UnmountFlags::DETACH).context("the held cgroups")
    })?;
    mount("proc", "/proc", "proc", plain, None).context("/proc")?;

    for (path, mode) in [
        ("/run", c"mode=755"),
        ("/tmp", c"mode=1777"),
        ("/var/lib", c"mode=755"),
        ("/var/log", c"mode=755"),
    ] {
        mount(
            "tmpfs",
            path,
            "tmpfs",
            MountFlags::NOSUID | MountFlags::NODEV,
            Some(mode),
        )
        .with_context(|| path.to_owned())?;
    }
    for (own, place) in [
        ("containerd", "/var/lib/containerd"),
        ("kubelet", "/var/lib/kubelet"),
        ("cni", "/var/lib/cni"),
        ("pod-logs", "/var/log/pods"),
    ] {
        let own = folder.join(own);
        fs::create_dir_all(&own)?;
        fs::create_dir_all(place)?;
        mount_bind_recursive(&own, place).with_context(|| place.to_owned())?;
    }
    // Volumes mounted by the kubelet must appear in containers that are already running.
    mount_change(
        "/",
        MountPropagationFlags::SHARED | MountPropagationFlags::REC,
    )
    .context("making the mounts shared")
}

/// Never returns without an error: a node runs until it is killed.
fn supervise(programs: &[NodeProgram]) -> Result<()> {
    let mut running: BTreeMap<u32, usize> = BTreeMap::new();
    let mut not_before: Vec<Instant> = vec![now(); programs.len()];
    loop {
        while let Ok(Some((pid, _))) = wait(WaitOptions::NOHANG) {
            if let Some(index) = running.remove(&pid.as_raw_nonzero().get().cast_unsigned()) {
                not_before[index] = now() + Duration::from_secs(1);
            }
        }
        for (index, program) in programs.iter().enumerate() {
            let waits = running.values().any(|&other| other == index)
                || now() < not_before[index]
                || program.needs.as_ref().is_some_and(|needs| !needs.exists());
            if !waits {
                running.insert(start(program)?, index);
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn start(program: &NodeProgram) -> Result<u32> {
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&program.log)
        .with_context(|| program.log.display().to_string())?;
    let child = Command::new(&program.path)
        .args(&program.arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| program.path.display().to_string())?;
    Ok(child.id())
}
