//! /metrics, /healthz and /readyz. Ready means: the process runs and can reach its API server, as
//! leader or in waiting.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::routing::get;

use crate::metrics::Metrics;

/// Serves until the process ends.
pub async fn serve(address: SocketAddr, metrics: Arc<Metrics>) -> std::io::Result<()> {
    let render = move || {
        let metrics = metrics.clone();
        async move { metrics.render() }
    };
    let app = Router::new()
        .route("/metrics", get(render))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(|| async { "ok" }));
    let listener = tokio::net::TcpListener::bind(address).await?;
    axum::serve(listener, app).await
}
