//! From the command line, the environment or a file to one text per flag.
//!
//! Go's rules for flags: `-name value`, `--name=value`, a switch alone or with `=`. With a file, flags and environment are
//! ignored; a variable for a flag that is also given is an error. What is unknown or has not its flag's form ends the process
//! with 2, wherever it stands; etcd does so for flags, ends with 1 for the others and reads over unknown options of a file.
//!
//! etcd: Go's package flag, pkg/flags/flag.go.

use std::collections::HashMap;
use std::time::Duration;

use super::flags::{
    self, ANCIENT, AUTO, DEPRECATED, Effect, FLAGS, Flag, Form, GATES, SECURITY_OPTIONS,
};
use super::urls::Url;

/// Why the process ends before it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Print this on stdout, exit 0.
    Told(String),
    /// A flag, variable or option of a file that is not one, or whose value is none: exit 2.
    BadFlag(String),
    /// Sound flags that do not make a configuration: exit 1.
    BadConfig(String),
}

/// The text of each flag that was given somewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Values {
    given: HashMap<&'static str, String>,
    /// To be logged once logging works.
    pub warnings: Vec<String>,
    pub from_file: Option<String>,
}

/// What the command line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    Help,
    Version,
    Run(Values),
}

impl Values {
    pub fn is_given(&self, name: &str) -> bool {
        self.given.contains_key(name)
    }

    /// The given text, or the default.
    pub fn text(&self, name: &str) -> &str {
        let default = || flags::find(name).map_or("", |flag| flag.default);
        self.given.get(name).map_or_else(default, String::as_str)
    }

    pub fn bool(&self, name: &str) -> bool {
        parse_bool(self.text(name)).unwrap_or_default()
    }

    /// Values were checked when they were taken; what does not parse here is a bug, and the default's own form is tested.
    pub fn u64(&self, name: &str) -> u64 {
        parse_uint(self.text(name)).unwrap_or_default()
    }

    /// None for "auto".
    pub fn bytes(&self, name: &str) -> Option<u64> {
        parse_uint(self.text(name))
    }

    pub fn i64(&self, name: &str) -> i64 {
        parse_int(self.text(name)).unwrap_or_default()
    }

    pub fn duration(&self, name: &str) -> Duration {
        parse_duration(self.text(name)).unwrap_or_default()
    }

    fn set(&mut self, flag: &'static Flag, value: &str) -> Result<(), String> {
        check(flag, value)
            .map_err(|why| format!("invalid value \"{value}\" for flag -{}: {why}", flag.name))?;
        if let Effect::Missing(why) = flag.effect
            && value != flag.default
        {
            return Err(format!("--{} is not supported: {why}", flag.name));
        }
        let deprecated = DEPRECATED.iter().find(|(name, _)| *name == flag.name);
        if self.given.insert(flag.name, value.to_owned()).is_none()
            && let Some((_, warning)) = deprecated
        {
            self.warnings.push((*warning).to_owned());
        }
        Ok(())
    }

    /// Reads the command line, without the program's name.
    pub fn from_args(args: &[String]) -> Result<Asked, Stop> {
        let mut values = Values::default();
        let mut file = None;
        let mut version = false;
        let mut rest = args.iter();
        while let Some(arg) = rest.next() {
            let Some(name) = arg.strip_prefix('-').filter(|name| !name.is_empty()) else {
                return Err(Stop::BadConfig(format!("\"{arg}\" is not a valid flag")));
            };
            let name = name.strip_prefix('-').unwrap_or(name);
            if name.is_empty() {
                // "--" ends the flags, and nothing may follow them.
                match rest.next() {
                    Some(extra) => {
                        return Err(Stop::BadConfig(format!("\"{extra}\" is not a valid flag")));
                    }
                    None => break,
                }
            }
            if name.starts_with(['-', '=']) {
                return Err(Stop::BadFlag(format!("bad flag syntax: {arg}")));
            }
            let (name, inline) = match name.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (name, None),
            };
            if matches!(name, "h" | "help") {
                return Ok(Asked::Help);
            }
            if name == "version" {
                version = inline.is_none_or(|value| parse_bool(&value).unwrap_or(true));
                continue;
            }
            let flag = flags::find(name);
            let known = flag.is_some() || name == "config-file" || ANCIENT.contains(&name);
            if !known {
                return Err(Stop::BadFlag(format!(
                    "flag provided but not defined: -{name}"
                )));
            }
            let value = match inline {
                Some(value) => value,
                None if flag.is_some_and(|flag| flag.form == Form::Bool) => "true".to_owned(),
                None => rest
                    .next()
                    .cloned()
                    .ok_or_else(|| Stop::BadFlag(format!("flag needs an argument: -{name}")))?,
            };
            match flag {
                Some(flag) => values.set(flag, &value).map_err(Stop::BadFlag)?,
                None if name == "config-file" => file = Some(value),
                None => values.warnings.push(format!("flag --{name} is ignored")),
            }
        }
        if version {
            return Ok(Asked::Version);
        }
        values.from_file = file;
        Ok(Asked::Run(values))
    }

    /// Adds the environment, or replaces everything by the file that flag or environment names.
    pub fn complete(mut self, env: &[(String, String)]) -> Result<Self, Stop> {
        let file_in_env = env
            .iter()
            .find(|(name, value)| name == "ETCD_CONFIG_FILE" && !value.is_empty());
        if let Some(path) = self
            .from_file
            .clone()
            .or(file_in_env.map(|(_, path)| path.clone()))
        {
            return Values::from_file(&path);
        }
        let by_env: HashMap<String, &'static Flag> = FLAGS
            .iter()
            .map(|flag| (flags::env_name(flag.name), flag))
            .collect();
        for (name, value) in env {
            if !name.starts_with("ETCD_") {
                continue;
            }
            match by_env.get(name) {
                None if name == "ETCD_VERSION" => self.warnings.push(format!(
                    "cannot set special environment variable {name}={value}"
                )),
                None if name == "ETCD_UNSUPPORTED_ARCH" => {}
                None => self
                    .warnings
                    .push(format!("unrecognized environment variable {name}={value}")),
                Some(flag) if self.is_given(flag.name) => {
                    return Err(Stop::BadConfig(format!(
                        "conflicting environment variable is shadowed by corresponding command-line flag (either unset environment variable or disable flag)): {name}"
                    )));
                }
                Some(_) if value.is_empty() => {}
                Some(flag) => self.set(flag, value).map_err(|why| {
                    Stop::BadFlag(format!("invalid value \"{value}\" for {name}: {why}"))
                })?,
            }
        }
        Ok(self)
    }

    fn from_file(path: &str) -> Result<Self, Stop> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Stop::BadConfig(format!("open {path}: {error}")))?;
        let mut values =
            Self::from_file_text(&text).map_err(|why| Stop::BadFlag(format!("{path}: {why}")))?;
        values.from_file = Some(path.to_owned());
        Ok(values)
    }

    /// YAML, and so JSON too. Lists become comma-separated, numbers of a duration are nanoseconds.
    fn from_file_text(text: &str) -> Result<Self, String> {
        let parsed: serde_yaml_ng::Value =
            serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
        let mut values = Values::default();
        let map = match parsed {
            serde_yaml_ng::Value::Null => return Ok(values),
            serde_yaml_ng::Value::Mapping(map) => map,
            _ => return Err("not a mapping of option names to values".to_owned()),
        };
        for (name, value) in map {
            let Some(name) = name.as_str() else {
                return Err(format!("option names are texts, not {name:?}"));
            };
            match name {
                "client-transport-security" | "peer-transport-security" => {
                    values.set_security(name, &value)?;
                    continue;
                }
                "discovery-config" => {
                    check_off(name, &value, "this release has no discovery service")?;
                    continue;
                }
                "socket-options" => {
                    values.set_socket_options(&value)?;
                    continue;
                }
                _ => {}
            }
            let Some(flag) = flags::find(name) else {
                return Err(format!("unknown option \"{name}\""));
            };
            values.set(flag, &scalar(flag, &value)?)?;
        }
        Ok(values)
    }

    fn set_security(&mut self, section: &str, value: &Yaml) -> Result<(), String> {
        for (name, value) in section_options(section, value)? {
            let known = SECURITY_OPTIONS.iter().find(|(known, _, _)| *known == name);
            let (_, client, peer) =
                known.ok_or_else(|| format!("{section}: unknown option \"{name}\""))?;
            let flag = match section {
                "peer-transport-security" => Some(*peer),
                _ => *client,
            };
            match flag.and_then(flags::find) {
                Some(flag) => self.set(flag, &scalar(flag, value)?)?,
                None if is_off(value) => {}
                None => {
                    return Err(format!(
                        "{section}: {name} is not supported: only peers are asked for it"
                    ));
                }
            }
        }
        Ok(())
    }

    fn set_socket_options(&mut self, value: &Yaml) -> Result<(), String> {
        for (name, value) in section_options("socket-options", value)? {
            let flag = match name {
                "reuse-port" | "reuse-address" => flags::find(&format!("socket-{name}")),
                _ => None,
            };
            let flag = flag.ok_or_else(|| format!("socket-options: unknown option \"{name}\""))?;
            self.set(flag, &scalar(flag, value)?)?;
        }
        Ok(())
    }
}

type Yaml = serde_yaml_ng::Value;

/// A section of options for something that is not here: all must be off.
fn check_off(section: &str, value: &Yaml, why: &str) -> Result<(), String> {
    for (name, value) in section_options(section, value)? {
        if !is_off(value) {
            return Err(format!("{section}: {name} is not supported: {why}"));
        }
    }
    Ok(())
}

fn is_off(value: &Yaml) -> bool {
    match value {
        Yaml::Null | Yaml::Bool(false) => true,
        Yaml::String(text) => text.is_empty(),
        Yaml::Sequence(list) => list.is_empty(),
        _ => false,
    }
}

fn section_options<'a>(section: &str, value: &'a Yaml) -> Result<Vec<(&'a str, &'a Yaml)>, String> {
    let map = match value {
        Yaml::Null => return Ok(Vec::new()),
        Yaml::Mapping(map) => map,
        _ => return Err(format!("invalid {section}: not a mapping of options")),
    };
    map.iter()
        .map(|(name, value)| match name.as_str() {
            Some(name) => Ok((name, value)),
            None => Err(format!("{section}: option names are texts, not {name:?}")),
        })
        .collect()
}

fn scalar(flag: &Flag, value: &Yaml) -> Result<String, String> {
    match value {
        Yaml::Null => Ok(flag.default.to_owned()),
        Yaml::Bool(value) => Ok(value.to_string()),
        Yaml::Number(number) if flag.form == Form::Duration => Ok(format!("{number}ns")),
        Yaml::Number(number) => Ok(number.to_string()),
        Yaml::String(text) => Ok(text.clone()),
        Yaml::Sequence(list) => {
            let parts: Result<Vec<String>, String> =
                list.iter().map(|item| scalar(flag, item)).collect();
            Ok(parts?.join(","))
        }
        _ => Err(format!("{}: not a value of this option", flag.name)),
    }
}

/// True when `value` has the flag's form; else why not.
pub fn check(flag: &Flag, value: &str) -> Result<(), String> {
    let parse_error = || "parse error".to_owned();
    match flag.form {
        Form::Text => Ok(()),
        Form::Bool => parse_bool(value).map(|_| ()).ok_or_else(parse_error),
        Form::AutoUint if value == AUTO => Ok(()),
        Form::Uint | Form::AutoUint => parse_uint(value).map(|_| ()).ok_or_else(parse_error),
        Form::Uint32 => parse_uint(value)
            .filter(|value| u32::try_from(*value).is_ok())
            .map(|_| ())
            .ok_or_else(parse_error),
        Form::Int => parse_int(value).map(|_| ()).ok_or_else(parse_error),
        Form::Duration => parse_duration(value).map(|_| ()).ok_or_else(parse_error),
        Form::Urls => Url::parse_list(value).map(|_| ()),
        Form::Choice(choices) => {
            if choices.contains(&value) {
                Ok(())
            } else {
                Err(format!("must be one of {}", choices.join(", ")))
            }
        }
        Form::Gates => parse_gates(value).map(|_| ()),
        Form::AutoDefrag => super::auto_defrag::parse(value).map(|_| ()),
    }
}

/// The gates that are on, defaults included.
pub fn parse_gates(text: &str) -> Result<Vec<&'static str>, String> {
    let mut states: Vec<(&'static str, bool)> = GATES.to_vec();
    for part in text
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let (name, value) = part
            .split_once('=')
            .ok_or_else(|| format!("missing bool value for {part}"))?;
        let on =
            parse_bool(value.trim()).ok_or_else(|| format!("invalid value of {name}: {value}"))?;
        let state = states
            .iter_mut()
            .find(|(known, _)| *known == name.trim())
            .ok_or_else(|| format!("unrecognized feature gate: {name}"))?;
        state.1 = on;
    }
    Ok(states
        .into_iter()
        .filter(|(_, on)| *on)
        .map(|(name, _)| name)
        .collect())
}

fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Go's notation: `10`, `0x10`, `0o10` or `010`, `0b10`, and `1_000` where a base is given.
fn parse_uint(text: &str) -> Option<u64> {
    let lower = text.to_ascii_lowercase();
    let (digits, radix) = match lower.strip_prefix('0') {
        None | Some("") => return lower.parse().ok().filter(|_| !text.starts_with('+')),
        Some(rest) => match rest.split_at_checked(1)? {
            ("x", digits) => (digits, 16),
            ("o", digits) => (digits, 8),
            ("b", digits) => (digits, 2),
            _ => (rest, 8),
        },
    };
    let digits = digits.strip_prefix('_').unwrap_or(digits);
    if digits.starts_with(['+', '_']) || digits.ends_with('_') || digits.contains("__") {
        return None;
    }
    u64::from_str_radix(&digits.replace('_', ""), radix).ok()
}

fn parse_int(text: &str) -> Option<i64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let number = i128::from(parse_uint(digits)?);
    i64::try_from(if negative { -number } else { number }).ok()
}

/// Go's notation: `1h30m`, `100ms`, `0`.
pub fn parse_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut seconds = 0.0f64;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit_len = rest
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(rest.len());
        let unit = match &rest[..unit_len] {
            "ns" => 1e-9,
            "us" | "\u{b5}s" | "\u{3bc}s" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        rest = &rest[unit_len..];
        seconds += number * unit;
    }
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Result<Asked, Stop> {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Values::from_args(&args)
    }

    fn run(line: &str) -> Values {
        match args(line) {
            Ok(Asked::Run(values)) => values,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn env(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(a, b)| ((*a).to_owned(), (*b).to_owned()))
            .collect()
    }

    #[test]
    fn flags_are_read_as_go_reads_them() {
        let values =
            run("-name a --data-dir=/d --pre-vote=false --socket-reuse-port --max-txn-ops 5");
        assert_eq!(values.text("name"), "a");
        assert_eq!(values.text("data-dir"), "/d");
        assert!(!values.bool("pre-vote"));
        assert!(values.bool("socket-reuse-port"));
        assert_eq!(values.u64("max-txn-ops"), 5);
        assert_eq!(values.u64("max-request-bytes"), 1_572_864);
    }

    #[test]
    fn bad_flags_are_named() {
        for (line, expected) in [
            (
                "--nmae x",
                Stop::BadFlag("flag provided but not defined: -nmae".to_owned()),
            ),
            (
                "--name",
                Stop::BadFlag("flag needs an argument: -name".to_owned()),
            ),
            (
                "--max-txn-ops=x",
                Stop::BadFlag("invalid value \"x\" for flag -max-txn-ops: parse error".to_owned()),
            ),
            (
                "---name x",
                Stop::BadFlag("bad flag syntax: ---name".to_owned()),
            ),
            (
                "serve",
                Stop::BadConfig("\"serve\" is not a valid flag".to_owned()),
            ),
            (
                "--peer-crl-file=/c",
                Stop::BadFlag(
                    "--peer-crl-file is not supported: this release reads no lists of revoked certificates"
                        .to_owned(),
                ),
            ),
        ] {
            assert_eq!(args(line), Err(expected), "{line}");
        }
        assert_eq!(args("--version"), Ok(Asked::Version));
        assert_eq!(args("-h"), Ok(Asked::Help));
        assert!(run("--auto-tls=false --snapshot 1").warnings.len() == 1);
    }

    /// A value that is not the default, and one of the wrong form.
    fn samples(flag: &Flag) -> (String, Option<&'static str>) {
        let other = |choices: &[&str]| {
            let other = choices.iter().find(|choice| **choice != flag.default);
            (*other.unwrap_or(&flag.default)).to_owned()
        };
        match flag.form {
            Form::Text => ("some".to_owned(), None),
            Form::Bool => ((flag.default != "true").to_string(), Some("perhaps")),
            Form::Uint | Form::AutoUint => ("7".to_owned(), Some("-7")),
            Form::Uint32 => ("7".to_owned(), Some("4294967296")),
            Form::Int => ("7".to_owned(), Some("7.5")),
            Form::Duration => ("7s".to_owned(), Some("7")),
            Form::Urls => ("http://127.0.0.1:7".to_owned(), Some("127.0.0.1:7")),
            Form::Choice(choices) => (other(choices), Some("neither")),
            Form::Gates => ("LeaseCheckpoint=true".to_owned(), Some("Nope=true")),
            Form::AutoDefrag => ("size=1GiB,free=50%".to_owned(), Some("size=lots")),
        }
    }

    #[test]
    fn every_flag_is_read_alike_from_line_environment_and_file() {
        for flag in FLAGS {
            assert_eq!(run("").text(flag.name), flag.default);
            let (sample, bad) = samples(flag);
            let read = |value: &str| -> [Result<Values, String>; 3] {
                let line = args(&format!("--{}={value}", flag.name));
                let variable = env(&[(&flags::env_name(flag.name), value)]);
                let file = format!("{}: '{value}'", flag.name);
                [
                    line.map(|asked| match asked {
                        Asked::Run(values) => values,
                        other => panic!("{other:?}"),
                    })
                    .map_err(|stop| format!("{stop:?}")),
                    run("")
                        .complete(&variable)
                        .map_err(|stop| format!("{stop:?}")),
                    Values::from_file_text(&file),
                ]
            };
            let refused = matches!(flag.effect, Effect::Missing(_)) && sample != flag.default;
            for (form, got) in ["line", "environment", "file"].iter().zip(read(&sample)) {
                match got {
                    Ok(values) => {
                        assert!(!refused, "{form}: {} is not refused", flag.name);
                        assert_eq!(values.text(flag.name), sample, "{form}: {}", flag.name);
                        assert!(values.is_given(flag.name));
                    }
                    Err(why) => {
                        assert!(refused, "{form}: {why}");
                        assert!(
                            why.contains(flag.name) && why.contains("not supported"),
                            "{why}"
                        );
                    }
                }
            }
            for got in bad.map(read).into_iter().flatten() {
                let why = got.unwrap_err();
                assert!(
                    why.contains(flag.name) && why.contains(bad.unwrap_or_default()),
                    "{}: {why}",
                    flag.name
                );
            }
        }
    }

    #[test]
    fn environment_fills_in_and_never_shadows() {
        let values = run("--name a")
            .complete(&env(&[
                ("ETCD_DATA_DIR", "/x"),
                ("ETCD_TYPO", "1"),
                ("HOME", "/root"),
            ]))
            .unwrap();
        assert_eq!(values.text("data-dir"), "/x");
        assert_eq!(
            values.warnings,
            ["unrecognized environment variable ETCD_TYPO=1"]
        );
        assert!(matches!(
            run("--name a").complete(&env(&[("ETCD_NAME", "b")])),
            Err(Stop::BadConfig(_))
        ));
        assert!(matches!(
            run("").complete(&env(&[("ETCD_MAX_TXN_OPS", "b")])),
            Err(Stop::BadFlag(_))
        ));
    }

    #[test]
    fn a_file_holds_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        std::fs::write(
            &path,
            "data-dir: /x\nmax-txn-ops: 7\nlog-outputs: [stderr]\nbackend-batch-interval: 5000000\nclient-transport-security:\n  cert-file: ''\n",
        )
        .unwrap();
        let values = run("--data-dir /y")
            .complete(&env(&[
                ("ETCD_CONFIG_FILE", path.to_str().unwrap()),
                ("ETCD_DATA_DIR", "/z"),
            ]))
            .unwrap();
        assert_eq!(values.text("data-dir"), "/x");
        assert_eq!(values.u64("max-txn-ops"), 7);
        assert_eq!(values.text("log-outputs"), "stderr");
        assert_eq!(
            values.duration("backend-batch-interval"),
            Duration::from_millis(5)
        );
        for (text, why) in [
            ("nmae: x", "unknown option \"nmae\""),
            (
                "client-crl-file: /x",
                "--client-crl-file is not supported: this release reads no lists of revoked certificates",
            ),
            ("- a", "not a mapping of option names to values"),
            (
                "client-transport-security:\n  allowed-cn: [a]",
                "client-transport-security: allowed-cn is not supported: only peers are asked for it",
            ),
            (
                "client-transport-security:\n  nmae: ''",
                "client-transport-security: unknown option \"nmae\"",
            ),
            (
                "client-transport-security: 5",
                "invalid client-transport-security: not a mapping of options",
            ),
            (
                "discovery-config:\n  token: x",
                "discovery-config: token is not supported: this release has no discovery service",
            ),
            (
                "socket-options:\n  reuse-prot: true",
                "socket-options: unknown option \"reuse-prot\"",
            ),
            (
                "max-txn-ops: many",
                "invalid value \"many\" for flag -max-txn-ops: parse error",
            ),
        ] {
            assert_eq!(Values::from_file_text(text).unwrap_err(), why, "{text}");
        }
    }

    #[test]
    fn sections_of_a_file_are_flags_too() {
        let values =
            Values::from_file_text("socket-options:\n  reuse-port: true\ndiscovery-config:\n")
                .unwrap();
        assert!(values.bool("socket-reuse-port"));
        assert!(!values.bool("socket-reuse-address"));
        let values = Values::from_file_text(
            "client-transport-security:\n  cert-file: /c\npeer-transport-security:\n  cert-file: /p\n  client-cert-auth: true\n  allowed-cn: [a, b]",
        )
        .unwrap();
        assert_eq!(values.text("cert-file"), "/c");
        assert_eq!(values.text("peer-cert-file"), "/p");
        assert!(values.bool("peer-client-cert-auth") && !values.bool("client-cert-auth"));
        assert_eq!(values.text("peer-cert-allowed-cn"), "a,b");
    }

    #[test]
    fn numbers_are_gos() {
        for (text, expected) in [
            ("0", Some(0)),
            ("17", Some(17)),
            ("0x1F", Some(31)),
            ("010", Some(8)),
            ("0o10", Some(8)),
            ("0b101", Some(5)),
            ("0x1_0", Some(16)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("", None),
            ("+1", None),
            ("-1", None),
            ("08", None),
            ("0x", None),
            ("0x_", None),
        ] {
            assert_eq!(parse_uint(text), expected, "{text}");
        }
        for (text, expected) in [
            ("-5", Some(-5)),
            ("+5", Some(5)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("--5", None),
        ] {
            assert_eq!(parse_int(text), expected, "{text}");
        }
    }

    #[test]
    fn durations_are_gos() {
        for (text, expected) in [
            ("0", Some(Duration::ZERO)),
            ("0s", Some(Duration::ZERO)),
            ("100ms", Some(Duration::from_millis(100))),
            ("1h30m", Some(Duration::from_mins(90))),
            ("1.5s", Some(Duration::from_millis(1500))),
            ("5", None),
            ("", None),
            ("5x", None),
        ] {
            assert_eq!(parse_duration(text), expected, "{text}");
        }
    }

    #[test]
    fn gates_are_known_ones() {
        assert_eq!(
            parse_gates("").unwrap(),
            [
                "TxnModeWriteWithSharedBuffer",
                "LeaseCheckpoint",
                "FastLeaseKeepAlive"
            ]
        );
        assert_eq!(
            parse_gates("FastLeaseKeepAlive=false,LeaseCheckpoint=false").unwrap(),
            ["TxnModeWriteWithSharedBuffer"]
        );
        assert!(parse_gates("Nope=true").is_err());
    }
}
