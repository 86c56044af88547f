//! The benchmark's table: medians with their spread, and ratios of the program under test to etcd.

use std::fmt::{self, Display, Write as _};

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
    /// Of a latency under something over the quiet one.
    Rise,
}

impl Metric {
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
            Metric::Rise => "p99 over quiet p99",
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
            Metric::Rise => "x",
        }
    }
}

/// What is asked of a metric.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    /// Ours to etcd's, the first stage's and the goal: no less of a throughput, no more of anything else.
    Ratio(f64, f64),
    /// Ours alone, in the metric's unit.
    AtMost(f64),
    /// Ours no more than this above our own in the row of this name.
    Above(&'static str, f64),
}

/// Bounds of a row.
pub type Bounds = &'static [(Metric, Bound)];

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
            "| row | metric | etcd | {} | ratio | first | met | goal |\n|---|---|---|---|---|---|---|---|\n",
            self.program
        );
        for line in &self.lines {
            for metric in line.metrics() {
                let [etcd, ours] = [0, 1].map(|side| Spread::of(&line.values(side, metric)));
                let ratio = ours.median / etcd.median;
                let bound = line.first.iter().find(|(of, _)| *of == metric);
                let (first, met, goal) = match bound.map(|(_, bound)| *bound) {
                    None => (String::new(), "", String::new()),
                    Some(Bound::Ratio(first, goal)) => {
                        let (sign, met) = match metric {
                            Metric::Throughput => (">=", ratio >= first),
                            _ => ("<=", ratio <= first),
                        };
                        let goal = format!("{sign} {goal}x");
                        (format!("{sign} {first}x"), word(met), goal)
                    }
                    Some(Bound::AtMost(most)) => {
                        let first = format!("<= {most} {}", metric.unit());
                        (first, word(ours.median <= most), String::new())
                    }
                    Some(Bound::Above(row, by)) => {
                        let base = self.ours(row, metric);
                        let first = format!("<= {row} + {by} {}", metric.unit());
                        (first, word(ours.median <= base + by), String::new())
                    }
                };
                let ratio = if ratio.is_finite() {
                    format!("{ratio:.2}")
                } else {
                    String::new()
                };
                let _ = writeln!(
                    text,
                    "| {} | {} ({}) | {etcd} | {ours} | {ratio} | {first} | {met} | {goal} |",
                    line.row,
                    metric.name(),
                    metric.unit()
                );
            }
        }
        text
    }

    /// The median of the program under test in a row; no number when there is none.
    fn ours(&self, row: &str, metric: Metric) -> f64 {
        let line = self.lines.iter().find(|line| line.row == row);
        line.map_or(f64::NAN, |line| Spread::of(&line.values(1, metric)).median)
    }

    /// Bounds of the first stage that were not met.
    pub fn missed(&self) -> usize {
        self.markdown().matches("| NO |").count()
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
             time per 1,000 requests says more than the throughput. Ratios are ours to etcd's; `first` is what the first stage asks, \
             `goal` what comes after.{divided}\n\n{}",
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
        if self.median.is_nan() {
            return Ok(());
        }
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
        let first: Bounds = &[
            (Metric::Throughput, Bound::Ratio(1.3, 2.0)),
            (Metric::Cpu, Bound::Ratio(0.7, 0.4)),
        ];
        for (etcd, ours) in [(1_000.0, 3_000.0), (2_000.0, 1_000.0), (1_500.0, 2_100.0)] {
            for (side, value) in [etcd, ours].into_iter().enumerate() {
                let mut samples = Samples::of(Metric::Throughput, value);
                samples.set(Metric::Cpu, 0.1);
                table.add("put", first, side, samples);
            }
        }
        let text = table.markdown();
        assert!(
            text.contains("| put | throughput (/s) | 1,500 (1,000 - 2,000) | 2,100 (1,000 - 3,000) | 1.40 | >= 1.3x | yes | >= 2x |"),
            "{text}"
        );
        assert!(text.contains("| 1.00 | <= 0.7x | NO | <= 0.4x |"), "{text}");
        assert_eq!(table.missed(), 1);
    }

    #[test]
    fn a_bound_may_be_a_figure_or_another_row_of_ours() {
        let mut table = Table::new("ballast", 1, 1);
        let beside: Bounds = &[(Metric::P999, Bound::Above("quiet", 10.0))];
        let most: Bounds = &[(Metric::Anonymous, Bound::AtMost(450.0))];
        table.add("quiet", &[], 1, Samples::of(Metric::P999, 5.0));
        table.add("near", beside, 1, Samples::of(Metric::P999, 14.0));
        table.add("far", beside, 1, Samples::of(Metric::P999, 16.0));
        table.add("memory", most, 1, Samples::of(Metric::Anonymous, 451.0));
        let text = table.markdown();
        let has = |line: &str| assert!(text.contains(line), "{text}");
        has("| near | p99.9 (ms) |  | 14.0 (14.0 - 14.0) |  | <= quiet + 10 ms | yes |  |");
        has("| far | p99.9 (ms) |  | 16.0 (16.0 - 16.0) |  | <= quiet + 10 ms | NO |  |");
        has("| <= 450 MiB | NO |  |");
    }

    #[test]
    fn figures_have_three_digits() {
        assert_eq!(figure(1_234_567.8), "1,234,568");
        assert_eq!(figure(123.4), "123");
        assert_eq!(figure(12.34), "12.3");
        assert_eq!(figure(0.0123), "0.012");
    }
}
