//! A whole cluster: what a test stands up, uses and takes down.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node as KubeNode, Pod, ServiceAccount};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::{Deserialize, Serialize};

use crate::control_plane::{self, ApiServer, StoreKind};
use crate::netns::NetworkNamespace;
use crate::node::{self, Node, NodeOptions};
use crate::pki::Pki;
use crate::process::{self, Process, Program};
use crate::progress::Progress;
use crate::wait::wait_for;
use crate::{addons, forward, images, packages, paths, tools};

/// The node's address inside its network namespace. Every cluster has its own, so all use the same.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 1);
const FIRST_API_PORT: u16 = 6443;

/// What to stand up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Options {
    /// Names the state folder, the network namespace and the cgroups.
    pub name: String,
    pub store: StoreKind,
    /// Members of the store.
    #[serde(default = "one")]
    pub store_members: u16,
    /// A node with a kubelet, the controllers and the add-ons; without it only the API.
    pub node: bool,
    pub api_servers: u16,
    /// Further flags of every kube-apiserver.
    pub api_flags: Vec<String>,
}

/// Of a cluster that was recorded before stores had several.
fn one() -> u16 {
    1
}

impl Options {
    /// A full cluster on the store the environment names; see [`StoreKind::from_environment`].
    pub fn full(name: &str) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            store: StoreKind::from_environment()?,
            store_members: 1,
            node: true,
            api_servers: 1,
            api_flags: Vec::new(),
        })
    }

    /// API servers on a store, and nothing else.
    pub fn api_only(name: &str, api_servers: u16) -> Result<Self> {
        Ok(Self {
            node: false,
            api_servers,
            ..Self::full(name)?
        })
    }
}

/// A cluster that runs. It keeps running when this value is dropped; [`Cluster::down`] ends it, and
/// [`Guard`] does so at the end of a test.
pub struct Cluster {
    pub options: Options,
    state: PathBuf,
    namespace: NetworkNamespace,
    node: Option<Node>,
    pki: Pki,
}

/// What is written down for a later `attach`.
#[derive(Serialize, Deserialize)]
struct Facts {
    options: Options,
}

impl Cluster {
    /// Stands a cluster up. Remains of an earlier one of this name are removed first.
    pub async fn up(options: Options, progress: &Progress) -> Result<Self> {
        let state = paths::state(&options.name)?;
        progress.stage("Packages");
        packages::ensure(progress)?;
        progress.stage("Tools");
        let needed: &[&str] = if options.node {
            &["etcd", "pods", "kubernetes", "coredns"]
        } else {
            &["etcd", "kubernetes"]
        };
        tools::ensure(needed, progress)?;
        Self::down_by_name(&options.name)?;
        fs::create_dir_all(&state)?;

        progress.stage("Network namespace and certificates");
        let namespace = NetworkNamespace::named(&format!("ballast-{}", options.name));
        namespace.create(&ADDRESS.to_string(), 24)?;
        let pki = Pki::create(&state.join("pki"))?;
        control_plane::prepare(&pki, ADDRESS)?;

        let mut cluster = Self {
            options,
            state,
            namespace,
            node: None,
            pki,
        };
        cluster.start(progress).await?;
        let facts = Facts {
            options: cluster.options.clone(),
        };
        fs::write(
            cluster.state.join("cluster.json"),
            serde_json::to_vec_pretty(&facts)?,
        )?;
        progress.finish();
        Ok(cluster)
    }

    /// A cluster an earlier run left running.
    pub fn attach(name: &str) -> Result<Self> {
        let state = paths::state(name)?;
        let facts = fs::read(state.join("cluster.json"))
            .with_context(|| format!("no cluster named {name} is up"))?;
        let facts: Facts = serde_json::from_slice(&facts)?;
        let processes = process::recorded(&state)?;
        for process in &processes {
            process.check()?;
        }
        let init = processes
            .into_iter()
            .find(|process| process.name() == "node-init");
        let node = init.map(|init| Node::attach(&facts.options.node_name(), &state, init));
        Ok(Self {
            namespace: NetworkNamespace::named(&format!("ballast-{name}")),
            options: facts.options,
            pki: Pki::open(&state.join("pki")),
            state,
            node,
        })
    }

    async fn start(&mut self, progress: &Progress) -> Result<()> {
        progress.stage("Store");
        let members = self.options.store_members;
        control_plane::start_store(&self.options.store, &self.state, &self.namespace, members)?;
        progress.stage("kube-apiserver");
        for index in 0..self.options.api_servers {
            let name = api_server_name(index);
            let server =
                self.start_api_server(&name, index, &control_plane::store_urls(members))?;
            self.wait_ready(index, &server).await?;
        }
        if self.options.node {
            self.start_node(progress).await
        } else {
            Ok(())
        }
    }

    /// Starts an API server on the given store, with a door to it and a kubeconfig.
    pub fn start_api_server(&self, name: &str, index: u16, store: &str) -> Result<Process> {
        let port = FIRST_API_PORT + index;
        let server = ApiServer {
            name,
            port,
            address: ADDRESS,
            store,
            extra: &self.options.api_flags,
        };
        let process = server.start(&self.pki, &self.state, &self.namespace)?;
        let to = SocketAddr::from((ADDRESS, port));
        let (_, door) = forward::start(&self.state, &format!("door-{name}"), &self.namespace, to)?;
        let config = self.pki.kubeconfig("admin", &format!("https://{door}"))?;
        fs::write(self.kubeconfig(index), config)?;
        Ok(process)
    }

    /// Starts a member of the store that has ended, on its data, and returns when it serves.
    pub fn restart_store_member(&self, index: u16) -> Result<()> {
        let place = (index, self.options.store_members);
        let (kind, state) = (&self.options.store, &self.state);
        let process = control_plane::start_store_member(kind, state, &self.namespace, place)?;
        control_plane::wait_store_member(&process, &self.namespace, index)
    }

    /// Starts the controller manager; a cluster with a node has it already.
    pub fn start_controllers(&self, extra: &[&str]) -> Result<Process> {
        let (pki, state) = (&self.pki, &self.state);
        control_plane::start_controllers(pki, state, &self.namespace, &inside(), extra)
    }

    /// Waits until an API server calls itself ready.
    pub async fn wait_ready(&self, index: u16, server: &Process) -> Result<()> {
        let client = self.client(index).await?;
        wait_for(
            &format!("{} is ready", server.name()),
            Duration::from_mins(2),
            || async {
                server.check()?;
                let request = http::Request::get("/readyz").body(Vec::new())?;
                Ok((client.request_text(request).await? == "ok").then_some(()))
            },
        )
        .await
    }

    async fn start_node(&mut self, progress: &Progress) -> Result<()> {
        let inside = inside();
        let pki = &self.pki;
        progress.stage("Controllers and scheduler");
        self.start_controllers(&[])?;
        control_plane::start_scheduler(pki, &self.state, &self.namespace, &inside)?;
        progress.stage("Node: containerd, kubelet, kube-proxy");
        let node = Node::start(&NodeOptions {
            name: &self.options.node_name(),
            state: &self.state,
            namespace: &self.namespace,
            address: ADDRESS,
            cgroup: &self.options.cgroup(),
            pki,
            server: &inside,
        })?;
        progress.stage("Images");
        for archive in images::base()? {
            node.import(&archive)?;
        }
        progress.stage("Node is Ready");
        let client = self.client(0).await?;
        let nodes: Api<KubeNode> = Api::all(client.clone());
        let name = node.name.clone();
        self.node = Some(node);
        wait_for("the node is Ready", Duration::from_mins(2), || async {
            let node = nodes.get_opt(&name).await?;
            Ok(node
                .and_then(|node| node.status)
                .is_some_and(|status| {
                    status
                        .conditions
                        .iter()
                        .flatten()
                        .any(|c| c.type_ == "Ready" && c.status == "True")
                })
                .then_some(()))
        })
        .await?;
        progress.stage("StorageClass and CoreDNS");
        addons::apply(&self.kubeconfig(0), addons::STORAGE_CLASS)?;
        Program::new("provisioner", paths::harness_binary()?)
            .argument("provision")
            .argument(format!("--kubeconfig={}", self.kubeconfig(0).display()))
            .argument(format!(
                "--folder={}",
                self.state.join("node/volumes").display()
            ))
            .start(&self.state)?;
        addons::apply(&self.kubeconfig(0), addons::COREDNS)?;
        self.wait_available("kube-system", "coredns", Duration::from_mins(2))
            .await?;
        // Pods made before their namespace's account is there are refused.
        let accounts: Api<ServiceAccount> = Api::namespaced(client, "default");
        wait_for(
            "the default ServiceAccount",
            Duration::from_mins(1),
            || async { Ok(accounts.get_opt("default").await?.map(|_| ())) },
        )
        .await
    }

    /// Waits until a Deployment has its pods ready; the error tells what the pods say.
    pub async fn wait_available(
        &self,
        namespace: &str,
        name: &str,
        deadline: Duration,
    ) -> Result<()> {
        let client = self.client(0).await?;
        let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
        let ready = wait_for(
            &format!("{namespace}/{name} is available"),
            deadline,
            || async {
                let deployment = deployments.get(name).await?;
                let wanted = deployment.spec.and_then(|spec| spec.replicas).unwrap_or(1);
                let status = deployment.status.unwrap_or_default();
                let current = status.observed_generation == deployment.metadata.generation;
                let enough = status.available_replicas.unwrap_or(0) >= wanted
                    && status.updated_replicas.unwrap_or(0) >= wanted;
                Ok((current && enough).then_some(()))
            },
        )
        .await;
        if ready.is_err() {
            let pods: Api<Pod> = Api::namespaced(client, namespace);
            let listed = pods.list(&kube::api::ListParams::default()).await?;
            let state = listed
                .items
                .iter()
                .map(|pod| serde_json::to_string(&pod.status).unwrap_or_default())
                .collect::<Vec<_>>()
                .join("\n");
            return ready.with_context(|| format!("pods in {namespace}:\n{state}"));
        }
        ready
    }

    /// A client of the API server of this number.
    pub async fn client(&self, index: u16) -> Result<Client> {
        let config = Kubeconfig::read_from(self.kubeconfig(index))?;
        let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
        Ok(Client::try_from(config)?)
    }

    /// The kubeconfig of the API server of this number, for use from outside.
    pub fn kubeconfig(&self, index: u16) -> PathBuf {
        let number = if index == 0 {
            String::new()
        } else {
            format!("-{}", index + 1)
        };
        self.state.join(format!("kubeconfig{number}"))
    }

    pub fn state(&self) -> &Path {
        &self.state
    }

    /// The network namespace: Service and pod addresses answer inside.
    pub fn namespace(&self) -> &NetworkNamespace {
        &self.namespace
    }

    pub fn node(&self) -> Result<&Node> {
        self.node.as_ref().context("this cluster has no node")
    }

    /// A program of the control plane by its name: `store`, `kube-apiserver`, `kube-apiserver-2`.
    pub fn process(&self, name: &str) -> Result<Process> {
        let found = process::recorded(&self.state)?
            .into_iter()
            .find(|process| process.name() == name);
        found.with_context(|| format!("no {name} runs in {}", self.options.name))
    }

    /// Ends everything and removes every trace.
    pub fn down(self) -> Result<()> {
        Self::down_by_name(&self.options.name)
    }

    /// [`Cluster::down`] for a cluster of which only the name is known. Nothing to do is no error.
    pub fn down_by_name(name: &str) -> Result<()> {
        let state = paths::state(name)?;
        let mut processes = process::recorded(&state)?;
        // Clients first, the store last: nobody waits for a server that is gone.
        processes.reverse();
        for process in &processes {
            let stopped = match process.name() {
                name if name.starts_with(control_plane::STORE_NAME) => {
                    process.stop(Duration::from_secs(10))
                }
                _ => process.kill(),
            };
            stopped.with_context(|| format!("stopping {}", process.name()))?;
        }
        node::remove_cgroups(&cgroup(name))?;
        NetworkNamespace::named(&format!("ballast-{name}")).delete()?;
        match fs::remove_dir_all(&state) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                bail!("{}: {error}", state.display())
            }
            _ => {}
        }
        // Goes only with the last cluster: a folder with another's state in it stays.
        let _ = fs::remove_dir(paths::state_root());
        Ok(())
    }
}

impl Options {
    fn node_name(&self) -> String {
        format!("{}-node", self.name)
    }

    fn cgroup(&self) -> String {
        cgroup(&self.name)
    }
}

/// The first API server, as seen inside the namespace.
fn inside() -> String {
    format!("https://{ADDRESS}:{FIRST_API_PORT}")
}

fn cgroup(name: &str) -> String {
    format!("/ballast-{name}")
}

/// The record's name of the API server of this number.
pub fn api_server_name(index: u16) -> String {
    if index == 0 {
        "kube-apiserver".to_owned()
    } else {
        format!("kube-apiserver-{}", index + 1)
    }
}

/// Takes the cluster of this name down when a test ends, whichever way it ends. With
/// `BALLAST_E2E_KEEP` set it is left for a look.
pub struct Guard(pub String);

impl Drop for Guard {
    fn drop(&mut self) {
        if std::env::var_os("BALLAST_E2E_KEEP").is_some() {
            return;
        }
        if let Err(error) = Cluster::down_by_name(&self.0) {
            tracing::error!("taking {} down: {error:#}", self.0);
        }
    }
}
