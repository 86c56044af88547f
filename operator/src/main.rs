//! ballast-operator: the operator, its CRDs on paper, and the agent beside a store.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use ballast_operator::agent::{self, AgentCommand};
use ballast_operator::crdgen;
use ballast_operator::run::{self, RunArgs};
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

#[derive(Parser)]
#[command(version, about = "Operates Ballast stores on Kubernetes")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the operator.
    Run(RunArgs),
    /// Print the CRDs, or write one file per kind.
    Crds {
        /// Write to `crds/` and the chart's copy below the current folder.
        #[arg(long)]
        write: bool,
    },
    /// Work beside a store; the operator's pods call this.
    #[command(subcommand)]
    Agent(AgentCommand),
}

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .json()
        // kube's spans repeat at length what each line here says in a word.
        .with_current_span(false)
        .with_span_list(false)
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    match dispatch(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "failed");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Run(args) => tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?
            .block_on(run::run(args)),
        Command::Crds { write: false } => Ok(std::io::stdout()
            .lock()
            .write_all(crdgen::stream().as_bytes())?),
        Command::Crds { write: true } => Ok(crdgen::write(Path::new("."))?),
        Command::Agent(command) => Ok(agent::run(command)?),
    }
}
