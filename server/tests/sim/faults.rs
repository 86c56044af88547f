//! What goes wrong, and when: one thing with the network and one with the members at a time, drawn from the seed.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::time::Duration;

use ballast_server::raft::members::Change;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::member::{Order, id_of, row_of};
use crate::run::World;

/// Milliseconds.
const REST: RangeInclusive<u64> = 100..=1500;
const NETWORK: RangeInclusive<u64> = 300..=4000;
const DOWN: RangeInclusive<u64> = 20..=3000;
const SLOW: RangeInclusive<u64> = 500..=3000;
/// When the group begins to grow, in runs in which it does.
const GROWS_AT: RangeInclusive<u64> = 2000..=6000;
/// Between two attempts at a change.
const CHANGE_RETRY: Duration = Duration::from_secs(1);
/// A learner is promoted when it is so near.
const LAG_MAX: u64 = 10;

#[derive(Debug)]
enum Kind {
    /// These hear nobody else.
    Apart(BTreeSet<usize>),
    /// What the first sends does not arrive at the second.
    OneWay(usize, usize),
    /// What they send each other arrives when it is over.
    Held(usize, usize),
    Down(BTreeSet<usize>),
    SlowDisk(usize),
    /// Over at once.
    Nothing,
}

/// What is wrong now, or when the next comes.
#[derive(Debug)]
struct Slot {
    active: Option<Kind>,
    until: Duration,
}

fn millis(rng: &mut StdRng, range: RangeInclusive<u64>) -> Duration {
    Duration::from_millis(rng.random_range(range))
}

#[derive(Debug)]
enum Growth {
    Never,
    /// Until the new member is in the list.
    Adding(Duration),
    Promoting(Duration),
    Removing(usize, Duration),
    Done,
}

/// The faults of a run.
#[derive(Debug)]
pub(crate) struct Faults {
    rng: StdRng,
    network: Slot,
    members: Slot,
    growth: Growth,
}

impl Faults {
    pub(crate) fn new(mut rng: StdRng, grows: bool) -> Self {
        let first = |rng: &mut StdRng| Slot {
            active: None,
            until: Duration::from_millis(1500) + millis(rng, REST),
        };
        Self {
            network: first(&mut rng),
            members: first(&mut rng),
            growth: if grows {
                Growth::Adding(millis(&mut rng, GROWS_AT))
            } else {
                Growth::Never
            },
            rng,
        }
    }

    pub(crate) fn turn(&mut self, world: &mut World) {
        let now = world.now();
        if now >= self.network.until {
            if self.network.active.is_some() {
                self.end_network(world);
            } else {
                self.begin_network(world);
            }
        }
        if now >= self.members.until {
            if self.members.active.is_some() {
                self.end_members(world);
            } else {
                self.begin_members(world);
            }
        }
        self.grow(world);
    }

    /// From here on nothing is wrong.
    pub(crate) fn end(&mut self, world: &mut World) {
        if self.network.active.is_some() {
            self.end_network(world);
        }
        if self.members.active.is_some() {
            self.end_members(world);
        }
    }

    /// Mostly whoever leads.
    fn victim(&mut self, world: &World) -> usize {
        let voters = world.members();
        match world.leader() {
            Some(leader) if self.rng.random_bool(0.5) => leader,
            _ => *voters.choose(&mut self.rng).expect("a group has members"),
        }
    }

    fn pair(&mut self, world: &World) -> (usize, usize) {
        let one = self.victim(world);
        let others: Vec<usize> = world
            .members()
            .into_iter()
            .filter(|other| *other != one)
            .collect();
        let other = *others.choose(&mut self.rng).expect("there are several");
        if self.rng.random_bool(0.5) {
            (one, other)
        } else {
            (other, one)
        }
    }

    fn begin_network(&mut self, world: &mut World) {
        let kind = match self.rng.random_range(0..100) {
            0..45 => Kind::Apart(BTreeSet::from([self.victim(world)])),
            45..65 => {
                let members = world.members();
                let count = self.rng.random_range(1..=members.len() / 2);
                let apart = members.choose_multiple(&mut self.rng, count);
                Kind::Apart(apart.copied().collect())
            }
            65..85 => {
                let (from, to) = self.pair(world);
                Kind::OneWay(from, to)
            }
            _ => {
                let (one, other) = self.pair(world);
                Kind::Held(one, other)
            }
        };
        world.note(format!("begins {kind:?}"));
        match &kind {
            Kind::Apart(apart) => {
                for (one, other) in world.pairs() {
                    if apart.contains(&one) != apart.contains(&other) {
                        world.partition(one, other);
                    }
                }
            }
            Kind::OneWay(from, to) => world.partition_one_way(*from, *to),
            Kind::Held(one, other) => world.hold(*one, *other),
            _ => {}
        }
        self.network.active = Some(kind);
        self.network.until = world.now() + millis(&mut self.rng, NETWORK);
    }

    fn end_network(&mut self, world: &mut World) {
        let kind = self.network.active.take();
        world.note(format!("ends {kind:?}"));
        if let Some(Kind::Held(one, other)) = kind {
            world.release(one, other);
        } else {
            for (one, other) in world.pairs() {
                world.repair(one, other);
            }
        }
        self.network.until = world.now() + millis(&mut self.rng, REST);
    }

    fn begin_members(&mut self, world: &mut World) {
        let victim = self.victim(world);
        let (kind, lasts) = match self.rng.random_range(0..100) {
            0..35 => (Kind::Down(BTreeSet::from([victim])), DOWN),
            35..50 => {
                let members = world.members();
                let count = self.rng.random_range(1..=members.len());
                let down = members.choose_multiple(&mut self.rng, count);
                (Kind::Down(down.copied().collect()), DOWN)
            }
            50..60 => (Kind::Down(world.members().into_iter().collect()), DOWN),
            60..75 => (Kind::SlowDisk(victim), SLOW),
            _ => (Kind::Nothing, REST),
        };
        world.note(format!("begins {kind:?}"));
        match &kind {
            Kind::Down(down) => {
                // A process that dies says goodbye on its connections, a machine does not.
                let silently = self.rng.random_bool(0.5);
                if silently && self.network.active.is_some() {
                    self.end_network(world);
                }
                for member in down {
                    world.crash(*member, silently);
                }
            }
            Kind::SlowDisk(member) => world.slow_disk(*member, true),
            _ => {
                let target = self.victim(world);
                if let Some(leader) = world.leader() {
                    world.order(leader, Order::Transfer(id_of(target)));
                }
            }
        }
        self.members.active = Some(kind);
        self.members.until = world.now() + millis(&mut self.rng, lasts);
    }

    fn end_members(&mut self, world: &mut World) {
        let kind = self.members.active.take();
        world.note(format!("ends {kind:?}"));
        match kind {
            Some(Kind::Down(down)) => {
                for member in down {
                    world.start(member);
                }
            }
            Some(Kind::SlowDisk(member)) => world.slow_disk(member, false),
            _ => {}
        }
        self.members.until = world.now() + millis(&mut self.rng, REST);
    }

    /// A member more, which learns, then votes; and then one of the old ones less.
    fn grow(&mut self, world: &mut World) {
        let now = world.now();
        let new = world.founders();
        let (Growth::Adding(at) | Growth::Promoting(at) | Growth::Removing(_, at)) = self.growth
        else {
            return;
        };
        if now < at {
            return;
        }
        let Some(leader) = world.leader() else { return };
        let again = now + CHANGE_RETRY;
        let row = world.row(leader, new);
        match self.growth {
            Growth::Adding(_) => {
                if row.is_some() {
                    world.join(new);
                    self.growth = Growth::Promoting(now);
                } else {
                    let change = Change::AddLearner {
                        id: id_of(new),
                        urls: row_of(new).peer_ur_ls,
                    };
                    world.order(leader, Order::Change(change));
                    self.growth = Growth::Adding(again);
                }
            }
            Growth::Promoting(_) => {
                if row.is_some_and(|row| !row.is_learner) {
                    world.votes(new);
                    let old = self.rng.random_range(0..world.founders());
                    self.growth = Growth::Removing(old, again);
                } else if world.lag(leader, new).is_some_and(|lag| lag <= LAG_MAX) {
                    let change = Change::Promote { id: id_of(new) };
                    world.order(leader, Order::Change(change));
                    self.growth = Growth::Promoting(again);
                }
            }
            Growth::Removing(old, _) => {
                if world.row(leader, old).is_none() {
                    world.removed(old);
                    self.growth = Growth::Done;
                } else {
                    let change = Change::Remove { id: id_of(old) };
                    world.order(leader, Order::Change(change));
                    self.growth = Growth::Removing(old, again);
                }
            }
            Growth::Never | Growth::Done => {}
        }
    }

    /// Nothing is wrong any more, but what was begun with the group goes on.
    pub(crate) fn calm_turn(&mut self, world: &mut World) {
        self.grow(world);
    }

    pub(crate) fn has_grown(&self) -> bool {
        matches!(self.growth, Growth::Done)
    }
}
