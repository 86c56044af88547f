//! metrics (the rpc helper's).
