//! Where log lines go: `--log-outputs`, and files that are set aside when they are full (`--enable-log-rotation`).
//!
//!     server.log                             written to
//!     server-2026-11-30T05-40-00.000.log     set aside at that time
//!
//! Promises: a line is in one file, whole. A file that cannot be written loses its lines; the server goes on.
//!
//! etcd: setupLogging in server/embed/config_logging.go, and the library lumberjack it rotates with.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tracing_subscriber::fmt::MakeWriter;

use crate::clock::Clock;

const MEGABYTE: u64 = 1024 * 1024;
/// Days and milliseconds as in `server-2026-11-30T05-40-00.000.log`.
const BACKUP_TIME: &str = "%Y-%m-%dT%H-%M-%S%.3f";

/// One place of `--log-outputs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Stderr,
    Stdout,
    File(PathBuf),
}

/// `--log-rotation-config-json`, when rotation is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default)]
pub struct Rotation {
    /// Megabytes; 0 is 100.
    #[serde(rename = "maxsize")]
    max_megabytes: u64,
    /// Days; 0 keeps files of any age.
    #[serde(rename = "maxage")]
    max_days: u64,
    /// 0 keeps any number.
    #[serde(rename = "maxbackups")]
    max_backups: usize,
    /// Names in this machine's time instead of UTC.
    localtime: bool,
    compress: bool,
}

impl Default for Rotation {
    fn default() -> Self {
        Self {
            max_megabytes: 100,
            max_days: 0,
            max_backups: 0,
            localtime: false,
            compress: false,
        }
    }
}

impl Rotation {
    pub fn parse(json: &str) -> Result<Self, String> {
        let rotation: Self = serde_json::from_str(json).map_err(|error| {
            let what = match error.classify() {
                serde_json::error::Category::Data => "invalid log rotation config",
                _ => "improperly formatted log rotation config",
            };
            format!("{what}: {error}")
        })?;
        if rotation.compress {
            return Err(
                "invalid log rotation config: files set aside are not compressed here".to_owned(),
            );
        }
        Ok(rotation)
    }

    fn max_bytes(&self) -> u64 {
        match self.max_megabytes {
            0 => 100 * MEGABYTE,
            some => some * MEGABYTE,
        }
    }
}

/// All outputs, open. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Outputs(Arc<Vec<Sink>>);

#[derive(Debug)]
enum Sink {
    Stderr,
    Stdout,
    File(Mutex<LogFile>),
}

#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    rotation: Option<Rotation>,
}

impl Outputs {
    pub fn stderr() -> Self {
        Self(Arc::new(vec![Sink::Stderr]))
    }

    /// Opens every file, to append to it.
    pub fn open(targets: &[Target], rotation: Option<Rotation>) -> io::Result<Self> {
        let open = |target: &Target| {
            Ok(match target {
                Target::Stderr => Sink::Stderr,
                Target::Stdout => Sink::Stdout,
                Target::File(path) => Sink::File(Mutex::new(LogFile::open(path, rotation)?)),
            })
        };
        let sinks: io::Result<Vec<Sink>> = targets.iter().map(open).collect();
        Ok(Self(Arc::new(sinks?)))
    }
}

impl<'a> MakeWriter<'a> for Outputs {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

impl Write for &Outputs {
    /// Takes the whole line, whatever becomes of it: there is nowhere to complain to.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        for sink in self.0.iter() {
            let _ = match sink {
                Sink::Stderr => io::stderr().write_all(line),
                Sink::Stdout => io::stdout().write_all(line),
                Sink::File(file) => file.lock().write(line),
            };
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl LogFile {
    fn open(path: &Path, rotation: Option<Rotation>) -> io::Result<Self> {
        if rotation.is_some()
            && let Some(dir) = path.parent()
        {
            fs::create_dir_all(dir)?;
        }
        let file = append(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self {
            path: path.to_owned(),
            file,
            bytes,
            rotation,
        })
    }

    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        if let Some(rotation) = self.rotation
            && self.bytes > 0
            && self.bytes + line.len() as u64 > rotation.max_bytes()
        {
            self.rotate(rotation)?;
        }
        self.bytes += line.len() as u64;
        self.file.write_all(line)
    }

    fn rotate(&mut self, rotation: Rotation) -> io::Result<()> {
        let now = Clock::default().wall();
        fs::rename(&self.path, backup_name(&self.path, now, rotation.localtime))?;
        self.file = append(&self.path)?;
        self.bytes = 0;
        self.forget_old(now, rotation)
    }

    fn forget_old(&self, now: SystemTime, rotation: Rotation) -> io::Result<()> {
        let mut backups = backups(&self.path)?;
        // Their names sort as their times do; the newest first.
        backups.sort_unstable_by(|a, b| b.cmp(a));
        let kept = match rotation.max_backups {
            0 => backups.len(),
            some => some.min(backups.len()),
        };
        for path in &backups[kept..] {
            fs::remove_file(path)?;
        }
        if rotation.max_days > 0 {
            let age_max = Duration::from_secs(rotation.max_days * 24 * 3600);
            for path in &backups[..kept] {
                let modified = fs::metadata(path)?.modified()?;
                if now.duration_since(modified).is_ok_and(|age| age > age_max) {
                    fs::remove_file(path)?;
                }
            }
        }
        Ok(())
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// Name and extension between which the time stands.
fn stem_and_extension(path: &Path) -> (String, String) {
    let part = |part: Option<&std::ffi::OsStr>| {
        part.map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default()
    };
    let extension = match path.extension() {
        Some(extension) => format!(".{}", extension.to_string_lossy()),
        None => String::new(),
    };
    (part(path.file_stem()), extension)
}

fn backup_name(path: &Path, now: SystemTime, localtime: bool) -> PathBuf {
    let now = jiff::Timestamp::try_from(now).unwrap_or_default();
    let zone = if localtime {
        jiff::tz::TimeZone::system()
    } else {
        jiff::tz::TimeZone::UTC
    };
    let (stem, extension) = stem_and_extension(path);
    let time = now
        .to_zoned_datetime(zone)
        .strftime(BACKUP_TIME)
        .to_string();
    path.with_file_name(format!("{stem}-{time}{extension}"))
}

/// The files set aside beside `path`.
fn backups(path: &Path) -> io::Result<Vec<PathBuf>> {
    let (stem, extension) = stem_and_extension(path);
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_one = name
            .strip_prefix(&format!("{stem}-"))
            .and_then(|rest| rest.strip_suffix(&extension))
            .is_some_and(is_backup_time);
        if is_one {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// True for a text of [`BACKUP_TIME`]'s form: nobody else's files are removed.
fn is_backup_time(text: &str) -> bool {
    const FORM: &[u8] = b"0000-00-00T00-00-00.000";
    text.len() == FORM.len()
        && text.bytes().zip(FORM).all(|(byte, form)| match form {
            b'0' => byte.is_ascii_digit(),
            other => byte == *other,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_output_gets_every_line() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a.log"), dir.path().join("b"));
        fs::write(&a, "before\n").unwrap();
        let targets = [Target::File(a.clone()), Target::File(b.clone())];
        let outputs = Outputs::open(&targets, None).unwrap();
        (&outputs).write_all(b"line\n").unwrap();
        assert_eq!(fs::read_to_string(a).unwrap(), "before\nline\n");
        assert_eq!(fs::read_to_string(b).unwrap(), "line\n");
    }

    #[test]
    fn a_full_file_is_set_aside_and_the_oldest_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/server.log");
        let rotation = Rotation {
            max_megabytes: 1,
            max_backups: 2,
            ..Rotation::default()
        };
        let outputs = Outputs::open(&[Target::File(path.clone())], Some(rotation)).unwrap();
        // Files of others are none of ours.
        let other = dir.path().join("deep/server-notes.log");
        fs::write(&other, "mine").unwrap();
        let line = vec![b'x'; 300 * 1024];
        for _ in 0..13 {
            (&outputs).write_all(&line).unwrap();
            // Names have milliseconds: two in one would be one file.
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(backups(&path).unwrap().len(), 2);
        assert_eq!(fs::metadata(&path).unwrap().len(), 300 * 1024);
        for backup in backups(&path).unwrap() {
            assert_eq!(fs::metadata(backup).unwrap().len(), 900 * 1024);
        }
        assert!(other.exists());
    }

    #[test]
    fn the_rotation_is_read_as_etcd_reads_it() {
        let default = r#"{"maxsize": 100, "maxage": 0, "maxbackups": 0, "localtime": false, "compress": false}"#;
        assert_eq!(Rotation::parse(default), Ok(Rotation::default()));
        assert_eq!(Rotation::parse("{}"), Ok(Rotation::default()));
        for (json, why) in [
            ("{", "improperly formatted log rotation config: "),
            (r#"{"maxsize": "1"}"#, "invalid log rotation config: "),
            (r#"{"compress": true}"#, "invalid log rotation config: "),
        ] {
            let error = Rotation::parse(json).unwrap_err();
            assert!(error.starts_with(why), "{json}: {error}");
        }
    }
}
