//! Three members on loopback, each with a directory of its own, ended with the test.

use std::path::PathBuf;
use std::process::{Child, Command, Output};

use ballast_api::etcdserverpb as pb;
use pb::kv_client::KvClient;
use pb::maintenance_client::MaintenanceClient;
use tonic::transport::Channel;

use crate::harness::{ballast, free_port, spawn_ready};

pub(crate) struct Three {
    dir: tempfile::TempDir,
    scheme: &'static str,
    flags: Vec<String>,
    children: Vec<Option<Child>>,
    ports: Vec<u16>,
    peers: Vec<u16>,
}

impl Three {
    /// `scheme` is that of the peer URLs. They are started together: none is ready before there is a leader.
    pub(crate) fn start(scheme: &'static str, flags: &[String]) -> Self {
        let mut three = Self {
            dir: tempfile::tempdir().unwrap(),
            scheme,
            flags: flags.to_vec(),
            children: Vec::new(),
            ports: (0..3).map(|_| free_port()).collect(),
            peers: (0..3).map(|_| free_port()).collect(),
        };
        let commands = [0, 1, 2].map(|i| three.command(i, &[]));
        let starting = commands.map(|command| std::thread::spawn(move || spawn_ready(command).0));
        three.children = starting.map(|start| Some(start.join().unwrap())).into();
        three
    }

    pub(crate) fn data_dir(&self, i: usize) -> PathBuf {
        self.dir.path().join(format!("m{i}"))
    }

    pub(crate) fn peer_url(&self, i: usize) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.peers[i])
    }

    fn command(&self, i: usize, more: &[&str]) -> Command {
        let client = self.url(i);
        let peer = self.peer_url(i);
        let cluster: Vec<String> = (0..3)
            .map(|i| format!("m{i}={}", self.peer_url(i)))
            .collect();
        let mut command = ballast();
        command
            .arg(format!("--name=m{i}"))
            .arg(format!("--data-dir={}", self.data_dir(i).display()))
            .arg(format!("--listen-client-urls={client}"))
            .arg(format!("--advertise-client-urls={client}"))
            .arg(format!("--listen-peer-urls={peer}"))
            .arg(format!("--initial-advertise-peer-urls={peer}"))
            .arg(format!("--initial-cluster={}", cluster.join(",")))
            .args(&self.flags)
            .args(more);
        command
    }

    fn url(&self, i: usize) -> String {
        format!("http://127.0.0.1:{}", self.ports[i])
    }

    pub(crate) fn stop(&mut self, i: usize) {
        let mut child = self.children[i].take().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        child.wait().unwrap();
    }

    pub(crate) fn restart(&mut self, i: usize, more: &[&str]) {
        self.children[i] = Some(spawn_ready(self.command(i, more)).0);
    }

    /// A start that is to fail.
    pub(crate) fn fail_to_start(&self, i: usize, more: &[&str]) -> Output {
        self.command(i, more).output().unwrap()
    }

    pub(crate) async fn kv(&self, i: usize) -> KvClient<Channel> {
        KvClient::connect(self.url(i)).await.unwrap()
    }

    pub(crate) async fn maintenance(&self, i: usize) -> MaintenanceClient<Channel> {
        MaintenanceClient::connect(self.url(i)).await.unwrap()
    }

    pub(crate) async fn status(&self, i: usize) -> pb::StatusResponse {
        let asked = self.maintenance(i).await.status(pb::StatusRequest {}).await;
        asked.unwrap().into_inner()
    }

    pub(crate) async fn member_id(&self, i: usize) -> u64 {
        self.status(i).await.header.unwrap().member_id
    }
}

impl Drop for Three {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
