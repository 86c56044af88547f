//! The agent beside a store, with a script in the store's place.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ballast_operator::agent::{AgentCommand, AgentError, run};
use ballast_operator::backup::plan::BackupReport;
use ballast_operator::cluster::build::hex;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

/// A folder with a `ballast` in it that does what `script` says.
struct Beside {
    folder: TempDir,
}

impl Beside {
    fn new(script: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let me = Self { folder };
        me.store_does(script);
        fs::write(me.path("snapshot"), snapshot()).unwrap();
        me
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn store_does(&self, script: &str) {
        let path = self.path("ballast");
        let here = self.folder.path().display();
        fs::write(
            &path,
            format!("#!/bin/sh\nset -e\ncd {here}\necho \"$@\" >> calls\n{script}"),
        )
        .unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.path("calls")).unwrap_or_default()
    }

    fn backup(&self) -> Result<BackupReport, AgentError> {
        run(AgentCommand::Backup {
            ballast: self.path("ballast"),
            endpoint: "http://store:2379".to_owned(),
            file: self.path("backups/uid/b.db"),
            report: self.path("report"),
        })?;
        Ok(serde_json::from_slice(&fs::read(self.path("report")).unwrap()).unwrap())
    }

    fn restore(&self) -> Result<(), AgentError> {
        run(AgentCommand::Restore {
            ballast: self.path("ballast"),
            snapshot: self.path("snapshot"),
            sha256: hash(&fs::read(self.path("snapshot")).unwrap()),
            data_dir: self.path("data"),
            flags: vec!["--bump-revision=5".to_owned()],
        })
    }
}

const SAVE: &str = r#"
case "$2" in
  save) cp snapshot "$3" ;;
  status) echo '{"hash":1,"revision":42,"totalKey":7,"totalSize":1024,"version":"3.7.0"}' ;;
esac
"#;

/// Two sectors of content and their hash.
fn snapshot() -> Vec<u8> {
    let mut bytes = vec![7_u8; 1024];
    let trailer = Sha256::digest(&bytes);
    bytes.extend_from_slice(&trailer);
    bytes
}

fn hash(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn exists(path: &Path) -> bool {
    path.exists()
}

#[test]
fn a_backup_appears_under_its_name_only_when_it_is_whole_and_is_reported() {
    let beside = Beside::new(SAVE);
    let report = beside.backup().unwrap();
    assert_eq!(
        (report.revision, report.total_keys, report.size_bytes),
        (42, 7, 1056)
    );
    assert_eq!(report.sha256, hash(&snapshot()));
    assert!(exists(&beside.path("backups/uid/b.db")));
    assert!(!exists(&beside.path("backups/uid/b.db.part")));
    assert!(beside.calls().contains("--endpoints=http://store:2379"));
}

#[test]
fn a_second_run_verifies_what_the_first_left_and_fetches_nothing() {
    let beside = Beside::new(SAVE);
    beside.backup().unwrap();
    beside.backup().unwrap();
    assert_eq!(beside.calls().matches("snapshot save").count(), 1);
}

#[test]
fn a_damaged_snapshot_never_gets_its_name() {
    let beside = Beside::new(SAVE);
    let mut bytes = snapshot();
    bytes[100] ^= 1;
    fs::write(beside.path("snapshot"), &bytes).unwrap();
    assert!(matches!(beside.backup(), Err(AgentError::Trailer { .. })));
    assert!(!exists(&beside.path("backups/uid/b.db")));

    fs::write(beside.path("snapshot"), &bytes[..1024]).unwrap();
    assert!(matches!(beside.backup(), Err(AgentError::NoTrailer { .. })));
}

#[test]
fn what_the_store_said_is_in_the_error() {
    let beside = Beside::new("echo 'etcdserver: no leader' >&2; exit 1");
    let error = beside.backup().unwrap_err().to_string();
    assert!(error.contains("etcdserver: no leader"), "{error}");
    let last_words = fs::read_to_string(beside.path("report")).unwrap();
    assert_eq!(last_words, error);
}

#[test]
fn a_restore_happens_once() {
    let beside = Beside::new("mkdir \"$5\"; echo restored > \"$5/db\"");
    beside.restore().unwrap();
    beside.restore().unwrap();
    assert_eq!(beside.calls().lines().count(), 1);
    assert!(beside.calls().contains("--bump-revision=5"));
    assert!(exists(&beside.path("data/db")));
}

#[test]
fn an_interrupted_restore_begins_anew() {
    let beside = Beside::new("mkdir \"$5\"; echo half > \"$5/half\"; exit 1");
    assert!(beside.restore().is_err());
    assert!(!exists(&beside.path("data")));
    beside.store_does("mkdir \"$5\"; echo whole > \"$5/db\"");
    beside.restore().unwrap();
    assert!(exists(&beside.path("data/db")) && !exists(&beside.path("data/half")));
}

#[test]
fn another_file_than_the_recorded_one_is_not_restored() {
    let beside = Beside::new("exit 0");
    let error = run(AgentCommand::Restore {
        ballast: beside.path("ballast"),
        snapshot: beside.path("snapshot"),
        sha256: "00".to_owned(),
        data_dir: beside.path("data"),
        flags: Vec::new(),
    });
    assert!(matches!(error, Err(AgentError::OtherFile { .. })));
    assert!(beside.calls().is_empty());
}

#[test]
fn removal_takes_the_parts_and_the_empty_folder_and_nothing_else() {
    let beside = Beside::new("exit 0");
    let file = beside.path("backups/uid/b.db");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    for name in ["b.db", "b.db.part", "other.db"] {
        fs::write(file.with_file_name(name), "x").unwrap();
    }
    run(AgentCommand::Remove { file: file.clone() }).unwrap();
    assert!(!exists(&file) && exists(&file.with_file_name("other.db")));
    run(AgentCommand::Remove {
        file: file.with_file_name("other.db"),
    })
    .unwrap();
    assert!(!exists(file.parent().unwrap()));
    run(AgentCommand::Remove { file }).unwrap();
}

#[test]
fn the_agent_copies_itself_as_something_that_runs() {
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("agent");
    run(AgentCommand::Install { to: to.clone() }).unwrap();
    assert_eq!(
        fs::metadata(&to).unwrap().permissions().mode() & 0o777,
        0o755
    );
}
