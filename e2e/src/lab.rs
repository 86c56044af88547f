//! A network of a test's own, made of namespaces, in which the links between members can be broken.
//!
//! ```text
//!  the test's threads (hub) --- bridge "clients" --- client0 of each member     always whole
//!                               bridge "peers" ----- peer0 of each member       cut one way, losing packets, or slow
//! ```
//!
//! Promises: faults touch only what members say to each other; [`Lab::set`] states all of them, so that `Links::default()` heals
//! everything; the namespaces go away with the value, and those of a process that was killed with the next lab.
//! Not here: the members (`members.rs`). The kernel may lack netem, so a slow link is one of few bits a second, which delays
//! packets by their size and by what is queued before them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::future::Future;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::netns::{NetworkNamespace, enter};
use crate::packages;
use crate::store_server::Place;

const PREFIX: &str = "ballastlab";
const PEERS: &str = "10.77.1";
const CLIENTS: &str = "10.77.2";
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
/// A slow link drops what would wait longer.
const QUEUE_MS: u32 = 2_000;

/// What is wrong with the links between members, who are named by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// Nothing goes from the first to the second.
    pub cut: BTreeSet<(u8, u8)>,
    /// Of the packets that arrive there, per hundred.
    pub loss_percent: BTreeMap<u8, u8>,
    /// Of what is sent from there.
    pub kilobits: BTreeMap<u8, u32>,
}

impl Links {
    /// Nothing between these two, either way.
    pub fn cut_both(&mut self, one: u8, other: u8) {
        self.cut.insert((one, other));
        self.cut.insert((other, one));
    }
}

/// The network.
#[derive(Debug)]
pub struct Lab {
    hub: NetworkNamespace,
    stem: String,
    members: Mutex<BTreeMap<u8, NetworkNamespace>>,
    slow: Mutex<BTreeSet<u8>>,
}

impl Lab {
    pub fn new() -> Result<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        packages::ensure_named(&["iproute2", "nftables"])?;
        sweep();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let stem = format!("{PREFIX}-{}-{number}", std::process::id());
        let hub = NetworkNamespace::named(&format!("{stem}-hub"));
        hub.add()?;
        let lab = Self {
            hub,
            stem,
            members: Mutex::default(),
            slow: Mutex::default(),
        };
        for bridge in ["peers", "clients"] {
            lab.hub.ip(&["link", "add", bridge, "type", "bridge"])?;
            lab.hub.ip(&["link", "set", bridge, "up"])?;
        }
        let address = format!("{CLIENTS}.254/24");
        lab.hub
            .ip(&["address", "add", &address, "dev", "clients"])?;
        Ok(lab)
    }

    /// Does the work, and everything it starts, with the hub as network.
    pub fn run<T, F>(work: impl FnOnce(Arc<Self>) -> F + Send) -> Result<T>
    where
        T: Send,
        F: Future<Output = Result<T>>,
    {
        let lab = Arc::new(Self::new()?);
        let path = lab.hub.path();
        let entered = path.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .on_thread_start(move || enter(&entered).expect("the hub outlives the runtime"))
            .build()?;
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    enter(&path)?;
                    runtime.block_on(work(Arc::clone(&lab)))
                })
                .join()
                .map_err(|_| anyhow!("the work in the lab panicked"))?
        })
    }

    /// Makes the place of a member; its number is at least 1 and unlike all others.
    pub fn place(&self, number: u8) -> Result<Place> {
        let namespace = NetworkNamespace::named(&format!("{}-m{number}", self.stem));
        namespace.add()?;
        for (bridge, network, device) in
            [("peers", PEERS, "peer0"), ("clients", CLIENTS, "client0")]
        {
            let outer = format!("{bridge}{number}");
            self.hub.ip(&[
                "link",
                "add",
                &outer,
                "type",
                "veth",
                "peer",
                "name",
                device,
                "netns",
                namespace.name(),
            ])?;
            self.hub
                .ip(&["link", "set", &outer, "master", bridge, "up"])?;
            let address = format!("{network}.{number}/24");
            namespace.ip(&["address", "add", &address, "dev", device])?;
            namespace.ip(&["link", "set", device, "up"])?;
        }
        let place = Place {
            name: format!("m{number}"),
            client: format!("{CLIENTS}.{number}:{CLIENT_PORT}"),
            peer: format!("{PEERS}.{number}:{PEER_PORT}"),
            peer_host: None,
            namespace: Some(namespace.clone()),
            initial_cluster: None,
            joins: false,
        };
        self.lock().insert(number, namespace);
        Ok(place)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u8, NetworkNamespace>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These faults, and no others.
    pub fn set(&self, links: &Links) -> Result<()> {
        let members = self.lock();
        let mut slow = self.slow.lock().unwrap_or_else(PoisonError::into_inner);
        for (number, namespace) in &*members {
            namespace
                .nft(&rules(*number, links))
                .with_context(|| format!("links of member {number}"))?;
            if slow.remove(number) {
                namespace.tc(&["qdisc", "del", "dev", "peer0", "root"])?;
            }
            if let Some(kilobits) = links.kilobits.get(number) {
                let (rate, latency) = (format!("{kilobits}kbit"), format!("{QUEUE_MS}ms"));
                namespace.tc(&[
                    "qdisc", "add", "dev", "peer0", "root", "tbf", "rate", &rate, "burst", "3000",
                    "latency", &latency,
                ])?;
                slow.insert(*number);
            }
        }
        Ok(())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for namespace in self.lock().values() {
            let _ = namespace.delete();
        }
        let _ = self.hub.delete();
    }
}

/// What member `number` does not take in.
fn rules(number: u8, links: &Links) -> String {
    let mut rules = String::new();
    for (from, to) in &links.cut {
        if *to == number {
            let _ = writeln!(rules, "iifname \"peer0\" ip saddr {PEERS}.{from} drop");
        }
    }
    if let Some(percent) = links.loss_percent.get(&number) {
        let _ = writeln!(
            rules,
            "iifname \"peer0\" numgen random mod 100 < {percent} drop"
        );
    }
    format!(
        "add table inet nemesis\ndelete table inet nemesis\ntable inet nemesis {{\n\
         chain input {{\ntype filter hook input priority 0;\n{rules}}}\n}}\n"
    )
}

/// Takes away what processes that are gone have left.
fn sweep() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let mut words = name.split('-');
        let (Some(PREFIX), Some(pid)) = (words.next(), words.next()) else {
            continue;
        };
        if !Path::new("/proc").join(pid).exists() {
            let _ = NetworkNamespace::named(&name).delete();
        }
    }
}

/// The number of the member at this place.
pub fn number_of(place: &Place) -> Result<u8> {
    let digits = place.name.trim_start_matches('m');
    match digits.parse() {
        Ok(number) => Ok(number),
        Err(_) => bail!("{} is no member of a lab", place.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_drops_what_comes_over_a_link_that_is_cut_towards_it() {
        let mut links = Links::default();
        links.cut.insert((1, 2));
        links.loss_percent.insert(3, 20);
        assert!(rules(2, &links).contains("ip saddr 10.77.1.1 drop"));
        assert!(!rules(1, &links).contains("drop"));
        assert!(rules(3, &links).contains("mod 100 < 20 drop"));
    }
}
