//! Starts a server in a directory of its own, and ends it with the test.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use pb::cluster_client::ClusterClient;
use pb::kv_client::KvClient;
use pb::lease_client::LeaseClient;
use pb::maintenance_client::MaintenanceClient;
use pb::watch_client::WatchClient;
use pb::watch_request::RequestUnion;
use tonic::transport::Channel;
use tonic::{Code, Status};

pub(crate) use crate::ports::free_port;

const READY: &str = "ready to serve client requests";
const DEADLINE: Duration = Duration::from_secs(30);

/// A server under test.
pub(crate) struct Server {
    child: Child,
    log: Log,
    pub(crate) port: u16,
    pub(crate) peer_port: u16,
    dir: tempfile::TempDir,
    args: Vec<String>,
}

/// What a process has written to its standard error.
type Log = Arc<Mutex<Vec<String>>>;

pub(crate) fn ballast() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
    command.env_clear();
    command
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// In `args`, `{port}`, `{peer_port}` and `{dir}` stand for this server's own.
    pub(crate) fn start_with(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (port, peer_port) = (free_port(), free_port());
        let own = |arg: &&str| {
            arg.replace("{port}", &port.to_string())
                .replace("{peer_port}", &peer_port.to_string())
                .replace("{dir}", &dir.path().to_string_lossy())
        };
        let args: Vec<String> = args.iter().map(own).collect();
        let (child, log) = spawn(&dir.path().join("data"), port, peer_port, &args);
        Self {
            child,
            log,
            port,
            peer_port,
            dir,
            args,
        }
    }

    /// Runs it with other flags than at its start, on the same data.
    pub(crate) fn restart_with(&mut self, args: &[&str]) {
        self.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self.restart();
    }

    /// What it wrote to its standard error since its last start.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Ends it with SIGTERM and waits.
    pub(crate) fn stop(&mut self) -> ExitStatus {
        rustix::process::kill_process(self.pid(), rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap()
    }

    pub(crate) fn restart(&mut self) {
        self.stop();
        self.start_again();
    }

    /// As a crash would: no warning, no flush.
    pub(crate) fn kill_and_restart(&mut self) {
        self.kill();
        self.start_again();
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// After it was ended.
    pub(crate) fn start_again(&mut self) {
        let dir = self.data_dir();
        (self.child, self.log) = spawn(&dir, self.port, self.peer_port, &self.args);
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

fn spawn(data_dir: &Path, port: u16, peer_port: u16, args: &[String]) -> (Child, Log) {
    let url = format!("http://127.0.0.1:{port}");
    let mut command = ballast();
    command
        .args(["--name", "one", "--data-dir"])
        .arg(data_dir)
        .args([
            "--listen-client-urls",
            &url,
            "--advertise-client-urls",
            &url,
        ])
        .arg(format!("--listen-peer-urls=http://127.0.0.1:{peer_port}"))
        .args(args);
    spawn_ready(command)
}

/// Starts a server and waits until it says on its standard error that it serves.
pub(crate) fn spawn_ready(mut command: Command) -> (Child, Log) {
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let log = Log::default();
    let kept = Arc::clone(&log);
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let (told, ready) = mpsc::channel();
    // Reads to the end, or the server would block on a full pipe.
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            let ready = line.contains(READY);
            kept.lock().unwrap().push(line);
            if ready {
                let _ = told.send(Ok(()));
            }
        }
        let _ = told.send(Err(kept.lock().unwrap().join("\n")));
    });
    let ready = ready
        .recv_timeout(DEADLINE)
        .expect("the server is ready in time");
    if let Err(log) = ready {
        panic!("the server ended before it was ready:\n{log}");
    }
    (child, log)
}

/// One watch stream of a client that takes messages of any size.
pub(crate) struct Watching {
    requests: tokio::sync::mpsc::UnboundedSender<pb::WatchRequest>,
    answers: tonic::Streaming<pb::WatchResponse>,
}

impl Watching {
    pub(crate) async fn open(server: &Server) -> Self {
        Self::open_limited(server, usize::MAX).await
    }

    /// Of a client that takes no messages above `bytes_max`.
    pub(crate) async fn open_limited(server: &Server, bytes_max: usize) -> Self {
        let (requests, sent) = tokio::sync::mpsc::unbounded_channel();
        let sent = tokio_stream::wrappers::UnboundedReceiverStream::new(sent);
        let mut client = WatchClient::new(server.channel().await);
        client = client.max_decoding_message_size(bytes_max);
        let answers = client.watch(sent).await.unwrap().into_inner();
        Self { requests, answers }
    }

    pub(crate) fn ask(&self, request: RequestUnion) {
        let request_union = Some(request);
        self.requests
            .send(pb::WatchRequest { request_union })
            .unwrap();
    }

    /// Asks for a watcher and gives what is told of it first.
    pub(crate) async fn create(&mut self, request: pb::WatchCreateRequest) -> pb::WatchResponse {
        self.ask(RequestUnion::CreateRequest(request));
        let told = self.next().await;
        assert!(told.created, "{told:?}");
        told
    }

    pub(crate) async fn next(&mut self) -> pb::WatchResponse {
        self.try_next().await.unwrap()
    }

    pub(crate) async fn try_next(&mut self) -> Result<pb::WatchResponse, Status> {
        let told = tokio::time::timeout(DEADLINE, self.answers.message()).await;
        let told = told.expect("an answer in time")?;
        Ok(told.expect("the stream goes on"))
    }
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
