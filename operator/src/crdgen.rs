//! Prints the CRDs from the types in `crd/`, one file per kind.
//!
//! `crds/` and the chart's `crds/` folder hold what this prints; `tests/generated.rs` compares.

use std::path::Path;
use std::{fs, io};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::Value;

use crate::crd::{StoreBackup, StoreCluster};

/// Where the CRDs lie on paper, below the root of the repository.
pub const FOLDERS: [&str; 2] = ["crds", "charts/ballast-operator/crds"];

/// Writes every CRD to its places.
pub fn write(root: &Path) -> io::Result<()> {
    for folder in FOLDERS {
        fs::create_dir_all(root.join(folder))?;
        for (name, yaml) in all() {
            fs::write(root.join(folder).join(name), yaml)?;
        }
    }
    Ok(())
}

/// Every CRD as (file name, YAML).
pub fn all() -> Vec<(String, String)> {
    [StoreCluster::crd(), StoreBackup::crd()]
        .into_iter()
        .map(|crd| (format!("{}.yaml", crd.spec.names.plural), print(&crd)))
        .collect()
}

fn print(crd: &CustomResourceDefinition) -> String {
    let mut value = serde_json::to_value(crd).expect("a CRD is plain data");
    tidy(&mut value);
    serde_yaml_ng::to_string(&value).expect("a CRD is plain data")
}

/// An absent field is absent, not null; bounds of integers are integers.
fn tidy(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.remove("nullable");
            for (key, child) in map {
                match child.as_f64() {
                    Some(bound) if key == "minimum" || key == "maximum" => {
                        *child = Value::from(bound as i64);
                    }
                    _ => tidy(child),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

/// Every CRD in one stream of YAML documents.
pub fn stream() -> String {
    all()
        .into_iter()
        .flat_map(|(_, yaml)| ["---\n".to_owned(), yaml])
        .collect()
}
