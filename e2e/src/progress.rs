//! What a person sees while the harness works: one line per stage, with its time.

use std::io::Write as _;
use std::sync::Mutex;
use std::time::Instant;

use crate::wait::now;

/// Prints stages to standard error. Cheap to share; quiet in tests that ask for it.
pub struct Progress {
    start: Instant,
    quiet: bool,
    open: Mutex<Option<(String, Instant)>>,
}

impl Progress {
    pub fn new() -> Self {
        Self {
            start: now(),
            quiet: false,
            open: Mutex::new(None),
        }
    }

    /// Says nothing.
    pub fn quiet() -> Self {
        Self {
            quiet: true,
            ..Self::new()
        }
    }

    /// Ends the stage before, if one is open, and begins the next.
    pub fn stage(&self, title: &str) {
        self.finish();
        self.line(&format!("{title} ..."));
        *self.open.lock().expect("no holder panics") = Some((title.to_owned(), now()));
    }

    /// A detail below the open stage.
    pub fn detail(&self, text: &str) {
        self.line(&format!("    {text}"));
    }

    /// Ends the open stage with its time.
    pub fn finish(&self) {
        if let Some((title, began)) = self.open.lock().expect("no holder panics").take() {
            self.line(&format!(
                "{title}: done in {:.1} s",
                began.elapsed().as_secs_f64()
            ));
        }
    }

    fn line(&self, text: &str) {
        if self.quiet {
            return;
        }
        let total = self.start.elapsed().as_secs();
        // A closed standard error is no reason to stop working.
        let _ = writeln!(
            std::io::stderr(),
            "[{:>2}:{:02}] {text}",
            total / 60,
            total % 60
        );
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}
