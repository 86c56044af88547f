//! `ballast snapshot save|status|verify|restore`: etcd's snapshot files, ours and etcd's own.
//!
//! Promises: flags, figures and refusals are those of etcdctl and etcdutl. A file that is cut or changed is refused before
//! anything is written. What is saved or restored has its final name only when it is whole and synced.
//! Not here: the file's form (`ballast_storage::bolt`), the database that is made of it (`ballast_storage::mvcc::restore`).
//!
//! etcd: client/v3/snapshot, etcdutl/etcdutl/snapshot_command.go, etcdutl/snapshot/v3_snapshot.go.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::etcdserverpb::SnapshotRequest;
use ballast_api::etcdserverpb::maintenance_client::MaintenanceClient;
use ballast_storage::StorageError;
use ballast_storage::backend::Kind;
use ballast_storage::bolt::{self, BoltFile, SnapshotStatus, Trailer};
use ballast_storage::check::Problems;
use ballast_storage::mvcc::{RestoreOptions, RestoreReport, restore};
use clap::{Parser, Subcommand, ValueEnum};
use hyper_util::rt::TokioIo;
use tonic::transport::Endpoint;
use tower::service_fn;
use tracing_subscriber::filter::LevelFilter;

use crate::cluster;
use crate::config::tls::TlsOptions;
use crate::config::urls::Url;
use crate::config::{Asked, Config, Stop, Values};
use crate::data_dir;
use crate::logging::{self, LogFormat, Outputs};
use crate::peer::{Dial, channel};
use crate::tls::{Tls, TlsError};

/// cobrautl.ExitBadArgs.
const EXIT_BAD_ARGS: u8 = 128;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Only the owner may read a store.
const FILE_MODE: u32 = 0o600;
const DIR_MODE: u32 = 0o700;

#[derive(Debug, Parser)]
#[command(
    name = "ballast snapshot",
    about = "Saves, inspects and restores snapshots in etcd's format"
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Saves a snapshot of a running member to a file.
    Save(Save),
    /// Checks a file and prints its hash, revision, total keys, size and version.
    Status(StatusArgs),
    /// Checks everything in a file: its hash, its pages, its records and that they make sense together.
    Verify(Verify),
    /// Makes a member's data directory from a file.
    Restore(Restore),
}

#[derive(Debug, clap::Args)]
struct Save {
    file: PathBuf,
    /// The member to ask: a snapshot is of one.
    #[arg(long, default_value = "127.0.0.1:2379")]
    endpoints: String,
    /// Authorities of which one has signed the member's certificate, in PEM; the system's when not given.
    #[arg(long)]
    cacert: Option<PathBuf>,
    /// A certificate to show to the member, in PEM.
    #[arg(long, requires = "key")]
    cert: Option<PathBuf>,
    /// Its key.
    #[arg(long, requires = "cert")]
    key: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct StatusArgs {
    file: PathBuf,
    #[arg(short, long, value_enum, default_value_t)]
    write_out: Format,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit code: 0 nothing is wrong, 1 something is; each problem is printed with its place."
)]
struct Verify {
    file: PathBuf,
    /// Also take a file without a hash, such as a copy of etcd's member/snap/db.
    #[arg(long, action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    skip_hash_check: bool,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Format {
    #[default]
    Simple,
    Fields,
    Json,
    Table,
}

#[derive(Debug, clap::Args)]
struct Restore {
    file: PathBuf,
    /// The data directory to make; `NAME.etcd` when not given.
    #[arg(long, default_value = "")]
    data_dir: String,
    /// Must not exist; the server makes its log there.
    #[arg(long, default_value = "")]
    wal_dir: String,
    #[arg(long, default_value = "default=http://localhost:2380")]
    initial_cluster: String,
    #[arg(long, default_value = "etcd-cluster")]
    initial_cluster_token: String,
    #[arg(long, default_value = "http://localhost:2380")]
    initial_advertise_peer_urls: String,
    #[arg(long, default_value = "default")]
    name: String,
    /// Take a file without its hash, or with a wrong one (a copy of a data directory's database).
    #[arg(long, action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    skip_hash_check: bool,
    /// How much to let the revision grow, so that no client sees a revision twice.
    #[arg(long, default_value_t = 0)]
    bump_revision: u64,
    /// Count everything before the bumped revision as compacted: required with a bump, disallowed otherwise.
    #[arg(long, action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    mark_compacted: bool,
    /// The engine of the database: redb or sled.
    #[arg(long, value_parser = super::storage_engine, default_value_t)]
    storage_engine: Kind,
    /// Accepted for etcdutl's sake; changes nothing.
    #[arg(long, default_value_t = 0)]
    initial_memory_map_size: u64,
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// The command line contradicts itself.
    #[error("{0}")]
    BadArgs(String),
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("{op} {path}: {source}")]
    Io {
        op: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("snapshot must be requested to one selected node, not multiple [{0}]")]
    SeveralEndpoints(String),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("snapshot of {endpoint}: {why}")]
    Remote { endpoint: String, why: String },
    #[error("sha256 checksum not found [bytes: {0}]")]
    NoChecksum(u64),
    #[error("snapshot missing hash but --skip-hash-check=false")]
    MissingHash,
    #[error("expected sha256 {expected}, got {got}")]
    WrongHash { expected: String, got: String },
    #[error("snapshot file integrity check failed. 1 errors found.\n{0}")]
    Damaged(StorageError),
    #[error("data-dir {0:?} not empty or could not be read")]
    DataDirNotEmpty(PathBuf),
    #[error("{} problems found:\n{}", .0.len(), .0.told.join("\n"))]
    Unsound(Problems),
    #[error("wal-dir {0:?} exists")]
    WalDirExists(PathBuf),
}

/// Runs `ballast snapshot` with what follows on the command line.
pub(super) fn run(args: &[String]) -> ExitCode {
    let words = std::iter::once("ballast snapshot").chain(args.iter().map(String::as_str));
    let args = match Args::try_parse_from(words) {
        Ok(args) => args,
        Err(error) => {
            let code = if error.use_stderr() { EXIT_BAD_ARGS } else { 0 };
            // Nothing can be done about a closed terminal.
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    logging::start(LevelFilter::INFO, LogFormat::Json, Outputs::stderr());
    let done = match args.command {
        Command::Save(args) => run_save(&args),
        Command::Status(args) => run_status(&args),
        Command::Verify(args) => run_verify(&args),
        Command::Restore(args) => run_restore(&args),
    };
    match done {
        Ok(text) => {
            super::print(&text);
            ExitCode::SUCCESS
        }
        Err(error) => {
            super::complain(&format!("Error: {error}"));
            match error {
                Failure::BadArgs(_) => ExitCode::from(EXIT_BAD_ARGS),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn io(op: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Failure {
    let path = path.to_owned();
    move |source| Failure::Io { op, path, source }
}

// Save.

fn run_save(args: &Save) -> Result<String, Failure> {
    if args.endpoints.contains(',') {
        let endpoints = args.endpoints.replace(',', " ");
        return Err(Failure::SeveralEndpoints(endpoints));
    }
    let member = args.member()?;
    let tls = args.tls(&member)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(io("start a runtime for", &args.file))?;
    let mut part = args.file.clone().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    let saved = runtime
        .block_on(fetch(&member, tls, &part))
        .and_then(|version| {
            // Read back: what counts is what the file holds.
            check_hash(&part, false).map_err(|error| match error {
                Failure::MissingHash => {
                    Failure::NoChecksum(fs::metadata(&part).map_or(0, |part| part.len()))
                }
                other => other,
            })?;
            fs::rename(&part, &args.file).map_err(io("rename to", &args.file))?;
            sync_dir(parent(&args.file))?;
            Ok(version)
        });
    if saved.is_err() {
        // It may not be there; a leftover is harmless and is overwritten the next time.
        let _ = fs::remove_file(&part);
    }
    let version = saved?;
    let mut text = format!("Snapshot saved at {}\n", args.file.display());
    if !version.is_empty() {
        text.push_str(&format!("Server version {version}\n"));
    }
    Ok(text)
}

impl Save {
    /// As etcdctl reads an endpoint: without a scheme it is asked over TLS when there is a file for that.
    fn member(&self) -> Result<Url, Failure> {
        let endpoint = self.endpoints.trim_end_matches('/');
        let secure = self.cacert.is_some() || self.cert.is_some();
        let url = match (endpoint.contains("://"), secure) {
            (true, _) => endpoint.to_owned(),
            (false, true) => format!("https://{endpoint}"),
            (false, false) => format!("http://{endpoint}"),
        };
        Url::parse(&url).map_err(Failure::BadArgs)
    }

    /// None when the member is asked in plain text, whatever files are named.
    fn tls(&self, member: &Url) -> Result<Option<Arc<Tls>>, Failure> {
        if !member.is_secure() {
            return Ok(None);
        }
        let (cacert, cert, key) = (self.cacert.clone(), self.cert.clone(), self.key.clone());
        let options = TlsOptions::of_tool(cacert, cert, key).map_err(Failure::BadArgs)?;
        Ok(Some(Tls::load(options, Path::new(""), &[])?))
    }
}

/// Writes and syncs what the member sends; gives the storage version it names.
async fn fetch(member: &Url, tls: Option<Arc<Tls>>, part: &Path) -> Result<String, Failure> {
    let remote = |why: String| Failure::Remote {
        endpoint: member.to_string(),
        why,
    };
    let url = member.clone();
    let dial = Dial::new(tls, CONNECT_TIMEOUT);
    let connector = service_fn(move |_| {
        let (url, dial) = (url.clone(), dial.clone());
        async move { channel::connect(&url, &dial).await.map(TokioIo::new) }
    });
    // The connector knows where.
    let channel = Endpoint::from_static("http://member")
        .connect_timeout(CONNECT_TIMEOUT)
        .connect_with_connector(connector)
        .await
        .map_err(|error| remote(chain(&error)))?;
    let mut client = MaintenanceClient::new(channel).max_decoding_message_size(usize::MAX);
    let status = |status: tonic::Status| remote(status.message().to_owned());
    let mut pieces = client
        .snapshot(SnapshotRequest {})
        .await
        .map_err(status)?
        .into_inner();
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(FILE_MODE)
        .open(part)
        .map_err(io("open", part))?;
    let mut version = String::new();
    while let Some(piece) = pieces.message().await.map_err(status)? {
        file.write_all(&piece.blob).map_err(io("write", part))?;
        version = piece.version;
    }
    file.sync_all().map_err(io("sync", part))?;
    Ok(version)
}

/// An error with what caused it: tonic's outermost says only "transport error".
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

/// Compares the hash at the end of a file with the rest.
fn check_hash(file: &Path, skip: bool) -> Result<(), Failure> {
    if skip {
        return Ok(());
    }
    match bolt::verify_trailer(file)? {
        Trailer::Good => Ok(()),
        Trailer::Missing => Err(Failure::MissingHash),
        Trailer::Bad { expected, got } => Err(Failure::WrongHash {
            expected: hex::encode(expected),
            got: hex::encode(got),
        }),
    }
}

// Status.

fn run_status(args: &StatusArgs) -> Result<String, Failure> {
    let status = bolt::status(&args.file).map_err(|error| match error {
        StorageError::Io { .. } => Failure::Storage(error),
        _ => Failure::Damaged(error),
    })?;
    Ok(match args.write_out {
        Format::Simple => format!("{}\n", cells(&status).join(", ")),
        Format::Fields => format!(
            "\"Hash\" : {}\n\"Revision\" : {}\n\"Keys\" : {}\n\"Size\" : {}\n\"Version\" : {}\n",
            status.hash, status.revision, status.total_keys, status.total_size, status.version
        ),
        Format::Json => format!(
            "{{\"hash\":{},\"revision\":{},\"totalKey\":{},\"totalSize\":{},\"version\":{}}}\n",
            status.hash,
            status.revision,
            status.total_keys,
            status.total_size,
            serde_json::Value::from(status.version)
        ),
        Format::Table => table(&cells(&status)),
    })
}

fn cells(status: &SnapshotStatus) -> [String; 5] {
    [
        format!("{:x}", status.hash),
        status.revision.to_string(),
        status.total_keys.to_string(),
        human_bytes(status.total_size),
        status.version.clone(),
    ]
}

const HEADERS: [&str; 5] = ["HASH", "REVISION", "TOTAL KEYS", "TOTAL SIZE", "VERSION"];

/// One row in a box, as etcdutl draws it: headers centred, cells to the right.
fn table(cells: &[String; 5]) -> String {
    let widths: Vec<usize> = HEADERS
        .iter()
        .zip(cells)
        .map(|(header, cell)| header.len().max(cell.len()) + 2)
        .collect();
    let line = |left, middle, right| {
        let bars: Vec<String> = widths
            .iter()
            .map(|width| "\u{2500}".repeat(*width))
            .collect();
        format!("{left}{}{right}\n", bars.join(middle))
    };
    let row = |texts: Vec<String>| format!("\u{2502}{}\u{2502}\n", texts.join("\u{2502}"));
    let headers = HEADERS
        .iter()
        .zip(&widths)
        .map(|(header, width)| format!("{header:^width$}"));
    let values = cells
        .iter()
        .zip(&widths)
        .map(|(cell, width)| format!("{cell:>0$} ", width - 1));
    [
        line("\u{250c}", "\u{252c}", "\u{2510}"),
        row(headers.collect()),
        line("\u{251c}", "\u{253c}", "\u{2524}"),
        row(values.collect()),
        line("\u{2514}", "\u{2534}", "\u{2518}"),
    ]
    .concat()
}

/// Decimal units, one digit after the point below 10, as etcdutl prints sizes.
fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    if bytes < 10 {
        return format!("{bytes} B");
    }
    let mut unit = 0;
    let mut scale = 1_u64;
    while unit + 1 < UNITS.len() && bytes / scale >= 1000 {
        scale *= 1000;
        unit += 1;
    }
    let value = (bytes as f64 / scale as f64 * 10.0 + 0.5).floor() / 10.0;
    if value < 10.0 {
        format!("{value:.1} {}", UNITS[unit])
    } else {
        format!("{value:.0} {}", UNITS[unit])
    }
}

// Verify.

fn run_verify(args: &Verify) -> Result<String, Failure> {
    let mut problems = Problems::default();
    let verified = match bolt::verify(&args.file, &mut problems) {
        Ok(verified) => Some(verified),
        Err(StorageError::Io { op, path, source }) if problems.is_empty() => {
            return Err(Failure::Storage(StorageError::Io { op, path, source }));
        }
        Err(error) => {
            problems.add(error.to_string());
            None
        }
    };
    let file = args.file.display();
    if verified.as_ref().is_some_and(|v| !v.hashed) && !args.skip_hash_check {
        problems.add(format!("{file}: {}", Failure::MissingHash));
    }
    if problems.is_empty()
        && let Some(v) = verified
    {
        return Ok(format!(
            "{file} is sound: revision {}, {} records, {} keys, {} leases{}\n",
            v.revision,
            v.records,
            v.keys,
            v.leases,
            if v.hashed { "" } else { "; it has no hash" }
        ));
    }
    Err(Failure::Unsound(problems))
}

// Restore.

fn run_restore(args: &Restore) -> Result<String, Failure> {
    if (args.bump_revision > 0) != args.mark_compacted {
        let text = "--mark-compacted required if --revision-bump > 0";
        return Err(Failure::BadArgs(text.to_owned()));
    }
    let config = server_config(args).map_err(Failure::BadArgs)?;
    let wal_dir = config.wal_dir.as_deref().filter(|wal_dir| wal_dir.exists());
    if let Some(wal_dir) = wal_dir {
        return Err(Failure::WalDirExists(wal_dir.to_owned()));
    }
    let data_dir = &config.data_dir;
    if !data_dir::is_free(data_dir) {
        return Err(Failure::DataDirNotEmpty(data_dir.clone()));
    }
    check_hash(&args.file, args.skip_hash_check)?;
    let file = BoltFile::open(&args.file)?;
    let founders = cluster::founders(&config.initial_cluster, &config.initial_cluster_token);
    let ids: Vec<u64> = founders.iter().map(|member| member.id).collect();
    let own = founders.iter().find(|member| member.name == config.name);
    let options = RestoreOptions {
        cluster_id: cluster::cluster_id(&ids),
        member_id: own.map_or(0, |member| member.id),
        members: founders,
        engine: args.storage_engine,
        revision_bump: args.bump_revision,
    };
    tracing::info!(
        path = %args.file.display(),
        data_dir = %data_dir.display(),
        cluster_id = %format!("{:x}", options.cluster_id),
        "restoring snapshot"
    );
    let report = restore_into(&file, data_dir, &options)?;
    tracing::info!(
        path = %args.file.display(),
        data_dir = %data_dir.display(),
        revision = report.revision,
        records = report.records,
        leases = report.leases,
        "restored snapshot"
    );
    Ok(told(&report))
}

/// The server's flags of the same names, checked by the server's rules.
fn server_config(args: &Restore) -> Result<Config, String> {
    let flags = [
        ("name", &args.name),
        ("data-dir", &args.data_dir),
        ("wal-dir", &args.wal_dir),
        ("initial-cluster", &args.initial_cluster),
        ("initial-cluster-token", &args.initial_cluster_token),
        (
            "initial-advertise-peer-urls",
            &args.initial_advertise_peer_urls,
        ),
    ];
    let words: Vec<String> = flags
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("--{name}={value}"))
        .collect();
    let stopped = |stop| match stop {
        Stop::Told(text) | Stop::BadFlag(text) | Stop::BadConfig(text) => text,
    };
    match Values::from_args(&words).map_err(stopped)? {
        Asked::Run(values) => {
            // The environment is the server's, not ours.
            let values = values.complete(&[]).map_err(stopped)?;
            Config::from_values(&values)
        }
        Asked::Help | Asked::Version => Err("these flags start no server".to_owned()),
    }
}

/// Builds aside and renames, so that a server never finds half a database.
fn restore_into(
    file: &BoltFile,
    data_dir: &Path,
    options: &RestoreOptions,
) -> Result<RestoreReport, Failure> {
    let is_new = !data_dir.exists();
    let aside = data_dir.join(data_dir::RESTORING);
    if aside.exists() {
        // An attempt that was cut short.
        fs::remove_dir_all(&aside).map_err(io("remove", &aside))?;
    }
    DirBuilder::new()
        .recursive(true)
        .mode(DIR_MODE)
        .create(&aside)
        .map_err(io("make", &aside))?;
    let built = restore(file, &aside.join("db"), options)
        .map_err(Failure::from)
        .and_then(|report| {
            sync_dir(&aside)?;
            let member = data_dir.join("member");
            fs::rename(&aside, &member).map_err(io("rename to", &member))?;
            sync_dir(data_dir)?;
            sync_dir(parent(data_dir))?;
            Ok(report)
        });
    if built.is_err() {
        // Best effort: what stays is recognised and removed by the next attempt.
        let _ = fs::remove_dir_all(&aside);
        if is_new {
            let _ = fs::remove_dir(data_dir);
        }
    }
    built
}

/// What a person should know of what was taken over, and what not.
fn told(report: &RestoreReport) -> String {
    let mut text = format!(
        "restored {} records at revision {}, {} leases\n",
        report.records, report.revision, report.leases
    );
    if report.auth_enabled {
        text.push_str(
            "warning: the snapshot has authentication enabled; users and roles are kept, but this release does not enforce them\n",
        );
    }
    for unknown in &report.unknown {
        text.push_str(&format!("not restored, unknown: {unknown}\n"));
    }
    text
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

fn sync_dir(dir: &Path) -> Result<(), Failure> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(io("sync", dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_etcdutl_prints_them() {
        for (bytes, text) in [
            (0, "0 B"),
            (9, "9 B"),
            (24_576, "25 kB"),
            (999, "999 B"),
            (1_000, "1.0 kB"),
            (9_949, "9.9 kB"),
            (9_951, "10 kB"),
            (20_480_000, "20 MB"),
            (2_147_483_648, "2.1 GB"),
        ] {
            assert_eq!(human_bytes(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn the_table_is_etcdutls() {
        let status = SnapshotStatus {
            hash: 0xfbc2_1f19,
            revision: 62,
            total_keys: 19,
            total_size: 24_576,
            version: "3.7.0".to_owned(),
        };
        let expected = [
            "\u{250c}----------\u{252c}----------\u{252c}------------\u{252c}------------\u{252c}---------\u{2510}",
            "|   HASH   | REVISION | TOTAL KEYS | TOTAL SIZE | VERSION |",
            "\u{251c}----------\u{253c}----------\u{253c}------------\u{253c}------------\u{253c}---------\u{2524}",
            "| fbc21f19 |       62 |         19 |      25 kB |   3.7.0 |",
            "\u{2514}----------\u{2534}----------\u{2534}------------\u{2534}------------\u{2534}---------\u{2518}",
            "",
        ];
        let expected = expected
            .join("\n")
            .replace('-', "\u{2500}")
            .replace('|', "\u{2502}");
        assert_eq!(table(&cells(&status)), expected);
    }

    fn restore_args(words: &[&str]) -> Restore {
        let line = ["ballast snapshot", "restore", "f"].iter().chain(words);
        match Args::try_parse_from(line).unwrap().command {
            Command::Restore(restore) => restore,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_bump_and_the_mark_go_together() {
        for words in [
            &["--bump-revision", "5"][..],
            &["--mark-compacted"],
            &["--mark-compacted=true", "--bump-revision=0"],
        ] {
            let error = run_restore(&restore_args(words)).unwrap_err();
            let text = "--mark-compacted required if --revision-bump > 0";
            assert_eq!(error.to_string(), text, "{words:?}");
        }
        assert!(!restore_args(&["--mark-compacted=false"]).mark_compacted);
    }

    #[test]
    fn the_new_cluster_is_checked_by_the_servers_rules() {
        let config = server_config(&restore_args(&[])).unwrap();
        assert_eq!(config.data_dir, Path::new("default.etcd"));
        let words = ["--initial-cluster", "b=http://h:1"];
        let error = server_config(&restore_args(&words)).unwrap_err();
        assert!(
            error.contains("couldn't find local name \"default\""),
            "{error}"
        );
    }
}
