//! Network namespaces by name, as `ip netns` keeps them, and work done inside one.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::fd::AsFd as _;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A named network namespace.
#[derive(Clone, Debug)]
pub struct NetworkNamespace {
    name: String,
}

impl NetworkNamespace {
    /// The namespace of this name, which may or may not exist.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
        }
    }

    pub fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    pub fn exists(&self) -> bool {
        self.path().exists()
    }

    /// Makes the namespace with a bridge that carries the node's address and the default route, so
    /// that the node has an address that is not loopback. The kernel has no `dummy` device type.
    pub fn create(&self, address: &str, prefix: u8) -> Result<()> {
        run("ip", &["netns", "add", &self.name])?;
        self.ip(&["link", "set", "lo", "up"])?;
        self.ip(&["link", "add", "node0", "type", "bridge"])?;
        self.ip(&[
            "address",
            "add",
            &format!("{address}/{prefix}"),
            "dev",
            "node0",
        ])?;
        self.ip(&["link", "set", "node0", "up"])?;
        self.ip(&["route", "add", "default", "dev", "node0"])?;
        self.inside(|| {
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("net.ipv4.ip_forward")
        })?
    }

    /// Makes the namespace with nothing in it but loopback.
    pub fn add(&self) -> Result<()> {
        run("ip", &["netns", "add", &self.name])?;
        self.ip(&["link", "set", "lo", "up"])
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Deletes the name; the namespace goes when its last process has.
    pub fn delete(&self) -> Result<()> {
        if self.exists() {
            run("ip", &["netns", "delete", &self.name])?;
        }
        Ok(())
    }

    /// `ip` on the devices inside.
    pub fn ip(&self, arguments: &[&str]) -> Result<()> {
        let mut all = vec!["-n", &self.name];
        all.extend(arguments);
        run("ip", &all)
    }

    /// `tc` on the devices inside.
    pub fn tc(&self, arguments: &[&str]) -> Result<()> {
        let mut all = vec!["-n", &self.name];
        all.extend(arguments);
        run("tc", &all)
    }

    /// A whole file of nftables rules, taken at once.
    pub fn nft(&self, rules: &str) -> Result<()> {
        self.inside(|| {
            let mut child = Command::new("nft")
                .args(["-f", "-"])
                .stdin(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .context("nft")?;
            let mut input = child.stdin.take().expect("it is piped");
            input.write_all(rules.as_bytes())?;
            drop(input);
            let output = child.wait_with_output()?;
            if !output.status.success() {
                bail!("nft: {}", String::from_utf8_lossy(&output.stderr));
            }
            Ok(())
        })?
    }

    /// Runs blocking work on a thread that has entered the namespace. Sockets made there belong to
    /// it, wherever they are used afterwards.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let path = self.path();
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    enter(&path)?;
                    Ok(work())
                })
                .join()
                .map_err(|_| anyhow!("work inside {} panicked", path.display()))?
        })
    }

    /// The command line prefix that starts a program inside. Not `ip netns exec`: that remounts
    /// `/sys` and hides the cgroups.
    pub fn nsenter(&self) -> String {
        format!("--net={}", self.path().display())
    }
}

/// Moves the calling thread into the namespace at this path.
pub fn enter(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("entering {}", path.display()))
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| program.to_owned())?;
    if !output.status.success() {
        bail!(
            "{program} {} failed: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
