//! What a run came to, in words and as the table of docs/failure-modes.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::faults::Fault;
use super::record::Kind;

const HEADING: &str = "## The nemesis\n";

/// Counted over all windows.
#[derive(Debug, Default)]
pub struct Summary {
    pub program: String,
    pub seed: u64,
    pub time: Duration,
    pub windows: u64,
    pub faults: BTreeMap<Fault, u64>,
    /// By kind, known outcomes and unknown ones.
    pub requests: BTreeMap<Kind, (u64, u64)>,
    pub linearizable: u64,
    pub judged_steps: u64,
    pub sessions: u64,
    pub events: u64,
    pub hashes: u64,
    pub leases: u64,
    pub revisions: i64,
    /// Between two answered writes, over all windows.
    pub longest_gap: Duration,
}

impl Summary {
    pub fn requests(&self) -> u64 {
        self.requests
            .values()
            .map(|(known, lost)| known + lost)
            .sum()
    }

    pub fn lost(&self) -> u64 {
        self.requests.values().map(|(_, lost)| lost).sum()
    }

    /// In one line.
    pub fn line(&self) -> String {
        let faults: Vec<String> = self
            .faults
            .iter()
            .map(|(fault, count)| format!("{} {count}", fault.name()))
            .collect();
        format!(
            "{}: seed {}, {} s, {} histories linearizable of {}, {} requests ({} of unknown outcome), {} watches, {} events, {} hashes equal, \
             {} leases ran out, {} revisions, longest gap in writes {:.1} s; {}",
            self.program,
            self.seed,
            self.time.as_secs(),
            self.linearizable,
            self.windows,
            self.requests(),
            self.lost(),
            self.sessions,
            self.events,
            self.hashes,
            self.leases,
            self.revisions,
            self.longest_gap.as_secs_f64(),
            faults.join(", ")
        )
    }

    fn section(&self) -> String {
        let mut text = String::from(HEADING);
        let _ = writeln!(
            text,
            "\nWritten by `make nemesis MINUTES=...`: three members, clients and watchers on all of them, one fault after the other.\n\n\
             | what | of the last long run |\n|---|---|\n\
             | time, seed | {} minutes, {} |\n\
             | requests | {}, of which {} of unknown outcome |\n\
             | histories judged by porcupine | {}, all linearizable, none unknown ({} steps) |\n\
             | watches held against the one history | {} ({} events) |\n\
             | equal HashKV of all members | {} times |\n\
             | leases left to run out | {}, none early |\n\
             | revisions | {} |\n\
             | longest time without an answered write, faults on all members included | {:.1} s |\n",
            self.time.as_secs() / 60,
            self.seed,
            self.requests(),
            self.lost(),
            self.linearizable,
            self.judged_steps,
            self.sessions,
            self.events,
            self.hashes,
            self.leases,
            self.revisions,
            self.longest_gap.as_secs_f64(),
        );
        text.push_str("| fault | times |\n|---|---|\n");
        for (fault, count) in &self.faults {
            let _ = writeln!(text, "| {} | {count} |", fault.name());
        }
        text
    }

    /// Puts the section into a document in place of the one before.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let text = replaced(&text, &self.section());
        std::fs::write(path, text).with_context(|| path.display().to_string())
    }
}

fn replaced(text: &str, section: &str) -> String {
    let Some((before, rest)) = text.split_once(HEADING) else {
        return format!("{}\n\n{section}", text.trim_end());
    };
    match rest.split_once("\n## ") {
        Some((_, after)) => format!("{before}{section}\n## {after}"),
        None => format!("{before}{section}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_takes_the_place_of_the_one_before() {
        let section = format!("{HEADING}\nnew\n");
        let first = replaced("# A\n\ntext\n", &section);
        assert_eq!(first, "# A\n\ntext\n\n## The nemesis\n\nnew\n");
        assert_eq!(replaced(&first, &section), first);
        let between = "# A\n\n## The nemesis\n\nold\n\n## B\n";
        assert_eq!(
            replaced(between, &section),
            "# A\n\n## The nemesis\n\nnew\n\n## B\n"
        );
    }
}
