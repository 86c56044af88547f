//! /metrics beside a real etcd's: every name etcd has is here with the same type, labels and buckets, or stands in
//! `e2e/expected/etcd-metrics.txt` with the reason why not.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_e2e::store_server::{Program, StoreServer, etcdctl};

/// A family: its type, and the label names and buckets of its series.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Family {
    kind: String,
    labels: BTreeSet<String>,
    buckets: BTreeSet<String>,
    /// The values of a gRPC series' method labels.
    methods: BTreeSet<String>,
}

fn scrape(server: &StoreServer) -> Result<String> {
    let mut stream = TcpStream::connect(server.endpoint())?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    // The older version knows no chunks, whose lengths would stand between the lines.
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("an HTTP answer")?;
    ensure!(head.contains(" 200 OK"), "{head}");
    Ok(body.to_owned())
}

fn families(text: &str) -> BTreeMap<String, Family> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            if let Some((name, kind)) = rest.split_once(' ') {
                name.clone_into(&mut current);
                kind.clone_into(&mut families.entry(current.clone()).or_default().kind);
            }
            continue;
        }
        if !line.starts_with(&current) || current.is_empty() {
            continue;
        }
        let family = families.entry(current.clone()).or_default();
        let Some((_, rest)) = line.split_once('{') else {
            continue;
        };
        let Some((labels, _)) = rest.rsplit_once('}') else {
            continue;
        };
        let mut method = [String::new(), String::new(), String::new()];
        for label in labels.split("\",") {
            let Some((name, value)) = label.split_once("=\"") else {
                continue;
            };
            let value = value.trim_end_matches('"');
            match name {
                "le" => {
                    let bound: f64 = value.parse().unwrap_or(f64::INFINITY);
                    family.buckets.insert(format!("{bound:e}"));
                    continue;
                }
                "grpc_service" => value.clone_into(&mut method[0]),
                "grpc_method" => value.clone_into(&mut method[1]),
                "grpc_type" => value.clone_into(&mut method[2]),
                _ => {}
            }
            family.labels.insert(name.to_owned());
        }
        if !method[0].is_empty() {
            family.methods.insert(method.join("/"));
        }
    }
    families
}

/// Something of everything, so that families that begin with their first event are there.
fn exercise(server: &StoreServer) -> Result<()> {
    for line in [
        "put a b",
        "put a c",
        "get a",
        "del a",
        "lease grant 100 -w json",
        "compaction 3 --physical",
        "endpoint hashkv",
        "endpoint status",
        "snapshot save s.db",
        "defrag",
        "lease revoke 1234",
        "member list",
    ] {
        let arguments: Vec<&str> = line.split(' ').collect();
        etcdctl(server, &arguments, "")?;
    }
    etcdctl(server, &["txn"], "mod(\"a\") = \"0\"\n\nget a\n\nget a\n\n")?;
    etcdctl(
        server,
        &["txn"],
        "mod(\"a\") = \"0\"\n\nput a b\n\nget a\n\n",
    )?;
    Ok(())
}

/// What is missing on purpose: a name, or a prefix with a star, then the reason.
fn expected_missing() -> Vec<(String, String)> {
    include_str!("../expected/etcd-metrics.txt")
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (name, reason) = line.split_once(' ').unwrap_or((line, ""));
            (name.to_owned(), reason.trim().to_owned())
        })
        .collect()
}

fn is_covered(name: &str, pattern: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == pattern,
    }
}

fn value(text: &str, series: &str) -> Result<f64> {
    let line = text
        .lines()
        .find(|line| {
            line.strip_prefix(series)
                .is_some_and(|rest| rest.starts_with(' '))
        })
        .with_context(|| format!("no series {series}"))?;
    let (_, value) = line.rsplit_once(' ').context("a value")?;
    Ok(value.parse()?)
}

async fn compare() -> Result<()> {
    let flags = ["--metrics=extensive"];
    let etcd = StoreServer::start(&Program::etcd()?, &flags).await?;
    let ours = StoreServer::start(&Program::under_test()?, &flags).await?;
    let (etcd_before, before) = (scrape(&etcd)?, scrape(&ours)?);
    for server in [&etcd, &ours] {
        exercise(server)?;
    }
    let theirs_text = scrape(&etcd)?;
    let ours_text = scrape(&ours)?;
    let (theirs, ours_families) = (families(&theirs_text), families(&ours_text));
    ensure!(theirs.len() > 90, "etcd has only {} families", theirs.len());
    let missing = expected_missing();
    let mut complaints = Vec::new();
    for (name, family) in &theirs {
        let excused = missing.iter().any(|(pattern, _)| is_covered(name, pattern));
        match ours_families.get(name) {
            None if excused => {}
            None => complaints.push(format!("{name}: missing")),
            Some(_) if excused => {
                complaints.push(format!("{name}: is there, and listed as missing"));
            }
            Some(own) if own != family => {
                complaints.push(format!("{name}: etcd has {family:?}, here is {own:?}"));
            }
            Some(_) => {}
        }
    }
    for (pattern, reason) in &missing {
        if reason.is_empty() {
            complaints.push(format!("{pattern}: no reason given"));
        }
        if !theirs.keys().any(|name| is_covered(name, pattern)) {
            complaints.push(format!("{pattern}: etcd has no such name"));
        }
    }
    if !complaints.is_empty() {
        bail!("{}", complaints.join("\n"));
    }

    // The same work counts the same.
    for series in [
        "etcd_mvcc_put_total",
        "etcd_mvcc_delete_total",
        "etcd_debugging_mvcc_total_put_size_in_bytes",
        "etcd_debugging_mvcc_keys_total",
        "etcd_debugging_mvcc_current_revision",
        "etcd_debugging_mvcc_compact_revision",
        "etcd_debugging_lease_granted_total",
        "etcd_debugging_lease_ttl_total_sum",
        "etcd_server_has_leader",
        "etcd_server_is_leader",
        "etcd_server_leader_changes_seen_total",
        "etcd_server_quota_backend_bytes",
        "etcd_disk_backend_defrag_duration_seconds_count",
        "etcd_disk_backend_snapshot_duration_seconds_count",
        "etcd_mvcc_hash_rev_duration_seconds_count",
    ] {
        let (theirs, own) = (value(&theirs_text, series)?, value(&ours_text, series)?);
        ensure!(
            (theirs - own).abs() < 1e-9,
            "{series}: etcd counts {theirs}, here it is {own}"
        );
    }
    let put = r#"{grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary"}"#;
    for family in ["started", "msg_received", "msg_sent"] {
        let series = format!("grpc_server_{family}_total{put}");
        let counted = value(&ours_text, &series)? - value(&before, &series)?;
        ensure!((counted - 2.0).abs() < 1e-9, "{series} rose by {counted}");
    }
    let refused = r#"grpc_server_handled_total{grpc_code="NotFound",grpc_method="LeaseRevoke",grpc_service="etcdserverpb.Lease",grpc_type="unary"}"#;
    ensure!(value(&ours_text, refused)? >= 1.0, "{refused}");
    // Both count messages without their frames. What comes in is the same; what goes out differs in ids and terms.
    let risen = |series: &str| -> Result<(f64, f64)> {
        Ok((
            value(&theirs_text, series)? - value(&etcd_before, series)?,
            value(&ours_text, series)? - value(&before, series)?,
        ))
    };
    let (theirs, own) = risen("etcd_network_client_grpc_received_bytes_total")?;
    ensure!(
        theirs > 0.0 && (theirs - own).abs() < 1e-9,
        "etcd received {theirs} bytes, here it was {own}"
    );
    let (theirs, own) = risen("etcd_network_client_grpc_sent_bytes_total")?;
    ensure!(
        theirs > 100.0 && own > 100.0,
        "etcd sent {theirs} bytes, here it was {own}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_types_labels_and_buckets_are_etcds() {
    compare().await.expect("the metrics are etcd's");
}
