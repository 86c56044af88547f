//! `--auto-defrag`: when a member gives unused space of its database back to the disk without being asked.
//!
//!     off
//!     size=100MiB,free=45%,interval=10m      each part may be left out and then has this value
//!
//! The three are those of the operator's `defragmentation` (minSize, minFreeRatioPercent, minIntervalSeconds), with the same
//! defaults. Not here: following the rule (`crate::defrag`).

use std::time::Duration;

use super::values::parse_duration;

/// Both must hold: the database is at least so large, and so much of it is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoDefrag {
    pub size_min_bytes: u64,
    pub free_min_percent: u64,
    /// From the end of one to the start of the next.
    pub interval: Duration,
}

impl Default for AutoDefrag {
    fn default() -> Self {
        Self {
            size_min_bytes: 100 << 20,
            free_min_percent: 45,
            interval: Duration::from_mins(10),
        }
    }
}

/// The default rule as a flag's text.
pub const DEFAULT: &str = "size=100MiB,free=45%,interval=10m";

/// None for `off`.
pub fn parse(text: &str) -> Result<Option<AutoDefrag>, String> {
    if text.trim() == "off" {
        return Ok(None);
    }
    let mut rule = AutoDefrag::default();
    for part in text.split(',').map(str::trim) {
        let (name, value) = part.split_once('=').ok_or_else(|| {
            format!("\"{part}\" is neither off nor size=BYTES, free=PERCENT% or interval=TIME")
        })?;
        let bad = || format!("\"{value}\" is no value of {name}");
        match name {
            "size" => rule.size_min_bytes = parse_bytes(value).ok_or_else(bad)?,
            "free" => {
                rule.free_min_percent = value
                    .strip_suffix('%')
                    .unwrap_or(value)
                    .parse()
                    .ok()
                    .filter(|percent| (1..=99).contains(percent))
                    .ok_or_else(bad)?;
            }
            "interval" => {
                rule.interval = parse_duration(value)
                    .filter(|interval| !interval.is_zero())
                    .ok_or_else(bad)?;
            }
            _ => return Err(format!("unknown part \"{name}\"")),
        }
    }
    Ok(Some(rule))
}

/// `1048576`, `100MiB`, `100Mi` or `100MB`.
fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit.strip_suffix('B').unwrap_or(unit) {
        "" => 1,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "k" | "K" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_off_or_parts_with_defaults() {
        let rule = |mib: u64, percent, secs| {
            Ok(Some(AutoDefrag {
                size_min_bytes: mib << 20,
                free_min_percent: percent,
                interval: Duration::from_secs(secs),
            }))
        };
        for (text, expected) in [
            ("off", Ok(None)),
            (DEFAULT, rule(100, 45, 600)),
            ("size=1GiB", rule(1024, 45, 600)),
            ("free=60", rule(100, 60, 600)),
            ("interval=1h30m, size=2097152, free=5%", rule(2, 5, 5400)),
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
        for text in [
            "",
            "on",
            "size=",
            "size=1XiB",
            "size=99999999999TiB",
            "free=0%",
            "free=100%",
            "free=x",
            "interval=0",
            "interval=5",
            "speed=1",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
