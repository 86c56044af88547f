//! What every pass is given: clients, settings, patience.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;

use crate::cluster::validate::Settings;
use crate::events::Events;
use crate::metrics::Metrics;
use crate::store_client::StoreClient;

/// Shared by all passes.
pub struct Context {
    pub client: Client,
    pub store: Arc<dyn StoreClient>,
    pub settings: Settings,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    /// Longest time between two looks at a store.
    pub resync: Duration,
    /// Time after which a failed pass is tried again.
    pub retry_after: Duration,
}
