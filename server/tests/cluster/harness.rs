//! Members as processes, each with ports and a directory of its own; they end with the test.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_api::ballastpeerpb::peer_client::PeerClient;
use ballast_api::etcdserverpb as pb;
use pb::cluster_client::ClusterClient;
use pb::kv_client::KvClient;
use pb::lease_client::LeaseClient;
use pb::maintenance_client::MaintenanceClient;
use rustix::process::Signal;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::get::get;
use crate::ports::free_port;

/// Whatever is waited for comes within this, also on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_millis(50);

type Log = Arc<Mutex<Vec<String>>>;

/// One member, running or not.
pub(crate) struct Member {
    pub(crate) name: String,
    client_port: u16,
    peer_port: u16,
    peer_scheme: &'static str,
    /// Behind a `unix://` URL.
    socket: PathBuf,
    dir: PathBuf,
    child: Option<Child>,
    log: Log,
}

/// Members that were started together or joined.
pub(crate) struct Cluster {
    pub(crate) members: Vec<Member>,
    flags: Vec<String>,
    /// What the build says of itself.
    pretended: Option<String>,
    token: String,
    folder: tempfile::TempDir,
    /// Peers meet at socket files.
    sockets: bool,
    /// Members there ever were, by which they are named.
    named: usize,
}

/// Waits until `probe` gives something.
pub(crate) async fn eventually<T, F>(what: &str, probe: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    eventually_or(probe)
        .await
        .unwrap_or_else(|| panic!("not within {DEADLINE:?}: {what}"))
}

/// None after the deadline.
async fn eventually_or<T, F>(mut probe: impl FnMut() -> F) -> Option<T>
where
    F: Future<Output = Option<T>>,
{
    let waited = async {
        loop {
            if let Some(found) = probe().await {
                return found;
            }
            tokio::time::sleep(STEP).await;
        }
    };
    tokio::time::timeout(DEADLINE, waited).await.ok()
}

impl Member {
    pub(crate) fn peer_url(&self) -> String {
        match self.peer_scheme {
            "unix" | "unixs" => format!("{}://{}", self.peer_scheme, self.socket.display()),
            scheme => format!("{scheme}://127.0.0.1:{}", self.peer_port),
        }
    }

    pub(crate) fn client_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.client_port)
    }

    pub(crate) fn data_dir(&self) -> &Path {
        &self.dir
    }

    /// With a deadline on each request.
    pub(crate) fn channel(&self) -> Channel {
        Endpoint::from_shared(self.client_url())
            .unwrap()
            .timeout(Duration::from_secs(10))
            .connect_lazy()
    }

    /// As another member reaches it.
    pub(crate) fn peer(&self) -> PeerClient<Channel> {
        PeerClient::new(
            Endpoint::from_shared(self.peer_url())
                .unwrap()
                .connect_lazy(),
        )
    }

    pub(crate) fn kv(&self) -> KvClient<Channel> {
        KvClient::new(self.channel())
    }

    pub(crate) fn lease(&self) -> LeaseClient<Channel> {
        LeaseClient::new(self.channel())
    }

    pub(crate) fn cluster(&self) -> ClusterClient<Channel> {
        ClusterClient::new(self.channel())
    }

    pub(crate) fn maintenance(&self) -> MaintenanceClient<Channel> {
        MaintenanceClient::new(self.channel())
    }

    pub(crate) async fn put(&self, key: &str, value: &str) -> Result<i64, Status> {
        let request = pb::PutRequest {
            key: key.to_owned().into(),
            value: value.to_owned().into(),
            ..Default::default()
        };
        let response = self.kv().put(request).await?.into_inner();
        Ok(response.header.unwrap().revision)
    }

    async fn read(&self, key: &str, serializable: bool) -> Result<Option<String>, Status> {
        let request = pb::RangeRequest {
            key: key.to_owned().into(),
            serializable,
            ..Default::default()
        };
        let response = self.kv().range(request).await?.into_inner();
        let text =
            |kv: &ballast_api::mvccpb::KeyValue| String::from_utf8_lossy(&kv.value).into_owned();
        Ok(response.kvs.first().map(text))
    }

    pub(crate) async fn get(&self, key: &str) -> Result<Option<String>, Status> {
        self.read(key, false).await
    }

    pub(crate) async fn get_serializable(&self, key: &str) -> Result<Option<String>, Status> {
        self.read(key, true).await
    }

    pub(crate) async fn status(&self) -> Result<pb::StatusResponse, Status> {
        let status = self.maintenance().status(pb::StatusRequest {}).await?;
        Ok(status.into_inner())
    }

    pub(crate) async fn id(&self) -> u64 {
        let status = eventually("status", || async { self.status().await.ok() }).await;
        status.header.unwrap().member_id
    }

    /// What /metrics tells.
    pub(crate) async fn metrics(&self) -> String {
        let (_, text) = get(&format!("{}/metrics", self.client_url())).await;
        text
    }

    /// Its hash and the revision it is of.
    pub(crate) async fn hash(&self) -> Option<(u32, i64)> {
        let request = pb::HashKvRequest { revision: 0 };
        let hash = self.maintenance().hash_kv(request).await.ok()?.into_inner();
        Some((hash.hash, hash.header?.revision))
    }

    /// Until it takes a write.
    pub(crate) async fn put_eventually(&self, key: &str, value: &str) {
        eventually("a write", || async { self.put(key, value).await.ok() }).await;
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().unwrap();
        rustix::process::kill_process(rustix::process::Pid::from_child(child), signal).unwrap();
    }

    /// Waits for the process to end by itself.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let mut child = self.child.take().unwrap();
        let status = Mutex::new(&mut child);
        eventually("the end of the process", || async {
            status.lock().unwrap().try_wait().unwrap()
        })
        .await
    }

    /// What it wrote to its standard error since its last start.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    pub(crate) async fn logged(&self, words: &str) {
        eventually(words, || async { self.log().contains(words).then_some(()) }).await;
    }

    /// What `ballast check` says of its data while it does not run.
    pub(crate) fn check(&self) -> (Option<i32>, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_ballast"))
            .arg("check")
            .arg(&self.dir)
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        (output.status.code(), said)
    }

    /// Another directory, as if the disk had been replaced.
    pub(crate) fn lose_data(&mut self) {
        self.dir.set_extension("new");
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Cluster {
    /// So many founders, with these flags, none of them waited for.
    pub(crate) fn prepare(count: usize, flags: &[&str]) -> Self {
        Self::prepare_at(count, flags, false)
    }

    fn prepare_at(count: usize, flags: &[&str], sockets: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut cluster = Self {
            members: Vec::new(),
            pretended: None,
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            token: folder.path().display().to_string(),
            folder,
            sockets,
            named: 0,
        };
        for _ in 0..count {
            cluster.add_member();
        }
        cluster
    }

    /// Founders that all answer.
    pub(crate) async fn start(count: usize, flags: &[&str]) -> Self {
        Self::prepare(count, flags).begin().await
    }

    /// Founders that meet at socket files.
    pub(crate) async fn start_on_sockets(count: usize, flags: &[&str]) -> Self {
        Self::prepare_at(count, flags, true).begin().await
    }

    async fn begin(mut self) -> Self {
        for at in 0..self.members.len() {
            self.run(at, "new");
        }
        self.ready().await;
        self
    }

    pub(crate) async fn ready(&self) {
        for member in &self.members {
            let asked = eventually_or(|| async { member.get("ready").await.ok() });
            if asked.await.is_none() {
                let logs = self.members.iter().map(|member| {
                    let (name, log) = (&member.name, member.log());
                    format!("== {name}\n{log}\n")
                });
                panic!(
                    "no answer from {}:\n{}",
                    member.name,
                    logs.collect::<String>()
                );
            }
        }
    }

    /// Ports and a directory; gives its place.
    pub(crate) fn add_member(&mut self) -> usize {
        let at = self.members.len();
        self.named += 1;
        let name = format!("m{}", self.named);
        self.members.push(Member {
            dir: self.folder.path().join(&name),
            socket: self.folder.path().join(format!("{name}.sock")),
            name,
            client_port: free_port(),
            peer_port: free_port(),
            peer_scheme: self.peer_scheme(),
            child: None,
            log: Log::default(),
        });
        at
    }

    /// Peers speak over TLS when they have certificates.
    fn peer_scheme(&self) -> &'static str {
        let tls = ["--peer-cert-file", "--peer-auto-tls"];
        let secure = |flag: &String| tls.iter().any(|name| flag.starts_with(name));
        match (self.sockets, self.flags.iter().any(secure)) {
            (false, false) => "http",
            (false, true) => "https",
            (true, false) => "unix",
            (true, true) => "unixs",
        }
    }

    /// Members that are started from now on say that they are of this version.
    pub(crate) fn pretend(&mut self, version: Option<&str>) {
        self.pretended = version.map(str::to_owned);
    }

    /// For members that are started from now on.
    pub(crate) fn add_flag(&mut self, flag: &str) {
        self.flags.push(flag.to_owned());
    }

    pub(crate) fn drop_flag(&mut self, flag: &str) {
        self.flags.retain(|held| held != flag);
    }

    /// Ends a member with SIGTERM.
    pub(crate) async fn stop(&mut self, at: usize) {
        self.members[at].signal(Signal::TERM);
        self.members[at].ended().await;
    }

    pub(crate) fn set_token(&mut self, token: &str) {
        token.clone_into(&mut self.token);
    }

    pub(crate) fn run(&mut self, at: usize, state: &str) {
        let all: Vec<String> = self
            .members
            .iter()
            .map(|member| format!("{}={}", member.name, member.peer_url()))
            .collect();
        self.run_with(at, state, &all.join(","));
    }

    pub(crate) fn run_with(&mut self, at: usize, state: &str, initial_cluster: &str) {
        let member = &mut self.members[at];
        assert!(member.child.is_none(), "{} runs already", member.name);
        let client = member.client_url();
        let peer = member.peer_url();
        let mut child = Command::new(env!("CARGO_BIN_EXE_ballast"))
            .env_clear()
            .envs(
                self.pretended
                    .iter()
                    .map(|it| ("BALLAST_PRETEND_VERSION", it)),
            )
            .arg(format!("--name={}", member.name))
            .arg(format!("--data-dir={}", member.dir.display()))
            .arg(format!("--listen-client-urls={client}"))
            .arg(format!("--advertise-client-urls={client}"))
            .arg(format!("--listen-peer-urls={peer}"))
            .arg(format!("--initial-advertise-peer-urls={peer}"))
            .arg(format!("--initial-cluster={initial_cluster}"))
            .arg(format!("--initial-cluster-state={state}"))
            .arg(format!("--initial-cluster-token={}", self.token))
            .args(&self.flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = child.stderr.take().unwrap();
        let log = Log::default();
        member.log = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                log.lock().unwrap().push(line);
            }
        });
        member.child = Some(child);
    }

    /// Adds a learner, starts it, and makes it a voter.
    pub(crate) async fn grow(&mut self) -> usize {
        let at = self.add_member();
        let request = pb::MemberAddRequest {
            peer_ur_ls: vec![self.members[at].peer_url()],
            is_learner: true,
        };
        let added = eventually("a learner", || async {
            self.members[0]
                .cluster()
                .member_add(request.clone())
                .await
                .ok()
        })
        .await;
        let id = added.into_inner().member.unwrap().id;
        self.run(at, "existing");
        let request = pb::MemberPromoteRequest { id };
        eventually("a promotion", || async {
            let promoted = self.members[0].cluster().member_promote(request).await;
            promoted.ok()
        })
        .await;
        at
    }

    /// The place of the leader that a majority knows.
    pub(crate) async fn leader(&self) -> usize {
        eventually("a leader", || async {
            for (at, member) in self.members.iter().enumerate() {
                let Ok(status) = member.status().await else {
                    continue;
                };
                if status.leader == status.header.unwrap().member_id {
                    return Some(at);
                }
            }
            None
        })
        .await
    }

    /// Until all have the same.
    pub(crate) async fn agree(&self) {
        eventually("equal hashes", || async {
            let mut first = None;
            for member in &self.members {
                let hash = member.hash().await?;
                if *first.get_or_insert(hash) != hash {
                    return None;
                }
            }
            Some(())
        })
        .await;
    }
}

pub(crate) fn is(status: &Status, code: Code, text: &str) -> bool {
    (status.code(), status.message()) == (code, text)
}

/// What member `from` asks of the one that has answered with this header.
pub(crate) fn introduced<T>(
    message: T,
    from: u64,
    header: &pb::ResponseHeader,
) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    for (name, id) in [
        ("ballast-cluster", header.cluster_id),
        ("ballast-from", from),
        ("ballast-to", header.member_id),
    ] {
        let value = format!("{id:x}").parse().unwrap();
        request.metadata_mut().insert(name, value);
    }
    request
}
