//! The CRDs' CEL rules, both ways, evaluated here as the API server evaluates them.

use crate::support::{UID, backup, cluster, cluster_with};
use ballast_operator::crd::{StoreBackup, StoreCluster};
use serde_json::{Value, json};

fn refusal(cluster: &StoreCluster) -> Option<String> {
    cluster.validate_cel().err().map(|e| e.to_string())
}

#[test]
fn the_sample_and_its_like_are_taken() {
    for change in [
        json!({}),
        json!({ "version": null, "image": "x" }),
        json!({ "replicas": 3 }),
        json!({ "backup": { "schedule": "0 3 * * *" } }),
        json!({ "backup": { "storage": { "pvc": { "size": null, "claimName": "mine" } } } }),
        json!({ "backup": null }),
    ] {
        assert_eq!(refusal(&cluster_with(change.clone())), None, "{change}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_a_sentence() {
    for (change, words) in [
        (json!({ "version": null }), "must set version or image"),
        (json!({ "replicas": 2 }), "must be odd"),
        (
            json!({ "backup": { "schedule": "0 3 * *" } }),
            "must have five cron fields",
        ),
        (
            json!({ "backup": { "storage": { "pvc": { "claimName": "x" } } } }),
            "exactly one of",
        ),
        (
            json!({ "backup": { "storage": { "pvc": { "size": null } } } }),
            "exactly one of",
        ),
        (
            json!({ "backup": { "storage": { "pvc": {
                "size": null, "claimName": "x", "storageClassName": "y",
            } } } }),
            "must come with size",
        ),
    ] {
        let said = refusal(&cluster_with(change.clone())).unwrap_or_default();
        assert!(said.contains(words), "{change}: {said:?}");
    }
}

#[test]
fn names_that_cannot_name_a_service_are_refused() {
    for (name, ok) in [
        ("a", true),
        ("0a", false),
        ("a.b", false),
        (&*"a".repeat(41), false),
    ] {
        let mut c = cluster();
        c.metadata.name = Some(name.to_owned());
        assert_eq!(refusal(&c).is_none(), ok, "{name}");
    }
}

/// The change, and what the update is refused with.
#[test]
fn what_cannot_change_is_held() {
    let restore = json!({ "bootstrap": { "restore": { "backupRef": { "name": "b" } } } });
    let class = json!({ "storage": { "storageClassName": "fast" } });
    let rows: [(Value, Value, Option<&str>); 9] = [
        (json!({}), json!({ "storage": { "size": "8Gi" } }), None),
        (json!({}), json!({ "storage": { "size": "4096Mi" } }), None),
        (
            json!({}),
            json!({ "storage": { "size": "3Gi" } }),
            Some("must not shrink"),
        ),
        (
            json!({}),
            class.clone(),
            Some("must not be added or removed"),
        ),
        (
            class.clone(),
            json!({}),
            Some("must not be added or removed"),
        ),
        (
            class,
            json!({ "storage": { "storageClassName": "slow" } }),
            Some("must not change"),
        ),
        (
            json!({}),
            restore.clone(),
            Some("must not be added or removed"),
        ),
        (
            restore,
            json!({ "bootstrap": { "restore": { "backupRef": { "name": "c" } } } }),
            Some("must not change"),
        ),
        (json!({}), json!({ "quota": "512Mi" }), None),
    ];
    for (old, new, words) in rows {
        let said = cluster_with(new.clone())
            .validate_cel_update(&cluster_with(old.clone()))
            .err()
            .map(|e| e.to_string());
        match words {
            None => assert_eq!(said, None, "{old} -> {new}"),
            Some(words) => {
                let said = said.unwrap_or_default();
                assert!(said.contains(words), "{old} -> {new}: {said:?}");
            }
        }
    }
}

#[test]
fn a_backups_spec_is_fixed_and_its_status_is_not() {
    let old: StoreBackup = backup("b", UID, None);
    assert!(
        backup("b", UID, Some(true))
            .validate_cel_update(&old)
            .is_ok()
    );
    let mut other = old.clone();
    other.spec.cluster_ref.name = "another".to_owned();
    let said = other.validate_cel_update(&old).unwrap_err().to_string();
    assert!(said.contains("must not change"), "{said}");
}
