//! etcdctl, and `ballast snapshot save`, over TLS with certificates on both sides: what works in plain text works so, and who has no
//! certificate, or one of another authority, is kept out. The same on real etcd.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use ballast_e2e::pki::Pki;
use ballast_e2e::store_server::{Answer, Place, Program, StoreServer, etcdctl_at, free_port};

/// A server that is asked over TLS on a second port; the first is the harness's own.
struct Side {
    server: StoreServer,
    secure: String,
}

impl Side {
    async fn start(program: &Program, files: &Pki) -> Result<Self> {
        let place = Place::on_loopback("default")?;
        let secure = format!("127.0.0.1:{}", free_port()?);
        let file = |flag: &str, name: &str| format!("--{flag}={}", files.file(name).display());
        let flags = [
            format!(
                "--listen-client-urls=http://{},https://{secure}",
                place.client
            ),
            format!("--advertise-client-urls=https://{secure}"),
            file("cert-file", "server.crt"),
            file("key-file", "server.key"),
            file("trusted-ca-file", "ca.crt"),
            "--client-cert-auth".to_owned(),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut server = StoreServer::prepare_at(program, &flags, place)?;
        server.restart().await?;
        Ok(Self { server, secure })
    }

    /// etcdctl with these files, in the folder of the server.
    fn etcdctl(&self, endpoint: &str, files: &[String], line: &str) -> Result<Answer> {
        let arguments = files.iter().map(String::as_str).chain(line.split(' '));
        let arguments: Vec<&str> = arguments.collect();
        etcdctl_at(endpoint, self.server.folder(), &arguments, "")
    }
}

/// `--cacert` of one authority, `--cert` and `--key` of another's client.
fn shown(trusted: &Pki, client: Option<&Pki>) -> Vec<String> {
    let mut flags = vec![format!("--cacert={}", trusted.file("ca.crt").display())];
    if let Some(client) = client {
        flags.push(format!("--cert={}", client.file("client.crt").display()));
        flags.push(format!("--key={}", client.file("client.key").display()));
    }
    flags
}

fn authority(folder: &Path) -> Result<Pki> {
    let files = Pki::create(folder)?;
    files.server("server", &["127.0.0.1", "localhost"])?;
    files.client("client", "client", &[])?;
    Ok(files)
}

/// What etcdctl answers to each line, without what differs by nature.
fn answers(side: &Side, files: &[String]) -> Result<Vec<String>> {
    let url = format!("https://{}", side.secure);
    let mut answers = Vec::new();
    for (endpoint, line) in [
        (&url, "put a 1"),
        (&url, "put a 2 --prev-kv"),
        // Without a scheme the files decide.
        (&side.secure, "get a --print-value-only"),
        (&url, "get a --consistency=s"),
        (&url, "del a"),
        (&url, "endpoint health"),
        (&url, "endpoint health --cluster"),
        (&url, "alarm list"),
        (&url, "defrag"),
        (&url, "lease grant 100"),
        (&url, "snapshot save s.db"),
    ] {
        let answer = side.etcdctl(endpoint, files, line)?;
        let text = format!("{}{}", answer.stdout, answer.stderr);
        let text = text.replace(&side.secure, "ENDPOINT");
        // Log lines carry times; what follows such words is a time or an id.
        let lines = text
            .lines()
            .filter(|line| !line.starts_with('{'))
            .map(|line| {
                let words = ["took = ", "took: ", "lease ", "took ", "version "];
                let end = words
                    .iter()
                    .filter_map(|word| line.find(word).map(|at| at + word.len()));
                &line[..end.min().unwrap_or(line.len())]
            });
        let lines: Vec<&str> = lines.collect();
        answers.push(format!("{line}: {:?} {}", answer.code, lines.join(" | ")));
    }
    Ok(answers)
}

fn ballast(ours: &Program, side: &Side, file: &str, flags: &[String]) -> Result<Answer> {
    let output = Command::new(&ours.path)
        .args(["snapshot", "save", file])
        .args(flags)
        .current_dir(side.server.folder())
        .output()?;
    Ok(Answer {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Our own tool, of either server.
fn saves(ours: &Program, side: &Side, good: &[String], bad: &[Vec<String>]) -> Result<()> {
    for (n, endpoint) in [format!("https://{}", side.secure), side.secure.clone()]
        .iter()
        .enumerate()
    {
        let endpoint = format!("--endpoints={endpoint}");
        let with = |files: &[String]| [std::slice::from_ref(&endpoint), files].concat();
        let name = format!("own-{n}.db");
        let told = ballast(ours, side, &name, &with(good))?.ok()?;
        ensure!(told.contains("Snapshot saved at"), "{told}");
        ensure!(side.server.folder().join(&name).is_file());
        for files in bad {
            let refused = ballast(ours, side, "refused.db", &with(files))?;
            ensure!(refused.code == Some(1), "{files:?}: {refused:?}");
            ensure!(!side.server.folder().join("refused.db").exists());
        }
    }
    let endpoint = format!("--endpoints=https://{}", side.secure);
    let absent = [endpoint, "--cacert=absent.crt".to_owned()];
    let refused = ballast(ours, side, "refused.db", &absent)?;
    ensure!(
        refused.code == Some(1) && refused.stderr.contains("--cacert absent.crt: No such file"),
        "{refused:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_with_certificates_are_served_and_others_kept_out_as_on_etcd() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let own = authority(&folder.path().join("own"))?;
    let strange = authority(&folder.path().join("strange"))?;
    let (etcd, ours) = (Program::etcd()?, Program::under_test()?);
    let sides = [
        Side::start(&etcd, &own).await?,
        Side::start(&ours, &own).await?,
    ];
    let good = shown(&own, Some(&own));
    let [expected, got] = [answers(&sides[0], &good)?, answers(&sides[1], &good)?];
    for (expected, got) in expected.iter().zip(&got) {
        ensure!(expected == got, "etcd answers\n{expected}\nand we\n{got}");
        ensure!(got.contains("Some(0)"), "{got}");
    }
    let bad = [
        // No certificate; one that nobody here has signed; a server that is not the one we trust.
        shown(&own, None),
        shown(&own, Some(&strange)),
        shown(&strange, Some(&own)),
    ];
    for side in &sides {
        let url = format!("https://{}", side.secure);
        for files in &bad {
            let impatient = [
                "--command-timeout=2s".to_owned(),
                "--dial-timeout=2s".to_owned(),
            ];
            let files = [&impatient[..], &files[..]].concat();
            let refused = side.etcdctl(&url, &files, "put refused 1")?;
            ensure!(refused.code == Some(1), "{files:?}: {refused:?}");
        }
        let plain = side.etcdctl(
            &format!("http://{}", side.secure),
            &[],
            "put refused 1 --command-timeout=2s",
        )?;
        ensure!(plain.code == Some(1), "{plain:?}");
        let read = side.etcdctl(&url, &good, "get refused")?;
        ensure!(read.ok()?.is_empty(), "a write was let in");
        saves(&ours, side, &good, &bad).context("ballast snapshot save")?;
    }
    Ok(())
}
