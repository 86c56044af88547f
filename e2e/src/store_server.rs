//! A store as a process: one member of etcd, or of the program under test, on free loopback ports with a data directory of its own.
//!
//! Promises: `start` and `restart` return only when the member answers a linearizable read, or fail with the end of its log; a process
//! is signalled through its own handle, never by name; dropping the handle kills the process and removes its directory.
//! Not here: what is asked of the store (the suites), clusters of several members.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ballast_api::etcdserverpb::RangeRequest;
use ballast_api::etcdserverpb::cluster_client::ClusterClient;
use ballast_api::etcdserverpb::kv_client::KvClient;
use ballast_api::etcdserverpb::lease_client::LeaseClient;
use ballast_api::etcdserverpb::maintenance_client::MaintenanceClient;
use ballast_api::etcdserverpb::watch_client::WatchClient;
use rand::Rng as _;
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use crate::netns::NetworkNamespace;
use crate::{paths, tools, wait};

/// A member must answer within this after its start, whatever else the machine does.
const START_DEADLINE: Duration = Duration::from_mins(1);
/// A member must end within this after SIGTERM.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Below the range from which the kernel takes ports of outgoing connections, so that a member that restarts finds its port free.
const PORTS: std::ops::Range<u16> = 15_000..32_000;
/// Lists of a large keyspace come in one message.
const MESSAGE_BYTES_MAX: usize = 1 << 30;

/// A server program and the name under which reports speak of it.
#[derive(Clone, Debug)]
pub struct Program {
    pub name: String,
    pub path: PathBuf,
}

impl Program {
    /// Real etcd, as the harness built it.
    pub fn etcd() -> Result<Self> {
        Ok(Self {
            name: "etcd".to_owned(),
            path: tools::path("etcd")?,
        })
    }

    /// What a suite of clusters runs on: the server under test, or real etcd with `BALLAST_STORE=etcd`, which shows that the suite is right.
    pub fn chosen() -> Result<Self> {
        match std::env::var("BALLAST_STORE").as_deref() {
            Ok("etcd") => Self::etcd(),
            _ => Self::under_test(),
        }
    }

    pub fn is_etcd(&self) -> bool {
        self.name == "etcd"
    }

    /// The server under test.
    pub fn under_test() -> Result<Self> {
        let path = paths::server_binary();
        let path = path
            .canonicalize()
            .with_context(|| format!("no server at {}", path.display()))?;
        let name = path
            .file_name()
            .context("the server is a file")?
            .to_string_lossy()
            .into_owned();
        Ok(Self { name, path })
    }
}

/// Where a member is, and with whom it begins.
#[derive(Clone, Debug)]
pub struct Place {
    pub name: String,
    /// `host:port` for clients and for peers.
    pub client: String,
    pub peer: String,
    /// The name by which peers know the host, instead of its address.
    pub peer_host: Option<String>,
    /// Where its sockets are; none is where the test runs.
    pub namespace: Option<NetworkNamespace>,
    /// `name=url,...`; the member alone when there is none.
    pub initial_cluster: Option<String>,
    /// It joins members that run already.
    pub joins: bool,
}

impl Place {
    /// Alone on free ports of loopback.
    pub fn on_loopback(name: &str) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            client: format!("127.0.0.1:{}", free_port()?),
            peer: format!("127.0.0.1:{}", free_port()?),
            peer_host: None,
            namespace: None,
            initial_cluster: None,
            joins: false,
        })
    }

    /// As the others know it.
    pub fn peer_url(&self) -> String {
        let port = self.peer.rsplit_once(':').map_or("", |(_, port)| port);
        match &self.peer_host {
            Some(host) => format!("http://{host}:{port}"),
            None => format!("http://{}", self.peer),
        }
    }

    /// As `--initial-cluster` names it.
    pub fn initial(&self) -> String {
        format!("{}={}", self.name, self.peer_url())
    }
}

/// One member.
pub struct StoreServer {
    program: Program,
    flags: Vec<String>,
    environment: Vec<(String, String)>,
    /// Files that lie over others of the machine, for this process alone.
    overlays: Vec<(PathBuf, &'static str)>,
    folder: TempDir,
    data_dir: PathBuf,
    place: Place,
    child: Option<Child>,
}

impl StoreServer {
    /// Starts a member with an empty data directory and waits until it answers.
    pub async fn start(program: &Program, flags: &[&str]) -> Result<Self> {
        let mut server = Self::prepare(program, flags)?;
        server.restart().await?;
        Ok(server)
    }

    /// Ports and directories of a member, nothing running yet: for one whose data directory is filled first.
    pub fn prepare(program: &Program, flags: &[&str]) -> Result<Self> {
        Self::prepare_at(program, flags, Place::on_loopback("default")?)
    }

    /// The same at a place somebody else chose.
    pub fn prepare_at(program: &Program, flags: &[&str], place: Place) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("ballast-store-")
            .tempdir()?;
        Ok(Self {
            program: program.clone(),
            flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
            environment: Vec::new(),
            overlays: Vec::new(),
            data_dir: folder.path().join("data"),
            folder,
            place,
            child: None,
        })
    }

    /// Elsewhere than in the server's own folder, from the next start on.
    pub fn set_data_dir(&mut self, data_dir: PathBuf) {
        self.data_dir = data_dir;
    }

    pub fn place(&self) -> &Place {
        &self.place
    }

    /// For the next start.
    pub fn set_place(&mut self, place: Place) {
        self.place = place;
    }

    /// Another build from the next start on.
    pub fn set_program(&mut self, program: &Program) {
        self.program = program.clone();
    }

    /// For the next start.
    pub fn set_environment(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// From the next start on the process finds `file` where the machine has `over`. Needs root.
    pub fn set_overlay(&mut self, file: PathBuf, over: &'static str) {
        self.overlays.push((file, over));
    }

    /// Other flags from the next start on.
    pub fn set_flags(&mut self, flags: &[&str]) {
        self.flags = flags.iter().map(|&flag| flag.to_owned()).collect();
    }

    /// Starts the process on the data that is there and waits until it answers.
    pub async fn restart(&mut self) -> Result<()> {
        self.spawn()?;
        self.wait_ready(START_DEADLINE).await
    }

    /// Starts the process without waiting for it.
    pub fn spawn(&mut self) -> Result<()> {
        if self.child.is_some() {
            bail!("{} runs already", self.program.name);
        }
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_path())?;
        let client = format!("http://{}", self.endpoint());
        let (listen, peer) = (format!("http://{}", self.place.peer), self.peer_url());
        let state = if self.place.joins { "existing" } else { "new" };
        let initial = &self.place.initial_cluster;
        let initial = initial.clone().unwrap_or_else(|| self.place.initial());
        let mut command = self.command();
        command
            .arg(format!("--name={}", self.place.name))
            .arg(format!("--data-dir={}", self.data_dir().display()))
            .arg(format!("--listen-client-urls={client}"))
            .arg(format!("--advertise-client-urls={client}"))
            .arg(format!("--listen-peer-urls={listen}"))
            .arg(format!("--initial-advertise-peer-urls={peer}"))
            .arg(format!("--initial-cluster={initial}"))
            .arg(format!("--initial-cluster-state={state}"))
            .args(&self.flags)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = match &self.place.namespace {
            Some(namespace) => namespace.inside(|| command.spawn())?,
            None => command.spawn(),
        };
        let child = child.with_context(|| format!("start {}", self.program.path.display()))?;
        self.child = Some(child);
        Ok(())
    }

    /// The program; with overlays in a mount namespace of its own, as the same process.
    fn command(&self) -> Command {
        if self.overlays.is_empty() {
            return Command::new(&self.program.path);
        }
        let mut script = String::new();
        for (file, over) in &self.overlays {
            script.push_str(&format!("mount --bind '{}' {over} && ", file.display()));
        }
        script.push_str("exec \"$@\"");
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation=private", "sh", "-c"])
            .args([&script, "sh"])
            .arg(&self.program.path);
        command
    }

    /// Waits for the first linearizable read that is answered.
    pub async fn wait_ready(&mut self, deadline: Duration) -> Result<()> {
        let end = wait::now() + deadline;
        loop {
            if let Some(status) = self.child.as_mut().context("not started")?.try_wait()? {
                self.child = None;
                bail!(
                    "{} ended with {status} before it served:\n{}",
                    self.program.name,
                    self.log_tail()
                );
            }
            let why = match self.probe().await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if wait::now() >= end {
                bail!(
                    "{} did not answer within {deadline:?} ({why:#}):\n{}",
                    self.program.name,
                    self.log_tail()
                );
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn probe(&self) -> Result<()> {
        let attempt = async {
            let channel = self.connect_endpoint()?.connect().await?;
            KvClient::new(channel)
                .range(RangeRequest {
                    key: "health".into(),
                    ..RangeRequest::default()
                })
                .await?;
            anyhow::Ok(())
        };
        tokio::time::timeout(Duration::from_secs(5), attempt)
            .await
            .context("no answer")?
    }

    /// `host:port`, as etcdctl takes it.
    pub fn endpoint(&self) -> String {
        self.place.client.clone()
    }

    pub fn peer_url(&self) -> String {
        self.place.peer_url()
    }

    pub fn program(&self) -> &Program {
        &self.program
    }

    pub fn data_dir(&self) -> PathBuf {
        self.data_dir.clone()
    }

    /// A folder that goes away with the server, for files a test makes.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn log_path(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }

    /// What the process printed, over all its starts.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.log_path()).unwrap_or_default()).into_owned()
    }

    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// The process, while it runs.
    pub fn pid(&self) -> Result<u32> {
        Ok(self.child.as_ref().context("the server does not run")?.id())
    }

    /// How the process ended by itself; None while it runs.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let child = self.child.as_mut().context("the server does not run")?;
        let ended = child.try_wait()?;
        if ended.is_some() {
            self.child = None;
        }
        Ok(ended)
    }

    /// Whether the process still runs by itself.
    pub fn alive(&mut self) -> Result<bool> {
        match &mut self.child {
            Some(child) => Ok(child.try_wait()?.is_none()),
            None => Ok(false),
        }
    }

    pub fn signal(&self, signal: rustix::process::Signal) -> Result<()> {
        let child = self.child.as_ref().context("the server does not run")?;
        let pid = rustix::process::Pid::from_child(child);
        Ok(rustix::process::kill_process(pid, signal)?)
    }

    /// SIGKILL, as a crash of the process.
    pub fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the server does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// SIGTERM; the process must end by itself.
    pub async fn stop(&mut self) -> Result<ExitStatus> {
        let mut child = self.child.take().context("the server does not run")?;
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let end = wait::now() + STOP_DEADLINE;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            if wait::now() >= end {
                child.kill()?;
                child.wait()?;
                bail!(
                    "{} did not end within {STOP_DEADLINE:?} of SIGTERM:\n{}",
                    self.program.name,
                    self.log_tail()
                );
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn connect_endpoint(&self) -> Result<Endpoint> {
        connect_endpoint(&self.endpoint())
    }

    /// A connection that dials when first used and again after a loss.
    pub fn channel(&self) -> Result<Channel> {
        Ok(self.connect_endpoint()?.connect_lazy())
    }

    /// The services of the store over one connection.
    pub fn client(&self) -> Result<Client> {
        Client::at(&self.endpoint())
    }
}

fn connect_endpoint(endpoint: &str) -> Result<Endpoint> {
    Ok(Endpoint::from_shared(format!("http://{endpoint}"))?
        .connect_timeout(Duration::from_secs(5))
        .tcp_nodelay(true))
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The services a suite asks.
#[derive(Clone, Debug)]
pub struct Client {
    pub kv: KvClient<Channel>,
    pub lease: LeaseClient<Channel>,
    pub watch: WatchClient<Channel>,
    pub maintenance: MaintenanceClient<Channel>,
    pub cluster: ClusterClient<Channel>,
    pub channel: Channel,
}

impl Client {
    /// Of the store at `host:port`, over one connection that dials when first used and again after a loss.
    pub fn at(endpoint: &str) -> Result<Self> {
        let channel = connect_endpoint(endpoint)?.connect_lazy();
        Ok(Self {
            kv: KvClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
            lease: LeaseClient::new(channel.clone()),
            watch: WatchClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
            maintenance: MaintenanceClient::new(channel.clone()),
            cluster: ClusterClient::new(channel.clone()),
            channel,
        })
    }
}

/// What a command line tool answered.
#[derive(Clone, Debug)]
pub struct Answer {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Answer {
    /// The standard output, or an error with all of the answer when the tool failed.
    pub fn ok(self) -> Result<String> {
        if self.code == Some(0) {
            return Ok(self.stdout);
        }
        bail!("exit {:?}: {}{}", self.code, self.stdout, self.stderr)
    }
}

/// Runs etcdctl on a server, with `input` on its standard input.
pub fn etcdctl(server: &StoreServer, arguments: &[&str], input: &str) -> Result<Answer> {
    etcdctl_at(&server.endpoint(), server.folder(), arguments, input)
}

/// Runs etcdctl on whoever serves at this endpoint, in this folder.
pub fn etcdctl_at(
    endpoint: &str,
    folder: &Path,
    arguments: &[&str],
    input: &str,
) -> Result<Answer> {
    use std::io::Write as _;
    let mut child = Command::new(tools::path("etcdctl")?)
        .env_clear()
        .arg(format!("--endpoints={endpoint}"))
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // A tool that ends without reading its input is judged by its answer.
    let _ = child
        .stdin
        .take()
        .expect("it is piped")
        .write_all(input.as_bytes());
    let output = child.wait_with_output()?;
    Ok(Answer {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// A port nobody listens on now.
pub fn free_port() -> Result<u16> {
    let mut random = rand::rng();
    for _ in 0..1_000 {
        let port = random.random_range(PORTS);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no free port in {PORTS:?}")
}
