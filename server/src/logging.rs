//! Logs in etcd's form: one JSON object a line, with level, ts, caller, msg and the fields.
//!
//! Not here: where the lines go (`logging/output.rs`).
//!
//! etcd: client/pkg/logutil.

pub mod output;

use std::fmt;
use std::io::IsTerminal;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry, reload};

use crate::clock::Clock;
pub use output::{Outputs, Rotation, Target};

/// `--log-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    #[default]
    Json,
    Console,
}

/// The level in force, as a number; see [`level`].
static LEVEL: AtomicU8 = AtomicU8::new(0);
/// Changes the filter of the running subscriber.
static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();
/// Whether the consensus library was told to stop; see [`library_stops`].
static LIBRARY_STOPS: AtomicBool = AtomicBool::new(false);

/// From the least to the most told.
const LEVELS: [(&str, LevelFilter); 4] = [
    ("error", LevelFilter::ERROR),
    ("warn", LevelFilter::WARN),
    ("info", LevelFilter::INFO),
    ("debug", LevelFilter::DEBUG),
];

/// The level of a name of `--log-level`; those beyond "error" all mean errors.
pub fn level_of(name: &str) -> Option<LevelFilter> {
    if matches!(name, "dpanic" | "panic" | "fatal") {
        return Some(LevelFilter::ERROR);
    }
    let found = LEVELS.iter().find(|(known, _)| *known == name);
    found.map(|(_, level)| *level)
}

pub fn level_name(level: LevelFilter) -> &'static str {
    let found = LEVELS.iter().find(|(_, known)| *known == level);
    found.map_or("error", |(name, _)| name)
}

/// The level in force.
pub fn level() -> LevelFilter {
    LEVELS[usize::from(LEVEL.load(Ordering::Relaxed))].1
}

/// Tells more or less from here on.
pub fn set_level(level: LevelFilter) {
    let at = LEVELS.iter().position(|(_, known)| *known == level);
    LEVEL.store(at.unwrap_or_default() as u8, Ordering::Relaxed);
    refilter();
}

/// The consensus library is about to be told to stop. Each call under way then ends with an error, of which it tells as if nobody had
/// wished it; whoever stops it learns from its answer whether anything is wrong.
pub fn library_stops() {
    LIBRARY_STOPS.store(true, Ordering::Relaxed);
    refilter();
}

fn refilter() {
    if let Some(handle) = FILTER.get()
        && let Err(error) = handle.reload(filter(level(), LIBRARY_STOPS.load(Ordering::Relaxed)))
    {
        tracing::warn!(error = %error, "cannot change what the log tells");
    }
}

fn filter(level: LevelFilter, library_stops: bool) -> Targets {
    // The consensus library tells at `info` what interests only those who debug it, and at `warn` each attempt at a peer that is down.
    let library = if level >= LevelFilter::DEBUG {
        level
    } else if library_stops {
        LevelFilter::OFF
    } else {
        LevelFilter::ERROR
    };
    Targets::new()
        .with_default(level)
        .with_target("openraft", library)
}

/// Lets so many lines of one kind pass in a second, and counts the others.
#[derive(Debug)]
pub struct Limit<const PER_SECOND_MAX: u32>(Mutex<Window>);

#[derive(Debug)]
struct Window {
    began: Option<Instant>,
    passed: u32,
    suppressed: u64,
}

impl<const PER_SECOND_MAX: u32> Limit<PER_SECOND_MAX> {
    pub const fn new() -> Self {
        Self(Mutex::new(Window {
            began: None,
            passed: 0,
            suppressed: 0,
        }))
    }

    /// None when the line is one too many; else how many were before it since the last one that passed.
    pub fn pass(&self, now: Instant) -> Option<u64> {
        let mut window = self.0.lock();
        let is_new = window
            .began
            .is_none_or(|began| now.saturating_duration_since(began) >= Duration::from_secs(1));
        if is_new {
            window.began = Some(now);
            window.passed = 0;
        }
        if window.passed >= PER_SECOND_MAX {
            window.suppressed += 1;
            return None;
        }
        window.passed += 1;
        Some(std::mem::take(&mut window.suppressed))
    }
}

impl<const PER_SECOND_MAX: u32> Default for Limit<PER_SECOND_MAX> {
    fn default() -> Self {
        Self::new()
    }
}

/// Sends every event of this process to `output` from here on. A second call changes nothing.
pub fn start(level: LevelFilter, format: LogFormat, output: Outputs) {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(output)
        .event_format(EtcdFormat {
            format,
            colour: format == LogFormat::Console && std::io::stderr().is_terminal(),
        });
    let (filter, handle) = reload::Layer::new(filter(level, false));
    let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter));
    // Only tests start twice in a process.
    if tracing::subscriber::set_global_default(subscriber).is_ok() {
        let _ = FILTER.set(handle);
        set_level(level);
    }
}

#[derive(Debug)]
struct EtcdFormat {
    format: LogFormat,
    colour: bool,
}

impl<S, N> FormatEvent<S, N> for EtcdFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let mut fields = Fields::default();
        event.record(&mut fields);
        let level = match *metadata.level() {
            Level::ERROR => "error",
            Level::WARN => "warn",
            Level::INFO => "info",
            Level::DEBUG | Level::TRACE => "debug",
        };
        let caller = caller(metadata.file(), metadata.line());
        let ts = timestamp();
        match self.format {
            LogFormat::Console => {
                let (on, off) = if self.colour {
                    ("\x1b[1m", "\x1b[0m")
                } else {
                    ("", "")
                };
                write!(
                    writer,
                    "{ts}\t{on}{level}{off}\t{caller}\t{}",
                    fields.message
                )?;
                if !fields.rest.is_empty() {
                    write!(writer, "\t{}", Value::Object(fields.rest))?;
                }
                writeln!(writer)
            }
            LogFormat::Json => {
                write!(
                    writer,
                    r#"{{"level":"{level}","ts":"{ts}","caller":{},"msg":{}"#,
                    Value::from(caller),
                    Value::from(fields.message)
                )?;
                for (name, value) in fields.rest {
                    write!(writer, ",{}:{value}", Value::from(name))?;
                }
                writeln!(writer, "}}")
            }
        }
    }
}

/// Folder, file and line, as etcd's logger shortens them.
fn caller(file: Option<&str>, line: Option<u32>) -> String {
    let file = file.unwrap_or("unknown");
    let mut parts = file.rsplit('/');
    let name = parts.next().unwrap_or(file);
    let folder = parts.next().unwrap_or("server");
    format!("{folder}/{name}:{}", line.unwrap_or(0))
}

/// Microseconds and a numeric zone, as etcd writes them; the zone is UTC.
fn timestamp() -> String {
    let now = jiff::Timestamp::try_from(Clock::default().wall()).unwrap_or_default();
    format!("{}", now.strftime("%Y-%m-%dT%H:%M:%S%.6f+0000"))
}

/// An event's fields; underscores in names become dashes, etcd's way of writing them.
#[derive(Default)]
struct Fields {
    message: String,
    rest: Map<String, Value>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        if field.name() == "message" {
            self.message = match value {
                Value::String(text) => text,
                other => other.to_string(),
            };
        } else {
            self.rest.insert(field.name().replace('_', "-"), value);
        }
    }
}

impl Visit for Fields {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}").into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_passes_in_part_and_is_counted() {
        let limit = Limit::<3>::new();
        let now = Clock::default().now();
        let passed: Vec<_> = (0..10).filter_map(|_| limit.pass(now)).collect();
        assert_eq!(passed, [0, 0, 0]);
        let later = now + Duration::from_secs(1);
        assert_eq!(limit.pass(later), Some(7));
        assert_eq!(limit.pass(later), Some(0));
    }

    #[test]
    fn names_of_levels_are_etcds() {
        for (name, level) in LEVELS {
            assert_eq!(level_of(name), Some(level));
            assert_eq!(level_name(level), name);
        }
        assert_eq!(level_of("fatal"), Some(LevelFilter::ERROR));
        assert_eq!(level_of("loud"), None);
    }
}
