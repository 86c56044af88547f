//! Random scripts and the edges on one real server, judged by the reference model alone: what `make diff` compares with etcd, without etcd.
//!
//! A failure names its seed; `BALLAST_SEED=n` runs one again, `BALLAST_OPS=n` makes scripts longer.

use ballast_e2e::diff;
use ballast_e2e::store_server::Program;

const OPS: usize = 200;

/// The server that `cargo test --workspace` built beside this test.
fn program() -> Program {
    let me = std::env::current_exe().expect("a program knows where it lies");
    let folder = me.parent().and_then(|deps| deps.parent());
    let path = folder
        .expect("tests lie in target/debug/deps")
        .join("ballast");
    assert!(
        path.is_file(),
        "no server at {}: `cargo test --workspace` builds it",
        path.display()
    );
    Program {
        name: "ballast".to_owned(),
        path,
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().expect("a number"))
}

async fn as_the_model_says(seed: u64) {
    let ops = number("BALLAST_OPS").map_or(OPS, |ops| ops as usize);
    if let Err(error) = diff::run_seed_alone(&program(), seed, ops).await {
        panic!("{error:#}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edges_are_answered_as_the_model_says() {
    if let Err(error) = diff::run_edges_alone(&program()).await {
        panic!("{error:#}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fixed_script_is_answered_as_the_model_says() {
    as_the_model_says(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_script_of_the_day_is_answered_as_the_model_says() {
    as_the_model_says(number("BALLAST_SEED").unwrap_or_else(|| rand::random::<u32>().into())).await;
}
