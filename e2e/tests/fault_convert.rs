//! kill -9 under a mixed load while one storage engine is converted into the other, there and back: nothing acknowledged is lost, and what
//! is live afterwards is the one engine or the other.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_api::etcdserverpb::PutRequest;
use ballast_e2e::kill_history::Attempt;
use ballast_e2e::store_server::{Program, StoreServer};
use ballast_e2e::storm::{Counts, Storm, Witness};
use ballast_e2e::suites::rounds;
use ballast_e2e::up::say;
use ballast_e2e::wait;

/// Enough that a conversion takes longer than some rounds.
const FILL_KEYS: usize = 400;
const FILL_BYTES: usize = 60_000;
const CONVERT_DEADLINE: Duration = Duration::from_mins(1);

async fn fill(server: &StoreServer) -> Result<Vec<Attempt>> {
    let mut kv = server.client()?.kv;
    let mut attempts = Vec::new();
    for number in 0..FILL_KEYS {
        let key = format!("fill/{number}");
        let value = format!("{number}{}", "f".repeat(FILL_BYTES));
        let request = PutRequest {
            key: key.clone().into(),
            value: value.clone().into(),
            ..PutRequest::default()
        };
        let header = kv.put(request).await?.into_inner().header;
        attempts.push(Attempt {
            value,
            puts: vec![key],
            deletes: Vec::new(),
            acknowledged: Some(header.context("no header")?.revision),
        });
    }
    Ok(attempts)
}

/// The engine of the live database.
fn engine(server: &StoreServer) -> Result<String> {
    let current = server.data_dir().join("member/db/CURRENT");
    let name = std::fs::read_to_string(&current).context("read CURRENT")?;
    let (_, engine) = name
        .trim()
        .split_once('.')
        .context("no engine in CURRENT")?;
    Ok(engine.to_owned())
}

/// In every third round the kill waits until the conversion is done, so that there is one the other way to cut short.
async fn converted_to(server: &StoreServer, wanted: &str) -> Result<()> {
    wait::wait_for("the conversion", CONVERT_DEADLINE, || async {
        Ok((engine(server)? == wanted).then_some(()))
    })
    .await
}

async fn conversions(program: &Program, rounds: usize) -> Result<()> {
    let mut wanted = "redb";
    let mut server = StoreServer::start(program, &["--storage-engine=redb"]).await?;
    let mut witness = Witness::default();
    let filled = fill(&server).await?;
    witness.check(&server.client()?, &filled).await?;
    let counts = Arc::new(Counts::default());
    let (mut converted, mut cut) = (0, 0);
    for number in 0..rounds {
        let round = async {
            let storm = Storm::start(&server, &format!("r{number}"), witness.checked, &counts)?;
            if number % 3 == 2 {
                converted_to(&server, wanted).await?;
            } else {
                storm.rage().await;
            }
            server.kill()?;
            let attempts = storm.end().await?;
            if engine(&server)? == wanted {
                converted += 1;
                wanted = if wanted == "redb" { "sled" } else { "redb" };
            } else {
                cut += 1;
            }
            server.set_flags(&[&format!("--storage-engine={wanted}")]);
            server.restart().await?;
            witness.check(&server.client()?, &attempts).await
        };
        round.await.with_context(|| format!("round {number}"))?;
    }
    ensure!(converted > 1 && cut > 0, "{converted} converted, {cut} cut");
    say(&format!(
        "{rounds} kills: {converted} times the engine was as wanted, {cut} conversions were cut short; {} writes acknowledged, \
         {} defragmentations, {} hashes compared",
        witness.acknowledged,
        counts.defragmentations.load(Ordering::Relaxed),
        witness.hashes,
    ));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_during_conversions_lose_no_acknowledged_write() -> Result<()> {
    let program = Program::under_test()?;
    conversions(&program, rounds(16, 100)).await
}
