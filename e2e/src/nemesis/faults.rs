//! What is done to the members, one fault at a time, and undone again.
//!
//! Promises: [`strike`] returns when what it did is undone (links whole, disks as they should be, everybody started), not when the members
//! have recovered from it. Everything chosen is chosen by the given random numbers.
//! Not here: when (`run.rs`).

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ballast_api::etcdserverpb as pb;
use rand::Rng as _;
use rand::rngs::StdRng;

use super::traffic::Shared;
use super::watching::Watching;
use crate::lab::Links;
use crate::members::Members;
use crate::store_server::Program;
use crate::wait;

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Fault {
    /// kill -9 of one member, the leader as often as another.
    Kill,
    KillAll,
    /// SIGSTOP for longer than an election takes.
    Pause,
    /// The leader alone on one side.
    PartitionMajority,
    /// Another alone.
    PartitionMinority,
    /// The leader hears nobody, or nobody hears it.
    OneWay,
    /// Two that do not hear each other, and one that hears both.
    Bridge,
    Loss,
    Delay,
    SlowDisk,
    FullDisk,
    PowerCut,
    PowerCutAll,
    ClockJump,
    /// A member's disk is lost; another joins as a learner in its place.
    Replace,
    MoveLeader,
    Compact,
    Defragment,
    /// All members, one after the other, by another build.
    Upgrade,
}

pub const ALL: [Fault; 19] = [
    Fault::Kill,
    Fault::PartitionMajority,
    Fault::PowerCutAll,
    Fault::Pause,
    Fault::MoveLeader,
    Fault::OneWay,
    Fault::Replace,
    Fault::Loss,
    Fault::Compact,
    Fault::Bridge,
    Fault::PowerCut,
    Fault::SlowDisk,
    Fault::KillAll,
    Fault::PartitionMinority,
    Fault::Delay,
    Fault::Defragment,
    Fault::ClockJump,
    Fault::FullDisk,
    Fault::Upgrade,
];

impl Fault {
    pub fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self)
            .expect("no kind is hidden")
            .get_name()
            .to_owned()
    }
}

/// How far the clock goes, in seconds.
const CLOCK_JUMPS: [&str; 4] = ["-3600", "+3600", "+86400", "-20"];
const RESTART_DEADLINE: Duration = Duration::from_secs(60);
/// A member with its disk full may have stopped itself.
const STOPPED_DEADLINE: Duration = Duration::from_secs(2);
const LOSS_PERCENT: std::ops::Range<u8> = 10..50;
const KILOBITS: std::ops::Range<u32> = 150..1_000;
const SLOW_SYNC_MS: std::ops::Range<u64> = 50..400;
/// Left of a disk that is about to be full.
const LEFT_BYTES: std::ops::Range<u64> = 0..50_000;
/// An answer of a member that is not well.
const ASK_DEADLINE: Duration = Duration::from_secs(10);

/// What a fault needs beside the members.
#[derive(Debug)]
pub struct Around<'a> {
    pub shared: &'a Shared,
    pub watching: &'a Watching,
    /// The builds that members are changed between.
    pub builds: &'a [Program],
}

/// Does it and undoes it; what was done to whom.
pub async fn strike(
    fault: Fault,
    members: &mut Members,
    random: &mut StdRng,
    around: &Around<'_>,
) -> Result<String> {
    let hold = Duration::from_millis(random.random_range(1_500..4_000));
    match fault {
        Fault::Kill | Fault::KillAll => kill(fault, members, random).await,
        Fault::Pause => {
            let index = either(members, random).await?;
            members.all[index].pause()?;
            tokio::time::sleep(hold).await;
            members.all[index].resume()?;
            Ok(format!("member {index} for {hold:?}"))
        }
        Fault::PartitionMajority
        | Fault::PartitionMinority
        | Fault::OneWay
        | Fault::Bridge
        | Fault::Loss
        | Fault::Delay => {
            let links = links(fault, members, random).await?;
            members.lab()?.set(&links)?;
            tokio::time::sleep(hold).await;
            members.lab()?.set(&Links::default())?;
            Ok(format!("{links:?} for {hold:?}"))
        }
        Fault::SlowDisk => {
            let index = either(members, random).await?;
            let slow = random.random_range(SLOW_SYNC_MS);
            let disk = members.all[index].disk.as_ref().context("no such disk")?;
            disk.ask(&format!("slow-sync {slow}"))?;
            tokio::time::sleep(hold).await;
            disk.ask("slow-sync 0")?;
            Ok(format!("member {index}, {slow} ms a sync for {hold:?}"))
        }
        Fault::FullDisk => full_disk(members, random, hold).await,
        Fault::PowerCut => {
            let index = either(members, random).await?;
            power_cut(members, random, &[index]).await
        }
        Fault::PowerCutAll => {
            let all = members.present();
            power_cut(members, random, &all).await
        }
        Fault::ClockJump => {
            let index = either(members, random).await?;
            let jump = CLOCK_JUMPS[random.random_range(0..CLOCK_JUMPS.len())];
            members.all[index].set_clock(jump)?;
            tokio::time::sleep(hold).await;
            members.all[index].set_clock("+0")?;
            Ok(format!("member {index} by {jump} s for {hold:?}"))
        }
        Fault::Replace => {
            let index = either(members, random).await?;
            members.replace(index).await?;
            Ok(format!("member {index}"))
        }
        Fault::MoveLeader => {
            let mut done = 0;
            for _ in 0..4 {
                let others = members.present();
                let to = others[random.random_range(0..others.len())];
                // It may be the leader already, or the leader have changed meanwhile.
                done += u32::from(members.move_leader(to).await.is_ok());
                tokio::time::sleep(hold / 4).await;
            }
            Ok(format!("{done} times"))
        }
        Fault::Compact => compact(members, random, around, hold).await,
        Fault::Defragment => {
            for index in members.present() {
                let mut maintenance = members.client(index)?.maintenance;
                let asked = maintenance.defragment(pb::DefragmentRequest {});
                tokio::time::timeout(ASK_DEADLINE, asked)
                    .await
                    .with_context(|| format!("member {index} does not end"))?
                    .with_context(|| format!("member {index}"))?;
                tokio::time::sleep(hold / 3).await;
            }
            Ok("all members".to_owned())
        }
        Fault::Upgrade => upgrade(members, around.builds).await,
    }
}

/// The leader half of the time.
async fn either(members: &Members, random: &mut StdRng) -> Result<usize> {
    if random.random_bool(0.5) {
        return members.leader().await;
    }
    let all = members.present();
    Ok(all[random.random_range(0..all.len())])
}

async fn kill(fault: Fault, members: &mut Members, random: &mut StdRng) -> Result<String> {
    let victims = if fault == Fault::KillAll {
        members.present()
    } else {
        vec![either(members, random).await?]
    };
    for &index in &victims {
        members.all[index].kill()?;
    }
    let down = Duration::from_millis(random.random_range(0..2_500));
    tokio::time::sleep(down).await;
    for &index in &victims {
        members.all[index].server.spawn()?;
    }
    Ok(format!("members {victims:?}, down for {down:?}"))
}

async fn links(fault: Fault, members: &Members, random: &mut StdRng) -> Result<Links> {
    let leader = members.leader().await?;
    let all = members.present();
    let numbers: Result<Vec<u8>> = all.iter().map(|&i| members.all[i].number()).collect();
    let numbers = numbers?;
    let leader = members.all[leader].number()?;
    let others: Vec<u8> = numbers.iter().copied().filter(|&n| n != leader).collect();
    let other = others[random.random_range(0..others.len())];
    let mut links = Links::default();
    match fault {
        Fault::PartitionMajority => {
            for &peer in &others {
                links.cut_both(leader, peer);
            }
        }
        Fault::PartitionMinority => {
            for &peer in numbers.iter().filter(|&&n| n != other) {
                links.cut_both(other, peer);
            }
        }
        Fault::OneWay => {
            let deaf = random.random_bool(0.5);
            for &peer in &others {
                let link = if deaf { (peer, leader) } else { (leader, peer) };
                links.cut.insert(link);
            }
        }
        Fault::Bridge => links.cut_both(leader, other),
        Fault::Loss => {
            for &number in &numbers {
                let percent = random.random_range(LOSS_PERCENT);
                links.loss_percent.insert(number, percent);
            }
        }
        Fault::Delay => {
            for &number in &numbers {
                let kilobits = random.random_range(KILOBITS);
                links.kilobits.insert(number, kilobits);
            }
        }
        _ => bail!("{fault:?} is not one of links"),
    }
    Ok(links)
}

async fn full_disk(members: &mut Members, random: &mut StdRng, hold: Duration) -> Result<String> {
    let index = either(members, random).await?;
    let member = &mut members.all[index];
    let disk = member.disk.as_ref().context("no such disk")?;
    let full = disk.stats()?.used_bytes + random.random_range(LEFT_BYTES);
    disk.ask(&format!("full {full}"))?;
    tokio::time::sleep(hold).await;
    disk.ask("full max")?;
    let ended = wait::wait_for("", STOPPED_DEADLINE, || {
        let ended = member.server.ended();
        async move { ended }
    })
    .await;
    if ended.is_ok() {
        member.server.spawn()?;
    }
    let end = if ended.is_ok() { "; it stopped" } else { "" };
    Ok(format!("member {index} for {hold:?}{end}"))
}

async fn power_cut(
    members: &mut Members,
    random: &mut StdRng,
    victims: &[usize],
) -> Result<String> {
    // More is under way on a disk that takes its time.
    let slow = random.random_range(1..30);
    for &index in victims {
        let disk = members.all[index].disk.as_ref().context("no such disk")?;
        disk.ask(&format!("slow-sync {slow}"))?;
    }
    tokio::time::sleep(Duration::from_millis(random.random_range(100..600))).await;
    for &index in victims {
        let disk = members.all[index].disk.as_ref().context("no such disk")?;
        disk.ask("off")?;
    }
    let mut told = Vec::new();
    for &index in victims {
        let member = &mut members.all[index];
        // It may have noticed, and ended by itself.
        if member.server.ended()?.is_none() {
            member.kill()?;
        }
        let disk = member.disk.as_ref().context("no such disk")?;
        told.push(format!("member {index}: {}", disk.cut(random.random())?));
        disk.ask("slow-sync 0")?;
    }
    let down = Duration::from_millis(random.random_range(0..1_500));
    tokio::time::sleep(down).await;
    for &index in victims {
        members.all[index].server.spawn()?;
    }
    Ok(format!("{}; down for {down:?}", told.join(", ")))
}

async fn compact(
    members: &Members,
    random: &mut StdRng,
    around: &Around<'_>,
    hold: Duration,
) -> Result<String> {
    let (mut done, mut last) = (0, 0);
    for _ in 0..6 {
        let index = either(members, random).await?;
        let mut kv = members.client(index)?.kv;
        let lag = random.random_range(0..40);
        // What one watcher was told is known, whatever becomes of the others.
        let known = around.watching.told().into_iter().max().unwrap_or_default();
        last = (known - lag).max(1);
        let request = pb::CompactionRequest {
            revision: last,
            physical: random.random_bool(0.5),
        };
        // An earlier one may have gone further.
        let asked = kv.compact(request);
        let answer = tokio::time::timeout(ASK_DEADLINE, asked).await;
        done += u32::from(matches!(answer, Ok(Ok(_))));
        tokio::time::sleep(hold / 6).await;
    }
    let head = around
        .shared
        .head
        .load(std::sync::atomic::Ordering::Acquire);
    Ok(format!("{done} times up to {last}, head {head}"))
}

async fn upgrade(members: &mut Members, builds: &[Program]) -> Result<String> {
    let now = members.all[0].server.program().path.clone();
    let next = builds
        .iter()
        .find(|build| build.path != now)
        .context("no other build")?
        .clone();
    for index in members.present() {
        let server = &mut members.all[index].server;
        server.stop().await?;
        server.set_program(&next);
        server.spawn()?;
        members.wait_healthy(RESTART_DEADLINE).await?;
    }
    Ok(format!("to {}", next.path.display()))
}
