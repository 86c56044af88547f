//! cli (the rpc helper's).
