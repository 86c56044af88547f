//! The power goes under a mixed load, again and again: what was not synced is dropped, kept or torn sector by sector, and names that no sync
//! made durable are gone. Nothing acknowledged is lost, no transaction is torn, and it always opens.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_e2e::lossy::{Lossy, Names};
use ballast_e2e::store_server::{Program, StoreServer};
use ballast_e2e::storm::{Counts, Storm, Witness};
use ballast_e2e::suites::rounds;
use ballast_e2e::up::say;
use rand::Rng as _;

/// Few, so that the log is purged in most rounds.
const FLAGS: [&str; 3] = [
    "--snapshot-count=500",
    "--snapshot-catchup-entries=100",
    "--max-wals=1",
];

async fn cuts(program: &Program, flags: &[&str], names: Names, rounds: usize) -> Result<()> {
    let disk = Lossy::start(names)?;
    let mut server = StoreServer::prepare(program, &[&FLAGS, flags].concat())?;
    server.set_data_dir(disk.path().join("data"));
    server.restart().await?;
    let mut witness = Witness::default();
    let counts = Arc::new(Counts::default());
    for number in 0..rounds {
        let seed = rand::rng().random();
        let round = async {
            let storm = Storm::start(&server, &format!("r{number}"), witness.checked, &counts)?;
            storm.rage().await;
            disk.ask("off")?;
            server.kill()?;
            let attempts = storm.end().await?;
            disk.cut(seed)?;
            server.restart().await?;
            witness.check(&server.client()?, &attempts).await
        };
        let told = || format!("round {number}, names {names:?}, seed {seed}");
        round.await.with_context(told)?;
    }
    let acknowledged = witness.acknowledged;
    ensure!(
        acknowledged > rounds * 10,
        "only {acknowledged} writes were acknowledged in all rounds"
    );
    server.stop().await?;
    server.restart().await?;
    witness
        .check(&server.client()?, &[])
        .await
        .context("after a clean stop")?;
    say(&format!(
        "names {names:?}: {rounds} power cuts, {} writes sent, {acknowledged} acknowledged, {} revisions, {} compactions, \
         {} defragmentations, {} snapshots, {} hashes compared",
        witness.sent,
        witness.checked,
        counts.compactions.load(Ordering::Relaxed),
        counts.defragmentations.load(Ordering::Relaxed),
        counts.snapshots.load(Ordering::Relaxed),
        witness.hashes,
    ));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn power_cuts_lose_no_acknowledged_write_and_tear_no_transaction() -> Result<()> {
    let program = Program::under_test()?;
    cuts(&program, &[], Names::Journal, rounds(8, 150)).await?;
    cuts(&program, &[], Names::Strict, rounds(4, 50)).await
}

/// The first start makes everything; wherever it is cut, the next one opens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_power_cut_while_a_member_is_made_leaves_one_that_starts() -> Result<()> {
    let program = Program::under_test()?;
    for number in 0..rounds(6, 60) {
        let names = [Names::Journal, Names::Strict][number % 2];
        let (seed, pause) = {
            let mut random = rand::rng();
            (random.random(), random.random_range(0..300))
        };
        let disk = Lossy::start(names)?;
        let mut server = StoreServer::prepare(&program, &[])?;
        server.set_data_dir(disk.path().join("data"));
        server.spawn()?;
        tokio::time::sleep(Duration::from_millis(pause)).await;
        disk.ask("off")?;
        server.kill()?;
        disk.cut(seed)?;
        let told = || format!("names {names:?}, seed {seed}, cut after {pause} ms");
        server.restart().await.with_context(told)?;
        Witness::default()
            .check(&server.client()?, &[])
            .await
            .with_context(told)?;
    }
    Ok(())
}
