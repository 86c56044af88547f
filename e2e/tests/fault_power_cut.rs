//! The power goes under a mixed load, again and again: what was not synced is dropped, kept or torn sector by sector, and names that no sync
//! made durable are gone. Nothing acknowledged is lost, no transaction is torn, and it always opens.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_e2e::lossy::{Lossy, Names};
use ballast_e2e::store_server::{Program, StoreServer};
use ballast_e2e::storm::{Counts, Storm, Witness};
use ballast_e2e::suites::rounds;
use ballast_e2e::up::say;
use rand::Rng as _;

const REDB: &str = "--storage-engine=redb";
const SLED: &str = "--storage-engine=sled";

/// Few, so that the log is purged in most rounds.
const FLAGS: [&str; 3] = [
    "--snapshot-count=500",
    "--snapshot-catchup-entries=100",
    "--max-wals=1",
];

/// What is cut off, and how often.
#[derive(Clone, Copy, Debug)]
struct Plan {
    engine: &'static str,
    names: Names,
    rounds: usize,
    /// sled's sync as it was published, which is none.
    as_published: bool,
}

async fn cuts(plan: Plan) -> Result<()> {
    let Plan {
        engine,
        names,
        rounds,
        as_published,
    } = plan;
    let disk = Lossy::start(names)?;
    let flags = [&FLAGS, &[engine][..]].concat();
    let mut server = StoreServer::prepare(&Program::under_test()?, &flags)?;
    if as_published {
        server.set_environment("BALLAST_UNSAFE_SLED_AS_PUBLISHED", "1");
    }
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
        let told = || format!("{engine}, round {number}, names {names:?}, seed {seed}");
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
        "{engine}, names {names:?}: {rounds} power cuts, {}",
        witness.told(&counts)
    ));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn power_cuts_lose_no_acknowledged_write_and_tear_no_transaction() -> Result<()> {
    for (engine, names, rounds) in [
        (REDB, Names::Journal, rounds(6, 150)),
        (REDB, Names::Strict, rounds(3, 50)),
        (SLED, Names::Journal, rounds(3, 150)),
        (SLED, Names::Strict, rounds(2, 50)),
    ] {
        cuts(Plan {
            engine,
            names,
            rounds,
            as_published: false,
        })
        .await?;
    }
    Ok(())
}

/// What the replacement of sled's sync is for, and that this suite would notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sled_with_its_sync_as_published_does_not_survive() -> Result<()> {
    let plan = Plan {
        engine: SLED,
        names: Names::Journal,
        rounds: rounds(0, 60),
        as_published: true,
    };
    if plan.rounds == 0 {
        return Ok(());
    }
    let failure = cuts(plan).await.expect_err("it lost nothing");
    let text = format!("{failure:#}");
    say(&format!(
        "sled as published: {}",
        text.chars().take(600).collect::<String>()
    ));
    Ok(())
}

/// The first start makes everything; wherever it is cut, the next one opens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_power_cut_while_a_member_is_made_leaves_one_that_starts() -> Result<()> {
    let program = Program::under_test()?;
    for number in 0..rounds(8, 80) {
        let names = [Names::Journal, Names::Strict][number % 2];
        let engine = [REDB, SLED][number / 2 % 2];
        let (seed, pause) = {
            let mut random = rand::rng();
            (random.random(), random.random_range(0..300))
        };
        let disk = Lossy::start(names)?;
        let mut server = StoreServer::prepare(&program, &[engine])?;
        server.set_data_dir(disk.path().join("data"));
        server.spawn()?;
        tokio::time::sleep(Duration::from_millis(pause)).await;
        disk.ask("off")?;
        server.kill()?;
        disk.cut(seed)?;
        let told = || format!("{engine}, names {names:?}, seed {seed}, cut after {pause} ms");
        server.restart().await.with_context(told)?;
        Witness::default()
            .check(&server.client()?, &[])
            .await
            .with_context(told)?;
    }
    Ok(())
}
