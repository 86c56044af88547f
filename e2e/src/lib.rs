//! The harness: it builds the tools it needs, stands up a real Kubernetes whose control plane is
//! stored in a server under test, and takes all of it away again.
//!
//! [`cluster::Cluster`] is what a test uses; `ballast-e2e up` is the same thing kept running for a
//! person. Everything that runs lives in network, mount and process namespaces of its own, so
//! several clusters can stand side by side and nothing is left on the machine afterwards. Nothing
//! here knows how the server or the operator work inside: both are programs to start.

pub mod addons;
pub mod bench;
pub mod bench_kube;
pub mod bench_learner;
pub mod bench_members;
pub mod bench_objects;
pub mod bench_process;
pub mod bench_table;
pub mod cluster;
pub mod control_plane;
pub mod diff;
pub mod forward;
pub mod image;
pub mod images;
pub mod kill_history;
pub mod lab;
pub mod latency;
pub mod load;
pub mod lossy;
pub mod members;
pub mod nemesis;
pub mod netns;
pub mod node;
pub mod node_init;
pub mod operator;
pub mod packages;
pub mod paths;
pub mod peers;
pub mod peers_list;
pub mod pki;
pub mod planted;
pub mod process;
pub mod progress;
pub mod provisioner;
pub mod slow_reader;
pub mod store_server;
pub mod storm;
pub mod suites;
pub mod tools;
pub mod up;
pub mod wait;
