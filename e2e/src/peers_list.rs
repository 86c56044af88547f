//! The lists of expected outcomes below `e2e/expected`, one test a line; `#` opens a comment.
//!
//!     pass NAME              runs, and passes
//!     long NAME              passes, in the long run only
//!     fail NAME     # why    runs, and fails
//!     leave PATTERN # why    is not run; a pattern of `go test -skip`
//!
//! Promises: nothing passes or fails unnoticed. A listed test must do what the list says; one that is not listed may only skip itself; what
//! is left out says why.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Result, bail};

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Pass,
    Fail,
    Skip,
}

/// What a list says of one test.
#[derive(Clone, Debug)]
struct Listed {
    outcome: Outcome,
    is_long: bool,
    /// With its `#`.
    comment: String,
}

/// What a list says.
#[derive(Debug, Default)]
pub struct Expected {
    /// What stands above the first test: comments, and what is left out.
    head: String,
    tests: BTreeMap<String, Listed>,
    leaves: Vec<String>,
}

/// Which part of a list should have run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Everything.
    Long,
    /// All but what is long.
    Short,
    /// A few, by a pattern of somebody's own.
    Some,
}

impl Expected {
    pub fn parse(text: &str) -> Result<Self> {
        let mut list = Self::default();
        for (number, whole) in text.lines().enumerate() {
            let number = number + 1;
            // Names hold no blanks: go test writes underscores for them. A `#` inside a name is told from a comment by the blank before.
            let (line, comment) = match whole.find(" #") {
                Some(at) if !whole.starts_with('#') => whole.split_at(at),
                _ => (whole, ""),
            };
            let (line, comment) = (line.trim(), comment.trim());
            if line.is_empty() || line.starts_with('#') {
                if list.tests.is_empty() {
                    list.head.push_str(whole);
                    list.head.push('\n');
                }
                continue;
            }
            let (outcome, name) = match line.split_once(' ') {
                Some(("leave", pattern)) => {
                    if comment.is_empty() {
                        bail!("line {number}: {pattern} is left out, and no reason given");
                    }
                    if !list.tests.is_empty() {
                        bail!("line {number}: what is left out stands above the tests");
                    }
                    list.leaves.push(pattern.trim().to_owned());
                    list.head.push_str(whole);
                    list.head.push('\n');
                    continue;
                }
                Some(("pass" | "long", name)) => (Outcome::Pass, name.trim()),
                Some(("fail", name)) => (Outcome::Fail, name.trim()),
                _ => bail!("line {number}: none of `pass`, `long`, `fail` and `leave`: {line}"),
            };
            let listed = Listed {
                outcome,
                is_long: line.starts_with("long "),
                comment: comment.to_owned(),
            };
            if list.tests.insert(name.to_owned(), listed).is_some() {
                bail!("line {number}: {name} is listed twice");
            }
        }
        Ok(list)
    }

    /// The pattern of what is not run, for `go test -skip`; empty for nothing.
    pub fn skips(&self, extent: Extent) -> String {
        let mut patterns = self.leaves.clone();
        if extent == Extent::Short {
            let long = self.tests.iter().filter(|(_, listed)| listed.is_long);
            patterns.extend(long.map(|(name, _)| pattern_of(name)));
        }
        patterns.join("|")
    }

    /// The differences between the list and what happened.
    pub fn judge(&self, happened: &BTreeMap<String, Outcome>, extent: Extent) -> Vec<String> {
        let mut complaints = Vec::new();
        for (name, &outcome) in happened {
            let listed = self.tests.get(name).map(|listed| listed.outcome);
            match (listed, outcome) {
                (Some(listed), outcome) if listed == outcome => {}
                (None, Outcome::Skip) => {}
                (Some(_), Outcome::Skip) => complaints.push(format!("skipped, but listed: {name}")),
                (Some(_), Outcome::Pass) => {
                    complaints.push(format!("passes now, but listed as failing: {name}"));
                }
                (Some(_), Outcome::Fail) => {
                    complaints.push(format!("failed, but listed as passing: {name}"));
                }
                (None, Outcome::Pass) => complaints.push(format!("passed, but not listed: {name}")),
                (None, Outcome::Fail) => complaints.push(format!("failed, and not listed: {name}")),
            }
        }
        let should_have_run = self.tests.iter().filter(|(_, listed)| match extent {
            Extent::Long => true,
            Extent::Short => !listed.is_long,
            Extent::Some => false,
        });
        let missing = should_have_run.filter(|(name, _)| !happened.contains_key(*name));
        complaints.extend(missing.map(|(name, _)| format!("listed, but did not run: {name}")));
        complaints
    }

    /// Without what is no test itself, and looks so when all its subtests were left for the long run.
    pub fn without_hulls(
        &self,
        mut happened: BTreeMap<String, Outcome>,
    ) -> BTreeMap<String, Outcome> {
        let mut hulls = BTreeSet::new();
        for name in self.tests.keys() {
            hulls.extend(name.match_indices('/').map(|(at, _)| &name[..at]));
        }
        happened.retain(|name, outcome| {
            *outcome != Outcome::Pass
                || self.tests.contains_key(name)
                || !hulls.contains(name.as_str())
        });
        happened
    }

    /// The same list with what happened. What did not run keeps its line unless all of it should have.
    pub fn render(&self, happened: &BTreeMap<String, Outcome>, extent: Extent) -> String {
        let mut text = self.head.clone();
        let names: BTreeSet<&String> = self.tests.keys().chain(happened.keys()).collect();
        for name in names {
            let listed = self.tests.get(name);
            let outcome = match (happened.get(name), listed) {
                (Some(Outcome::Skip), _) => continue,
                (Some(outcome), _) => *outcome,
                (None, Some(listed)) if extent != Extent::Long => listed.outcome,
                (None, _) => continue,
            };
            let word = match outcome {
                Outcome::Fail => "fail",
                _ if listed.is_some_and(|listed| listed.is_long) => "long",
                _ => "pass",
            };
            let _ = write!(text, "{word} {name}");
            if let Some(listed) = listed
                && !listed.comment.is_empty()
                && listed.outcome == outcome
            {
                let _ = write!(text, "  {}", listed.comment);
            }
            text.push('\n');
        }
        text
    }
}

/// Matches this test alone: an expression for each of its levels.
fn pattern_of(name: &str) -> String {
    let levels = name.split('/').map(|level| {
        let mut pattern = String::from("^");
        for character in level.chars() {
            if character.is_ascii_punctuation() && character != '_' {
                pattern.push('\\');
            }
            pattern.push(character);
        }
        pattern.push('$');
        pattern
    });
    levels.collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn happened(outcomes: &[(&str, Outcome)]) -> BTreeMap<String, Outcome> {
        outcomes
            .iter()
            .map(|&(name, outcome)| (name.to_owned(), outcome))
            .collect()
    }

    fn parse(text: &str) -> Expected {
        Expected::parse(text).expect("the list is well formed")
    }

    #[test]
    fn a_run_as_listed_is_no_complaint() {
        let list = parse("# head\npass A/x\nfail B#01  # known\n");
        let run = happened(&[
            ("A/x", Outcome::Pass),
            ("B#01", Outcome::Fail),
            ("C", Outcome::Skip),
        ]);
        assert_eq!(list.judge(&run, Extent::Long), Vec::<String>::new());
    }

    #[test]
    fn everything_unlisted_and_everything_missing_is_a_complaint() {
        let list = parse("pass A\npass B\nfail C\npass D\nlong L\n");
        let run = happened(&[
            ("A", Outcome::Fail),
            ("B", Outcome::Skip),
            ("C", Outcome::Pass),
            ("E", Outcome::Pass),
            ("F", Outcome::Fail),
        ]);
        assert_eq!(list.judge(&run, Extent::Long).len(), 7);
        assert_eq!(list.judge(&run, Extent::Short).len(), 6);
        assert_eq!(list.judge(&run, Extent::Some).len(), 5);
    }

    #[test]
    fn what_is_long_or_left_out_is_skipped_by_name_and_pattern() {
        let list =
            parse("leave ^TestAuth  # no users\n\npass A/x\nlong B/a_[b]/\"c.\"\nlong B/d#01\n");
        assert_eq!(list.skips(Extent::Long), "^TestAuth");
        assert_eq!(
            list.skips(Extent::Short),
            r#"^TestAuth|^B$/^a_\[b\]$/^\"c\.\"$|^B$/^d\#01$"#
        );
        // A function whose subtests are all skipped passes by itself.
        let run = happened(&[("A/x", Outcome::Pass), ("B", Outcome::Pass)]);
        let run = list.without_hulls(run);
        assert_eq!(list.judge(&run, Extent::Short), Vec::<String>::new());
        let run = happened(&[("A/x", Outcome::Pass), ("B", Outcome::Fail)]);
        let run = list.without_hulls(run);
        assert_eq!(list.judge(&run, Extent::Short).len(), 1);
    }

    #[test]
    fn a_list_that_is_rewritten_keeps_what_it_says_beside_the_outcomes() {
        let text = "# head\nleave ^T  # why\n\nfail A  # known\nlong B/x\npass C\n";
        let list = parse(text);
        let run = happened(&[("A", Outcome::Fail), ("C", Outcome::Pass)]);
        assert_eq!(list.render(&run, Extent::Short), text);
        let run = happened(&[("A", Outcome::Pass), ("D/y", Outcome::Pass)]);
        assert_eq!(
            list.render(&run, Extent::Long),
            "# head\nleave ^T  # why\n\npass A\npass D/y\n"
        );
    }

    #[test]
    fn a_list_that_says_less_than_it_must_is_refused() {
        for text in [
            "maybe A\n",
            "pass A\nfail A\n",
            "leave A\n",
            "pass A\nleave B  # late\n",
        ] {
            assert!(Expected::parse(text).is_err(), "{text}");
        }
    }
}
