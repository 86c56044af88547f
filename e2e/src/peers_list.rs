//! The lists of expected outcomes below `e2e/expected`: one test a line, `pass NAME` or `fail NAME  # why`; `#` opens a comment.
//!
//! Promises: nothing passes or fails unnoticed. A listed test must do what the list says; one that is not listed may only skip itself.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Result, bail};

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Pass,
    Fail,
    Skip,
}

/// What a list says.
#[derive(Debug, Default)]
pub struct Expected {
    outcomes: BTreeMap<String, Outcome>,
}

impl Expected {
    pub fn parse(text: &str) -> Result<Self> {
        let mut outcomes = BTreeMap::new();
        for (number, line) in text.lines().enumerate() {
            // Names hold no blanks: go test writes underscores for them. A `#` inside a name is told from a comment by the blank before.
            let line = line.split(" #").next().unwrap_or_default().trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (outcome, name) = match line.split_once(' ') {
                Some(("pass", name)) => (Outcome::Pass, name.trim()),
                Some(("fail", name)) => (Outcome::Fail, name.trim()),
                _ => bail!(
                    "line {}: neither `pass NAME` nor `fail NAME`: {line}",
                    number + 1
                ),
            };
            if outcomes.insert(name.to_owned(), outcome).is_some() {
                bail!("line {}: {name} is listed twice", number + 1);
            }
        }
        Ok(Self { outcomes })
    }

    /// The differences between the list and what happened; `whole` when every listed test should have run.
    pub fn judge(&self, happened: &BTreeMap<String, Outcome>, whole: bool) -> Vec<String> {
        let mut complaints = Vec::new();
        for (name, &outcome) in happened {
            match (self.outcomes.get(name), outcome) {
                (Some(&listed), outcome) if listed == outcome => {}
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
        if whole {
            let missing = self
                .outcomes
                .keys()
                .filter(|name| !happened.contains_key(*name));
            complaints.extend(missing.map(|name| format!("listed, but did not run: {name}")));
        }
        complaints
    }

    /// The comment a list opens with.
    pub fn head(text: &str) -> String {
        text.lines().take_while(|line| line.starts_with('#')).fold(
            String::new(),
            |mut head, line| {
                head.push_str(line);
                head.push('\n');
                head
            },
        )
    }

    pub fn render(head: &str, happened: &BTreeMap<String, Outcome>) -> String {
        let mut text = head.to_owned();
        for (name, outcome) in happened {
            let word = match outcome {
                Outcome::Pass => "pass",
                Outcome::Fail => "fail",
                Outcome::Skip => continue,
            };
            let _ = writeln!(text, "{word} {name}");
        }
        text
    }
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

    #[test]
    fn a_run_as_listed_is_no_complaint() {
        let list = Expected::parse("# head\npass A/x\nfail B#01  # known\n")
            .expect("the list is well formed");
        let run = happened(&[
            ("A/x", Outcome::Pass),
            ("B#01", Outcome::Fail),
            ("C", Outcome::Skip),
        ]);
        assert_eq!(list.judge(&run, true), Vec::<String>::new());
    }

    #[test]
    fn everything_unlisted_and_everything_missing_is_a_complaint() {
        let list =
            Expected::parse("pass A\npass B\nfail C\npass D\n").expect("the list is well formed");
        let run = happened(&[
            ("A", Outcome::Fail),
            ("B", Outcome::Skip),
            ("C", Outcome::Pass),
            ("E", Outcome::Pass),
            ("F", Outcome::Fail),
        ]);
        assert_eq!(list.judge(&run, true).len(), 6);
        assert_eq!(list.judge(&run, false).len(), 5);
    }

    #[test]
    fn a_list_with_a_word_of_its_own_is_refused() {
        assert!(Expected::parse("maybe A\n").is_err());
        assert!(Expected::parse("pass A\nfail A\n").is_err());
    }
}
