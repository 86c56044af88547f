//! One node: containerd, the kubelet and kube-proxy behind a process 1 of their own.
//!
//! The settings are those a machine without an image registry, without cgroup v2 and without the
//! capability to lower a process's OOM score needs.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use serde_json::json;

use crate::images::PAUSE;
use crate::netns::NetworkNamespace;
use crate::node_init::{NodeProgram, NodeSpec};
use crate::pki::Pki;
use crate::process::{Process, Program};
use crate::tools;
use crate::wait::wait_for_blocking;
use crate::{control_plane, paths};

/// The addresses pods get.
pub const POD_NETWORK: &str = "10.244.0.0/16";
const POD_SUBNET: &str = "10.244.0.0/24";
const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";

/// A node of a cluster.
pub struct Node {
    pub name: String,
    folder: PathBuf,
    init: Process,
}

/// What a node needs from its cluster.
pub struct NodeOptions<'a> {
    pub name: &'a str,
    pub state: &'a Path,
    pub namespace: &'a NetworkNamespace,
    pub address: Ipv4Addr,
    pub cgroup: &'a str,
    pub pki: &'a Pki,
    /// Where the node finds the API.
    pub server: &'a str,
}

impl Node {
    /// Starts the node and returns when containerd answers; the kubelet registers on its own.
    pub fn start(options: &NodeOptions<'_>) -> Result<Self> {
        let folder = options.state.join("node");
        let logs = options.state.join("log");
        fs::create_dir_all(&folder)?;
        fs::create_dir_all(&logs)?;
        make_cgroups(options.cgroup)?;
        let programs = options.configure(&folder, &logs)?;
        let spec = NodeSpec {
            host_name: options.name.to_owned(),
            folder: folder.clone(),
            cgroup: format!("{}/system", options.cgroup),
            programs,
        };
        let spec_path = folder.join("init.json");
        fs::write(&spec_path, serde_json::to_vec_pretty(&spec)?)?;
        let init = Program::new("node-init", "/usr/bin/unshare".into())
            .arguments([
                "--mount",
                "--pid",
                "--uts",
                "--ipc",
                "--fork",
                "--kill-child=KILL",
                "--",
            ])
            .argument(paths::harness_binary()?.to_string_lossy())
            .argument("node-init")
            .argument(spec_path.to_string_lossy())
            .inside(options.namespace)
            .start(options.state)?;
        let node = Self {
            name: options.name.to_owned(),
            folder,
            init,
        };
        wait_for_blocking("containerd answers", Duration::from_mins(1), || {
            node.init.check()?;
            node.ctr(&["version"]).map(|_| Some(()))
        })?;
        Ok(node)
    }

    /// A node that an earlier run started.
    pub fn attach(name: &str, state: &Path, init: Process) -> Self {
        Self {
            name: name.to_owned(),
            folder: state.join("node"),
            init,
        }
    }

    /// Makes an image known to the node, unless this very archive was imported before.
    pub fn import(&self, archive: &Path) -> Result<()> {
        let name = archive.file_name().context("an archive has a name")?;
        let written = fs::metadata(archive)?
            .modified()?
            .duration_since(UNIX_EPOCH)?;
        let stamp = format!("{}", written.as_nanos());
        let marks = self.folder.join("imported");
        let mark = marks.join(name);
        if fs::read_to_string(&mark).is_ok_and(|imported| imported == stamp) {
            return Ok(());
        }
        let path = archive
            .to_str()
            .context("the archive's path is not UTF-8")?;
        self.ctr(&["images", "import", path])?;
        fs::create_dir_all(&marks)?;
        Ok(fs::write(mark, stamp)?)
    }

    /// Containerd's own client, for the namespace in which the kubelet's containers are.
    pub fn ctr(&self, arguments: &[&str]) -> Result<String> {
        let mut all = vec!["ctr", "--namespace=k8s.io"];
        all.extend(arguments);
        self.run(&all)
    }

    /// Runs a program in the node's namespaces and returns what it prints.
    pub fn run(&self, command: &[&str]) -> Result<String> {
        let pid = self.inner_pid()?;
        let output = Command::new("nsenter")
            .args([
                &format!("--target={pid}"),
                "--mount",
                "--net",
                "--uts",
                "--ipc",
                "--",
            ])
            .args(command)
            .output()
            .context("nsenter")?;
        if !output.status.success() {
            bail!(
                "{} failed: {}",
                command.join(" "),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The node's process 1, seen from outside: the only child of `unshare`.
    fn inner_pid(&self) -> Result<u32> {
        let id = self.init.id();
        let path = format!("/proc/{id}/task/{id}/children");
        let children = fs::read_to_string(&path).with_context(|| path.clone())?;
        let first = children.split_whitespace().next();
        first
            .context("the node has no process 1")?
            .parse()
            .context(path)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// As pulling the plug: everything in the node is killed at once.
    pub fn power_off(&self) -> Result<()> {
        self.init.kill()
    }
}

impl NodeOptions<'_> {
    /// Writes the configuration of the node's programs.
    fn configure(&self, folder: &Path, logs: &Path) -> Result<Vec<NodeProgram>> {
        let socket = PathBuf::from(CONTAINERD_SOCKET);
        let program = |name: &str, path: PathBuf, arguments: Vec<String>, needs| NodeProgram {
            name: name.to_owned(),
            path,
            arguments,
            needs,
            log: logs.join(format!("{name}.log")),
        };
        let containerd = Self::containerd(folder)?;
        let kubelet = self.kubelet(folder)?;
        let proxy = self.proxy(folder)?;
        let flag = |name: &str, value: &Path| format!("--{name}={}", value.display());
        Ok(vec![
            program(
                "containerd",
                "/usr/bin/containerd".into(),
                vec![flag("config", &containerd)],
                None,
            ),
            program(
                "kubelet",
                tools::path("kubelet")?,
                vec![
                    flag("config", &kubelet),
                    flag("kubeconfig", &folder.join("kubelet.kubeconfig")),
                    format!("--hostname-override={}", self.name),
                    format!("--node-ip={}", self.address),
                ],
                Some(socket.clone()),
            ),
            program(
                "kube-proxy",
                tools::path("kube-proxy")?,
                vec![flag("config", &proxy)],
                Some(socket),
            ),
        ])
    }

    fn containerd(folder: &Path) -> Result<PathBuf> {
        let cni = folder.join("cni.d");
        fs::create_dir_all(&cni)?;
        let network = json!({
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": true,
                    "ipMasq": false,
                    "hairpinMode": true,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{ "subnet": POD_SUBNET }]],
                        "routes": [{ "dst": "0.0.0.0/0" }],
                    },
                },
                { "type": "portmap", "capabilities": { "portMappings": true } },
            ],
        });
        fs::write(cni.join("10-pods.conflist"), network.to_string())?;
        // restrict_oom_score_adj: without it runc dies where the score may not be lowered.
        // netns_mounts_under_state_dir: the pods' namespaces stay in the node's own /run.
        let config = format!(
            r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{}"
"#,
            cni.display()
        );
        let path = folder.join("containerd.toml");
        fs::write(&path, config)?;
        Ok(path)
    }

    fn kubelet(&self, folder: &Path) -> Result<PathBuf> {
        let user = format!("system:node:{}", self.name);
        self.pki.client("kubelet", &user, &["system:nodes"])?;
        let config = self.pki.kubeconfig("kubelet", self.server)?;
        fs::write(folder.join("kubelet.kubeconfig"), config)?;
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": { "enabled": false },
                "webhook": { "enabled": true },
                "x509": { "clientCAFile": self.pki.file("ca.crt") },
            },
            "authorization": { "mode": "Webhook" },
            "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": format!("{}/pods", self.cgroup),
            "failCgroupV1": false,
            "failSwapOn": false,
            "localStorageCapacityIsolation": true,
            "oomScoreAdj": 0,
            "resolvConf": "",
            "clusterDNS": [control_plane::DNS_ADDRESS],
            "clusterDomain": control_plane::DOMAIN,
            "volumePluginDir": folder.join("volume-plugins"),
            // The machine is shared with builds: its disk must not decide over pods.
            "evictionHard": { "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%" },
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "nodeStatusUpdateFrequency": "5s",
            "syncFrequency": "10s",
            "shutdownGracePeriod": "0s",
        });
        let path = folder.join("kubelet.json");
        fs::write(&path, config.to_string())?;
        Ok(path)
    }

    fn proxy(&self, folder: &Path) -> Result<PathBuf> {
        self.pki.client("kube-proxy", "system:kube-proxy", &[])?;
        let client = folder.join("kube-proxy.kubeconfig");
        fs::write(&client, self.pki.kubeconfig("kube-proxy", self.server)?)?;
        let config = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": { "kubeconfig": client },
            "hostnameOverride": self.name,
            "clusterCIDR": POD_NETWORK,
            "oomScoreAdj": 0,
            // It may not raise the machine's limits, and need not.
            "conntrack": { "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s" },
        });
        let path = folder.join("kube-proxy.json");
        fs::write(&path, config.to_string())?;
        Ok(path)
    }
}

/// The cgroup hierarchies in use: one folder per v1 controller, or the single v2 one.
pub fn cgroup_controllers() -> Result<Vec<PathBuf>> {
    let mut folders = cgroup_mounts()?;
    // Beside v1 controllers the v2 hierarchy has none, and nothing is placed in it.
    if folders.len() > 1 {
        folders.retain(|folder| !folder.ends_with("unified"));
    }
    Ok(folders)
}

/// Every mounted cgroup hierarchy.
fn cgroup_mounts() -> Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let folders: Vec<PathBuf> = mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (place, kind) = (fields.next()?, fields.next()?);
            let ours = place.starts_with("/sys/fs/cgroup") && kind.starts_with("cgroup");
            ours.then(|| PathBuf::from(place))
        })
        .collect();
    if folders.is_empty() {
        bail!("no cgroups are mounted below /sys/fs/cgroup");
    }
    Ok(folders)
}

/// Makes the node's cgroup in every hierarchy, with one part for its programs and one for its pods:
/// a kubelet kills what it does not know below its root.
fn make_cgroups(cgroup: &str) -> Result<()> {
    for controller in cgroup_controllers()? {
        for part in ["", "/system", "/pods"] {
            let folder = controller
                .join(cgroup.trim_start_matches('/'))
                .join(part.trim_start_matches('/'));
            fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
            let parent = folder.parent().expect("a cgroup has a parent");
            // A v1 cpuset is empty at first, and nothing can run in it.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let inherited = parent.join(file);
                if folder.join("cpuset.cpu_exclusive").exists() && inherited.exists() {
                    fs::write(folder.join(file), fs::read(inherited)?)?;
                }
            }
            // In v2 a child has the controllers its parent hands down.
            if part.is_empty() && parent.join("cgroup.subtree_control").exists() {
                for level in [parent, &folder] {
                    let all = fs::read_to_string(level.join("cgroup.controllers"))?;
                    for name in all.split_whitespace() {
                        fs::write(level.join("cgroup.subtree_control"), format!("+{name}"))?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Removes the node's cgroups once nothing runs in them.
pub fn remove_cgroups(cgroup: &str) -> Result<()> {
    // The kubelet leaves its folders in a v2 hierarchy it makes no use of, too.
    for controller in cgroup_mounts()? {
        let folder = controller.join(cgroup.trim_start_matches('/'));
        wait_for_blocking(
            &format!("{} is empty", folder.display()),
            Duration::from_secs(20),
            || {
                remove_tree(&folder)?;
                Ok((!folder.exists()).then_some(()))
            },
        )?;
    }
    Ok(())
}

fn remove_tree(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(folder).with_context(|| folder.display().to_string())
}
