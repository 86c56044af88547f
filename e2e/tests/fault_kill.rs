//! kill -9 under a mixed load, again and again: nothing acknowledged is lost, no transaction is torn, and it always opens.

use std::os::unix::process::ExitStatusExt as _;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use ballast_e2e::store_server::{Program, StoreServer};
use ballast_e2e::storm::{Counts, Storm, Witness};
use ballast_e2e::suites::rounds;
use ballast_e2e::up::say;

async fn kills(engine: &str, rounds: usize) -> Result<()> {
    let mut server = StoreServer::start(&Program::under_test()?, &[engine]).await?;
    let mut witness = Witness::default();
    let counts = Arc::new(Counts::default());
    for number in 0..rounds {
        let round = async {
            let storm = Storm::start(&server, &format!("r{number}"), witness.checked, &counts)?;
            storm.rage().await;
            server.kill()?;
            let attempts = storm.end().await?;
            server.restart().await?;
            witness.check(&server.client()?, &attempts).await
        };
        round.await.with_context(|| format!("round {number}"))?;
    }
    let acknowledged = witness.acknowledged;
    ensure!(
        acknowledged > rounds * 20,
        "only {acknowledged} writes were acknowledged in all rounds"
    );
    let status = server.stop().await?;
    // As etcd, which ends itself by the same signal once all is closed.
    let as_asked =
        status.success() || status.signal() == Some(rustix::process::Signal::TERM.as_raw());
    ensure!(as_asked, "SIGTERM ended the server with {status}");
    server.restart().await?;
    witness
        .check(&server.client()?, &[])
        .await
        .context("after a clean stop")?;
    say(&format!(
        "{engine}: {rounds} kills, {}",
        witness.told(&counts)
    ));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_lose_no_acknowledged_write_and_tear_no_transaction() -> Result<()> {
    kills("--storage-engine=redb", rounds(20, 200)).await?;
    kills("--storage-engine=sled", rounds(10, 200)).await
}
