//! What a server process costs, read from /proc.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// The unit of /proc's times, the same on every Linux of today.
const TICKS_PER_SECOND: f64 = 100.0;

/// A reading of one process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// User and system time since its start.
    pub cpu: Duration,
    /// Bytes it caused to be written to the disk.
    pub written: u64,
    pub rss: u64,
    /// Memory that is not file pages.
    pub anonymous: u64,
    pub rss_peak: u64,
}

impl Cost {
    pub fn of(pid: u32) -> Result<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The name in parentheses may hold anything; the fields after it are plain.
        let fields: Vec<&str> = stat
            .rsplit_once(')')
            .context("stat has a name")?
            .1
            .split_whitespace()
            .collect();
        let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let io = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
        Ok(Self {
            cpu: Duration::from_secs_f64(ticks as f64 / TICKS_PER_SECOND),
            written: line(&io, "write_bytes:")?,
            rss: line(&status, "VmRSS:")? * 1024,
            anonymous: line(&status, "RssAnon:")? * 1024,
            rss_peak: line(&status, "VmHWM:")? * 1024,
        })
    }
}

fn line(text: &str, name: &str) -> Result<u64> {
    let line = text
        .lines()
        .find(|line| line.starts_with(name))
        .with_context(|| format!("no {name}"))?;
    line.split_whitespace()
        .nth(1)
        .with_context(|| format!("{name} without a number"))?
        .parse()
        .with_context(|| format!("{name} is a number"))
}

/// Allocated bytes of the database: everything in the data directory but the log.
pub fn database_bytes(data_dir: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(data_dir)? {
        let path = entry?.path();
        if path.is_dir() {
            if path.file_name().is_none_or(|name| name != "wal") {
                sum += database_bytes(&path)?;
            }
        } else if let Ok(meta) = path.metadata() {
            // A file may go away while the folder is read.
            sum += meta.blocks() * 512;
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_costs_something() {
        let cost = Cost::of(std::process::id()).expect("this process is in /proc");
        assert!(cost.rss > 0 && cost.anonymous > 0 && cost.rss_peak >= cost.anonymous);
    }
}
