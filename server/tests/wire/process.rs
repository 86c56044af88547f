//! The process: flags, refusals, signals.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Output;

use crate::harness::{Server, ballast, free_port};

fn run(args: &[&str]) -> Output {
    ballast().args(args).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn bad_flags_end_with_two_and_are_named() {
    for args in [
        &["--nmae", "x"][..],
        &["--max-txn-ops=many"],
        &["--client-crl-file=/c"],
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let flag = args[0].trim_start_matches('-').split('=').next().unwrap();
        assert!(
            stderr(&output).contains(flag),
            "{args:?}: {}",
            stderr(&output)
        );
    }
    let output = run(&["--heartbeat-interval=0"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("--heartbeat-interval must be >0"));
}

#[test]
fn version_says_etcds_and_our_own() {
    let output = run(&["--version"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    assert!(text.starts_with("etcd Version: 3.7.3\n"), "{text}");
    assert!(text.contains("Ballast Version: "), "{text}");
}

#[test]
fn a_directory_in_use_or_of_etcd_is_refused_with_a_sentence() {
    let server = Server::start();
    let url = format!("http://127.0.0.1:{}", free_port());
    let peer_url = format!("http://127.0.0.1:{}", free_port());
    let start = |dir: &std::path::Path| {
        let dir = dir.to_str().unwrap();
        run(&[
            "--name",
            "one",
            "--data-dir",
            dir,
            "--listen-client-urls",
            &url,
            "--advertise-client-urls",
            &url,
            "--listen-peer-urls",
            &peer_url,
        ])
    };
    let output = start(&server.data_dir());
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("is in use by another process"),
        "{}",
        stderr(&output)
    );
    let etcd = tempfile::tempdir().unwrap();
    fs::create_dir_all(etcd.path().join("member/snap")).unwrap();
    // bbolt's first page begins so.
    let mut page = [0; 20];
    page[16..].copy_from_slice(&0xED0C_DAED_u32.to_le_bytes());
    fs::write(etcd.path().join("member/snap/db"), page).unwrap();
    let output = start(etcd.path());
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("ballast snapshot restore"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_signal_ends_it_as_that_signal_and_the_data_is_private() {
    let mut server = Server::start();
    let mode = fs::metadata(server.data_dir())
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o700);
    let status = server.stop();
    assert_eq!(status.signal(), Some(15), "{status:?}");
}
