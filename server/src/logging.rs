//! Logs in etcd's form: one JSON object a line, with level, ts, caller, msg and the fields.
//!
//! Not here: where the lines go (`logging/output.rs`).
//!
//! etcd: client/pkg/logutil.

pub mod output;

use std::fmt;
use std::io::IsTerminal;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;

use crate::clock::Clock;
pub use output::{Outputs, Rotation, Target};

/// `--log-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    #[default]
    Json,
    Console,
}

/// Sends every event of this process to `output` from here on. A second call changes nothing.
pub fn start(level: LevelFilter, format: LogFormat, output: Outputs) {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(output)
        .event_format(EtcdFormat {
            format,
            colour: format == LogFormat::Console && std::io::stderr().is_terminal(),
        });
    // The consensus library tells at `info` what interests only those who debug it.
    let library = level.min(LevelFilter::WARN);
    let filter = Targets::new().with_default(level).with_target(
        "openraft",
        if level >= LevelFilter::DEBUG {
            level
        } else {
            library
        },
    );
    let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter));
    // Only tests start twice in a process.
    let _ = tracing::subscriber::set_global_default(subscriber);
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
