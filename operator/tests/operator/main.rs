//! The operator's tests that need no Kubernetes: planner tables, built objects, CRDs, the agent, and
//! whole passes against an API server in memory. One binary, so that it is linked once.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod agent;
mod build_golden;
mod cel;
mod generated;
mod leader;
mod plan;
mod reconcile;
mod support;
