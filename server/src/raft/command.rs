//! One replicated change and its bytes: etcd's `InternalRaftRequest`, so that tools of the field can read the log.

use std::sync::Arc;

use ballast_api::etcdserverpb::InternalRaftRequest;

/// A change on its way through the log. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Command(pub Arc<InternalRaftRequest>);
