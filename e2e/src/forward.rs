//! A door from the machine's loopback into a cluster's network namespace.
//!
//! A socket belongs to the namespace it was made in, so one process can listen outside and connect
//! inside. Nothing is added to the machine's own network.

use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::net::{TcpListener, TcpStream};

use crate::netns::{self, NetworkNamespace};
use crate::paths;
use crate::process::{Process, Program};

/// Starts a forwarder from a free loopback port to an address inside, and returns the port.
pub fn start(
    state: &Path,
    name: &str,
    namespace: &NetworkNamespace,
    to: SocketAddr,
) -> Result<(Process, SocketAddr)> {
    // The port is chosen here and bound again by the forwarder: it must be known beforehand, and a
    // forwarder that cannot have it ends with a message in its log.
    let listen = StdListener::bind("127.0.0.1:0")?.local_addr()?;
    let process = Program::new(name, paths::harness_binary()?)
        .argument("forward")
        .argument(format!("--namespace={}", namespace.path().display()))
        .argument(format!("--listen={listen}"))
        .argument(format!("--to={to}"))
        .start(state)?;
    crate::wait::wait_for_blocking(&format!("{name} listens"), Duration::from_secs(10), || {
        process.check()?;
        Ok(std::net::TcpStream::connect(listen).is_ok().then_some(()))
    })?;
    Ok((process, listen))
}

/// The forwarder itself: the hidden subcommand `forward`. Returns only with an error.
pub fn run(namespace: &Path, listen: SocketAddr, to: SocketAddr) -> Result<()> {
    let outside = StdListener::bind(listen).with_context(|| format!("listening on {listen}"))?;
    outside.set_nonblocking(true)?;
    // From here on every new socket of this thread belongs to the namespace.
    netns::enter(namespace)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async move {
        let outside = TcpListener::from_std(outside)?;
        loop {
            let (mut client, _) = outside.accept().await?;
            tokio::spawn(async move {
                // A server that is away is the client's to notice: its connection closes.
                if let Ok(mut server) = TcpStream::connect(to).await {
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                }
            });
        }
    })
}
