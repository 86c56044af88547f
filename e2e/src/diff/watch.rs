//! A watch stream and what happens while it is open.
//!
//! Compared are the events of each watch in their order, its cancellation because of a compaction, and the answers to what the client
//! asked of the stream, in their order; how events are packed into responses is not, nor their headers, which must only not be below the
//! events. Progress must be true: no event at or below it comes after it.
//!
//! Where a server must have sent everything before the script can go on (a cancellation, a compaction, the end), the model's plan tells
//! how much that is. At the end a progress reply proves that nothing more came.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ballast_api::etcdserverpb as pb;
use ballast_api::mvccpb::Event;
use pb::watch_request::RequestUnion;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::perform::{self, Answer, Comparable as _};
use super::script::{Op, Step};
use crate::store_server::Client;

/// How long a watch may take to bring what is there already.
const DEADLINE: Duration = Duration::from_secs(15);
/// etcd leaves a progress request unanswered while a watch of the stream is behind, so it is asked again.
const PROGRESS_PERIOD: Duration = Duration::from_millis(10);
const REQUESTS_MAX: usize = 16;

/// What a watch of a stream must have told at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    pub events: usize,
    pub compacted: bool,
}

/// Where everything must have come.
#[derive(Clone, Debug, Default)]
pub struct Point {
    pub due: Vec<Due>,
    /// What a progress reply must reach then, where one can be asked for: it proves that a watch of which nothing was due is up to date too.
    pub progress: Option<i64>,
}

/// What will come, as the model says.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Before each step that needs it, and at the end.
    pub points: Vec<Point>,
    /// Whether each step is answered. A compaction that is not is left out: a watch that waits for the future lets nobody see whether the
    /// others have read what will be gone.
    pub answered: Vec<bool>,
    /// The ids that keep etcd from telling progress: canceled ones and such as wait for the future. They are canceled at the end.
    pub blocking: Vec<i64>,
    /// What progress must reach then, if watches are left.
    pub progress: Option<i64>,
}

/// Whether everything must have come before this step.
pub fn settles(step: &Step) -> bool {
    matches!(step, Step::Cancel(_) | Step::Write(Op::Compact(_)))
}

/// What one watch told.
#[derive(Clone, Debug, Default)]
pub struct Told {
    pub watch_id: i64,
    pub events: Vec<Event>,
    pub compacted: Option<String>,
    canceled: bool,
    /// What the stream's progress said while this watch was there.
    progress: i64,
}

/// What a stream told.
#[derive(Clone, Debug, Default)]
pub struct Session {
    /// Answers to requests, in order.
    pub replies: Vec<String>,
    /// In the order of their creation.
    pub watches: Vec<Told>,
}

impl Session {
    pub fn reply(&mut self, mut response: pb::WatchResponse) {
        response.clear();
        self.replies.push(format!("{response:?}"));
    }

    pub fn begin(&mut self, watch_id: i64) {
        self.watches.push(Told {
            watch_id,
            ..Told::default()
        });
    }

    pub fn answer(&self) -> Answer {
        let mut text = self.replies.join("\n    ");
        for watch in &self.watches {
            let _ = write!(text, "\n    watch {}:", watch.watch_id);
            for event in &watch.events {
                let _ = write!(text, "\n      {event:?}");
            }
            if let Some(compacted) = &watch.compacted {
                let _ = write!(text, "\n      {compacted}");
            }
        }
        Answer::text(text)
    }
}

/// A cancellation because of a compaction.
pub fn compaction_text(mut response: pb::WatchResponse) -> String {
    response.clear();
    format!("{response:?}")
}

pub(super) async fn perform(client: &Client, steps: &[Step], plan: &Plan) -> Result<Answer> {
    let (sender, receiver) = mpsc::channel(REQUESTS_MAX);
    let Some(Step::Create(first)) = steps.first() else {
        bail!("a stream begins with a watch");
    };
    // etcd opens a stream with its first answer.
    sender.send(create(first)).await?;
    let channel = ReceiverStream::new(receiver);
    let responses = client.watch.clone().watch(channel).await?.into_inner();
    let mut stream = Stream {
        sender,
        responses,
        told: Session::default(),
        progress: 0,
        part: None,
    };
    stream
        .take_until("the first answer", |told| !told.replies.is_empty())
        .await?;
    let mut points = plan.points.iter();
    for (step, &answered) in steps.iter().zip(&plan.answered).skip(1) {
        if settles(step) {
            let point = points.next().context("the plan is too short")?;
            stream.settle(point).await?;
        }
        match step {
            Step::Create(request) => {
                stream.ask(create(request), true).await?;
            }
            Step::Cancel(watch_id) => stream.cancel(*watch_id, answered).await?,
            Step::Progress => {
                stream.ask(progress(), false).await?;
            }
            Step::Write(_) if !answered => {}
            Step::Write(op) => {
                let answer = Box::pin(perform::perform(client, op, &Plan::default())).await?;
                stream.told.replies.push(answer.text);
            }
        }
    }
    let end = points.next().context("the plan is too short")?;
    stream.settle(end).await?;
    for &watch_id in &plan.blocking {
        stream.cancel(watch_id, true).await?;
    }
    if let Some(head) = plan.progress {
        stream.reach(head).await?;
    }
    Ok(stream.told.answer())
}

fn of(union: RequestUnion) -> pb::WatchRequest {
    pb::WatchRequest {
        request_union: Some(union),
    }
}

fn create(request: &pb::WatchCreateRequest) -> pb::WatchRequest {
    of(RequestUnion::CreateRequest(request.clone()))
}

fn progress() -> pb::WatchRequest {
    of(RequestUnion::ProgressRequest(pb::WatchProgressRequest {}))
}

struct Stream {
    sender: mpsc::Sender<pb::WatchRequest>,
    responses: Streaming<pb::WatchResponse>,
    told: Session,
    progress: i64,
    /// The watch of which a response is not complete.
    part: Option<i64>,
}

impl Stream {
    async fn ask(&mut self, request: pb::WatchRequest, answered: bool) -> Result<()> {
        let before = self.told.replies.len();
        self.sender.send(request).await?;
        if answered {
            self.take_until("an answer", |told| told.replies.len() > before)
                .await?;
        }
        Ok(())
    }

    async fn cancel(&mut self, watch_id: i64, answered: bool) -> Result<()> {
        let request = pb::WatchCancelRequest { watch_id };
        self.ask(of(RequestUnion::CancelRequest(request)), answered)
            .await
    }

    /// Waits for everything that must have come.
    async fn settle(&mut self, point: &Point) -> Result<()> {
        let due = &point.due;
        self.take_until(&format!("{due:?}"), |told| {
            let mut watches = told.watches.iter().zip(due);
            watches.all(|(watch, due)| {
                watch.canceled
                    || (watch.events.len() >= due.events
                        && watch.compacted.is_some() >= due.compacted)
            })
        })
        .await?;
        match point.progress {
            Some(head) => self.reach(head).await,
            None => Ok(()),
        }
    }

    async fn take_until(&mut self, what: &str, done: impl Fn(&Session) -> bool) -> Result<()> {
        let waiting = async {
            while !done(&self.told) {
                self.take().await?;
            }
            Ok(())
        };
        match tokio::time::timeout(DEADLINE, waiting).await {
            Ok(result) => result,
            Err(_) => bail!(
                "a watch stream did not bring {what} in time, but:\n    {}",
                self.told.answer().text
            ),
        }
    }

    /// Waits for progress up to `head`.
    async fn reach(&mut self, head: i64) -> Result<()> {
        // Told before, it would say nothing of watches that came since.
        self.progress = 0;
        let sender = self.sender.clone();
        let waiting = async {
            let mut tick = tokio::time::interval(PROGRESS_PERIOD);
            while self.progress < head {
                tokio::select! {
                    taken = self.take() => taken?,
                    // A full queue holds a request already.
                    _ = tick.tick() => drop(sender.try_send(progress())),
                }
            }
            anyhow::Ok(())
        };
        match tokio::time::timeout(DEADLINE, waiting).await {
            Ok(result) => result,
            Err(_) => bail!("no progress up to {head} in time"),
        }
    }

    async fn take(&mut self) -> Result<()> {
        let response = self
            .responses
            .next()
            .await
            .context("the watch stream ended")??;
        let revision = response.header.as_ref().map_or(0, |header| header.revision);
        if self.part.is_some_and(|id| id != response.watch_id) {
            bail!("something else within the parts of a response: {response:?}");
        }
        self.part = response.fragment.then_some(response.watch_id);
        if response.created {
            if !response.canceled {
                self.told.begin(response.watch_id);
            }
            self.told.reply(response);
            return Ok(());
        }
        if response.watch_id == -1 {
            self.progress = self.progress.max(revision);
            for watch in &mut self.told.watches {
                watch.progress = self.progress;
            }
            return Ok(());
        }
        let mut watches = self.told.watches.iter_mut().rev();
        let watch = watches
            .find(|watch| watch.watch_id == response.watch_id)
            .with_context(|| format!("no watch has this id: {response:?}"))?;
        if watch.canceled {
            bail!("a watch that was canceled goes on: {response:?}");
        }
        for event in &response.events {
            let changed = event.kv.as_ref().map_or(0, |kv| kv.mod_revision);
            if changed > revision {
                bail!("an event is newer than the header of its response: {response:?}");
            }
            if changed <= watch.progress {
                let progress = watch.progress;
                bail!("an event comes after progress to {progress}: {response:?}");
            }
        }
        watch.events.extend_from_slice(&response.events);
        if response.canceled {
            if response.compact_revision != 0 {
                watch.compacted = Some(compaction_text(response));
                return Ok(());
            }
            watch.canceled = true;
            self.told.reply(response);
        }
        Ok(())
    }
}
