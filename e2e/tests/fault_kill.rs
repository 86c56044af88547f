//! kill -9 under writes, again and again: nothing acknowledged is lost, no transaction is torn.

use std::os::unix::process::ExitStatusExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_e2e::kill_history::{Attempt, history, judge, write};
use ballast_e2e::store_server::{Program, StoreServer};
use ballast_e2e::up::say;
use rand::Rng as _;

const ROUNDS: usize = 50;
/// Of these the last two write transactions.
const WRITERS: usize = 6;

/// One round: writes, a kill at a moment nobody chose, what the clients know.
async fn round(server: &mut StoreServer, number: usize) -> Result<Vec<Attempt>> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let client = server.client()?;
        let stop = Arc::clone(&stop);
        let transactions = writer + 2 >= WRITERS;
        writers.push(tokio::spawn(async move {
            write(client, format!("r{number}w{writer}"), transactions, &stop).await
        }));
    }
    let pause = rand::rng().random_range(20..400);
    tokio::time::sleep(Duration::from_millis(pause)).await;
    server.kill()?;
    stop.store(true, Ordering::Release);
    let mut attempts = Vec::new();
    for writer in writers {
        attempts.extend(writer.await?);
    }
    Ok(attempts)
}

async fn rounds(program: &Program) -> Result<()> {
    let mut server = StoreServer::start(program, &[]).await?;
    let mut all = Vec::new();
    let mut checked = 1;
    for number in 0..ROUNDS {
        let attempts = round(&mut server, number).await?;
        server
            .restart()
            .await
            .with_context(|| format!("round {number}"))?;
        let (changes, head) = history(&server.client()?, checked).await?;
        let complaints = judge(&attempts, &changes, checked);
        ensure!(complaints.is_empty(), "round {number}: {complaints:#?}");
        checked = head;
        all.extend(attempts);
    }
    let acknowledged = all
        .iter()
        .filter(|attempt| attempt.acknowledged.is_some())
        .count();
    ensure!(
        acknowledged > ROUNDS * WRITERS,
        "only {acknowledged} writes were acknowledged in all rounds"
    );

    // What a round left sound must still be so after all the later ones, and after a clean stop.
    let (changes, _) = history(&server.client()?, 1).await?;
    let complaints = judge(&all, &changes, 1);
    ensure!(complaints.is_empty(), "all rounds: {complaints:#?}");
    let status = server.stop().await?;
    // As etcd, which ends itself by the same signal once all is closed.
    let as_asked =
        status.success() || status.signal() == Some(rustix::process::Signal::TERM.as_raw());
    ensure!(as_asked, "SIGTERM ended the server with {status}");
    server.restart().await?;
    let (again, _) = history(&server.client()?, 1).await?;
    ensure!(again == changes, "the history differs after a clean stop");
    say(&format!(
        "{ROUNDS} rounds, {} writes sent, {acknowledged} acknowledged, {checked} revisions",
        all.len()
    ));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_kills_lose_no_acknowledged_write_and_tear_no_transaction() {
    let program = Program::under_test().expect("the server under test is built");
    rounds(&program).await.expect("every round is sound");
}
