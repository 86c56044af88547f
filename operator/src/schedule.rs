//! Backup schedules: five cron fields, the `@` names, `@every`.
//!
//! Kubernetes' CronJob is what people know, so its rules hold: Sunday is 0 and 7, names are allowed,
//! and when day of month and day of week are both restricted either may match. A schedule is read in
//! a time zone: a local time that a change of clocks skips runs at the moment the clocks jump to, and
//! one that occurs twice runs once.

use jiff::civil::{Date, DateTime, Time, Weekday};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

/// Longest look ahead: 29 February of a weekday recurs within it.
const YEARS_AHEAD_MAX: i16 = 40;

/// A little more than a day: most schedules have a moment within it.
const RECENT_SECS: i64 = 25 * 3600;

/// A schedule that cannot be followed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ScheduleError {
    #[error("schedule {0:?} must have five fields: minute, hour, day of month, month, day of week")]
    Fields(String),
    #[error("schedule field {field:?} must be within {min}-{max}")]
    Field { field: String, min: u8, max: u8 },
    #[error(
        "schedule {0:?} must be one of @yearly @monthly @weekly @daily @hourly @every DURATION"
    )]
    Name(String),
    #[error("interval {0:?} must be a duration of at least 10s, such as 90s, 30m or 6h")]
    Interval(String),
    #[error("time zone {0:?} is not known")]
    TimeZone(String),
    #[error("schedule {0:?} never comes")]
    Never(String),
}

/// When backups are due.
#[derive(Clone, Debug, PartialEq)]
pub enum Schedule {
    /// Every so many seconds, counted from an anchor.
    Every(i64),
    /// By the calendar.
    Cron(Box<Cron>),
}

/// The five fields as bit sets, and the zone they are read in.
#[derive(Clone, Debug, PartialEq)]
pub struct Cron {
    minutes: u64,
    hours: u64,
    days: u64,
    months: u64,
    weekdays: u64,
    /// Both day fields are restricted, so that either may match.
    either_day: bool,
    zone: TimeZone,
}

impl Schedule {
    /// Reads a schedule in the named time zone, UTC when there is none.
    pub fn parse(text: &str, zone: Option<&str>) -> Result<Self, ScheduleError> {
        let zone = match zone {
            None => TimeZone::UTC,
            Some(name) => {
                TimeZone::get(name).map_err(|_| ScheduleError::TimeZone(name.to_owned()))?
            }
        };
        let text = text.trim();
        if let Some(interval) = text.strip_prefix("@every ") {
            return parse_interval(interval.trim()).map(Self::Every);
        }
        let fields = match text {
            "@yearly" | "@annually" => "0 0 1 1 *",
            "@monthly" => "0 0 1 * *",
            "@weekly" => "0 0 * * 0",
            "@daily" | "@midnight" => "0 0 * * *",
            "@hourly" => "0 * * * *",
            name if name.starts_with('@') => return Err(ScheduleError::Name(name.to_owned())),
            other => other,
        };
        let cron = Cron::parse(fields, zone)?;
        let schedule = Self::Cron(Box::new(cron));
        // A 30 February is refused when the spec is read, not discovered by silence.
        match schedule.next_after(0, 0) {
            Some(_) => Ok(schedule),
            None => Err(ScheduleError::Never(text.to_owned())),
        }
    }

    /// The first moment after `after`. `anchor` is where intervals are counted from.
    ///
    /// Moments are seconds since the epoch, here and below.
    pub fn next_after(&self, after: i64, anchor: i64) -> Option<i64> {
        match self {
            Self::Every(step) => {
                let since = (after - anchor).max(0);
                Some(anchor + (since / step + 1) * step)
            }
            Self::Cron(cron) => {
                let after = Timestamp::from_second(after).ok()?;
                cron.next_after(after).map(Timestamp::as_second)
            }
        }
    }

    /// The last moment in `(after, until]`: what is due when several were missed.
    pub fn last_due(&self, after: i64, until: i64, anchor: i64) -> Option<i64> {
        if let Self::Every(step) = self {
            let steps = (until - anchor).div_euclid(*step);
            let moment = anchor + steps * step;
            return (steps > 0 && moment > after).then_some(moment);
        }
        // Looking from a little before `until` finds it at once; only rare schedules need the walk.
        let recent = (until - RECENT_SECS).max(after);
        let last_from = |from: i64| {
            let later = |at: &i64| self.next_after(*at, anchor).filter(|next| *next <= until);
            std::iter::successors(later(&from), later).last()
        };
        last_from(recent).or_else(|| {
            if recent > after {
                last_from(after)
            } else {
                None
            }
        })
    }
}

impl Cron {
    fn parse(text: &str, zone: TimeZone) -> Result<Self, ScheduleError> {
        let fields: Vec<&str> = text.split_whitespace().collect();
        let [minutes, hours, days, months, weekdays] = fields[..] else {
            return Err(ScheduleError::Fields(text.to_owned()));
        };
        let mut weekday_bits = parse_field(weekdays, 0, 7, &WEEKDAYS, 0)?;
        if weekday_bits & (1 << 7) != 0 {
            weekday_bits |= 1;
        }
        Ok(Self {
            minutes: parse_field(minutes, 0, 59, &[], 0)?,
            hours: parse_field(hours, 0, 23, &[], 0)?,
            days: parse_field(days, 1, 31, &[], 0)?,
            months: parse_field(months, 1, 12, &MONTHS, 1)?,
            weekdays: weekday_bits,
            either_day: !days.starts_with('*') && !weekdays.starts_with('*'),
            zone,
        })
    }

    fn next_after(&self, after: Timestamp) -> Option<Timestamp> {
        let local = self.zone.to_datetime(after);
        let start_year = local.year();
        let mut date = local.date();
        // A clock set back repeats local times, so candidates begin a little before `after` and
        // those that are not later are passed over.
        let floor = local
            .checked_sub(SignedDuration::from_hours(3))
            .unwrap_or(local);
        while date.year() - start_year <= YEARS_AHEAD_MAX {
            if self.matches_day(date) {
                for minute_of_day in 0..1440_u32 {
                    let (hour, minute) = (minute_of_day / 60, minute_of_day % 60);
                    if self.hours & (1 << hour) == 0 || self.minutes & (1 << minute) == 0 {
                        continue;
                    }
                    let time = Time::new(hour as i8, minute as i8, 0, 0).ok()?;
                    let candidate = DateTime::from_parts(date, time);
                    if candidate >= floor
                        && let Some(at) = self.instant(candidate)
                        && at > after
                    {
                        return Some(at);
                    }
                }
            }
            date = self.next_candidate(date)?;
        }
        None
    }

    /// The day after `date`, or the first of the next month that can match.
    fn next_candidate(&self, date: Date) -> Option<Date> {
        let next = date.tomorrow().ok()?;
        if self.months & (1 << next.month()) != 0 {
            return Some(next);
        }
        let mut first = next.first_of_month();
        while self.months & (1 << first.month()) == 0 {
            first = first.last_of_month().tomorrow().ok()?;
        }
        Some(first)
    }

    fn matches_day(&self, date: Date) -> bool {
        let in_month = self.months & (1 << date.month()) != 0;
        let day = self.days & (1 << date.day()) != 0;
        let weekday = self.weekdays & (1 << weekday_number(date.weekday())) != 0;
        in_month
            && if self.either_day {
                day || weekday
            } else {
                day && weekday
            }
    }

    fn instant(&self, local: DateTime) -> Option<Timestamp> {
        // Jiff's "compatible" reading: a skipped time moves forward, a repeated one is the first.
        self.zone.to_ambiguous_timestamp(local).compatible().ok()
    }
}

fn weekday_number(day: Weekday) -> i8 {
    day.to_sunday_zero_offset()
}

const WEEKDAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];
const MONTHS: [&str; 12] = [
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
];

/// One field: a list of `*`, `a`, `a-b`, each with an optional `/step`.
fn parse_field(
    field: &str,
    min: u8,
    max: u8,
    names: &[&str],
    first: u8,
) -> Result<u64, ScheduleError> {
    let fail = || ScheduleError::Field {
        field: field.to_owned(),
        min,
        max,
    };
    let value = |text: &str| -> Result<u8, ScheduleError> {
        let lower = text.to_ascii_lowercase();
        if let Some(at) = names.iter().position(|name| *name == lower) {
            return Ok(first + u8::try_from(at).expect("names are few"));
        }
        text.parse()
            .ok()
            .filter(|n| (min..=max).contains(n))
            .ok_or_else(fail)
    };
    let mut bits = 0_u64;
    for part in field.split(',') {
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => (
                range,
                step.parse().ok().filter(|s| *s > 0).ok_or_else(fail)?,
            ),
            None => (part, 1_u8),
        };
        let (low, high) = match range.split_once('-') {
            _ if range == "*" => (min, max),
            Some((low, high)) => (value(low)?, value(high)?),
            None if part.contains('/') => (value(range)?, max),
            None => (value(range)?, value(range)?),
        };
        if low > high {
            return Err(fail());
        }
        for n in (low..=high).step_by(usize::from(step)) {
            bits |= 1 << n;
        }
    }
    Ok(bits)
}

/// `90s`, `30m`, `6h`, or several of them in a row.
fn parse_interval(text: &str) -> Result<i64, ScheduleError> {
    let fail = || ScheduleError::Interval(text.to_owned());
    let mut seconds = 0_i64;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(fail)?;
        let number: i64 = rest[..digits].parse().map_err(|_| fail())?;
        let unit = match rest[digits..].chars().next() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3600,
            _ => return Err(fail()),
        };
        seconds = number
            .checked_mul(unit)
            .and_then(|n| n.checked_add(seconds))
            .ok_or_else(fail)?;
        rest = &rest[digits + 1..];
    }
    // Below ten seconds a backup would begin before the one before it could end.
    if !(10..=31_536_000).contains(&seconds) {
        return Err(fail());
    }
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ts(text: &str) -> i64 {
        text.parse::<Timestamp>().unwrap().as_second()
    }

    fn next(schedule: &str, zone: Option<&str>, after: &str) -> String {
        let schedule = Schedule::parse(schedule, zone).unwrap();
        let next = schedule.next_after(ts(after), 0).unwrap();
        Timestamp::from_second(next).unwrap().to_string()
    }

    #[test]
    fn cron_fields_mean_what_a_cronjob_means() {
        for (schedule, after, want) in [
            ("* * * * *", "2026-03-01T10:00:00Z", "2026-03-01T10:01:00Z"),
            (
                "*/15 * * * *",
                "2026-03-01T10:46:00Z",
                "2026-03-01T11:00:00Z",
            ),
            (
                "5/20 * * * *",
                "2026-03-01T10:26:00Z",
                "2026-03-01T10:45:00Z",
            ),
            ("0 3 * * 1", "2026-03-01T10:00:00Z", "2026-03-02T03:00:00Z"),
            ("0 3 * * 7", "2026-03-02T10:00:00Z", "2026-03-08T03:00:00Z"),
            (
                "0 3 * * sun",
                "2026-03-02T10:00:00Z",
                "2026-03-08T03:00:00Z",
            ),
            (
                "0 0 13 * fri",
                "2026-03-01T00:00:00Z",
                "2026-03-06T00:00:00Z",
            ),
            (
                "30 4 1,15 * *",
                "2026-03-02T00:00:00Z",
                "2026-03-15T04:30:00Z",
            ),
            ("0 0 29 2 *", "2026-03-01T00:00:00Z", "2028-02-29T00:00:00Z"),
            (
                "0 22 * jan-mar 1-5",
                "2026-03-31T22:00:00Z",
                "2027-01-01T22:00:00Z",
            ),
            ("@daily", "2026-12-31T00:00:00Z", "2027-01-01T00:00:00Z"),
            ("@weekly", "2026-03-02T00:00:00Z", "2026-03-08T00:00:00Z"),
        ] {
            assert_eq!(
                next(schedule, None, after),
                want,
                "{schedule} after {after}"
            );
        }
    }

    #[test]
    fn a_time_the_clock_skips_runs_once_after_the_jump_and_a_repeated_one_runs_once() {
        let zone = Some("Europe/Berlin");
        assert_eq!(
            next("30 2 * * *", zone, "2026-03-28T12:00:00Z"),
            "2026-03-29T01:30:00Z"
        );
        assert_eq!(
            next("30 2 * * *", zone, "2026-10-24T12:00:00Z"),
            "2026-10-25T00:30:00Z"
        );
        assert_eq!(
            next("30 2 * * *", zone, "2026-10-25T00:30:00Z"),
            "2026-10-26T01:30:00Z"
        );
    }

    #[test]
    fn what_cannot_be_followed_is_refused_with_a_sentence() {
        for (schedule, part) in [
            ("* * * *", "five fields"),
            ("60 * * * *", "0-59"),
            ("* * 0 * *", "1-31"),
            ("* * * * 8", "0-7"),
            ("5-1 * * * *", "0-59"),
            ("*/0 * * * *", "0-59"),
            ("0 0 30 2 *", "never comes"),
            ("@sometimes", "@hourly"),
            ("@every 5s", "at least 10s"),
            ("@every soon", "at least 10s"),
            ("@every 10", "at least 10s"),
        ] {
            let error = Schedule::parse(schedule, None).unwrap_err().to_string();
            assert!(error.contains(part), "{schedule}: {error}");
        }
        let error = Schedule::parse("@daily", Some("Mars/Olympus")).unwrap_err();
        assert_eq!(error, ScheduleError::TimeZone("Mars/Olympus".into()));
    }

    #[test]
    fn of_several_missed_moments_the_last_is_due() {
        let daily = Schedule::parse("0 3 * * *", None).unwrap();
        let due = |s: &Schedule, after: &str, until: &str| s.last_due(ts(after), ts(until), 0);
        assert_eq!(
            due(&daily, "2026-03-01T03:00:00Z", "2026-03-05T04:00:00Z"),
            Some(ts("2026-03-05T03:00:00Z"))
        );
        assert_eq!(
            due(&daily, "2026-03-05T03:00:00Z", "2026-03-05T04:00:00Z"),
            None
        );
        let yearly = Schedule::parse("@yearly", None).unwrap();
        assert_eq!(
            due(&yearly, "2023-06-01T00:00:00Z", "2026-03-05T04:00:00Z"),
            Some(ts("2026-01-01T00:00:00Z"))
        );
    }

    #[test]
    fn an_interval_counts_from_its_anchor() {
        let every = Schedule::parse("@every 1m30s", None).unwrap();
        let anchor = ts("2026-03-01T00:00:10Z");
        assert_eq!(
            every.next_after(anchor, anchor),
            Some(ts("2026-03-01T00:01:40Z"))
        );
        assert_eq!(
            every.next_after(ts("2026-03-01T00:01:40Z"), anchor),
            Some(ts("2026-03-01T00:03:10Z"))
        );
        assert_eq!(
            every.last_due(anchor, ts("2026-03-01T00:01:39Z"), anchor),
            None
        );
        assert_eq!(
            every.last_due(anchor, ts("2026-03-01T00:09:00Z"), anchor),
            Some(ts("2026-03-01T00:07:40Z"))
        );
    }
}
