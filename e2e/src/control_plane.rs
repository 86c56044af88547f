//! The control plane: a store of one or several members, one or several kube-apiservers on it, the
//! controller manager and the scheduler.
//!
//! The store is a parameter: any program that takes etcd's flags and serves etcd's API.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use crate::netns::NetworkNamespace;
use crate::node::POD_NETWORK;
use crate::pki::Pki;
use crate::process::{Process, Program};
use crate::wait::wait_for_blocking;
use crate::{paths, tools};

pub const SERVICE_NETWORK: &str = "10.96.0.0/16";
pub const SERVICE_ADDRESS: &str = "10.96.0.1";
pub const DNS_ADDRESS: &str = "10.96.0.10";
pub const DOMAIN: &str = "cluster.local";
/// The record's name of the store, or of its first member.
pub const STORE_NAME: &str = "store";
const STORE_PORT: u16 = 2379;
/// From one member's ports to the next one's.
const STORE_PORTS_STEP: u16 = 10;

/// What lies under the API servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreKind {
    /// The real etcd, to tell a fault of the harness from one of the store.
    Etcd,
    /// Our server, as built at this path.
    Ballast(PathBuf),
}

impl std::fmt::Display for StoreKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Etcd => "etcd",
            Self::Ballast(_) => "Ballast",
        })
    }
}

impl StoreKind {
    /// What `BALLAST_STORE` names: `etcd`, or the path of a server. Unset it is our server; see
    /// [`paths::server_binary`].
    pub fn from_environment() -> Result<Self> {
        match std::env::var_os("BALLAST_STORE") {
            Some(name) if name == "etcd" => Ok(Self::Etcd),
            Some(path) => Ok(Self::Ballast(path.into())),
            None => Ok(Self::Ballast(paths::server_binary())),
        }
    }

    fn program(&self) -> Result<PathBuf> {
        match self {
            Self::Etcd => tools::path("etcd"),
            Self::Ballast(path) if path.is_file() => Ok(path.clone()),
            Self::Ballast(path) => bail!(
                "there is no server at {}: build it with `cargo build --release -p ballast-server`, \
                 or name it with --store-binary",
                path.display()
            ),
        }
    }
}

/// The client address of the store's first member as seen inside the namespace.
pub fn store_url() -> String {
    format!("http://{}", store_address(0))
}

/// The client addresses of so many members, as `--etcd-servers` takes them.
pub fn store_urls(members: u16) -> String {
    let urls = (0..members).map(|index| format!("http://{}", store_address(index)));
    urls.collect::<Vec<_>>().join(",")
}

/// Where the member of this place serves clients, inside the namespace.
pub fn store_address(index: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, STORE_PORT + index * STORE_PORTS_STEP))
}

/// The record's name of the store's member of this place.
pub fn store_name(index: u16) -> String {
    if index == 0 {
        STORE_NAME.to_owned()
    } else {
        format!("{STORE_NAME}-{}", index + 1)
    }
}

/// Starts the store and returns when all of its members serve.
pub fn start_store(
    kind: &StoreKind,
    state: &Path,
    namespace: &NetworkNamespace,
    members: u16,
) -> Result<()> {
    let started: Vec<Process> = (0..members)
        .map(|index| start_store_member(kind, state, namespace, (index, members)))
        .collect::<Result<_>>()?;
    for (index, process) in (0..).zip(&started) {
        wait_store_member(process, namespace, index)?;
    }
    Ok(())
}

/// Starts the member of this place among so many, on what its directory holds.
pub fn start_store_member(
    kind: &StoreKind,
    state: &Path,
    namespace: &NetworkNamespace,
    (index, members): (u16, u16),
) -> Result<Process> {
    let peer = |index| {
        let mut address = store_address(index);
        address.set_port(address.port() + 1);
        format!("http://{address}")
    };
    let all = (0..members).map(|index| format!("{}={}", store_name(index), peer(index)));
    let all: Vec<String> = all.collect();
    let (name, client, peer) = (
        store_name(index),
        format!("http://{}", store_address(index)),
        peer(index),
    );
    Program::new(&name, kind.program()?)
        .argument(format!("--name={name}"))
        .argument(format!("--data-dir={}", state.join(&name).display()))
        .argument(format!("--listen-client-urls={client}"))
        .argument(format!("--advertise-client-urls={client}"))
        .argument(format!("--listen-peer-urls={peer}"))
        .argument(format!("--initial-advertise-peer-urls={peer}"))
        .argument(format!("--initial-cluster={}", all.join(",")))
        .inside(namespace)
        .start(state)
}

/// Waits until the member of this place serves.
pub fn wait_store_member(
    process: &Process,
    namespace: &NetworkNamespace,
    index: u16,
) -> Result<()> {
    let address = store_address(index);
    let what = format!("{} answers /health", process.name());
    wait_for_blocking(&what, Duration::from_mins(1), || {
        process.check()?;
        let answer = namespace.inside(|| http_get(address, "/health"))??;
        Ok(answer.contains("\"true\"").then_some(()))
    })
}

/// One GET without a client library: the answer's whole text.
pub fn http_get(address: SocketAddr, path: &str) -> Result<String> {
    let limit = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_read_timeout(Some(limit))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split_whitespace().nth(1).context("no answer")?;
    if status != "200" {
        bail!(
            "{path} answered {}",
            answer.lines().next().unwrap_or_default()
        );
    }
    Ok(answer
        .split_once("\r\n\r\n")
        .map(|(_, body)| body.to_owned())
        .unwrap_or_default())
}

/// The certificates and keys every API server of the cluster shares.
pub fn prepare(pki: &Pki, address: Ipv4Addr) -> Result<()> {
    let address = address.to_string();
    pki.api_server_extras()?;
    pki.server(
        "apiserver",
        &[
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
            "localhost",
            "127.0.0.1",
            SERVICE_ADDRESS,
            &address,
        ],
    )?;
    pki.client(
        "apiserver-kubelet",
        "kube-apiserver-kubelet-client",
        &["system:masters"],
    )?;
    pki.client("admin", "admin", &["system:masters"])
}

/// One kube-apiserver.
pub struct ApiServer<'a> {
    pub name: &'a str,
    pub port: u16,
    pub address: Ipv4Addr,
    pub store: &'a str,
    pub extra: &'a [String],
}

impl ApiServer<'_> {
    pub fn start(&self, pki: &Pki, state: &Path, namespace: &NetworkNamespace) -> Result<Process> {
        let file = |flag: &str, name: &str| format!("--{flag}={}", pki.file(name).display());
        Program::new(self.name, tools::path("kube-apiserver")?)
            .argument("--bind-address=0.0.0.0")
            .argument(format!("--secure-port={}", self.port))
            .argument(format!("--advertise-address={}", self.address))
            .argument(format!("--etcd-servers={}", self.store))
            .argument(format!("--service-cluster-ip-range={SERVICE_NETWORK}"))
            .argument("--authorization-mode=Node,RBAC")
            .argument("--enable-admission-plugins=NodeRestriction")
            .argument("--allow-privileged=true")
            .argument("--enable-aggregator-routing=true")
            .argument("--kubelet-preferred-address-types=InternalIP")
            .argument("--service-account-issuer=https://kubernetes.default.svc.cluster.local")
            .argument("--requestheader-allowed-names=front-proxy")
            .argument("--requestheader-username-headers=X-Remote-User")
            .argument("--requestheader-group-headers=X-Remote-Group")
            .argument("--requestheader-extra-headers-prefix=X-Remote-Extra-")
            // A crash of a client leaves watches behind; the test must not wait for their end.
            .argument("--shutdown-delay-duration=0s")
            .argument(file("tls-cert-file", "apiserver.crt"))
            .argument(file("tls-private-key-file", "apiserver.key"))
            .argument(file("client-ca-file", "ca.crt"))
            .argument(file("service-account-key-file", "sa.pub"))
            .argument(file("service-account-signing-key-file", "sa.key"))
            .argument(file("kubelet-client-certificate", "apiserver-kubelet.crt"))
            .argument(file("kubelet-client-key", "apiserver-kubelet.key"))
            .argument(file("requestheader-client-ca-file", "front-proxy-ca.crt"))
            .argument(file("proxy-client-cert-file", "front-proxy.crt"))
            .argument(file("proxy-client-key-file", "front-proxy.key"))
            .arguments(self.extra.iter().cloned())
            .inside(namespace)
            .start(state)
    }
}

/// Makes a component's certificate and kubeconfig; gives the flag that names it.
fn component(pki: &Pki, name: &str, server: &str) -> Result<String> {
    pki.client(name, &format!("system:{name}"), &[])?;
    let path = pki.file(&format!("{name}.kubeconfig"));
    fs::write(&path, pki.kubeconfig(name, server)?)?;
    Ok(format!("--kubeconfig={}", path.display()))
}

/// Starts the controller manager.
pub fn start_controllers(
    pki: &Pki,
    state: &Path,
    namespace: &NetworkNamespace,
    server: &str,
    extra: &[&str],
) -> Result<Process> {
    let file = |flag: &str, name: &str| format!("--{flag}={}", pki.file(name).display());
    Program::new(
        "kube-controller-manager",
        tools::path("kube-controller-manager")?,
    )
    .argument(component(pki, "kube-controller-manager", server)?)
    .argument(file("root-ca-file", "ca.crt"))
    .argument(file("service-account-private-key-file", "sa.key"))
    .argument(file("cluster-signing-cert-file", "ca.crt"))
    .argument(file("cluster-signing-key-file", "ca.key"))
    .argument(format!("--cluster-cidr={POD_NETWORK}"))
    .argument(format!("--service-cluster-ip-range={SERVICE_NETWORK}"))
    .arguments([
        "--allocate-node-cidrs=true",
        "--use-service-account-credentials=true",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    ])
    .arguments(extra.iter().copied())
    .inside(namespace)
    .start(state)
}

/// Starts the scheduler.
pub fn start_scheduler(
    pki: &Pki,
    state: &Path,
    namespace: &NetworkNamespace,
    server: &str,
) -> Result<Process> {
    Program::new("kube-scheduler", tools::path("kube-scheduler")?)
        .argument(component(pki, "kube-scheduler", server)?)
        .arguments(["--bind-address=127.0.0.1", "--leader-elect=false"])
        .inside(namespace)
        .start(state)
}

/// Runs etcdctl against the store under the control plane, and returns what it prints.
pub fn etcdctl(namespace: &NetworkNamespace, arguments: &[&str]) -> Result<String> {
    let output = Command::new("nsenter")
        .arg(namespace.nsenter())
        .arg("--")
        .arg(tools::path("etcdctl")?)
        .arg(format!("--endpoints={}", store_url()))
        .args(arguments)
        .output()
        .context("nsenter")?;
    if !output.status.success() {
        bail!(
            "etcdctl {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
