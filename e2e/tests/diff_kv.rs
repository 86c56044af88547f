//! A short differential run: the same scripts on real etcd and on the server under test. `make diff` runs longer ones.

use ballast_e2e::diff;
use ballast_e2e::store_server::Program;

const OPS: usize = 250;
/// Always the same, so that what passed yesterday passes today.
const SEEDS: [u64; 2] = [1, 2];

/// All at a time: servers that start and sync leave the cores idle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edges_fixed_scripts_and_one_of_the_day_are_answered_as_by_etcd() {
    let program = Program::under_test().expect("the server under test is built");
    // The seed is in the message of a failure; `ballast-e2e diff --seeds 1 --seed N --ops 250` runs it again.
    let of_the_day = rand::random::<u32>().into();
    let scripts = SEEDS.into_iter().chain([of_the_day]);
    let scripts = scripts.map(|seed| diff::run_seed(&program, &[], seed, OPS));
    let outcome = futures::future::try_join(
        futures::future::try_join_all(scripts),
        diff::run_edges(&program, &[]),
    )
    .await;
    if let Err(error) = outcome {
        panic!("{error:#}");
    }
}
