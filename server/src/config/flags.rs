//! Every flag of etcd 3.7 and our own few: name, default, form, and what it does here.
//!
//! A flag whose feature this release does not have is accepted at its default and refused otherwise: nobody shall believe
//! that a connection is encrypted when it is not.
//!
//! etcd: server/embed/config.go (AddFlags), server/etcdmain/config.go.

/// The form of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Text,
    Bool,
    Uint,
    Uint32,
    /// A number, or [`AUTO`].
    AutoUint,
    Int,
    Duration,
    /// Comma-separated URLs.
    Urls,
    Choice(&'static [&'static str]),
    /// `Name=true,Other=false`.
    Gates,
    /// `off`, or `size=BYTES,free=PERCENT%,interval=TIME`.
    AutoDefrag,
}

/// What a flag does here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Used,
    /// Accepted: it tunes something that this server does otherwise.
    None,
    /// Refused unless at its default; the reason, said to the user.
    Missing(&'static str),
}

/// One flag.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    pub name: &'static str,
    pub default: &'static str,
    pub form: Form,
    pub effect: Effect,
}

const fn flag(name: &'static str, default: &'static str, form: Form, effect: Effect) -> Flag {
    Flag {
        name,
        default,
        form,
        effect,
    }
}

/// Chosen by what memory there is (config/memory.rs).
pub const AUTO: &str = "auto";

const REVOKED: Effect = Effect::Missing("this release reads no lists of revoked certificates");
const DISCOVERY: Effect = Effect::Missing("this release has no discovery service");
const USERS: Effect = Effect::Missing("this release has no users and roles");

/// In etcd's order. Durations are in Go's notation.
pub const FLAGS: &[Flag] = &[
    // Member.
    flag("name", "default", Form::Text, Effect::Used),
    flag("data-dir", "", Form::Text, Effect::Used),
    flag("wal-dir", "", Form::Text, Effect::Used),
    flag(
        "listen-peer-urls",
        "http://localhost:2380",
        Form::Urls,
        Effect::Used,
    ),
    flag(
        "listen-client-urls",
        "http://localhost:2379",
        Form::Urls,
        Effect::Used,
    ),
    flag("listen-client-http-urls", "", Form::Urls, Effect::Used),
    flag("listen-metrics-urls", "", Form::Urls, Effect::Used),
    flag("max-snapshots", "5", Form::Uint, Effect::None),
    flag("max-wals", "5", Form::Uint, Effect::Used),
    flag("snapshot-count", "10000", Form::Uint, Effect::Used),
    flag("snapshot-catchup-entries", "5000", Form::Uint, Effect::Used),
    flag("heartbeat-interval", "100", Form::Uint, Effect::Used),
    flag("election-timeout", "1000", Form::Uint, Effect::Used),
    flag(
        "initial-election-tick-advance",
        "true",
        Form::Bool,
        Effect::None,
    ),
    flag("quota-backend-bytes", "0", Form::Int, Effect::Used),
    flag(
        "backend-bbolt-freelist-type",
        "map",
        Form::Choice(&["array", "map"]),
        Effect::None,
    ),
    flag("backend-batch-interval", "0s", Form::Duration, Effect::Used),
    flag("backend-batch-limit", "0", Form::Int, Effect::Used),
    flag("max-txn-ops", "128", Form::Uint, Effect::Used),
    flag("max-request-bytes", "1572864", Form::Uint, Effect::Used),
    flag(
        "max-concurrent-streams",
        "4294967295",
        Form::Uint32,
        Effect::Used,
    ),
    flag(
        "grpc-keepalive-min-time",
        "5s",
        Form::Duration,
        Effect::Used,
    ),
    flag(
        "grpc-keepalive-interval",
        "2h",
        Form::Duration,
        Effect::Used,
    ),
    flag(
        "grpc-keepalive-timeout",
        "20s",
        Form::Duration,
        Effect::Used,
    ),
    flag("socket-reuse-port", "false", Form::Bool, Effect::Used),
    flag("socket-reuse-address", "false", Form::Bool, Effect::Used),
    flag("raft-read-timeout", "5s", Form::Duration, Effect::None),
    flag("raft-write-timeout", "5s", Form::Duration, Effect::None),
    flag("memory-mlock", "false", Form::Bool, Effect::Used),
    // Cluster.
    flag(
        "initial-advertise-peer-urls",
        "http://localhost:2380",
        Form::Urls,
        Effect::Used,
    ),
    flag(
        "advertise-client-urls",
        "http://localhost:2379",
        Form::Urls,
        Effect::Used,
    ),
    flag(
        "initial-cluster",
        "default=http://localhost:2380",
        Form::Text,
        Effect::Used,
    ),
    flag(
        "initial-cluster-state",
        "new",
        Form::Choice(&["new", "existing"]),
        Effect::Used,
    ),
    flag(
        "initial-cluster-token",
        "etcd-cluster",
        Form::Text,
        Effect::Used,
    ),
    flag("strict-reconfig-check", "true", Form::Bool, Effect::Used),
    flag("pre-vote", "true", Form::Bool, Effect::None),
    flag("max-learners", "1", Form::Int, Effect::Used),
    flag("discovery-token", "", Form::Text, DISCOVERY),
    flag("discovery-endpoints", "", Form::Text, DISCOVERY),
    flag("discovery-dial-timeout", "2s", Form::Duration, DISCOVERY),
    flag("discovery-request-timeout", "5s", Form::Duration, DISCOVERY),
    flag("discovery-keepalive-time", "2s", Form::Duration, DISCOVERY),
    flag(
        "discovery-keepalive-timeout",
        "6s",
        Form::Duration,
        DISCOVERY,
    ),
    flag(
        "discovery-insecure-transport",
        "true",
        Form::Bool,
        DISCOVERY,
    ),
    flag(
        "discovery-insecure-skip-tls-verify",
        "false",
        Form::Bool,
        DISCOVERY,
    ),
    flag("discovery-cert", "", Form::Text, DISCOVERY),
    flag("discovery-key", "", Form::Text, DISCOVERY),
    flag("discovery-cacert", "", Form::Text, DISCOVERY),
    flag("discovery-user", "", Form::Text, DISCOVERY),
    flag("discovery-password", "", Form::Text, DISCOVERY),
    flag("discovery-srv", "", Form::Text, DISCOVERY),
    flag("discovery-srv-name", "", Form::Text, DISCOVERY),
    flag(
        "discovery-fallback",
        "exit",
        Form::Choice(&["exit"]),
        Effect::None,
    ),
    flag("auto-compaction-retention", "0", Form::Text, Effect::Used),
    flag("auto-compaction-mode", "periodic", Form::Text, Effect::Used),
    flag(
        "v2-deprecation",
        "write-only",
        Form::Choice(&[
            "write-only",
            "write-only-skip-check",
            "write-only-drop-data",
            "gone",
        ]),
        Effect::None,
    ),
    // Security.
    flag("cert-file", "", Form::Text, Effect::Used),
    flag("key-file", "", Form::Text, Effect::Used),
    flag("client-cert-file", "", Form::Text, Effect::Used),
    flag("client-key-file", "", Form::Text, Effect::Used),
    flag("client-cert-auth", "false", Form::Bool, Effect::Used),
    flag("client-crl-file", "", Form::Text, REVOKED),
    flag("client-cert-allowed-hostname", "", Form::Text, Effect::Used),
    flag("trusted-ca-file", "", Form::Text, Effect::Used),
    flag("auto-tls", "false", Form::Bool, Effect::Used),
    flag("peer-cert-file", "", Form::Text, Effect::Used),
    flag("peer-key-file", "", Form::Text, Effect::Used),
    flag("peer-client-cert-file", "", Form::Text, Effect::Used),
    flag("peer-client-key-file", "", Form::Text, Effect::Used),
    flag("peer-client-cert-auth", "false", Form::Bool, Effect::Used),
    flag("peer-trusted-ca-file", "", Form::Text, Effect::Used),
    flag("peer-cert-allowed-cn", "", Form::Text, Effect::Used),
    flag("peer-cert-allowed-hostname", "", Form::Text, Effect::Used),
    flag("peer-auto-tls", "false", Form::Bool, Effect::Used),
    flag("peer-crl-file", "", Form::Text, REVOKED),
    flag(
        "peer-skip-client-san-verification",
        "false",
        Form::Bool,
        Effect::Used,
    ),
    flag("self-signed-cert-validity", "1", Form::Uint, Effect::Used),
    flag("cipher-suites", "", Form::Text, Effect::Used),
    flag("tls-min-version", "TLS1.2", Form::Text, Effect::Used),
    flag("tls-max-version", "", Form::Text, Effect::Used),
    flag("cors", "*", Form::Text, Effect::Used),
    flag("host-whitelist", "*", Form::Text, Effect::Used),
    // Auth.
    flag("auth-token", "simple", Form::Text, USERS),
    flag("bcrypt-cost", "10", Form::Uint, Effect::None),
    flag("auth-token-ttl", "300", Form::Uint, Effect::None),
    // Observability.
    flag(
        "enable-pprof",
        "false",
        Form::Bool,
        Effect::Missing("there is no Go runtime to look into; perf sees this server's symbols"),
    ),
    flag(
        "metrics",
        "basic",
        Form::Choice(&["basic", "extensive"]),
        Effect::Used,
    ),
    flag("logger", "zap", Form::Choice(&["zap"]), Effect::None),
    flag("log-outputs", "default", Form::Text, Effect::Used),
    flag(
        "log-level",
        "info",
        Form::Choice(&["debug", "info", "warn", "error", "dpanic", "panic", "fatal"]),
        Effect::Used,
    ),
    flag(
        "log-format",
        "json",
        Form::Choice(&["json", "console"]),
        Effect::Used,
    ),
    flag("enable-log-rotation", "false", Form::Bool, Effect::Used),
    flag(
        "log-rotation-config-json",
        r#"{"maxsize": 100, "maxage": 0, "maxbackups": 0, "localtime": false, "compress": false}"#,
        Form::Text,
        Effect::Used,
    ),
    flag(
        "warning-unary-request-duration",
        "300ms",
        Form::Duration,
        Effect::Used,
    ),
    flag(
        "warning-apply-duration",
        "100ms",
        Form::Duration,
        Effect::Used,
    ),
    flag(
        "enable-distributed-tracing",
        "false",
        Form::Bool,
        Effect::Used,
    ),
    flag(
        "distributed-tracing-address",
        "localhost:4317",
        Form::Text,
        Effect::Used,
    ),
    flag(
        "distributed-tracing-service-name",
        "etcd",
        Form::Text,
        Effect::Used,
    ),
    flag(
        "distributed-tracing-instance-id",
        "",
        Form::Text,
        Effect::Used,
    ),
    flag(
        "distributed-tracing-sampling-rate",
        "0",
        Form::Int,
        Effect::Used,
    ),
    // Tuning.
    flag("enable-grpc-gateway", "true", Form::Bool, Effect::None),
    flag("corrupt-check-time", "0s", Form::Duration, Effect::Used),
    flag(
        "compact-hash-check-time",
        "1m",
        Form::Duration,
        Effect::Used,
    ),
    flag("compaction-batch-limit", "0", Form::Int, Effect::Used),
    flag(
        "compaction-sleep-interval",
        "0s",
        Form::Duration,
        Effect::Used,
    ),
    flag(
        "watch-progress-notify-interval",
        "0s",
        Form::Duration,
        Effect::Used,
    ),
    flag(
        "bootstrap-defrag-threshold-megabytes",
        "0",
        Form::Uint,
        Effect::Used,
    ),
    flag("downgrade-check-time", "5s", Form::Duration, Effect::Used),
    flag("feature-gates", "", Form::Gates, Effect::Used),
    // Unsafe.
    flag("force-new-cluster", "false", Form::Bool, Effect::Used),
    flag("unsafe-no-fsync", "false", Form::Bool, Effect::Used),
    // Ours.
    flag(
        "lease-checkpoint-interval",
        "5m",
        Form::Duration,
        Effect::Used,
    ),
    flag("leader-lease-reads", "false", Form::Bool, Effect::Used),
    flag("value-cache-bytes", AUTO, Form::AutoUint, Effect::Used),
    flag("response-memory-bytes", AUTO, Form::AutoUint, Effect::Used),
    flag(
        "auto-defrag",
        super::auto_defrag::DEFAULT,
        Form::AutoDefrag,
        Effect::Used,
    ),
    flag(
        "storage-engine",
        "redb",
        Form::Choice(&["redb", "sled"]),
        Effect::Used,
    ),
];

/// Accepted and ignored, as etcd does for flags of its distant past.
pub const ANCIENT: &[&str] = &[
    "cluster-active-size",
    "cluster-remove-delay",
    "cluster-sync-interval",
    "config",
    "force",
    "max-result-buffer",
    "max-retry-attempts",
    "peer-heartbeat-interval",
    "peer-election-timeout",
    "retry-interval",
    "snapshot",
    "v",
    "vv",
];

/// Said to whoever still sets one.
pub const DEPRECATED: &[(&str, &str)] = &[
    (
        "max-snapshots",
        "--max-snapshots is deprecated in 3.6 and will be decommissioned in 3.8.",
    ),
    (
        "v2-deprecation",
        "--v2-deprecation is deprecated and scheduled for removal in v3.8. The default value is enforced, ignoring user input.",
    ),
];

/// What the transport security sections of a file may say, and the flag that it is in each: of clients, of peers.
pub const SECURITY_OPTIONS: &[(&str, Option<&str>, &str)] = &[
    ("cert-file", Some("cert-file"), "peer-cert-file"),
    ("key-file", Some("key-file"), "peer-key-file"),
    (
        "client-cert-file",
        Some("client-cert-file"),
        "peer-client-cert-file",
    ),
    (
        "client-key-file",
        Some("client-key-file"),
        "peer-client-key-file",
    ),
    (
        "client-cert-auth",
        Some("client-cert-auth"),
        "peer-client-cert-auth",
    ),
    (
        "trusted-ca-file",
        Some("trusted-ca-file"),
        "peer-trusted-ca-file",
    ),
    ("auto-tls", Some("auto-tls"), "peer-auto-tls"),
    ("allowed-cn", None, "peer-cert-allowed-cn"),
    (
        "allowed-hostname",
        Some("client-cert-allowed-hostname"),
        "peer-cert-allowed-hostname",
    ),
    (
        "skip-client-san-verification",
        None,
        "peer-skip-client-san-verification",
    ),
];

/// etcd's feature gates and their defaults, which are etcd's but for one: `LeaseCheckpoint` is on here.
pub const GATES: &[(&str, bool)] = &[
    ("StopGRPCServiceOnDefrag", false),
    ("InitialCorruptCheck", false),
    ("CompactHashCheck", false),
    ("TxnModeWriteWithSharedBuffer", true),
    ("LeaseCheckpoint", true),
    ("LeaseCheckpointPersist", false),
    ("SetMemberLocalAddr", false),
    ("FastLeaseKeepAlive", true),
    ("PriorityRequest", false),
    ("AllAlpha", false),
    ("AllBeta", false),
];

pub fn find(name: &str) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.name == name)
}

/// `some-flag` is `ETCD_SOME_FLAG`.
pub fn env_name(name: &str) -> String {
    format!("ETCD_{}", name.to_uppercase().replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_flag_stands_twice() {
        for (i, flag) in FLAGS.iter().enumerate() {
            assert!(
                FLAGS[i + 1..].iter().all(|other| other.name != flag.name),
                "{}",
                flag.name
            );
            assert!(!ANCIENT.contains(&flag.name), "{}", flag.name);
        }
    }

    #[test]
    fn every_default_has_its_own_form() {
        for flag in FLAGS {
            crate::config::values::check(flag, flag.default)
                .unwrap_or_else(|why| panic!("{}: {why}", flag.name));
        }
    }
}
