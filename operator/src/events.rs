//! Events: one per thing done or changed, never one per pass.
//!
//! kube's recorder folds events of the same reason and keeps the first note, which is right for
//! what repeats and wrong for figures. So what repeats goes through the shared recorder, and results
//! through one of their own.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

/// Longest note Kubernetes takes.
const NOTE_BYTES_MAX: usize = 1000;

/// Publishes events in the operator's name.
#[derive(Clone)]
pub struct Events {
    client: Client,
    reporter: Reporter,
    shared: Recorder,
}

impl Events {
    /// Reports as `instance`, the operator's pod.
    pub fn new(client: Client, instance: Option<String>) -> Self {
        let reporter = Reporter {
            controller: "ballast.dev/operator".to_owned(),
            instance,
        };
        let shared = Recorder::new(client.clone(), reporter.clone());
        Self {
            client,
            reporter,
            shared,
        }
    }

    /// Something went as it should; the note may hold figures.
    pub async fn result(&self, about: &ObjectReference, action: &str, reason: &str, note: &str) {
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        publish(&recorder, about, EventType::Normal, action, reason, note).await;
    }

    /// Something may repeat and is worth a look.
    pub async fn warning(&self, about: &ObjectReference, action: &str, reason: &str, note: &str) {
        publish(
            &self.shared,
            about,
            EventType::Warning,
            action,
            reason,
            note,
        )
        .await;
    }
}

/// An event that cannot be written is logged and forgotten: it must not fail the pass it reports.
async fn publish(
    recorder: &Recorder,
    about: &ObjectReference,
    type_: EventType,
    action: &str,
    reason: &str,
    note: &str,
) {
    let event = Event {
        type_,
        reason: reason.to_owned(),
        note: Some(shortened(note)),
        action: action.to_owned(),
        secondary: None,
    };
    if let Err(error) = recorder.publish(&event, about).await {
        tracing::warn!(reason, %error, "event was not written");
    }
}

fn shortened(note: &str) -> String {
    let mut end = note.len().min(NOTE_BYTES_MAX);
    while !note.is_char_boundary(end) {
        end -= 1;
    }
    note[..end].to_owned()
}
