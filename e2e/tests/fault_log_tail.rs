//! P24: a log whose end or middle was spoilt, after a clean stop and after kill -9 under writes.
//!
//! After a clean stop every change is damage: the member does not start, names file and offset, and leaves the file alone. After a kill a
//! record that was never synced may be cut, and everything acknowledged is there; anything else is damage too.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_e2e::kill_history::{Attempt, Work, history, judge, write};
use ballast_e2e::store_server::{Program, StoreServer};
use ballast_e2e::up::say;

const WRITERS: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spoil {
    CutSevenBytesNearTheEnd,
    AppendZeros,
    ZeroTheEnd,
    FlipAnEarlierByte,
}

const SPOILS: [Spoil; 4] = [
    Spoil::CutSevenBytesNearTheEnd,
    Spoil::AppendZeros,
    Spoil::ZeroTheEnd,
    Spoil::FlipAnEarlierByte,
];

/// The newest segment.
fn newest_segment(data: &Path) -> Result<PathBuf> {
    let mut segments = Vec::new();
    for entry in std::fs::read_dir(data.join("member/wal"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|ext| ext == "wal") {
            segments.push(path);
        }
    }
    segments.sort();
    segments.pop().context("there is a segment")
}

/// Does it, and gives the file.
fn spoil(data: &Path, what: Spoil) -> Result<PathBuf> {
    let path = newest_segment(data)?;
    let mut bytes = std::fs::read(&path)?;
    let used = bytes
        .iter()
        .rposition(|&byte| byte != 0)
        .context("something is written")?
        + 1;
    match what {
        Spoil::CutSevenBytesNearTheEnd => drop(bytes.drain(used - 12..used - 5)),
        Spoil::AppendZeros => bytes.resize(bytes.len() + (4 << 20), 0),
        Spoil::ZeroTheEnd => bytes[used - 12..].fill(0),
        Spoil::FlipAnEarlierByte => {
            // Within a record's bytes, whatever they are: the file is dense up to its end.
            let at = (used / 3..used)
                .find(|&at| bytes[at] != 0)
                .context("records are not all zeros")?;
            bytes[at] ^= 0x20;
        }
    }
    std::fs::write(&path, bytes)?;
    Ok(path)
}

fn copy_dir(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}

/// Writes of several clients until the kill.
async fn write_and_kill(server: &mut StoreServer) -> Result<Vec<Attempt>> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let client = server.client()?;
        let stop = Arc::clone(&stop);
        writers.push(tokio::spawn(async move {
            let work = [Work::Txns, Work::Puts][writer % 2];
            let name = format!("w{writer}");
            write(client, &name, &name, work, &stop).await
        }));
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    server.kill()?;
    stop.store(true, Ordering::Release);
    let mut attempts = Vec::new();
    for writer in writers {
        attempts.extend(writer.await?);
    }
    Ok(attempts)
}

/// Starts on a spoilt copy. Ok(true) when it serves with everything acknowledged; Ok(false) when it refuses as it should.
async fn outcome(server: &mut StoreServer, path: &Path, attempts: &[Attempt]) -> Result<bool> {
    let before = std::fs::read(path)?;
    let Err(error) = server.restart().await else {
        let (changes, _) = history(&server.client()?, 1).await?;
        let complaints = judge(attempts, &changes, 1);
        ensure!(complaints.is_empty(), "{complaints:#?}");
        server.kill()?;
        return Ok(true);
    };
    let told = format!("{error:#}");
    let name = path.file_name().context("a file")?.to_string_lossy();
    ensure!(told.contains("ended with exit status: 1"), "{told}");
    ensure!(
        told.contains(&*name),
        "the file {name} is not named: {told}"
    );
    ensure!(told.contains("damaged at byte"), "no offset: {told}");
    ensure!(std::fs::read(path)? == before, "the file was changed");
    Ok(false)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spoilt_log_is_cut_only_where_nothing_was_acknowledged() -> Result<()> {
    let mut server = StoreServer::start(&Program::under_test()?, &[]).await?;
    let attempts = write_and_kill(&mut server).await?;
    let killed = server.folder().join("killed");
    copy_dir(&server.data_dir(), &killed)?;
    server.restart().await?;
    server.stop().await?;
    let stopped = server.folder().join("stopped");
    copy_dir(&server.data_dir(), &stopped)?;

    for (kind, from) in [("killed", &killed), ("stopped", &stopped)] {
        for what in SPOILS {
            std::fs::remove_dir_all(server.data_dir())?;
            copy_dir(from, &server.data_dir())?;
            let path = spoil(&server.data_dir(), what)?;
            let serves = outcome(&mut server, &path, &attempts)
                .await
                .with_context(|| format!("{kind}, {what:?}"))?;
            let must_refuse = kind == "stopped" || what == Spoil::FlipAnEarlierByte;
            ensure!(!(must_refuse && serves), "{kind}, {what:?}: it serves");
            let must_serve = kind == "killed" && what == Spoil::AppendZeros;
            ensure!(!must_serve || serves, "{kind}, {what:?}: it refuses");
            say(&format!(
                "{kind}, {what:?}: {}",
                if serves { "serves" } else { "refuses" }
            ));
        }
    }
    Ok(())
}
