//! The two Services of a store.
//!
//! `<name>` is headless and names members, ready or not, since a member must be found by its peers
//! before it can become ready. `<name>-client` is what clients use: ready members only.

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{hash, owned, stamp, store_selector};
use crate::cluster::validate::Desired;

/// Port of etcd's client API.
pub const CLIENT_PORT: i32 = 2379;
/// Port between members.
pub const PEER_PORT: i32 = 2380;

/// What clients use.
pub fn build_client_service(desired: &Desired) -> Service {
    stamped(Service {
        metadata: owned(desired, desired.client_service()),
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".to_owned()),
            selector: Some(store_selector(&desired.name)),
            ports: Some(vec![port("client", CLIENT_PORT)]),
            ..ServiceSpec::default()
        }),
        status: None,
    })
}

/// What gives members their names.
pub fn build_peer_service(desired: &Desired) -> Service {
    stamped(Service {
        metadata: owned(desired, desired.peer_service()),
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".to_owned()),
            cluster_ip: Some("None".to_owned()),
            publish_not_ready_addresses: Some(true),
            selector: Some(store_selector(&desired.name)),
            ports: Some(vec![port("peer", PEER_PORT), port("client", CLIENT_PORT)]),
            ..ServiceSpec::default()
        }),
        status: None,
    })
}

fn port(name: &str, number: i32) -> ServicePort {
    ServicePort {
        name: Some(name.to_owned()),
        port: number,
        target_port: Some(IntOrString::Int(number)),
        protocol: Some("TCP".to_owned()),
        ..ServicePort::default()
    }
}

fn stamped(mut service: Service) -> Service {
    let hash = hash(&service);
    stamp(&mut service.metadata, hash);
    service
}
