//! Generated files are what the types say: `ballast-operator crds --write`.
//! `UPDATE=1 cargo test -p ballast-operator --test generated` rewrites both.

use std::path::{Path, PathBuf};

use ballast_operator::crdgen;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

#[test]
fn crds_on_paper_are_the_ones_in_the_types() {
    if std::env::var_os("UPDATE").is_some() {
        crdgen::write(&root()).unwrap();
    }
    for folder in crdgen::FOLDERS {
        let folder = root().join(folder);
        let all = crdgen::all();
        for (name, yaml) in &all {
            let paper = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
            assert_eq!(
                &paper,
                yaml,
                "{}/{name} is stale; UPDATE=1 rewrites it",
                folder.display()
            );
        }
        let files = std::fs::read_dir(&folder).unwrap().count();
        assert_eq!(
            files,
            all.len(),
            "{} holds a file no type stands for",
            folder.display()
        );
    }
}

/// Every list and string a CEL rule walks has a bound, or the API server refuses the rule's cost.
#[test]
fn crds_hold_to_the_api_conventions() {
    for (name, yaml) in crdgen::all() {
        let crd: serde_json::Value = serde_yaml_ng::from_str(&yaml).unwrap();
        let version = &crd["spec"]["versions"][0];
        assert!(
            version["subresources"]["status"].is_object(),
            "{name} has a status subresource"
        );
        assert_eq!(
            crd["spec"]["names"]["categories"],
            serde_json::json!(["ballast"])
        );
        let schema = &version["schema"]["openAPIV3Schema"];
        let conditions = &schema["properties"]["status"]["properties"]["conditions"];
        assert_eq!(conditions["x-kubernetes-list-type"], "map", "{name}");
        assert_eq!(
            conditions["x-kubernetes-list-map-keys"],
            serde_json::json!(["type"]),
            "{name}"
        );
        walk("", schema, &mut |path, node| {
            for rule in node["x-kubernetes-validations"]
                .as_array()
                .into_iter()
                .flatten()
            {
                let message = rule["message"].as_str().unwrap_or_default();
                assert!(
                    message.contains("must"),
                    "{name}{path}: {message:?} must say must"
                );
            }
            let property = path.rsplit('.').next().unwrap_or_default();
            assert_ne!(node["type"], "number", "{name}{path}: no floats");
            let bounded = node["maxLength"].is_u64() || node["enum"].is_array();
            if node["type"] == "string" && path.starts_with(".spec") && property != "*" {
                assert!(bounded, "{name}{path} has no bound");
            }
        });
    }
}

fn walk(path: &str, node: &serde_json::Value, visit: &mut dyn FnMut(&str, &serde_json::Value)) {
    visit(path, node);
    for (key, child) in node["properties"].as_object().into_iter().flatten() {
        walk(&format!("{path}.{key}"), child, visit);
    }
    for (key, child) in [("*", &node["items"]), ("*", &node["additionalProperties"])] {
        if child.is_object() {
            walk(&format!("{path}.{key}"), child, visit);
        }
    }
}
