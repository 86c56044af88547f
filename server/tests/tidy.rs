//! The rules of the tree that no compiler holds: who may import what, a `//!` on each file, ASCII, sizes.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

/// Files that may be longer than [`LINES_MAX`], each with its reason.
const LONG: [(&str, &str); 0] = [];
const LINES_MAX: usize = 1200;

/// In files under the folder no line may contain one of the words.
const BANNED: [(&str, &[&str], &str); 8] = [
    (
        "server/src/rpc",
        &["openraft::"],
        "openraft is named in raft/ only",
    ),
    (
        "server/src/apply",
        &["openraft::"],
        "openraft is named in raft/ only",
    ),
    (
        "server/src/watch",
        &["openraft::"],
        "openraft is named in raft/ only",
    ),
    (
        "server/src/apply",
        &["tonic::", "SystemTime::", "Instant::now", "rand::"],
        "apply is deterministic",
    ),
    (
        "server/src/apply",
        &["crate::rpc"],
        "data flows rpc -> raft -> apply -> storage",
    ),
    (
        "server/storage/src/mvcc",
        &["redb::", "sled::"],
        "an engine is named in backend/<engine>.rs only",
    ),
    (
        "server/storage/src",
        &["crate::server", "tokio::", "tonic::", "openraft::"],
        "storage is sync and knows nothing above it",
    ),
    (
        "operator/src/cluster/plan",
        &["kube::Api", "kube::Client", ".await"],
        "plan is pure",
    ),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("server/ lies in the workspace")
        .to_owned()
}

fn rust_files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            rust_files(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

fn sources() -> Vec<(String, String)> {
    let root = root();
    let mut files = Vec::new();
    for folder in ["server", "operator", "e2e"] {
        rust_files(&root.join(folder), &mut files);
    }
    assert!(files.len() > 20, "found only {} files", files.len());
    files
        .into_iter()
        .map(|path| {
            let name = path
                .strip_prefix(&root)
                .unwrap()
                .to_string_lossy()
                .into_owned();
            let text = fs::read_to_string(&path).unwrap();
            (name, text)
        })
        .collect()
}

#[test]
fn every_file_says_what_it_owns() {
    let bad: Vec<_> = sources()
        .into_iter()
        .filter(|(_, text)| !text.starts_with("//!"))
        .map(|(name, _)| name)
        .collect();
    assert!(bad.is_empty(), "no //! at the top of {bad:?}");
}

#[test]
fn sources_are_ascii() {
    let bad: Vec<_> = sources()
        .into_iter()
        .filter_map(|(name, text)| {
            text.lines()
                .position(|l| !l.is_ascii())
                .map(|l| format!("{name}:{}", l + 1))
        })
        .collect();
    assert!(bad.is_empty(), "not ASCII: {bad:?}");
}

#[test]
fn files_can_be_held_by_a_person() {
    let bad: Vec<_> = sources()
        .into_iter()
        .filter(|(name, text)| {
            text.lines().count() > LINES_MAX && !LONG.iter().any(|(long, _)| long == name)
        })
        .map(|(name, text)| format!("{name}: {} lines", text.lines().count()))
        .collect();
    assert!(
        bad.is_empty(),
        "split by noun, or list with a reason: {bad:?}"
    );
}

#[test]
fn layers_import_only_what_lies_below() {
    let mut bad = Vec::new();
    for (name, text) in sources() {
        for (folder, words, why) in BANNED {
            if !name.starts_with(folder) {
                continue;
            }
            for (number, line) in text.lines().enumerate() {
                let code = line.split("//").next().unwrap_or_default();
                if words.iter().any(|word| code.contains(word)) {
                    bad.push(format!("{name}:{}: {} ({why})", number + 1, line.trim()));
                }
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}
