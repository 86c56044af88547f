//! etcdctl against the server under test: each command prints what it prints against real etcd.
//!
//! The same commands run on both, one after the other; output, standard error and exit code are compared after what differs by nature
//! (ids, sizes, ports, times, Raft's counters) is replaced.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_e2e::store_server::{Answer, Program, StoreServer, etcdctl};
use ballast_e2e::tools;
use serde_json::Value;

const WATCH_DEADLINE: Duration = Duration::from_secs(30);

/// A command line, and what it reads.
struct Step {
    arguments: Vec<&'static str>,
    input: &'static str,
}

fn step(line: &'static str) -> Step {
    Step {
        arguments: line.split(' ').collect(),
        input: "",
    }
}

fn step_with(line: &'static str, input: &'static str) -> Step {
    Step {
        arguments: line.split(' ').collect(),
        input,
    }
}

/// One server and the lease that the last `lease grant` made there.
struct Side {
    server: StoreServer,
    lease: String,
}

impl Side {
    async fn start(program: &Program) -> Result<Self> {
        Ok(Self {
            server: StoreServer::start(program, &[]).await?,
            lease: String::new(),
        })
    }

    fn run(&mut self, step: &Step) -> Result<String> {
        let arguments: Vec<String> = step
            .arguments
            .iter()
            .map(|argument| argument.replace("LEASE", &self.lease))
            .collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let answer = etcdctl(&self.server, &arguments, step.input)?;
        if let ["lease", "grant", ..] = step.arguments[..] {
            let words: Vec<&str> = answer.stdout.split(' ').collect();
            if let ["lease", id, ..] = words[..] {
                id.clone_into(&mut self.lease);
            }
        }
        Ok(self.even(&answer))
    }

    /// The answer without what may differ.
    fn even(&self, answer: &Answer) -> String {
        let lines = answer
            .stdout
            .lines()
            .map(|line| match serde_json::from_str::<Value>(line) {
                Ok(mut value @ (Value::Object(_) | Value::Array(_))) => {
                    even_json(&mut value);
                    value.to_string()
                }
                _ => even_text(line),
            });
        // etcdctl's own log lines carry times and addresses of its objects.
        let errors = answer
            .stderr
            .lines()
            .filter(|line| !line.starts_with("{\"level\""))
            .map(even_text);
        let text: Vec<String> = lines.chain(errors).collect();
        let mut text = text.join("\n").replace(&self.server.endpoint(), "ENDPOINT");
        text = text.replace(&self.server.peer_url(), "PEER");
        if !self.lease.is_empty() {
            text = text.replace(&self.lease, "LEASE");
        }
        format!("exit {:?}\n{text}", answer.code)
    }
}

/// Fields that differ between two members by nature; those of a size or a counter must still be there and not be zero.
fn even_json(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match name.as_str() {
                    "cluster_id" | "member_id" | "raft_term" | "dbSize" | "dbSizeInUse"
                    | "leader" | "raftIndex" | "raftTerm" | "raftAppliedIndex" | "ID" | "id"
                    | "memberID" | "took" => {
                        let zero = field.as_u64() == Some(0);
                        *field = Value::from(if zero { "zero" } else { "some" });
                    }
                    // What is left of a lease may have lost a second.
                    "ttl" if field.as_i64().is_some_and(|ttl| ttl > 0) => {
                        *field = Value::from("some");
                    }
                    _ => even_json(field),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(even_json),
        _ => {}
    }
}

fn even_text(line: &str) -> String {
    let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
    for at in 0..words.len() {
        let before = at
            .checked_sub(1)
            .map(|before| words[before].clone())
            .unwrap_or_default();
        // `took = 1.2ms`, `Took 3 ms`, and `remaining(98s)`.
        if at > 1 && before == "=" && words[at - 2] == "took" {
            "TIME".clone_into(&mut words[at]);
        } else if words[at].starts_with("remaining(") {
            "remaining(TIME)".clone_into(&mut words[at]);
        } else if (before == "Took" || before == "took") && words[at] != "=" {
            "TIME".clone_into(&mut words[at]);
        }
        // Ids of members, as `member list` and error texts print them.
        let word = words[at].trim_end_matches(',');
        if (13..=16).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            words[at] = words[at].replace(word, "ID");
        }
    }
    let text = words.join(" ");
    // `"MemberID" : 123`, of `-w fields`.
    match text.split_once(" : ") {
        Some((name, _))
            if [
                "\"ClusterID\"",
                "\"MemberID\"",
                "\"RaftTerm\"",
                "\"ID\"",
                "\"Leader\"",
                "\"Lease\"",
            ]
            .contains(&name) =>
        {
            format!("{name} : SOME")
        }
        _ => text,
    }
}

async fn compare(steps: &[Step]) -> Result<()> {
    let program = Program::under_test()?;
    let mut etcd = Side::start(&Program::etcd()?).await?;
    let mut ours = Side::start(&program).await?;
    let mut differences = Vec::new();
    for step in steps {
        let (expected, got) = (etcd.run(step)?, ours.run(step)?);
        if expected != got {
            let command = step.arguments.join(" ");
            differences.push(format!(
                "etcdctl {command}\n-- etcd:\n{expected}\n-- {}:\n{got}\n",
                program.name
            ));
        }
    }
    ensure!(
        differences.is_empty(),
        "{} of {} differ\n{}",
        differences.len(),
        steps.len(),
        differences.join("\n")
    );
    Ok(())
}

async fn expect_equal(steps: &[Step]) {
    if let Err(error) = compare(steps).await {
        panic!("{error:#}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_put_read_and_deleted_as_on_etcd() {
    expect_equal(&[
        step("put a 1"),
        step("put a 2 --prev-kv"),
        step("put a/x 3 -w json"),
        step_with("put b", "from standard input"),
        step("put c 4 -w fields"),
        step("put c --ignore-value --prev-kv"),
        step("put none --ignore-value"),
        step("put c 5 --lease=1234"),
        step("get a"),
        step("get a -w json"),
        step("get a -w fields"),
        step("get a --print-value-only"),
        step("get a --hex"),
        step("get none"),
        step("get none -w json"),
        step("get a --prefix -w json"),
        step("get a c -w json"),
        step("get b --from-key -w json"),
        step("get --prefix  --limit=2 -w json"),
        step("get a --prefix --keys-only -w json"),
        step("get a --prefix --count-only -w fields"),
        step("get a --prefix --order=DESCEND --sort-by=VERSION -w json"),
        step("get a --prefix --order=DESCEND -w json"),
        step("get a --prefix --sort-by=VALUE -w json"),
        step("get a --rev=2 -w json"),
        step("get a --rev=99"),
        step("get a --consistency=s -w json"),
        step("get a --prefix --min-mod-rev=3 -w json"),
        step("get a --prefix --max-create-rev=2 -w json"),
        step("del none"),
        step("del a --prev-kv"),
        step("del a/x -w json"),
        step("put d 1"),
        step("put d/1 2"),
        step("del d --prefix --prev-kv -w json"),
        step("del b --from-key"),
        step("get --prefix  -w json"),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_are_answered_as_on_etcd() {
    expect_equal(&[
        step_with("txn", "mod(\"a\") = \"0\"\n\nput a 1\nget a\n\nget a\n\n"),
        step_with(
            "txn",
            "mod(\"a\") = \"0\"\n\nput a 2\n\nget a\nput b failed\n\n",
        ),
        step_with(
            "txn -w json",
            "value(\"a\") = \"1\"\nversion(\"b\") > \"0\"\n\ndel a\nget b\n\nput c 1\n\n",
        ),
        step_with(
            "txn -w json",
            "create(\"a\") < \"9\"\n\nput a 3\nput d 4\nget --prefix \n\n\n",
        ),
        step_with("txn", "\n\nput x 1\n\n\n"),
        step_with("txn", "\n\nput x 1\nput x 2\n\n\n"),
        step("get --prefix  -w json"),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_is_answered_as_on_etcd() {
    expect_equal(&[
        step("put a 1"),
        step("put a 2"),
        step("put a 3"),
        step("del a"),
        step("put b 1"),
        step("endpoint hashkv -w json"),
        step("compaction 4"),
        step("compaction 4"),
        step("compaction 99"),
        step("get a --rev=3"),
        step("get a --rev=4 -w json"),
        step("endpoint hashkv -w json"),
        step("endpoint hashkv --rev=3"),
        step("compaction 6 --physical"),
        step("get --prefix  -w json"),
        step("endpoint hashkv -w json"),
        step("endpoint hashkv --rev=6 -w json"),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_are_answered_as_on_etcd() {
    expect_equal(&[
        step("lease list"),
        step("lease grant 1000"),
        step("lease list"),
        step("put a 1 --lease=LEASE"),
        // One key: etcd lists several in no order.
        step("put b 1 --lease=LEASE"),
        step("put a 2"),
        step("get a -w fields"),
        step("lease timetolive LEASE"),
        step("lease timetolive LEASE --keys"),
        step("lease keep-alive --once LEASE"),
        step("put b 2"),
        step("lease timetolive LEASE --keys"),
        step("put c 1 --lease=LEASE"),
        step("lease revoke LEASE"),
        step("lease revoke LEASE"),
        step("lease timetolive LEASE"),
        step("lease keep-alive --once LEASE"),
        step("get --prefix  -w json"),
        step("lease grant 0"),
        step("lease grant 9999999999"),
        step("lock one true"),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_alarms_and_members_are_answered_as_on_etcd() {
    expect_equal(&[
        step("endpoint health"),
        step("endpoint health -w json"),
        step("endpoint status -w json"),
        step("endpoint hashkv -w json"),
        step("put a 1"),
        step("endpoint status -w json"),
        step("endpoint hashkv -w json"),
        step("alarm list"),
        step("alarm disarm"),
        step("defrag"),
        step("get a -w json"),
        step("endpoint hashkv -w json"),
        step("member list"),
        step("member list -w json"),
        step("endpoint health --cluster"),
    ])
    .await;
}

/// Runs `etcdctl watch ...` until it has printed `lines` lines.
fn watched(server: &StoreServer, arguments: &[&str], input: &str, lines: usize) -> Result<String> {
    use std::io::Write as _;
    let mut child = Command::new(tools::path("etcdctl")?)
        .arg(format!("--endpoints={}", server.endpoint()))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    // Held open: at its end, an interactive watch ends too.
    let mut stdin = child.stdin.take().context("it is piped")?;
    stdin.write_all(input.as_bytes())?;
    let stdout = child.stdout.take().context("it is piped")?;
    let (sender, receiver) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let mut text = Vec::new();
    while text.len() < lines {
        match receiver.recv_timeout(WATCH_DEADLINE) {
            Ok(line) => text.push(line),
            Err(error) => {
                text.push(format!("({error} after {} of {lines} lines)", text.len()));
                break;
            }
        }
    }
    child.kill()?;
    child.wait()?;
    drop(receiver);
    reader.join().expect("the reader does not panic");
    Ok(text.join("\n"))
}

async fn watches() -> Result<()> {
    let program = Program::under_test()?;
    let mut etcd = Side::start(&Program::etcd()?).await?;
    let mut ours = Side::start(&program).await?;
    for line in [
        "put a 1",
        "put a/1 2",
        "put b 3",
        "put a 4",
        "del a/1",
        "put a/1 5",
    ] {
        ensure!(
            etcd.run(&step(line))? == ours.run(&step(line))?,
            "etcdctl {line}"
        );
    }
    // Arguments, standard input, and how many lines etcdctl prints for the events there are.
    let cases: [(&[&str], &str, usize); 6] = [
        (&["watch", "a", "--rev=1"], "", 6),
        (&["watch", "a", "--prefix", "--rev=1"], "", 15),
        (&["watch", "a", "--prefix", "--rev=4", "--prev-kv"], "", 13),
        (&["watch", "a", "b", "--rev=2"], "", 15),
        (&["watch", "-i"], "watch a --rev=1\n", 6),
        (
            &["watch", "a", "--prefix", "--rev=5", "--progress-notify"],
            "",
            9,
        ),
    ];
    for (arguments, input, lines) in cases {
        let expected = watched(&etcd.server, arguments, input, lines)?;
        let got = watched(&ours.server, arguments, input, lines)?;
        ensure!(
            expected == got,
            "etcdctl {arguments:?}\n-- etcd:\n{expected}\n-- {}:\n{got}",
            program.name
        );
    }
    // A watch below the compacted revision says so and fails.
    let compaction = step("compaction 5");
    ensure!(
        etcd.run(&compaction)? == ours.run(&compaction)?,
        "etcdctl compaction 5"
    );
    let late = step("watch a --rev=2");
    let (expected, got) = (etcd.run(&late)?, ours.run(&late)?);
    ensure!(
        expected == got,
        "etcdctl watch a --rev=2\n-- etcd:\n{expected}\n-- {}:\n{got}",
        program.name
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn watches_print_what_they_print_on_etcd() {
    if let Err(error) = watches().await {
        panic!("{error:#}");
    }
}
