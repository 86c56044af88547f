//! etcd's flags, variables and file as one validated [`Config`].
//!
//! Not here: the table of flags (`config/flags.rs`), how texts are collected (`config/values.rs`).
//!
//! etcd: server/embed/config.go.

pub mod auto_defrag;
pub mod flags;
pub mod memory;
pub mod tls;
pub mod urls;
pub mod values;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use ballast_storage::backend::Kind;
use tracing_subscriber::filter::LevelFilter;

use crate::corrupt::Checks;
use crate::health::HttpAccess;
use crate::logging::{self, LogFormat, Rotation, Target};
use crate::rpc::mux::GRPC_OVERHEAD_BYTES;
use crate::rpc::watch::WatchConfig;
use crate::spans::{SAMPLING_RATE_MAX, Tracing};
pub use auto_defrag::AutoDefrag;
use tls::TlsOptions;
use urls::Url;
pub use values::{Asked, Stop, Values};

/// etcd's default quota.
const QUOTA_BYTES_DEFAULT: u64 = 2 * 1024 * 1024 * 1024;
/// Above it etcd warns.
const QUOTA_BYTES_ADVISED_MAX: u64 = 8 * 1024 * 1024 * 1024;
const ELECTION_MS_MAX: u64 = 50_000;
/// Above it etcd warns.
const REQUEST_BYTES_ADVISED_MAX: u64 = 10 * 1024 * 1024;
/// What gRPC takes when `--grpc-keepalive-min-time` is 0.
const KEEPALIVE_MIN_TIME_DEFAULT: Duration = Duration::from_mins(5);
/// What a request may take beside two elections.
const REQUEST_TIMEOUT_BASE: Duration = Duration::from_secs(5);

/// When history is compacted without anyone asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoCompaction {
    Off,
    /// Keep what was written within this time.
    Periodic(Duration),
    /// Keep this many revisions.
    Revision(i64),
}

/// A server's configuration, validated.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Config {
    pub name: String,
    pub data_dir: PathBuf,
    /// Apart from the data when given.
    pub wal_dir: Option<PathBuf>,
    pub listen_client_urls: Vec<Url>,
    pub listen_client_http_urls: Vec<Url>,
    pub listen_metrics_urls: Vec<Url>,
    pub listen_peer_urls: Vec<Url>,
    pub advertise_client_urls: Vec<Url>,
    pub advertise_peer_urls: Vec<Url>,
    /// Name to peer URLs of each founding member.
    pub initial_cluster: BTreeMap<String, Vec<Url>>,
    pub initial_cluster_token: String,
    pub initial_cluster_is_new: bool,
    /// Refuse membership changes that a majority of members that run would not survive.
    pub strict_reconfig_check: bool,
    pub learners_max: usize,
    /// Begin anew with this member alone and the data it has.
    pub force_new_cluster: bool,
    pub client_tls: TlsOptions,
    pub peer_tls: TlsOptions,

    pub heartbeat: Duration,
    pub election: Duration,
    /// The leader answers linearizable reads by its lease.
    pub lease_reads: bool,
    pub snapshot_count: u64,
    pub snapshot_catchup_entries: u64,
    /// 0 keeps every segment.
    pub wals_max: u64,
    pub unsafe_no_fsync: bool,
    /// Keep what is in memory there.
    pub memory_mlock: bool,
    /// Defragment before serving when that frees at least so much; None never.
    pub bootstrap_defrag_bytes: Option<u64>,

    /// None when the quota is switched off.
    pub quota_bytes: Option<u64>,
    /// As given, or the default: what Status and metrics tell, a negative one included.
    pub quota_told: i64,
    /// None leaves it to others.
    pub auto_defrag: Option<AutoDefrag>,
    pub batch_interval: Duration,
    pub batch_limit: usize,
    pub compaction_batch_limit: usize,
    pub compaction_sleep: Duration,
    pub value_cache_bytes: u64,
    pub storage_engine: Kind,
    pub response_memory_bytes: u64,
    pub auto_compaction: AutoCompaction,

    pub txn_ops_max: usize,
    pub request_bytes_max: usize,
    pub concurrent_streams_max: u32,
    /// None when pings are switched off.
    pub keepalive_interval: Option<Duration>,
    pub keepalive_timeout: Duration,
    /// Between two pings of a client.
    pub keepalive_min_time: Duration,
    pub reuse_port: bool,
    pub reuse_address: bool,
    pub watch_progress_interval: Duration,
    /// How often the leader notes what remains of long leases.
    pub lease_checkpoint_every: Duration,

    /// How often the leader looks whether a downgrade is done; 0 never.
    pub downgrade_check_every: Duration,
    /// How often the leader compares all members' data.
    pub corruption: Checks,
    /// Beyond these a request, or its applying, is told as slow.
    pub warn_request_after: Duration,
    pub warn_apply_after: Duration,
    /// Where spans go, if anywhere.
    pub tracing: Option<Tracing>,
    /// `--metrics=extensive`.
    pub extensive_metrics: bool,
    pub gates: Vec<&'static str>,
    pub log_level: LevelFilter,
    pub log_format: LogFormat,
    pub log_outputs: Vec<Target>,
    pub log_rotation: Option<Rotation>,
    pub http_access: HttpAccess,
    /// To be logged once logging works.
    pub warnings: Vec<String>,
}

impl Config {
    /// How long a request may wait for its answer: etcd's rule.
    pub fn request_timeout(&self) -> Duration {
        REQUEST_TIMEOUT_BASE + 2 * self.election
    }

    /// etcd's minimum: one and a half elections, rounded up to a second.
    pub fn lease_ttl_secs_min(&self) -> i64 {
        let millis = self.election.as_millis() * 3 / 2;
        millis.div_ceil(1000) as i64
    }

    /// None when the gate is off: then a restart begins every lease anew, as etcd does unless told otherwise.
    pub fn lease_checkpoint_interval(&self) -> Option<Duration> {
        self.gate("LeaseCheckpoint")
            .then_some(self.lease_checkpoint_every)
    }

    /// What the Watch service needs to know.
    pub fn watch_config(&self) -> WatchConfig {
        WatchConfig {
            progress_interval: self.watch_progress_interval,
            fragment_bytes: self.request_bytes_max + GRPC_OVERHEAD_BYTES,
            election_timeout: self.election,
        }
    }

    /// True when the gate is on.
    pub fn gate(&self, name: &str) -> bool {
        self.gates.contains(&name)
    }

    /// Checks what was given and fills in the rest.
    pub fn from_values(values: &Values) -> Result<Self, String> {
        let name = values.text("name").to_owned();
        let mut warnings = values.warnings.clone();
        if let Some(path) = &values.from_file {
            warnings.push(format!(
                "loaded server configuration from {path}, other configuration command line flags and environment variables will be ignored if provided"
            ));
        }
        if name == "default" {
            warnings.push(
                "it isn't recommended to use default name, please set a value for --name"
                    .to_owned(),
            );
        }
        let data_dir = match values.text("data-dir") {
            "" => {
                warnings.push(format!("'data-dir' was empty; using default {name}.etcd"));
                PathBuf::from(format!("{name}.etcd"))
            }
            dir => PathBuf::from(dir),
        };
        let bind = |flag| bind_urls(values, flag);
        let listen_client_urls = bind("listen-client-urls")?;
        let listen_client_http_urls = bind("listen-client-http-urls")?;
        if let Some(url) = listen_client_http_urls
            .iter()
            .find(|url| listen_client_urls.contains(url))
        {
            return Err(format!(
                "cannot bind both --listen-client-urls and --listen-client-http-urls on the same url {url}"
            ));
        }
        // In a file the default stays, as in etcd.
        if values.from_file.is_none()
            && values.is_given("listen-client-urls")
            && !values.is_given("advertise-client-urls")
        {
            return Err(
                "--advertise-client-urls is required when --listen-client-urls is set explicitly"
                    .to_owned(),
            );
        }
        let advertise_peer_urls = advertised(values, "initial-advertise-peer-urls")?;
        let (heartbeat, election) = timing(values)?;
        let quota_bytes = quota(values, &mut warnings);
        let request_bytes_max = values.u64("max-request-bytes");
        if request_bytes_max > REQUEST_BYTES_ADVISED_MAX {
            warnings.push(format!(
                "exceeded recommended request limit: {request_bytes_max} > {REQUEST_BYTES_ADVISED_MAX}"
            ));
        }
        let (log_outputs, log_rotation) = log_outputs(values)?;
        let (client_tls, peer_tls) = tls::from_values(values, &mut warnings)?;
        let mut config = Self {
            initial_cluster: initial_cluster(values, &name, &advertise_peer_urls)?,
            initial_cluster_token: values.text("initial-cluster-token").to_owned(),
            initial_cluster_is_new: values.text("initial-cluster-state") == "new",
            strict_reconfig_check: values.bool("strict-reconfig-check"),
            learners_max: usize::try_from(values.i64("max-learners")).unwrap_or_default(),
            force_new_cluster: values.bool("force-new-cluster"),
            client_tls,
            peer_tls,
            name,
            data_dir,
            wal_dir: Some(values.text("wal-dir"))
                .filter(|dir| !dir.is_empty())
                .map(PathBuf::from),
            listen_client_urls,
            listen_client_http_urls,
            listen_metrics_urls: bind("listen-metrics-urls")?,
            listen_peer_urls: bind("listen-peer-urls")?,
            advertise_client_urls: advertised(values, "advertise-client-urls")?,
            advertise_peer_urls,
            heartbeat,
            election,
            lease_reads: values.bool("leader-lease-reads"),
            // 0 is the default, as in etcd.
            snapshot_count: some_or(values.u64("snapshot-count"), 10_000),
            snapshot_catchup_entries: some_or(values.u64("snapshot-catchup-entries"), 5_000),
            wals_max: values.u64("max-wals"),
            unsafe_no_fsync: values.bool("unsafe-no-fsync"),
            memory_mlock: values.bool("memory-mlock"),
            bootstrap_defrag_bytes: match values.u64("bootstrap-defrag-threshold-megabytes") {
                0 => None,
                megabytes => Some(megabytes.saturating_mul(1024 * 1024)),
            },
            quota_bytes,
            quota_told: match values.i64("quota-backend-bytes") {
                0 => QUOTA_BYTES_DEFAULT as i64,
                bytes => bytes,
            },
            auto_defrag: auto_defrag::parse(values.text("auto-defrag"))?,
            batch_interval: or_default(
                values.duration("backend-batch-interval"),
                Duration::from_millis(100),
            ),
            batch_limit: positive_or(values.i64("backend-batch-limit"), 10_000),
            compaction_batch_limit: positive_or(values.i64("compaction-batch-limit"), 1000),
            compaction_sleep: or_default(
                values.duration("compaction-sleep-interval"),
                Duration::from_millis(10),
            ),
            storage_engine: engine(values.text("storage-engine"))?,
            value_cache_bytes: values
                .bytes("value-cache-bytes")
                .unwrap_or_else(|| memory::value_cache_default(memory::limit())),
            response_memory_bytes: values
                .bytes("response-memory-bytes")
                .unwrap_or_else(|| memory::response_budget_default(memory::limit())),
            auto_compaction: auto_compaction(
                values.text("auto-compaction-mode"),
                values.text("auto-compaction-retention"),
            )?,
            txn_ops_max: values.u64("max-txn-ops") as usize,
            request_bytes_max: request_bytes_max as usize,
            concurrent_streams_max: u32::try_from(values.u64("max-concurrent-streams"))
                .unwrap_or(u32::MAX),
            // Either at 0 switches the pings off.
            keepalive_interval: Some(values.duration("grpc-keepalive-interval")).filter(|time| {
                !time.is_zero() && !values.duration("grpc-keepalive-timeout").is_zero()
            }),
            keepalive_timeout: values.duration("grpc-keepalive-timeout"),
            keepalive_min_time: or_default(
                values.duration("grpc-keepalive-min-time"),
                KEEPALIVE_MIN_TIME_DEFAULT,
            ),
            reuse_port: values.bool("socket-reuse-port"),
            reuse_address: values.bool("socket-reuse-address"),
            watch_progress_interval: or_default(
                values.duration("watch-progress-notify-interval"),
                Duration::from_mins(10),
            ),
            lease_checkpoint_every: or_default(
                values.duration("lease-checkpoint-interval"),
                Duration::from_mins(5),
            ),
            downgrade_check_every: values.duration("downgrade-check-time"),
            corruption: corruption(values, election)?,
            warn_request_after: values.duration("warning-unary-request-duration"),
            warn_apply_after: values.duration("warning-apply-duration"),
            tracing: tracing(values)?,
            extensive_metrics: values.text("metrics") == "extensive",
            gates: gates(values)?,
            log_level: logging::level_of(values.text("log-level")).unwrap_or(LevelFilter::ERROR),
            log_format: match values.text("log-format") {
                "console" => LogFormat::Console,
                _ => LogFormat::Json,
            },
            log_outputs,
            log_rotation,
            http_access: HttpAccess::new(values.text("cors"), values.text("host-whitelist")),
            warnings: Vec::new(),
        };
        tls::check_urls(&config, &mut warnings)?;
        config.warnings = warnings;
        Ok(config)
    }
}

fn bind_urls(values: &Values, flag: &str) -> Result<Vec<Url>, String> {
    let urls = Url::parse_list(values.text(flag))?;
    for url in &urls {
        url.endpoint()?;
    }
    Ok(urls)
}

fn advertised(values: &Values, flag: &str) -> Result<Vec<Url>, String> {
    let urls = Url::parse_list(values.text(flag))?;
    for url in &urls {
        if url.host() == Some("") {
            return Err(format!(
                "--{flag} \"{url}\" must be \"host:port\" (unexpected empty host ({url}))"
            ));
        }
    }
    Ok(urls)
}

fn timing(values: &Values) -> Result<(Duration, Duration), String> {
    let heartbeat = values.u64("heartbeat-interval");
    let election = values.u64("election-timeout");
    if heartbeat == 0 {
        return Err("--heartbeat-interval must be >0 (set to 0ms)".to_owned());
    }
    if election == 0 {
        return Err("--election-timeout must be >0 (set to 0ms)".to_owned());
    }
    if heartbeat.saturating_mul(5) > election {
        return Err(format!(
            "--election-timeout[{election}ms] should be at least as 5 times as --heartbeat-interval[{heartbeat}ms]"
        ));
    }
    if election > ELECTION_MS_MAX {
        return Err(format!(
            "--election-timeout[{election}ms] is too long, and should be set less than {ELECTION_MS_MAX}ms"
        ));
    }
    Ok((
        Duration::from_millis(heartbeat),
        Duration::from_millis(election),
    ))
}

fn quota(values: &Values, warnings: &mut Vec<String>) -> Option<u64> {
    let quota = match values.i64("quota-backend-bytes") {
        0 => QUOTA_BYTES_DEFAULT,
        bytes => u64::try_from(bytes).ok()?,
    };
    if quota > QUOTA_BYTES_ADVISED_MAX {
        warnings.push(format!(
            "quota exceeds the maximum value: {quota} > {QUOTA_BYTES_ADVISED_MAX}"
        ));
    }
    Some(quota)
}

/// Name to peer URLs. This member must stand in it with the URLs it advertises.
fn initial_cluster(
    values: &Values,
    name: &str,
    advertised: &[Url],
) -> Result<BTreeMap<String, Vec<Url>>, String> {
    let mut cluster: BTreeMap<String, Vec<Url>> = BTreeMap::new();
    if !values.is_given("initial-cluster") && name != "default" {
        cluster.insert(name.to_owned(), advertised.to_vec());
        return Ok(cluster);
    }
    for part in values
        .text("initial-cluster")
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let (member, url) = part.split_once('=').ok_or_else(|| {
            format!("--initial-cluster: \"{part}\" does not have the form name=url")
        })?;
        cluster
            .entry(member.to_owned())
            .or_default()
            .push(Url::parse(url)?);
    }
    for urls in cluster.values_mut() {
        urls.sort();
    }
    let Some(own) = cluster.get(name) else {
        return Err(format!(
            "couldn't find local name \"{name}\" in the initial cluster configuration"
        ));
    };
    if own != advertised {
        let list = |urls: &[Url]| {
            urls.iter()
                .map(|url| format!("{name}={url}"))
                .collect::<Vec<_>>()
                .join(",")
        };
        let advertised_list: Vec<&str> = advertised.iter().map(Url::as_str).collect();
        return Err(format!(
            "--initial-cluster has {} but missing from --initial-advertise-peer-urls={}",
            list(own),
            advertised_list.join(",")
        ));
    }
    Ok(cluster)
}

/// Hours when the retention is a number alone, as etcd reads it.
fn auto_compaction(mode: &str, retention: &str) -> Result<AutoCompaction, String> {
    let number = retention.parse::<i64>().ok();
    match mode {
        "periodic" => {
            let time = match number {
                Some(hours) => u64::try_from(hours)
                    .ok()
                    .map(|hours| Duration::from_secs(hours * 3600)),
                None => values::parse_duration(retention),
            };
            match time {
                Some(Duration::ZERO) => Ok(AutoCompaction::Off),
                Some(time) => Ok(AutoCompaction::Periodic(time)),
                None => Err(format!(
                    "error parsing --auto-compaction-retention \"{retention}\""
                )),
            }
        }
        "revision" => match number {
            Some(0) => Ok(AutoCompaction::Off),
            Some(revisions) if revisions > 0 => Ok(AutoCompaction::Revision(revisions)),
            _ => Err(format!(
                "error parsing --auto-compaction-retention \"{retention}\""
            )),
        },
        "" => Err("undefined auto-compaction-mode".to_owned()),
        other => Err(format!("unknown auto-compaction-mode \"{other}\"")),
    }
}

fn gates(values: &Values) -> Result<Vec<&'static str>, String> {
    let gates = values::parse_gates(values.text("feature-gates"))?;
    if gates.contains(&"LeaseCheckpointPersist") && !gates.contains(&"LeaseCheckpoint") {
        return Err("enabling feature gate LeaseCheckpointPersist requires enabling feature gate LeaseCheckpoint".to_owned());
    }
    Ok(gates)
}

/// Where the lines go, and how files among them are rotated.
fn log_outputs(values: &Values) -> Result<(Vec<Target>, Option<Rotation>), String> {
    let mut texts: Vec<&str> = values.text("log-outputs").split(',').collect();
    texts.sort_unstable();
    texts.dedup();
    if texts.len() > 1 && texts.contains(&"default") {
        return Err("multi logoutput for \"default\" is not supported yet".to_owned());
    }
    let mut targets = Vec::new();
    for text in texts {
        targets.push(match text {
            "default" | "stderr" | "" => Target::Stderr,
            "stdout" => Target::Stdout,
            "systemd/journal" => {
                return Err("--log-outputs systemd/journal is not supported: what is written to stderr reaches the journal too".to_owned());
            }
            path => Target::File(PathBuf::from(path)),
        });
    }
    if !values.bool("enable-log-rotation") {
        return Ok((targets, None));
    }
    let files = targets
        .iter()
        .filter(|target| matches!(target, Target::File(_)))
        .count();
    if files != 1 {
        return Err(
            "--log-outputs requires a single file path when --log-rotate-config-json is defined"
                .to_owned(),
        );
    }
    let rotation = Rotation::parse(values.text("log-rotation-config-json"))?;
    Ok((targets, Some(rotation)))
}

fn corruption(values: &Values, election: Duration) -> Result<Checks, String> {
    let compactions = values.duration("compact-hash-check-time");
    if compactions.is_zero() {
        return Err("--compact-hash-check-time must be >0 (set to 0s)".to_owned());
    }
    let gates = values::parse_gates(values.text("feature-gates"))?;
    Ok(Checks {
        every: Some(values.duration("corrupt-check-time")).filter(|time| !time.is_zero()),
        compactions_every: gates.contains(&"CompactHashCheck").then_some(compactions),
        patience: REQUEST_TIMEOUT_BASE + 2 * election,
    })
}

fn some_or(given: u64, default: u64) -> u64 {
    if given == 0 { default } else { given }
}

fn tracing(values: &Values) -> Result<Option<Tracing>, String> {
    if !values.bool("enable-distributed-tracing") {
        return Ok(None);
    }
    let sampling_rate = values.i64("distributed-tracing-sampling-rate");
    if sampling_rate < 0 {
        return Err("tracing sampling rate must be positive".to_owned());
    }
    if sampling_rate > SAMPLING_RATE_MAX {
        return Err(format!(
            "tracing sampling rate must be less than {SAMPLING_RATE_MAX}"
        ));
    }
    Ok(Some(Tracing {
        address: values.text("distributed-tracing-address").to_owned(),
        service_name: values.text("distributed-tracing-service-name").to_owned(),
        instance_id: values.text("distributed-tracing-instance-id").to_owned(),
        sampling_rate,
    }))
}

fn or_default(given: Duration, default: Duration) -> Duration {
    if given.is_zero() { default } else { given }
}

fn positive_or(given: i64, default: usize) -> usize {
    usize::try_from(given)
        .ok()
        .filter(|given| *given > 0)
        .unwrap_or(default)
}

/// The engine of this name, which the flag's form has checked.
fn engine(name: &str) -> Result<Kind, String> {
    Kind::named(name).ok_or_else(|| format!("there is no storage engine {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(line: &str) -> Result<Config, String> {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        match Values::from_args(&args) {
            Ok(Asked::Run(values)) => Config::from_values(&values),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn defaults_are_etcds() {
        let config = config("").unwrap();
        assert_eq!(config.quota_bytes, Some(QUOTA_BYTES_DEFAULT));
        assert_eq!(config.request_timeout(), Duration::from_secs(7));
        assert_eq!(config.lease_ttl_secs_min(), 2);
        assert_eq!(config.data_dir, PathBuf::from("default.etcd"));
        assert_eq!(config.auto_compaction, AutoCompaction::Off);
        assert!(config.initial_cluster.contains_key("default"));
    }

    #[test]
    fn contradictions_are_refused_in_etcds_words() {
        for (line, expected) in [
            (
                "--listen-client-urls http://127.0.0.1:1",
                "--advertise-client-urls is required",
            ),
            (
                "--heartbeat-interval 300",
                "--election-timeout[1000ms] should be at least as 5 times",
            ),
            ("--election-timeout 60000", "is too long"),
            (
                "--listen-client-urls http://example.com:1 --advertise-client-urls http://example.com:1",
                "expected IP in URL for binding",
            ),
            (
                "--initial-cluster b=http://h:1",
                "couldn't find local name \"default\"",
            ),
            (
                "--name a --initial-cluster a=http://h:1",
                "but missing from --initial-advertise-peer-urls",
            ),
            (
                "--auto-compaction-mode hourly",
                "unknown auto-compaction-mode",
            ),
            (
                "--enable-distributed-tracing --distributed-tracing-sampling-rate 1000001",
                "tracing sampling rate must be less than 1000000",
            ),
            (
                "--compact-hash-check-time 0s",
                "--compact-hash-check-time must be >0 (set to 0s)",
            ),
            (
                "--feature-gates LeaseCheckpoint=false,LeaseCheckpointPersist=true",
                "requires enabling feature gate LeaseCheckpoint",
            ),
            (
                "--listen-metrics-urls https://127.0.0.1:1",
                "must be provided for metrics secure url",
            ),
            (
                "--listen-client-urls http://127.0.0.1:1 --advertise-client-urls http://127.0.0.1:1 --listen-client-http-urls http://127.0.0.1:1",
                "cannot bind both --listen-client-urls and --listen-client-http-urls",
            ),
            (
                "--log-outputs default,/l",
                "multi logoutput for \"default\" is not supported yet",
            ),
            ("--log-outputs systemd/journal", "reaches the journal too"),
            (
                "--enable-log-rotation --log-outputs stderr",
                "requires a single file path",
            ),
            (
                "--enable-log-rotation --log-outputs /a,/b",
                "requires a single file path",
            ),
            (
                "--enable-log-rotation --log-outputs /a --log-rotation-config-json {",
                "improperly formatted log rotation config",
            ),
        ] {
            let why = config(line).unwrap_err();
            assert!(why.contains(expected), "{line}: {why}");
        }
    }

    #[test]
    fn nothing_means_etcds_default() {
        let config = config(
            "--snapshot-count 0 --snapshot-catchup-entries 0 --grpc-keepalive-min-time 0 --grpc-keepalive-timeout 0",
        )
        .unwrap();
        assert_eq!(
            (config.snapshot_count, config.snapshot_catchup_entries),
            (10_000, 5_000)
        );
        assert_eq!(config.keepalive_min_time, KEEPALIVE_MIN_TIME_DEFAULT);
        assert_eq!(config.keepalive_interval, None);
    }

    #[test]
    fn lines_go_to_all_that_is_named() {
        let config = config("--log-outputs stderr,/l/a.log,stdout --enable-log-rotation").unwrap();
        assert_eq!(
            config.log_outputs,
            [
                Target::File("/l/a.log".into()),
                Target::Stderr,
                Target::Stdout
            ]
        );
        assert_eq!(config.log_rotation, Some(Rotation::default()));
    }

    #[test]
    fn retention_is_hours_a_duration_or_revisions() {
        for (mode, retention, expected) in [
            (
                "periodic",
                "1",
                AutoCompaction::Periodic(Duration::from_secs(3600)),
            ),
            (
                "periodic",
                "5m",
                AutoCompaction::Periodic(Duration::from_secs(300)),
            ),
            ("revision", "1000", AutoCompaction::Revision(1000)),
            ("revision", "0", AutoCompaction::Off),
        ] {
            assert_eq!(
                auto_compaction(mode, retention),
                Ok(expected),
                "{mode} {retention}"
            );
        }
        assert!(auto_compaction("revision", "5m").is_err());
    }

    #[test]
    fn a_name_alone_names_the_cluster() {
        let config = config("--name a --initial-advertise-peer-urls http://h:1").unwrap();
        assert_eq!(config.initial_cluster["a"][0].as_str(), "http://h:1");
    }
}
