//! The command line: which command, and for the server its life from flags to the end.
//!
//! Not here: the offline commands themselves (`cli/`).
//!
//! etcd: server/etcdmain, etcdutl.

mod check;
mod defrag;
mod rebuild;
mod snapshot;
mod wal;

use std::fmt::Write;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use ballast_api::API_VERSION;
use ballast_storage::backend::Kind;
use rustix::mm::MlockAllFlags;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::{Asked, Config, Stop, Values, flags};
use crate::logging;
use crate::node::{Node, StartError};
use crate::raft::End;

/// Runs the command that `args` (without the program's name) ask for.
pub fn run(args: &[String]) -> ExitCode {
    match args.first().map(String::as_str) {
        Some("help") => {
            print(&usage());
            ExitCode::SUCCESS
        }
        Some("version") => {
            print(&version());
            ExitCode::SUCCESS
        }
        Some("check") => check::run(&args[1..]),
        Some("defrag") => defrag::run(&args[1..]),
        Some("rebuild") => rebuild::run(&args[1..]),
        Some("snapshot") => snapshot::run(&args[1..]),
        Some("wal") => wal::run(&args[1..]),
        _ => match configure(args) {
            Ok(config) => serve(config),
            Err(Stop::Told(text)) => {
                print(&text);
                ExitCode::SUCCESS
            }
            Err(Stop::BadFlag(why)) => {
                complain(&format!(
                    "{why}\nUsage: ballast [flags]; ballast -h lists them"
                ));
                ExitCode::from(2)
            }
            Err(Stop::BadConfig(why)) => {
                logging::start(
                    tracing_subscriber::filter::LevelFilter::INFO,
                    logging::LogFormat::Json,
                    logging::Outputs::stderr(),
                );
                tracing::error!(error = %why, "failed to verify flags");
                ExitCode::FAILURE
            }
        },
    }
}

fn configure(args: &[String]) -> Result<Config, Stop> {
    let values = match Values::from_args(args)? {
        Asked::Help => return Err(Stop::Told(usage())),
        Asked::Version => return Err(Stop::Told(version())),
        Asked::Run(values) => values,
    };
    let env: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    Config::from_values(&values.complete(&env)?).map_err(Stop::BadConfig)
}

/// Serves until a signal or a failure.
fn serve(config: Config) -> ExitCode {
    let outputs = match logging::Outputs::open(&config.log_outputs, config.log_rotation) {
        Ok(outputs) => outputs,
        Err(error) => {
            complain(&format!("cannot open --log-outputs: {error}"));
            return ExitCode::FAILURE;
        }
    };
    logging::start(config.log_level, config.log_format, outputs);
    // The allocator asks for huge pages, which would cost an idle store twice its memory.
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        tracing::debug!(error = %error, "cannot switch transparent huge pages off");
    }
    if config.memory_mlock {
        // As it is touched: locking what is merely reserved would fill the memory at once.
        let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
        if let Err(error) = rustix::mm::mlockall(flags) {
            tracing::error!(error = %error, "--memory-mlock: cannot lock memory; raise this process's limit (ulimit -l)");
            return ExitCode::FAILURE;
        }
    }
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    tracing::info!(
        name = %config.name,
        data_dir = %config.data_dir.display(),
        pid = std::process::id(),
        "starting ballast"
    );
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(error = %error, "failed to start");
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let starting = Node::start(config);
        let node = tokio::select! {
            node = starting => match node {
                Err(StartError::Ended(End::Removed)) => {
                    tracing::error!("{}; its data may be deleted", End::Removed);
                    return Ok(None);
                }
                Err(StartError::Ended(End::Anew)) => begin_anew(),
                node => node?,
            },
            _ = interrupt.recv() => return Ok(Some(SignalKind::interrupt())),
            _ = terminate.recv() => return Ok(Some(SignalKind::terminate())),
        };
        let received = tokio::select! {
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
            // Nothing is flushed on top of storage that failed.
            end = node.failed() => match end {
                End::Failed(why) => anyhow::bail!("this member cannot go on: {why}"),
                // As etcd ends: nothing failed.
                End::Removed => {
                    tracing::error!("{end}; its data may be deleted");
                    node.stop().await?;
                    return Ok(None);
                }
                End::Anew => begin_anew(),
            },
        };
        tracing::info!(
            signal = received.as_raw_value(),
            "received signal; shutting down"
        );
        node.stop().await?;
        anyhow::Ok(Some(received))
    });
    runtime.shutdown_timeout(std::time::Duration::from_millis(100));
    match outcome {
        Ok(Some(received)) => end_by(received),
        Ok(None) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = %format!("{error:#}"), "failed to run");
            ExitCode::FAILURE
        }
    }
}

/// The same program with the same arguments, in this process's place: what is in memory is not what the directory holds.
fn begin_anew() -> ! {
    tracing::info!("beginning anew on the database of the snapshot");
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    // This very program, even if another lies under its name by now.
    let error = std::process::Command::new("/proc/self/exe")
        .arg0(name)
        .args(args)
        .exec();
    tracing::error!(%error, "cannot begin anew; start this member again");
    std::process::exit(1)
}

/// Ends the process as the signal would have, so that whoever sent it sees it; as the first process of a container there
/// is nobody to tell.
fn end_by(received: SignalKind) -> ExitCode {
    if std::process::id() != 1 {
        // Returns only when it cannot.
        let _ = signal_hook::low_level::emulate_default_handler(received.as_raw_value());
    }
    ExitCode::SUCCESS
}

/// A command's `--storage-engine`.
fn storage_engine(name: &str) -> Result<Kind, String> {
    Kind::named(name).ok_or_else(|| {
        format!(
            "must be one of {}",
            Kind::ALL.map(Kind::extension).join(", ")
        )
    })
}

fn version() -> String {
    format!(
        "etcd Version: {API_VERSION}\nBallast Version: {}\nOS/Arch: {}/{}\n",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        std::env::consts::ARCH
    )
}

fn usage() -> String {
    let mut text = String::from(
        "Usage:\n\n  ballast [flags]\n    Start a server. Each flag is also read from ETCD_<FLAG>.\n\n  ballast --version\n  ballast --config-file FILE\n    A YAML or JSON file with the flags' names; other flags and the environment are ignored.\n\n  ballast snapshot save|status|verify|restore FILE [flags]\n    Snapshots in etcd's format; -h after it tells more.\n\n  ballast check DIR\n    Looks the data of a member that does not run through; changes nothing.\n\n  ballast defrag --data-dir DIR\n    Rewrites the database of a member that does not run.\n\n  ballast rebuild <the member's flags>\n    Replaces the data of a member that does not run by the leader's.\n\n  ballast wal dump DIR\n    The log, one JSON line per entry.\n\nFlags:\n",
    );
    for flag in flags::FLAGS {
        let note = match flag.effect {
            flags::Effect::Used => "",
            flags::Effect::None => "  (accepted, changes nothing)",
            flags::Effect::Missing(_) => "  (not supported yet: default only)",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  --{} '{}'{note}", flag.name, flag.default);
    }
    text
}

/// Parses what follows the command's name, or prints why not, or the help that was asked for.
fn parse<A: clap::Parser>(command: &'static str, args: &[String]) -> Result<A, ExitCode> {
    let words = std::iter::once(command).chain(args.iter().map(String::as_str));
    A::try_parse_from(words).map_err(|error| {
        // Nothing can be done about a closed terminal.
        let _ = error.print();
        // A wrong flag ends as a wrong flag of the server does.
        ExitCode::from(if error.use_stderr() { 2 } else { 0 })
    })
}

#[expect(clippy::print_stdout, reason = "what a person asked to see")]
fn print(text: &str) {
    print!("{text}");
}

#[expect(
    clippy::print_stderr,
    reason = "logging is not configured when flags are bad"
)]
fn complain(text: &str) {
    eprintln!("{text}");
}
