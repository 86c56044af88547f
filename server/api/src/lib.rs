//! etcd's v3 wire interface: messages, services, error codes and texts.
//!
//! Names and field numbers are the interface and match etcd v3.7; the layout of the files is ours.
//! Without the feature `grpc` there are only messages, so that `ballast-storage` cannot reach tonic.
//!
//! etcd: api/etcdserverpb, api/mvccpb, api/authpb, api/membershippb, api/v3rpc/rpctypes.

#[cfg(feature = "grpc")]
pub mod codec;
#[cfg(feature = "grpc")]
pub mod error;

/// The API level reported where etcd reports its version.
pub const API_VERSION: &str = "3.7.3";

/// The cluster version reported beside [`API_VERSION`].
pub const CLUSTER_VERSION: &str = "3.7.0";

macro_rules! generated {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[allow(
            clippy::all,
            clippy::pedantic,
            clippy::allow_attributes_without_reason,
            unreachable_pub,
            unused_lifetimes,
            elided_lifetimes_in_paths,
            reason = "generated from the .proto files"
        )]
        pub mod $name {
            include!(concat!(env!("OUT_DIR"), "/", stringify!($name), ".rs"));
        }
    };
}

generated!(
    /// Services and their messages.
    etcdserverpb
);
generated!(
    /// Records and events.
    mvccpb
);
generated!(
    /// Users, roles, permissions.
    authpb
);
generated!(
    /// Membership changes in the log.
    membershippb
);
generated!(
    /// Leases as stored.
    leasepb
);
generated!(
    /// What members say to each other.
    ballastpeerpb
);
