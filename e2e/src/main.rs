//! The harness's command line. `up` and `down` are what `make up` and `make down` call.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use ballast_e2e::control_plane::StoreKind;
use ballast_e2e::progress::Progress;
use ballast_e2e::up::{self, UpOptions};
use ballast_e2e::{addons, forward, node_init, packages, paths, provisioner, suites, tools};
use ballast_e2e::{bench, diff, latency, lossy, nemesis, peers, planted};
use clap::{Parser, Subcommand};

/// A real Kubernetes on a store under test, on one machine.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Stand up a one-node Kubernetes with the operator and a sample cluster on it.
    Up {
        /// Names the cluster; several can stand side by side.
        #[arg(long, default_value = "up")]
        name: String,
        /// What lies under kube-apiserver: `ballast` or `etcd`.
        #[arg(long, default_value = "ballast")]
        store: String,
        /// The server to use for `ballast`; by default the release build's.
        #[arg(long)]
        store_binary: Option<PathBuf>,
        /// Stop when the cluster itself is ready.
        #[arg(long)]
        without_operator: bool,
    },
    /// Take a cluster down and remove every trace of it.
    Down {
        #[arg(long, default_value = "up")]
        name: String,
    },
    /// Tell what runs.
    Status {
        #[arg(long, default_value = "up")]
        name: String,
    },
    /// Run the suites beyond `cargo test`.
    Test(suites::Args),
    /// Run another project's suite against the server under test.
    Peers(peers::Args),
    /// Run the same random scripts on real etcd and on the server under test.
    Diff(diff::Args),
    /// Plant the bugs of `e2e/planted`, one at a time, and see who finds them.
    Planted(planted::Args),
    /// Faults on a cluster under load, and judges of what its clients saw.
    Nemesis(nemesis::Args),
    /// Measure the server under test against real etcd.
    Bench(bench::Args),
    /// Measure what requests notice of compaction and defragmentation.
    Latency(latency::Args),
    /// Build the tools, or only those of the named modules below `e2e/go`.
    Tools { modules: Vec<String> },
    /// Install the packages a node needs.
    Packages,
    /// Mount a file system that forgets what was not synced.
    #[command(hide = true)]
    Lossy(lossy::Args),
    #[command(hide = true)]
    NodeInit { spec: PathBuf },
    #[command(hide = true)]
    Provision {
        #[arg(long)]
        kubeconfig: PathBuf,
        #[arg(long)]
        folder: PathBuf,
    },
    #[command(hide = true)]
    Forward {
        #[arg(long)]
        namespace: PathBuf,
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        to: SocketAddr,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            up::say(&format!("ballast-e2e: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Up {
            name,
            store,
            store_binary,
            without_operator,
        } => {
            let store = match (store.as_str(), store_binary) {
                ("etcd", None) => StoreKind::Etcd,
                ("ballast", Some(path)) => StoreKind::Ballast(path),
                ("ballast", None) => StoreKind::Ballast(paths::server_binary()),
                _ => {
                    anyhow::bail!("--store is `ballast`, with or without --store-binary, or `etcd`")
                }
            };
            let runtime = tokio::runtime::Runtime::new()?;
            runtime.block_on(up::up(UpOptions {
                name,
                store,
                operator: !without_operator,
            }))
        }
        Command::Down { name } => up::down(&name),
        Command::Status { name } => up::status(&name),
        Command::Test(arguments) => suites::run(&arguments),
        Command::Peers(arguments) => peers::run(&arguments),
        Command::Diff(arguments) => tokio::runtime::Runtime::new()?.block_on(diff::run(&arguments)),
        Command::Planted(arguments) => planted::run(&arguments),
        Command::Nemesis(arguments) => nemesis::run(&arguments),
        Command::Bench(arguments) => {
            tokio::runtime::Runtime::new()?.block_on(bench::run(&arguments))
        }
        Command::Latency(arguments) => {
            tokio::runtime::Runtime::new()?.block_on(latency::run(&arguments))
        }
        Command::Tools { modules } => {
            let progress = Progress::new();
            let all: Vec<&str> = tools::MODULES.iter().map(|module| module.name).collect();
            let named: Vec<&str> = modules.iter().map(String::as_str).collect();
            tools::ensure(if named.is_empty() { &all } else { &named }, &progress)
        }
        Command::Packages => packages::ensure(&Progress::new()),
        Command::Lossy(arguments) => lossy::run(&arguments),
        Command::NodeInit { spec } => node_init::run(&spec),
        Command::Provision { kubeconfig, folder } => {
            tracing_subscriber::fmt()
                .with_writer(std::io::stderr)
                .init();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(provisioner::run(
                &kubeconfig,
                addons::STORAGE_CLASS_NAME,
                &folder,
            ))
        }
        Command::Forward {
            namespace,
            listen,
            to,
        } => forward::run(&namespace, listen, to),
    }
}
