//! One run: hosts, clients and faults of a seed, the steps of the simulation, and what must be true at its end.
//!
//!     faults and load --> nothing is wrong any more, load --> no load: all members come to be the same --> judged --> power cut of all --> judged

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, UNIX_EPOCH};

use ballast_api::etcdserverpb::Member;
use ballast_server::raft::End;
use ballast_server::raft::node::RaftStatus;
use ballast_storage::check::{self, Problems};
use ballast_storage::wal;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use turmoil::{Builder, Sim};

use crate::clients::{self, Shared};
use crate::faults::Faults;
use crate::findings::Findings;
use crate::member::{Machine, Order, id_of, name_of, row_of};

const TICK: Duration = Duration::from_millis(4);
const LATENCY_MAX: Duration = Duration::from_millis(20);
/// Segments under way on a connection.
const TCP_CAPACITY: usize = 1024;
const CLIENTS: usize = 3;
/// How long things go wrong, and how long there is load after that.
const FAULTS: Duration = Duration::from_secs(14);
const CALM: Duration = Duration::from_secs(3);
/// All members are the same within this.
const SETTLING: Duration = Duration::from_secs(30);

/// What became of a run.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Outcome {
    pub(crate) seed: u64,
    pub(crate) trace: Vec<String>,
    pub(crate) violations: Vec<String>,
    pub(crate) counts: Counts,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Counts {
    pub(crate) members: usize,
    pub(crate) requests: usize,
    pub(crate) answered: usize,
    pub(crate) terms: usize,
    pub(crate) crashes: usize,
    pub(crate) snapshots: usize,
    pub(crate) grown: usize,
}

impl Outcome {
    /// Equal for runs that are the same.
    pub(crate) fn digest(&self) -> String {
        let mut sha = Sha256::new();
        for line in &self.trace {
            sha.update(line);
            sha.update("\n");
        }
        hex::encode(&sha.finalize()[..8])
    }
}

/// What a member says: who leads in which term, whether it does, and whether it only learns.
type Seen = (u64, u64, bool, bool);

pub(crate) struct World {
    sim: Sim<'static>,
    seed: u64,
    folder: tempfile::TempDir,
    machines: Vec<Arc<Machine>>,
    founders: usize,
    /// Who votes.
    voters: BTreeSet<usize>,
    /// Down until somebody starts them.
    down: BTreeSet<usize>,
    gone: BTreeSet<usize>,
    seen: Vec<Seen>,
    shared: Arc<Shared>,
    findings: Arc<Findings>,
    counts: Counts,
}

/// To be called once in a process, on a thread whose randomness follows from the seed.
pub(crate) fn run(seed: u64) -> Outcome {
    let mut rng = StdRng::seed_from_u64(seed);
    let founders = if rng.random_bool(0.7) { 3 } else { 5 };
    let grows = rng.random_bool(0.4);
    let mut world = World::new(seed, founders);
    let mut faults = Faults::new(rng, grows);
    let result = world.live(&mut faults);
    if let Err(error) = result {
        world.findings.violated(error);
    }
    let (requests, answered) = world.shared.history.counts();
    let counts = Counts {
        members: founders,
        requests,
        answered,
        terms: world.findings.terms(),
        grown: usize::from(faults.has_grown()),
        ..world.counts
    };
    let (trace, violations) = world.findings.take();
    Outcome {
        seed,
        trace,
        violations,
        counts,
    }
}

impl World {
    fn new(seed: u64, founders: usize) -> Self {
        let sim = Builder::new()
            .rng_seed(seed)
            .epoch(UNIX_EPOCH)
            .tick_duration(TICK)
            .max_message_latency(LATENCY_MAX)
            .tcp_capacity(TCP_CAPACITY)
            .simulation_duration(Duration::from_secs(3600))
            .enable_random_order()
            .build();
        // Nothing survives that was not synced, so the machine's memory is disk enough.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let mut world = Self {
            sim,
            seed,
            folder: folder.unwrap(),
            machines: Vec::new(),
            founders,
            voters: BTreeSet::new(),
            down: BTreeSet::new(),
            gone: BTreeSet::new(),
            seen: Vec::new(),
            shared: Arc::default(),
            findings: Arc::default(),
            counts: Counts::default(),
        };
        let members: Vec<Member> = (0..founders).map(row_of).collect();
        for number in 0..founders {
            world.add(number, members.clone(), true);
            world.votes(number);
        }
        for number in 0..CLIENTS {
            let (shared, findings) = (Arc::clone(&world.shared), Arc::clone(&world.findings));
            let client = clients::run(number, seed, shared, findings);
            world.sim.client(format!("c{number}"), client);
        }
        world
    }

    fn add(&mut self, number: usize, known: Vec<Member>, founds: bool) {
        let dir = self.folder.path().join(name_of(number));
        let machine = Machine::new(number, known, founds, dir, self.seed, &self.findings);
        let runs = Arc::clone(&machine);
        self.sim
            .host(name_of(number), move || Arc::clone(&runs).run());
        self.machines.push(machine);
        self.seen.push(Seen::default());
    }

    fn live(&mut self, faults: &mut Faults) -> Result<(), String> {
        while self.now() < FAULTS {
            self.step()?;
            faults.turn(self);
        }
        faults.end(self);
        let until = self.now() + CALM;
        while self.now() < until {
            self.step()?;
            faults.calm_turn(self);
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        let until = self.now() + SETTLING;
        while !(self.step()? && self.is_settled()) {
            self.drop_removed();
            if self.now() > until {
                return Err(format!(
                    "the members do not come to be the same: {}",
                    self.told()
                ));
            }
        }
        self.judge();
        self.judge_after_power_cut();
        Ok(())
    }

    pub(crate) fn now(&self) -> Duration {
        self.sim.elapsed()
    }

    /// True once all clients have ended.
    fn step(&mut self) -> Result<bool, String> {
        let ended = self.sim.step().map_err(|error| error.to_string())?;
        self.look();
        if self.findings.is_violated() {
            return Err("nothing more is tried after that".to_owned());
        }
        Ok(ended)
    }

    pub(crate) fn note(&self, line: impl AsRef<str>) {
        let at = self.now().as_micros();
        self.findings.note(format!("{at} {}", line.as_ref()));
    }

    /// Who leads, who ended.
    fn look(&mut self) {
        for number in 0..self.machines.len() {
            let machine = Arc::clone(&self.machines[number]);
            if let Some(context) = &*machine.running.lock() {
                let RaftStatus {
                    leader,
                    term,
                    is_learner,
                    ..
                } = context.raft.status();
                let leads = context.raft.is_leader();
                let seen = (leader, term, leads, is_learner);
                if self.seen[number] != seen {
                    self.seen[number] = seen;
                    self.note(format!(
                        "{} sees {leader:x} lead in term {term}, leads {leads}, learns {is_learner}",
                        machine.name
                    ));
                }
                if leads {
                    self.findings.leads(&machine.name, term);
                }
            }
            let ended = machine.ended.lock().clone();
            match ended {
                None => {}
                Some(End::Anew) => {
                    self.note(format!("{} begins anew", machine.name));
                    self.counts.snapshots += 1;
                    self.end_process(number, false);
                    self.sim.bounce(machine.name.as_str());
                }
                Some(End::Removed) => {
                    self.removed(number);
                    self.end_process(number, false);
                }
                Some(End::Failed(why)) => {
                    self.findings
                        .violated(format!("{} failed: {why}", machine.name));
                }
            }
        }
    }

    // ---- what faults do -------------------------------------------------------------------------------------------------

    /// Founders' numbers are those below this.
    pub(crate) fn founders(&self) -> usize {
        self.founders
    }

    /// Who votes.
    pub(crate) fn members(&self) -> Vec<usize> {
        self.voters.iter().copied().collect()
    }

    pub(crate) fn leader(&self) -> Option<usize> {
        let leads = |machine: &&Arc<Machine>| {
            let running = machine.running.lock();
            running
                .as_ref()
                .is_some_and(|context| context.raft.is_leader())
        };
        self.machines
            .iter()
            .find(leads)
            .map(|machine| machine.number)
    }

    /// What a running member's list says of another.
    pub(crate) fn row(&self, of: usize, number: usize) -> Option<Member> {
        let running = self.machines[of].running.lock();
        running.as_ref()?.cluster.member(id_of(number))
    }

    /// How far behind the leader somebody is.
    pub(crate) fn lag(&self, leader: usize, number: usize) -> Option<u64> {
        let running = self.machines[leader].running.lock();
        let (matched, last) = running.as_ref()?.raft.progress_of(id_of(number))?;
        (matched > 0).then(|| last.saturating_sub(matched))
    }

    pub(crate) fn order(&self, number: usize, order: Order) {
        self.machines[number].order(order);
    }

    pub(crate) fn pairs(&self) -> Vec<(usize, usize)> {
        let count = self.machines.len();
        (0..count)
            .flat_map(|one| (one + 1..count).map(move |other| (one, other)))
            .collect()
    }

    pub(crate) fn partition(&self, one: usize, other: usize) {
        self.sim.partition(name_of(one), name_of(other));
    }

    pub(crate) fn partition_one_way(&self, from: usize, to: usize) {
        self.sim.partition_oneway(name_of(from), name_of(to));
    }

    pub(crate) fn hold(&self, one: usize, other: usize) {
        self.sim.hold(name_of(one), name_of(other));
    }

    pub(crate) fn release(&self, one: usize, other: usize) {
        self.sim.release(name_of(one), name_of(other));
    }

    pub(crate) fn repair(&self, one: usize, other: usize) {
        self.sim.repair(name_of(one), name_of(other));
    }

    pub(crate) fn slow_disk(&self, number: usize, is_slow: bool) {
        let slow_disk = &self.machines[number].slow_disk;
        slow_disk.store(is_slow, Ordering::Relaxed);
    }

    /// Ends the process; `silently` without a word to those it was connected with.
    pub(crate) fn crash(&mut self, number: usize, silently: bool) {
        self.counts.crashes += 1;
        self.down.insert(number);
        self.end_process(number, silently);
    }

    fn end_process(&mut self, number: usize, silently: bool) {
        self.seen[number] = Seen::default();
        self.machines[number].let_go();
        let others: Vec<String> = (0..self.machines.len())
            .filter(|other| *other != number)
            .map(name_of)
            .chain((0..CLIENTS).map(|client| format!("c{client}")))
            .collect();
        for other in others.iter().filter(|_| silently) {
            self.sim.partition(name_of(number), other.as_str());
        }
        self.sim.crash(name_of(number));
        for other in others.iter().filter(|_| silently) {
            self.sim.repair(name_of(number), other.as_str());
        }
    }

    pub(crate) fn start(&mut self, number: usize) {
        if self.down.remove(&number) && !self.gone.contains(&number) {
            self.sim.bounce(name_of(number));
        }
    }

    /// A member that was added begins to run.
    pub(crate) fn join(&mut self, number: usize) {
        let known = self.voters.iter().copied().map(row_of).collect();
        self.add(number, known, false);
    }

    pub(crate) fn votes(&mut self, number: usize) {
        self.voters.insert(number);
        self.shared.members.lock().push(name_of(number));
    }

    pub(crate) fn removed(&mut self, number: usize) {
        self.gone.insert(number);
        self.voters.remove(&number);
        self.shared
            .members
            .lock()
            .retain(|name| *name != name_of(number));
    }

    // ---- the end --------------------------------------------------------------------------------------------------------

    fn staying(&self) -> impl Iterator<Item = &Arc<Machine>> {
        self.machines
            .iter()
            .filter(|machine| !self.gone.contains(&machine.number))
    }

    /// A removed member may not have heard of it.
    fn drop_removed(&mut self) {
        let Some(leader) = self.leader() else { return };
        let running = self.machines[leader].running.lock().clone();
        let Some(context) = running else { return };
        for number in 0..self.machines.len() {
            if context.cluster.is_removed(id_of(number)) {
                self.removed(number);
            }
        }
    }

    /// All have applied the same entries, the last there are, and their engines have them.
    fn is_settled(&self) -> bool {
        let mut places = BTreeSet::new();
        for machine in self.staying() {
            let running = machine.running.lock();
            let Some(context) = &*running else {
                return false;
            };
            let status = context.raft.status();
            let durable = context.store.durable().index;
            places.extend([status.last_index, status.applied_index, durable]);
        }
        places.len() == 1
    }

    fn told(&self) -> String {
        let told = self.staying().map(|machine| {
            let running = machine.running.lock();
            let status = running.as_ref().map(|context| context.raft.status());
            format!("{}: {status:?}", machine.name)
        });
        told.collect::<Vec<_>>().join(", ")
    }

    fn judge(&self) {
        let mut hashes = BTreeSet::new();
        for machine in self.staying() {
            let running = machine.running.lock();
            let Some(context) = &*running else { continue };
            match context.store.hash_kv(0) {
                Ok(hash) => {
                    self.note(format!("{} has {hash:?}", machine.name));
                    hashes.insert((hash.current_revision, hash.hash));
                }
                Err(error) => self.findings.violated(error.to_string()),
            }
            let view = context.store.view();
            match view.events(1, usize::MAX) {
                Ok((events, _)) => self.shared.history.judge(&events, &self.findings),
                Err(error) => self.findings.violated(error.to_string()),
            }
        }
        if hashes.len() != 1 {
            self.findings
                .violated(format!("the members' data differ: {hashes:?}"));
        }
    }

    /// Log and database of each are whole and belong together; where two logs have the same index they have the same entry.
    fn judge_after_power_cut(&mut self) {
        for number in 0..self.machines.len() {
            self.end_process(number, true);
        }
        let mut logs = Vec::new();
        for machine in self.staying() {
            let mut problems = Problems::default();
            let database = check::database(&machine.dir.join("db"), &mut problems);
            let log = wal::inspect(&machine.dir.join("wal"));
            match (database, log) {
                (Ok(database), Ok(Some(log))) => {
                    check::together(&database, &log, &mut problems);
                    logs.push(log);
                }
                (database, log) => problems.add(format!("{:?} {:?}", database.err(), log.err())),
            }
            for problem in problems.told {
                self.findings.violated(problem);
            }
        }
        for (one, other) in self.pairs() {
            let (Some(one), Some(other)) = (logs.get(one), logs.get(other)) else {
                continue;
            };
            for index in 1..=one.last.index.min(other.last.index) {
                let terms = (one.term_of(index), other.term_of(index));
                if let (Some(a), Some(b)) = terms
                    && a != b
                {
                    self.findings.violated(format!(
                        "{} and {} have entry {index} of term {a} and {b}",
                        one.dir.display(),
                        other.dir.display()
                    ));
                }
            }
        }
    }
}
