//! A short differential run: the same scripts on real etcd and on the server under test. `make diff` runs longer ones.

use ballast_e2e::diff;
use ballast_e2e::store_server::Program;

const OPS: usize = 300;

async fn no_difference(seed: u64) {
    let program = Program::under_test().expect("the server under test is built");
    if let Err(error) = diff::run_seed(&program, &[], seed, OPS).await {
        panic!("seed {seed}: {error:#}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edges_are_answered_as_by_etcd() {
    let program = Program::under_test().expect("the server under test is built");
    if let Err(error) = diff::run_edges(&program, &[]).await {
        panic!("{error:#}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fixed_script_is_answered_as_by_etcd() {
    no_difference(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_script_of_the_day_is_answered_as_by_etcd() {
    // The seed is in the message of a failure; `ballast-e2e diff --seeds 1 --seed N --ops 300` runs it again.
    no_difference(rand::random::<u32>().into()).await;
}
