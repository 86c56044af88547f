//! etcd's snapshot file: a bbolt database (the bolt helper's).
