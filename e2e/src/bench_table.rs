//! The benchmark's table: medians with their spread, and ratios of the program under test to etcd.

use std::fmt::{self, Display, Write as _};

use crate::bench::better;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    Throughput,
    P50,
    P99,
    P999,
    Max,
    Cpu,
    Rss,
    IdleRss,
    Anonymous,
    Written,
    Seconds,
    File,
}

impl Metric {
    /// The name under which rows state their bounds.
    fn name(self) -> &'static str {
        match self {
            Metric::Throughput => "throughput",
            Metric::P50 => "p50",
            Metric::P99 => "p99",
            Metric::P999 => "p99.9",
            Metric::Max => "max",
            Metric::Cpu => "cpu",
            Metric::Rss => "rss",
            Metric::IdleRss => "idle rss",
            Metric::Anonymous => "anonymous",
            Metric::Written => "written",
            Metric::Seconds => "time",
            Metric::File => "file",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Metric::Throughput => "/s",
            Metric::P50 | Metric::P99 | Metric::P999 | Metric::Max => "ms",
            Metric::Cpu => "CPU s",
            Metric::Rss | Metric::IdleRss | Metric::Anonymous | Metric::File => "MiB",
            Metric::Written => "KiB/op",
            Metric::Seconds => "s",
        }
    }
}

/// Whether more or less of something is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    Higher,
    Lower,
}

/// The values of one workload on one server in one round.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<(Metric, f64)>);

impl Samples {
    pub fn set(&mut self, metric: Metric, value: f64) {
        self.0.push((metric, value));
    }

    pub fn of(metric: Metric, value: f64) -> Self {
        Self(vec![(metric, value)])
    }
}

impl Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (metric, value)) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(
                f,
                "{comma}{} {} {}",
                metric.name(),
                figure(*value),
                metric.unit()
            )?;
        }
        Ok(())
    }
}

/// Bounds of a row on the ratio, by metric name.
pub type Bounds = &'static [(&'static str, f64)];

struct Line {
    row: String,
    first: Bounds,
    /// Of etcd and of the program under test.
    rounds: [Vec<Samples>; 2],
}

/// All rows of a run.
pub struct Table {
    program: String,
    rounds: usize,
    divide: u64,
    lines: Vec<Line>,
}

impl Table {
    pub fn new(program: &str, rounds: usize, divide: u64) -> Self {
        Self {
            program: program.to_owned(),
            rounds,
            divide,
            lines: Vec::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// `side` is 0 for etcd, 1 for the program under test.
    pub fn add(&mut self, row: &str, first: Bounds, side: usize, samples: Samples) {
        let at = self
            .lines
            .iter()
            .position(|line| line.row == row)
            .unwrap_or_else(|| {
                self.lines.push(Line {
                    row: row.to_owned(),
                    first,
                    rounds: [Vec::new(), Vec::new()],
                });
                self.lines.len() - 1
            });
        self.lines[at].rounds[side].push(samples);
    }

    /// One line for each metric of each row.
    pub fn markdown(&self) -> String {
        let mut text = format!(
            "| row | metric | etcd | {} | ratio | first | met |\n|---|---|---|---|---|---|---|\n",
            self.program
        );
        for line in &self.lines {
            for metric in line.metrics() {
                let [etcd, ours] = [0, 1].map(|side| Spread::of(&line.values(side, metric)));
                let ratio = if etcd.median > 0.0 {
                    ours.median / etcd.median
                } else {
                    f64::NAN
                };
                let bound = line
                    .first
                    .iter()
                    .find(|(name, _)| *name == metric.name())
                    .map(|(_, bound)| *bound);
                let (bound, met) = match (bound, better(metric)) {
                    (None, _) => (String::new(), ""),
                    (Some(bound), Better::Higher) => (format!(">= {bound}x"), word(ratio >= bound)),
                    (Some(bound), Better::Lower) => (format!("<= {bound}x"), word(ratio <= bound)),
                };
                let _ = writeln!(
                    text,
                    "| {} | {} ({}) | {etcd} | {ours} | {ratio:.2} | {bound} | {met} |",
                    line.row,
                    metric.name(),
                    metric.unit()
                );
            }
        }
        text
    }

    /// The table with what a reader must know of it.
    pub fn document(&self) -> String {
        let divided = if self.divide > 1 {
            format!(
                " This run sent a {}th of the requests: a quick look, no measurement.",
                self.divide
            )
        } else {
            String::new()
        };
        format!(
            "# Benchmark\n\nWritten by `make bench`: {} interleaved rounds on one machine, etcd v3.7.3 and {} in turn, fresh data \
             each time; median (min - max). The load generator shares the machine's cores with the server, so the server's CPU \
             time per 1,000 requests says more than the throughput.{divided}\n\n{}",
            self.rounds,
            self.program,
            self.markdown()
        )
    }
}

impl Line {
    fn metrics(&self) -> Vec<Metric> {
        let mut metrics: Vec<Metric> = self
            .rounds
            .iter()
            .flatten()
            .flat_map(|samples| samples.0.iter().map(|(metric, _)| *metric))
            .collect();
        metrics.sort();
        metrics.dedup();
        metrics
    }

    fn values(&self, side: usize, metric: Metric) -> Vec<f64> {
        self.rounds[side]
            .iter()
            .filter_map(|samples| {
                samples
                    .0
                    .iter()
                    .find(|(of, _)| *of == metric)
                    .map(|(_, value)| *value)
            })
            .collect()
    }
}

fn word(met: bool) -> &'static str {
    if met { "yes" } else { "NO" }
}

/// Median, minimum and maximum.
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[n / 2],
            n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
        };
        let ends = |at: Option<&f64>| at.copied().unwrap_or(f64::NAN);
        Self {
            median,
            min: ends(sorted.first()),
            max: ends(sorted.last()),
        }
    }
}

impl Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({} - {})",
            figure(self.median),
            figure(self.min),
            figure(self.max)
        )
    }
}

/// Three significant digits, thousands marked.
fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 1_000.0 => {
            let digits = format!("{value:.0}");
            let mut text = String::new();
            for (at, digit) in digits.chars().enumerate() {
                if at > 0 && (digits.len() - at) % 3 == 0 {
                    text.push(',');
                }
                text.push(digit);
            }
            text
        }
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_the_median_its_spread_the_ratio_and_the_bound() {
        let mut table = Table::new("ballast", 3, 1);
        let first: Bounds = &[("throughput", 1.3), ("cpu", 0.7)];
        for (etcd, ours) in [(1_000.0, 3_000.0), (2_000.0, 1_000.0), (1_500.0, 2_100.0)] {
            for (side, value) in [etcd, ours].into_iter().enumerate() {
                let mut samples = Samples::of(Metric::Throughput, value);
                samples.set(Metric::Cpu, 0.1);
                table.add("put", first, side, samples);
            }
        }
        let text = table.markdown();
        assert!(
            text.contains("| put | throughput (/s) | 1,500 (1,000 - 2,000) | 2,100 (1,000 - 3,000) | 1.40 | >= 1.3x | yes |"),
            "{text}"
        );
        assert!(text.contains("| 1.00 | <= 0.7x | NO |"), "{text}");
    }

    #[test]
    fn figures_have_three_digits() {
        assert_eq!(figure(1_234_567.8), "1,234,568");
        assert_eq!(figure(123.4), "123");
        assert_eq!(figure(12.34), "12.3");
        assert_eq!(figure(0.0123), "0.012");
    }
}
