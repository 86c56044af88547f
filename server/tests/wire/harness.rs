//! Starts a server in a directory of its own, and ends it with the test.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use pb::cluster_client::ClusterClient;
use pb::kv_client::KvClient;
use pb::lease_client::LeaseClient;
use pb::maintenance_client::MaintenanceClient;
use tonic::transport::Channel;
use tonic::{Code, Status};

const READY: &str = "ready to serve client requests";
const DEADLINE: Duration = Duration::from_secs(30);

/// A server under test.
pub(crate) struct Server {
    child: Child,
    pub(crate) port: u16,
    dir: tempfile::TempDir,
    args: Vec<String>,
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}

pub(crate) fn ballast() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
    command.env_clear();
    command
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let port = free_port();
        let child = spawn(&dir.path().join("data"), port, &args);
        Self {
            child,
            port,
            dir,
            args,
        }
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Ends it with SIGTERM and waits.
    pub(crate) fn stop(&mut self) -> ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap()
    }

    pub(crate) fn restart(&mut self) {
        self.stop();
        self.child = spawn(&self.data_dir(), self.port, &self.args);
    }

    /// As a crash would: no warning, no flush.
    pub(crate) fn kill_and_restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = spawn(&self.data_dir(), self.port, &self.args);
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(crate) async fn channel(&self) -> Channel {
        Channel::from_shared(self.url())
            .unwrap()
            .connect()
            .await
            .unwrap()
    }

    pub(crate) async fn kv(&self) -> KvClient<Channel> {
        KvClient::new(self.channel().await)
    }

    pub(crate) async fn leases(&self) -> LeaseClient<Channel> {
        LeaseClient::new(self.channel().await)
    }

    pub(crate) async fn maintenance(&self) -> MaintenanceClient<Channel> {
        MaintenanceClient::new(self.channel().await)
    }

    pub(crate) async fn cluster(&self) -> ClusterClient<Channel> {
        ClusterClient::new(self.channel().await)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(data_dir: &Path, port: u16, args: &[String]) -> Child {
    let url = format!("http://127.0.0.1:{port}");
    let mut child = ballast()
        .args(["--name", "one", "--data-dir"])
        .arg(data_dir)
        .args([
            "--listen-client-urls",
            &url,
            "--advertise-client-urls",
            &url,
        ])
        .args(args)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let (told, ready) = mpsc::channel();
    // Reads to the end, or the server would block on a full pipe.
    std::thread::spawn(move || {
        let mut before = Vec::new();
        for line in lines.map_while(Result::ok) {
            if line.contains(READY) {
                let _ = told.send(Ok(()));
            }
            before.push(line);
        }
        let _ = told.send(Err(before.join("\n")));
    });
    let ready = ready
        .recv_timeout(DEADLINE)
        .expect("the server is ready in time");
    if let Err(log) = ready {
        panic!("the server ended before it was ready:\n{log}");
    }
    child
}

/// Expects a refusal with exactly this code and text.
#[track_caller]
pub(crate) fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code, text: &str) {
    let status = answer.unwrap_err();
    assert_eq!((status.code(), status.message()), (code, text));
}

/// Asks again until the answer is Some, or the deadline passes.
pub(crate) async fn eventually<T, F>(what: &str, mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let asking = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let answer = tokio::time::timeout(DEADLINE, asking).await;
    answer.unwrap_or_else(|_| panic!("never came true: {what}"))
}

pub(crate) fn put(key: impl Into<bytes::Bytes>, value: impl Into<bytes::Bytes>) -> pb::PutRequest {
    pb::PutRequest {
        key: key.into(),
        value: value.into(),
        ..Default::default()
    }
}

pub(crate) fn get(key: &'static str) -> pb::RangeRequest {
    pb::RangeRequest {
        key: key.into(),
        ..Default::default()
    }
}

/// All keys that begin with `prefix`.
pub(crate) fn prefix(prefix: &str) -> pb::RangeRequest {
    let mut end = prefix.as_bytes().to_vec();
    *end.last_mut().unwrap() += 1;
    pb::RangeRequest {
        key: prefix.to_owned().into(),
        range_end: end.into(),
        ..Default::default()
    }
}

pub(crate) fn keys(response: &pb::RangeResponse) -> Vec<String> {
    response
        .kvs
        .iter()
        .map(|kv| String::from_utf8_lossy(&kv.key).into_owned())
        .collect()
}
