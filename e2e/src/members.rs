//! A cluster of member processes: real etcd's, or those of the program under test.
//!
//! Promises: `start`, `add` and `replace` return when the members serve, or fail with the ends of their logs; a member keeps its place,
//! whatever happens to it; what a test leaves paused or running is killed with the value. Each wait has a deadline.
//! Not here: the network between them (`lab.rs`), when what is done to whom (`nemesis`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_api::etcdserverpb as pb;
use rustix::process::Signal;

use crate::lab::{Lab, number_of};
use crate::lossy::{Lossy, Names};
use crate::store_server::{Client, Place, Program, StoreServer};
use crate::wait;

/// All members must serve within this after a start.
const START_DEADLINE: Duration = Duration::from_mins(1);
/// A request to one member, where another could be asked.
const ASK_DEADLINE: Duration = Duration::from_secs(3);
/// etcd refuses changes until all members were connected for five seconds.
const CHANGE_DEADLINE: Duration = Duration::from_secs(40);
/// Of one request for a change.
const CHANGE_ASK_DEADLINE: Duration = Duration::from_secs(8);
const LIBFAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

/// What all members have in common.
#[derive(Clone, Debug)]
pub struct Setup {
    pub program: Program,
    pub flags: Vec<String>,
    /// On loopback when there is none.
    pub lab: Option<Arc<Lab>>,
    /// Their data lies on a disk that can be made to fail.
    pub lossy: bool,
    /// Their peer URLs have names, which these know once they are told. Needs root.
    pub hosts: Option<Arc<Hosts>>,
    /// Their wall clocks can be set. Needs libfaketime, and a program that is linked dynamically.
    pub clocks: bool,
}

impl Setup {
    pub fn new(program: Program, flags: &[&str]) -> Self {
        Self {
            program,
            flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
            lab: None,
            lossy: false,
            hosts: None,
            clocks: false,
        }
    }
}

/// Names of members, as a file that lies over the machine's own for them alone.
#[derive(Debug)]
pub struct Hosts {
    folder: tempfile::TempDir,
}

impl Hosts {
    const ALWAYS: &str = "127.0.0.1 localhost\n";

    /// No name is known yet.
    pub fn new() -> Result<Self> {
        let hosts = Self {
            folder: tempfile::tempdir()?,
        };
        std::fs::write(hosts.file(), Self::ALWAYS)?;
        Ok(hosts)
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("hosts")
    }

    /// The name of the member of this number.
    pub fn name(number: u8) -> String {
        format!("m{number}.members.invalid")
    }

    /// From now on the names of these members lead to loopback.
    pub fn tell(&self, numbers: &[u8]) -> Result<()> {
        let mut text = Self::ALWAYS.to_owned();
        for number in numbers {
            text.push_str(&format!("127.0.0.1 {}\n", Self::name(*number)));
        }
        // In place: what lies over the machine's file is this very one.
        std::fs::write(self.file(), text).context("the hosts file")
    }
}

/// One of them.
pub struct Member {
    pub server: StoreServer,
    pub disk: Option<Lossy>,
    /// The file that says how far its wall clock is off.
    clock: Option<PathBuf>,
    pub paused: bool,
    /// It was taken out of the cluster.
    pub removed: bool,
}

impl Member {
    /// Its number in the lab.
    pub fn number(&self) -> Result<u8> {
        number_of(self.server.place())
    }

    fn make_disk(&mut self) -> Result<()> {
        let disk = Lossy::start(Names::Journal)?;
        self.server.set_data_dir(disk.path().join("data"));
        self.disk = Some(disk);
        Ok(())
    }

    /// An offset such as `+3600`.
    pub fn set_clock(&self, offset: &str) -> Result<()> {
        let clock = self.clock.as_ref().context("its clock cannot be set")?;
        std::fs::write(clock, offset).context("the clock's file")
    }

    pub fn pause(&mut self) -> Result<()> {
        self.server.signal(Signal::STOP)?;
        self.paused = true;
        Ok(())
    }

    pub fn resume(&mut self) -> Result<()> {
        if self.paused {
            self.server.signal(Signal::CONT)?;
            self.paused = false;
        }
        Ok(())
    }

    pub fn kill(&mut self) -> Result<()> {
        self.paused = false;
        self.server.kill()
    }
}

/// All of them.
pub struct Members {
    setup: Setup,
    pub all: Vec<Member>,
}

impl Members {
    /// Starts a new cluster and waits until every member serves.
    pub async fn start(setup: Setup, count: usize) -> Result<Self> {
        let mut members = Self::prepare(setup, count)?;
        for member in &mut members.all {
            member.server.spawn()?;
        }
        members.wait_healthy(START_DEADLINE).await?;
        Ok(members)
    }

    /// Places of a new cluster, nothing running yet.
    pub fn prepare(setup: Setup, count: usize) -> Result<Self> {
        let mut members = Self {
            setup,
            all: Vec::new(),
        };
        for _ in 0..count {
            members.add_place()?;
        }
        let initial: Vec<String> = members
            .all
            .iter()
            .map(|member| member.server.place().initial())
            .collect();
        for member in &mut members.all {
            let place = Place {
                initial_cluster: Some(initial.join(",")),
                ..member.server.place().clone()
            };
            member.server.set_place(place);
        }
        Ok(members)
    }

    /// One more place; its index.
    fn add_place(&mut self) -> Result<usize> {
        let number = u8::try_from(self.all.len() + 1).context("few members")?;
        let mut place = match &self.setup.lab {
            Some(lab) => lab.place(number)?,
            None => Place::on_loopback(&format!("m{number}"))?,
        };
        if self.setup.hosts.is_some() {
            place.peer_host = Some(Hosts::name(number));
        }
        let flags: Vec<&str> = self.setup.flags.iter().map(String::as_str).collect();
        let mut member = Member {
            server: StoreServer::prepare_at(&self.setup.program, &flags, place)?,
            disk: None,
            clock: None,
            paused: false,
            removed: false,
        };
        if self.setup.lossy {
            member.make_disk()?;
        }
        if let Some(hosts) = &self.setup.hosts {
            member.server.set_overlay(hosts.file(), "/etc/hosts");
            // A machine without an answer to its name servers' questions would wait long for each.
            (member.server).set_environment("RES_OPTIONS", "timeout:1 attempts:1");
        }
        if self.setup.clocks {
            let clock = member.server.folder().join("clock");
            std::fs::write(&clock, "+0")?;
            let server = &mut member.server;
            let file = clock.to_str().context("a plain name")?;
            server.set_environment("LD_PRELOAD", LIBFAKETIME);
            server.set_environment("FAKETIME_TIMESTAMP_FILE", file);
            server.set_environment("FAKETIME_DONT_FAKE_MONOTONIC", "1");
            server.set_environment("FAKETIME_CACHE_DURATION", "1");
            member.clock = Some(clock);
        }
        self.all.push(member);
        Ok(self.all.len() - 1)
    }

    /// Members of the cluster, whether they run or not.
    pub fn present(&self) -> Vec<usize> {
        (0..self.all.len())
            .filter(|&index| !self.all[index].removed)
            .collect()
    }

    pub fn client(&self, index: usize) -> Result<Client> {
        self.all[index].server.client()
    }

    pub fn clients(&self) -> Result<Vec<Client>> {
        self.present()
            .into_iter()
            .map(|index| self.client(index))
            .collect()
    }

    pub fn program(&self) -> &Program {
        &self.setup.program
    }

    pub fn lab(&self) -> Result<&Arc<Lab>> {
        self.setup.lab.as_ref().context("no lab")
    }

    /// What a member says of itself.
    pub async fn status(&self, index: usize) -> Result<pb::StatusResponse> {
        let mut maintenance = self.client(index)?.maintenance;
        let asked = maintenance.status(pb::StatusRequest {});
        let answer = tokio::time::timeout(ASK_DEADLINE, asked).await;
        Ok(answer.context("no answer")??.into_inner())
    }

    /// The member's id.
    pub async fn id(&self, index: usize) -> Result<u64> {
        let status = self.status(index).await?;
        Ok(status.header.context("an answer has a header")?.member_id)
    }

    /// The member that takes itself for the leader, in the highest term.
    pub async fn leader(&self) -> Result<usize> {
        wait::wait_for("a leader", START_DEADLINE, || async {
            let mut best = None;
            for index in self.present() {
                if self.all[index].paused {
                    continue;
                }
                let Ok(status) = self.status(index).await else {
                    continue;
                };
                let id = status.header.context("a header")?.member_id;
                if status.leader == id && best.is_none_or(|(term, _)| term < status.raft_term) {
                    best = Some((status.raft_term, index));
                }
            }
            Ok(best.map(|(_, index)| index))
        })
        .await
    }

    /// Any member but the leader.
    pub async fn follower(&self) -> Result<usize> {
        let leader = self.leader().await?;
        let mut others = self.present().into_iter();
        others.rfind(|&index| index != leader).context("a follower")
    }

    /// Waits until all present members run, agree on the leader and answer linearizable reads.
    pub async fn wait_healthy(&mut self, deadline: Duration) -> Result<()> {
        let end = wait::now() + deadline;
        loop {
            let Err(error) = self.healthy().await else {
                return Ok(());
            };
            for index in self.present() {
                let server = &mut self.all[index].server;
                if server.pid().is_ok()
                    && let Some(status) = server.ended()?
                {
                    bail!("member {index} ended with {status}:\n{}", server.log_tail());
                }
            }
            if wait::now() >= end {
                let mut logs = String::new();
                for index in self.present() {
                    let tail = self.all[index].server.log_tail();
                    logs.push_str(&format!("\n-- member {index}:\n{tail}"));
                }
                return Err(error.context(format!("not healthy within {deadline:?}{logs}")));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn healthy(&self) -> Result<()> {
        let mut leaders = BTreeMap::new();
        for index in self.present() {
            let status = (self.status(index).await).with_context(|| format!("member {index}"))?;
            ensure!(status.leader != 0, "member {index} knows no leader");
            leaders.insert(index, status.leader);
            if status.is_learner {
                continue;
            }
            let mut kv = self.client(index)?.kv;
            let read = kv.range(pb::RangeRequest {
                key: "health".into(),
                ..pb::RangeRequest::default()
            });
            tokio::time::timeout(ASK_DEADLINE, read)
                .await
                .with_context(|| format!("member {index} does not answer a read"))?
                .with_context(|| format!("member {index}"))?;
        }
        let first = leaders.values().next();
        ensure!(
            leaders.values().all(|leader| Some(leader) == first),
            "leaders differ: {leaders:x?}"
        );
        Ok(())
    }

    /// Asks one member after the other until one has done it, or the deadline passes.
    async fn change<T, F>(
        &self,
        what: &str,
        except: Option<usize>,
        ask: impl Fn(Client) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T, tonic::Status>>,
    {
        let turn = std::cell::Cell::new(0);
        wait::wait_for(what, CHANGE_DEADLINE, || {
            let others: Vec<usize> = (self.present().into_iter())
                .filter(|&index| Some(index) != except)
                .collect();
            let index = others[turn.get() % others.len()];
            turn.set(turn.get() + 1);
            let asked = self.client(index).map(&ask);
            async move {
                // One whose leader is gone may never be answered.
                let answer = tokio::time::timeout(CHANGE_ASK_DEADLINE, asked?).await;
                Ok(Some(answer.context("no answer")??))
            }
        })
        .await
    }

    /// Adds a member to the cluster and starts it; its index.
    pub async fn add(&mut self, learner: bool) -> Result<usize> {
        let index = self.add_place()?;
        self.all[index].removed = true;
        self.join(index, learner).await?;
        Ok(index)
    }

    /// Adds a member to the cluster and leaves it to the caller to start it.
    pub async fn add_unstarted(&mut self, learner: bool) -> Result<usize> {
        let index = self.add_place()?;
        self.all[index].removed = true;
        self.take_in(index, learner).await?;
        Ok(index)
    }

    async fn join(&mut self, index: usize, learner: bool) -> Result<()> {
        self.take_in(index, learner).await?;
        self.all[index].server.spawn()
    }

    /// Has the cluster take in the member of this place, which is to start with nothing on its disk.
    async fn take_in(&mut self, index: usize, learner: bool) -> Result<()> {
        let url = self.all[index].server.peer_url();
        let known = self
            .change("a member is added", Some(index), |mut client| {
                let request = pb::MemberAddRequest {
                    peer_ur_ls: vec![url.clone()],
                    is_learner: learner,
                };
                async move {
                    match client.cluster.member_add(request).await {
                        Ok(answer) => Ok(answer.into_inner().members),
                        // An earlier attempt was done after all.
                        Err(status) if status.message().contains("Peer URLs already exists") => {
                            let all = pb::MemberListRequest { linearizable: true };
                            Ok(client.cluster.member_list(all).await?.into_inner().members)
                        }
                        Err(status) => Err(status),
                    }
                }
            })
            .await?;
        let own = self.all[index].server.place().clone();
        let initial: Vec<String> = known
            .iter()
            .flat_map(|member| {
                let name = if member.peer_ur_ls.contains(&url) {
                    &own.name
                } else {
                    &member.name
                };
                (member.peer_ur_ls.iter()).map(move |url| format!("{name}={url}"))
            })
            .collect();
        let member = &mut self.all[index];
        member.removed = false;
        member.server.set_place(Place {
            initial_cluster: Some(initial.join(",")),
            joins: true,
            ..own
        });
        Ok(())
    }

    /// Makes a voter of a learner as soon as it has caught up.
    pub async fn promote(&self, index: usize) -> Result<()> {
        let id = wait::wait_for("the learner answers", START_DEADLINE, || async {
            Ok(Some(self.id(index).await?))
        })
        .await?;
        self.change("a learner is promoted", Some(index), |mut client| {
            let request = pb::MemberPromoteRequest { id };
            async move {
                match client.cluster.member_promote(request).await {
                    // The same.
                    Err(status) if status.message().contains("only promote a learner member") => {
                        let in_sync = status.message().contains("in sync");
                        if in_sync { Err(status) } else { Ok(()) }
                    }
                    other => other.map(drop),
                }
            }
        })
        .await
    }

    /// Takes a member out of the cluster; its process is killed if it does not end by itself.
    pub async fn remove(&mut self, index: usize, id: u64) -> Result<()> {
        self.change("a member is removed", Some(index), |mut client| {
            let request = pb::MemberRemoveRequest { id };
            async move {
                match client.cluster.member_remove(request).await {
                    // An earlier attempt was done after all.
                    Err(status) if status.code() == tonic::Code::NotFound => Ok(()),
                    other => other.map(drop),
                }
            }
        })
        .await?;
        self.all[index].removed = true;
        if self.all[index].server.pid().is_ok() {
            self.all[index].kill()?;
        }
        Ok(())
    }

    /// The member is lost with its disk; another takes its place, first as a learner.
    pub async fn replace(&mut self, index: usize) -> Result<()> {
        let id = self.id(index).await?;
        self.all[index].kill()?;
        self.remove(index, id).await?;
        let member = &mut self.all[index];
        if member.disk.is_some() {
            member.disk = None;
            member.make_disk()?;
        } else {
            std::fs::remove_dir_all(member.server.data_dir())?;
        }
        self.join(index, true).await?;
        self.promote(index).await?;
        self.wait_healthy(START_DEADLINE).await
    }

    /// Has `to` be the leader.
    pub async fn move_leader(&self, to: usize) -> Result<()> {
        let from = self.leader().await?;
        let request = pb::MoveLeaderRequest {
            target_id: self.id(to).await?,
        };
        let mut maintenance = self.client(from)?.maintenance;
        let asked = maintenance.move_leader(request);
        tokio::time::timeout(ASK_DEADLINE, asked)
            .await
            .context("no answer")??;
        Ok(())
    }

    /// The logs of all members, for one who looks into a failure.
    pub fn keep_logs(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder)?;
        for member in &self.all {
            let name = format!("{}.log", member.server.place().name);
            std::fs::write(folder.join(name), member.server.log())?;
        }
        Ok(())
    }
}
