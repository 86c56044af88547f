//! Watchers beside the load: one of everything on each member, told from the window's beginning to its end whatever happens, and others of
//! random ranges, filters and beginnings that come and go.
//!
//! Each stream is a [`Session`] of its own; the next one goes on where it ended. Not here: the judge (`watch_check.rs`).

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use ballast_api::etcdserverpb as pb;
use pb::watch_create_request::FilterType;
use pb::watch_request::RequestUnion;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio_stream::wrappers::ReceiverStream;

use super::record::Event;
use super::traffic::{PREFIX, PREFIX_END, Shared};
use super::watch_check::{Response, Session};
use crate::store_server::Client;

const RANDOM_WATCHERS: usize = 4;
const RETRY: Duration = Duration::from_millis(100);
const REQUEST_PROGRESS_EVERY: Duration = Duration::from_millis(300);
/// Of a request that makes a stream.
const OPEN_DEADLINE: Duration = Duration::from_secs(3);

/// The watchers of a window.
#[derive(Debug)]
pub struct Watching {
    shared: Arc<Shared>,
    /// What each member's watcher of everything was told last.
    told: Vec<Arc<Mutex<i64>>>,
    ended: Arc<Mutex<Vec<(bool, Session)>>>,
    stop: tokio::sync::watch::Sender<bool>,
    tasks: tokio::task::JoinSet<()>,
}

impl Watching {
    /// `after` is the revision before the window.
    pub fn start(shared: &Arc<Shared>, members: &[Client], after: i64, seed: u64) -> Self {
        let (stop, _) = tokio::sync::watch::channel(false);
        let mut watching = Self {
            shared: Arc::clone(shared),
            told: Vec::new(),
            ended: Arc::default(),
            stop,
            tasks: tokio::task::JoinSet::new(),
        };
        for (member, client) in members.iter().enumerate() {
            let told = Arc::new(Mutex::new(after));
            watching.told.push(Arc::clone(&told));
            let session = Session {
                member,
                key: "\0".to_owned(),
                end: "\0".to_owned(),
                start: after + 1,
                prev_kv: true,
                ..Session::default()
            };
            let stream = watching.stream();
            let client = client.clone();
            watching
                .tasks
                .spawn(async move { stream.everything(client, session, &told).await });
        }
        for number in 0..RANDOM_WATCHERS {
            let stream = watching.stream();
            let members = members.to_vec();
            let random = StdRng::seed_from_u64(seed ^ (0x3a7c4 + number as u64));
            watching
                .tasks
                .spawn(async move { stream.come_and_go(members, random).await });
        }
        watching
    }

    fn stream(&self) -> Stream {
        Stream {
            shared: Arc::clone(&self.shared),
            ended: Arc::clone(&self.ended),
            stop: self.stop.subscribe(),
        }
    }

    /// What the watcher that lags most was told last.
    pub fn told(&self) -> Vec<i64> {
        self.told
            .iter()
            .map(|told| *told.lock().unwrap_or_else(PoisonError::into_inner))
            .collect()
    }

    /// Ends all of them. Those of everything are marked.
    pub async fn end(mut self) -> Vec<(bool, Session)> {
        self.stop.send_replace(true);
        while self.tasks.join_next().await.is_some() {}
        std::mem::take(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

struct Stream {
    shared: Arc<Shared>,
    ended: Arc<Mutex<Vec<(bool, Session)>>>,
    stop: tokio::sync::watch::Receiver<bool>,
}

impl Stream {
    fn stopped(&self) -> bool {
        *self.stop.borrow()
    }

    fn keep(&self, everything: bool, session: Session) {
        if !session.responses.is_empty() {
            let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
            ended.push((everything, session));
        }
    }

    async fn everything(mut self, client: Client, mut session: Session, told: &Mutex<i64>) {
        while !self.stopped() {
            let ended = self
                .watch(&client, &mut session, None, &mut |revision| {
                    let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                    *told = revision.max(*told);
                })
                .await;
            let mut start = session.next();
            if let Ok(Some(compacted)) = ended {
                start = start.max(compacted);
            }
            let next = Session {
                start,
                responses: Vec::new(),
                ..session.clone()
            };
            self.keep(true, std::mem::replace(&mut session, next));
            if !self.stopped() {
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    async fn come_and_go(mut self, members: Vec<Client>, mut random: StdRng) {
        while !self.stopped() {
            let mut session = self.random(members.len(), &mut random);
            let life = Duration::from_millis(random.random_range(300..3_000));
            let member = session.member;
            // A second stream goes on where the first ended, perhaps on another member.
            for _ in 0..2 {
                let client = &members[session.member];
                let _ = self
                    .watch(client, &mut session, Some(life), &mut |_| {})
                    .await;
                let next = Session {
                    start: session.next(),
                    member: (member + 1) % members.len(),
                    responses: Vec::new(),
                    ..session.clone()
                };
                self.keep(false, std::mem::replace(&mut session, next));
                if self.stopped() {
                    return;
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    fn random(&self, members: usize, random: &mut StdRng) -> Session {
        let head = self.shared.head.load(Ordering::Acquire);
        let (key, end) = match random.random_range(0..4) {
            0 => (
                format!("{PREFIX}{}", random.random_range(0..10)),
                String::new(),
            ),
            1 => (format!("{PREFIX}3"), format!("{PREFIX}7")),
            _ => (PREFIX.to_owned(), PREFIX_END.to_owned()),
        };
        let start = match random.random_range(0..3) {
            0 => 0,
            1 => (head - random.random_range(0..100)).max(1),
            _ => head + random.random_range(0..20),
        };
        Session {
            member: random.random_range(0..members),
            key,
            end,
            start,
            no_puts: random.random_bool(0.15),
            no_deletes: random.random_bool(0.2),
            prev_kv: random.random_bool(0.5),
            responses: Vec::new(),
        }
    }

    /// One stream, until it breaks, its life is over or all end. A revision that is compacted is returned.
    async fn watch(
        &mut self,
        client: &Client,
        session: &mut Session,
        life: Option<Duration>,
        told: &mut (dyn FnMut(i64) + Send),
    ) -> Result<Option<i64>> {
        let mut filters = Vec::new();
        if session.no_puts {
            filters.push(FilterType::Noput.into());
        }
        if session.no_deletes {
            filters.push(FilterType::Nodelete.into());
        }
        let create = pb::WatchCreateRequest {
            key: session.key.clone().into(),
            range_end: session.end.clone().into(),
            start_revision: session.start,
            filters,
            prev_kv: session.prev_kv,
            progress_notify: true,
            ..pb::WatchCreateRequest::default()
        };
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let request = |union| pb::WatchRequest {
            request_union: Some(union),
        };
        sender
            .send(request(RequestUnion::CreateRequest(create)))
            .await?;
        let mut watch = client.watch.clone();
        let mut stop = self.stop.clone();
        let opened = tokio::select! {
            opened = tokio::time::timeout(OPEN_DEADLINE, watch.watch(ReceiverStream::new(receiver))) => opened,
            _ = stop.wait_for(|&stop| stop) => return Ok(None),
        };
        let mut stream = opened.context("the stream is not opened")??.into_inner();
        let mut ask = tokio::time::interval(REQUEST_PROGRESS_EVERY);
        let end = async {
            match life {
                Some(life) => tokio::time::sleep(life).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(end);
        loop {
            let response = tokio::select! {
                response = stream.message() => response?.context("the stream ended")?,
                _ = ask.tick() => {
                    // It is of no matter whether it can be asked just now.
                    let progress = RequestUnion::ProgressRequest(pb::WatchProgressRequest {});
                    let _ = sender.try_send(request(progress));
                    continue;
                }
                () = &mut end => return Ok(None),
                _ = stop.wait_for(|&stop| stop) => return Ok(None),
            };
            let events: Result<Vec<Event>> = response.events.iter().map(Event::of).collect();
            let compacted = response.compact_revision;
            let canceled = response.canceled;
            session.responses.push(Response {
                at: self.shared.clock.now_ns(),
                revision: response.header.map_or(0, |header| header.revision),
                created: response.created,
                canceled,
                compact_revision: compacted,
                events: events?,
            });
            told(session.told_by_last());
            if canceled {
                return Ok((compacted > 0).then_some(compacted));
            }
        }
    }
}
