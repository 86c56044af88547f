//! The control plane: a store, one or several kube-apiservers on it, the controller manager and the
//! scheduler.
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
const STORE_PORT: u16 = 2379;

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

/// The store's client address as seen inside the namespace.
pub fn store_url() -> String {
    format!("http://127.0.0.1:{STORE_PORT}")
}

/// Starts the store and returns when it serves.
pub fn start_store(
    kind: &StoreKind,
    state: &Path,
    namespace: &NetworkNamespace,
) -> Result<Process> {
    let peer = "http://127.0.0.1:2380";
    let data = state.join("store");
    let process = Program::new("store", kind.program()?)
        .argument("--name=store")
        .argument(format!("--data-dir={}", data.display()))
        .argument(format!("--listen-client-urls={}", store_url()))
        .argument(format!("--advertise-client-urls={}", store_url()))
        .argument(format!("--listen-peer-urls={peer}"))
        .argument(format!("--initial-advertise-peer-urls={peer}"))
        .argument(format!("--initial-cluster=store={peer}"))
        .inside(namespace)
        .start(state)?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, STORE_PORT));
    wait_for_blocking("the store answers /health", Duration::from_mins(1), || {
        process.check()?;
        let answer = namespace.inside(|| http_get(address, "/health"))??;
        Ok(answer.contains("\"true\"").then_some(()))
    })?;
    Ok(process)
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

/// Starts the controller manager and the scheduler.
pub fn start_controllers(
    pki: &Pki,
    state: &Path,
    namespace: &NetworkNamespace,
    server: &str,
) -> Result<Vec<Process>> {
    let file = |flag: &str, name: &str| format!("--{flag}={}", pki.file(name).display());
    let client = |name: &str| -> Result<String> {
        pki.client(name, &format!("system:{name}"), &[])?;
        let path = pki.file(&format!("{name}.kubeconfig"));
        fs::write(&path, pki.kubeconfig(name, server)?)?;
        Ok(format!("--kubeconfig={}", path.display()))
    };
    let manager = Program::new(
        "kube-controller-manager",
        tools::path("kube-controller-manager")?,
    )
    .argument(client("kube-controller-manager")?)
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
    .inside(namespace)
    .start(state)?;
    let scheduler = Program::new("kube-scheduler", tools::path("kube-scheduler")?)
        .argument(client("kube-scheduler")?)
        .arguments(["--bind-address=127.0.0.1", "--leader-elect=false"])
        .inside(namespace)
        .start(state)?;
    Ok(vec![manager, scheduler])
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
