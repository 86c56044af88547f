//! Waiting on conditions with a deadline: the one way anything here waits.

use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// The harness's clock. It watches real programs in real time, so it reads the real clock.
#[expect(
    clippy::disallowed_methods,
    reason = "the harness observes real programs in real time"
)]
pub fn now() -> Instant {
    Instant::now()
}

const STEP: Duration = Duration::from_millis(100);

/// Asks again until the condition yields a value. An error from the condition counts as "not yet";
/// the last one is told when the deadline passes.
pub async fn wait_for<T, F, Fut>(what: &str, deadline: Duration, mut condition: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Option<T>>>,
{
    let end = now() + deadline;
    let mut last = None;
    loop {
        // A condition that hangs must not outlive the deadline.
        let left = end.saturating_duration_since(now()).max(STEP);
        match tokio::time::timeout(left, condition()).await {
            Ok(Ok(Some(value))) => return Ok(value),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => last = Some(error),
            Err(_) => last = Some(anyhow::anyhow!("the last attempt did not end")),
        }
        if now() >= end {
            let reason = format!("waited {} s in vain: {what}", deadline.as_secs_f64());
            return match last {
                Some(error) => Err(error).context(reason),
                None => bail!(reason),
            };
        }
        tokio::time::sleep(STEP).await;
    }
}

/// [`wait_for`] for code that is not asynchronous.
pub fn wait_for_blocking<T>(
    what: &str,
    deadline: Duration,
    mut condition: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let end = now() + deadline;
    let mut last = None;
    loop {
        match condition() {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => {}
            Err(error) => last = Some(error),
        }
        if now() >= end {
            let reason = format!("waited {} s in vain: {what}", deadline.as_secs_f64());
            return match last {
                Some(error) => Err(error).context(reason),
                None => bail!(reason),
            };
        }
        std::thread::sleep(STEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_condition_that_never_holds_ends_at_the_deadline_and_tells_its_last_error() {
        let result: Result<()> = wait_for("the moon", Duration::from_millis(250), || async {
            bail!("it is day")
        })
        .await;
        let text = format!("{:#}", result.expect_err("it cannot hold"));
        assert!(
            text.contains("the moon") && text.contains("it is day"),
            "{text}"
        );
    }

    #[tokio::test]
    async fn a_condition_is_asked_until_it_holds() {
        let mut asked = 0;
        let value = wait_for("three", Duration::from_secs(5), || {
            asked += 1;
            let asked = asked;
            async move { Ok((asked == 3).then_some(asked)) }
        })
        .await
        .expect("it holds at the third time");
        assert_eq!(value, 3);
    }
}
