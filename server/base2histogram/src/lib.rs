//! Stands in for the crate of this name, which openraft uses for statistics of its own: the same names, buckets of powers of two.
//!
//! The published crate computes the bucket bounds of all its precisions, 24 MiB of them, when the first histogram is made. That was more
//! than half of the memory of an idle member. We read none of these statistics (openraft's feature `runtime-stats` is off), so that
//! coarser ones do.
//! Not here: whatever openraft does not call. When the published crate makes its tables on demand, this one goes.

use std::fmt;
use std::marker::PhantomData;

const BUCKETS: usize = 65;

/// Counts of values by their number of binary digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram<T = ()> {
    counts: Vec<u64>,
    total: u64,
    data: PhantomData<T>,
}

impl<T> Default for Histogram<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Histogram<T> {
    pub fn new() -> Self {
        Self {
            counts: Vec::new(),
            total: 0,
            data: PhantomData,
        }
    }

    pub fn record(&mut self, value: u64) {
        self.record_n(value, 1);
    }

    pub fn record_n(&mut self, value: u64, count: u64) {
        if self.counts.is_empty() {
            self.counts = vec![0; BUCKETS];
        }
        self.counts[(u64::BITS - value.leading_zeros()) as usize] += count;
        self.total += count;
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// The upper end of the bucket that holds the value of this rank; 0 when nothing was recorded.
    pub fn percentile(&self, share: f64) -> u64 {
        let rank = (share * self.total as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (digits, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return u64::MAX.checked_shr(u64::BITS - digits as u32).unwrap_or(0);
            }
        }
        0
    }

    pub fn percentile_stats(&self) -> PercentileStats {
        PercentileStats {
            samples: self.total,
            p0_1: self.percentile(0.001),
            p1: self.percentile(0.01),
            p5: self.percentile(0.05),
            p10: self.percentile(0.1),
            p50: self.percentile(0.5),
            p90: self.percentile(0.9),
            p99: self.percentile(0.99),
            p99_9: self.percentile(0.999),
        }
    }
}

/// Some percentiles of a histogram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PercentileStats {
    pub samples: u64,
    pub p0_1: u64,
    pub p1: u64,
    pub p5: u64,
    pub p10: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p99_9: u64,
}

impl fmt::Display for PercentileStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "[samples: {}, P0.1: {}, P1: {}, P5: {}, P10: {}, P50: {}, P90: {}, P99: {}, P99.9: {}]",
            self.samples,
            self.p0_1,
            self.p1,
            self.p5,
            self.p10,
            self.p50,
            self.p90,
            self.p99,
            self.p99_9
        )
    }
}

/// Several histograms under their names, a line each.
#[derive(Debug, Clone, Default)]
pub struct AsciiChart(Vec<(String, Histogram)>);

impl AsciiChart {
    pub fn new() -> Self {
        Self::default()
    }

    #[must_use]
    pub fn add(mut self, name: impl Into<String>, histogram: Histogram) -> Self {
        self.0.push((name.into(), histogram));
        self
    }
}

impl fmt::Display for AsciiChart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, histogram) in &self.0 {
            writeln!(f, "{name} {}", histogram.percentile_stats())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_upper_ends_of_powers_of_two() {
        let mut histogram = Histogram::<()>::new();
        assert_eq!(histogram.percentile(0.5), 0);
        for value in [0, 1, 2, 3, 1_000, u64::MAX] {
            histogram.record(value);
        }
        assert_eq!(histogram.total(), 6);
        assert_eq!(histogram.percentile(0.0), 0);
        assert_eq!(histogram.percentile(0.5), 3);
        assert_eq!(histogram.percentile(0.8), 1_023);
        assert_eq!(histogram.percentile(1.0), u64::MAX);
        let chart = AsciiChart::new().add("batch", histogram);
        assert!(
            chart
                .to_string()
                .starts_with("batch [samples: 6, P0.1: 0, ")
        );
    }
}
